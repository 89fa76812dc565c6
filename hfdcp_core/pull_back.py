"""Pull a box of an arranged tensor back: to boxes of its fine shape, and to what lies in a box of a source.

A plan asks which elements of a target lie in each shard (`meeting`); whoever fills a window, which boxes of the fine
shape a box of the tensor is (`fine_boxes`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hfdcp_core.arrangement import Arrangement, Patch, merged
from hfdcp_core.box import Box, boxes_of_run
from hfdcp_core.rearrange import sliced


def restricted(given: Arrangement, box: Box) -> Arrangement:
    """Return a box of a target as a tensor of its own.

    >>> from hfdcp_core.arrangement import arranged
    >>> from hfdcp_core.catalog import TensorSpec
    >>> restricted(arranged("w", TensorSpec("F32", (4, 2))), Box((1, 0), (2, 1))).shape
    (2, 1)
    """
    for axis, (start, stop) in enumerate(zip(box.offset, box.stop, strict=True)):
        if (start, stop) != (0, given.shape[axis]):
            given = sliced(given, axis, start, stop)
    return merged(given)


def fine_boxes(box: Box, shape: Sequence[int], fine: Sequence[int]) -> Iterator[tuple[Box, Box]]:
    """Cut a box of a tensor into boxes of its fine shape.

    Yields:
        A box of the fine shape, and the same elements as a box of the tensor.

    >>> [(str(a), str(b)) for a, b in fine_boxes(Box((1,), (5,)), (6,), (2, 3))]
    [('[0:1, 1:3]', '[1:3]'), ('[1:2, 0:3]', '[3:6]')]
    """
    ways = [list(_runs(*row)) for row in zip(_groups(shape, fine), box.offset, box.stop, strict=True)]
    for chosen in itertools.product(*ways):
        finer = [run[0] for run in chosen]
        offset = tuple(itertools.chain.from_iterable(part.offset for part in finer))
        extents = tuple(itertools.chain.from_iterable(part.shape for part in finer))
        yield Box(offset, extents), Box(tuple(start for _, start in chosen), tuple(part.volume for part in finer))


def _groups(shape: Sequence[int], fine: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the fine extents of each dimension."""
    rest = list(fine)
    for extent in shape:
        group = [rest.pop(0)]
        while math.prod(group) < extent:
            group.append(rest.pop(0))
        yield tuple(group)


def _runs(group: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of a group that indices ``[start, stop)`` of its dimension are, and where each begins."""
    for offset, extents in boxes_of_run(group, start, stop):
        yield Box(offset, extents), start
        start += math.prod(extents)


def reach_of(patch: Patch) -> Box:
    """Return the smallest box of its source that holds everything that a patch takes."""
    last = list(patch.start)
    for extent, (axis, step) in zip(patch.box.shape, patch.moves, strict=True):
        if step:
            last[axis] += step * (extent - 1)
    return Box(patch.start, tuple(b - a + 1 for a, b in zip(patch.start, last, strict=True)))


def meeting(patch: Patch, held: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield the boxes of a target whose elements lie in a box of their source, and where there the first one lies.

    Args:
        patch: A patch of the target.
        held: A box of the source.

    Yields:
        A box of the fine shape, and an index in the source.

    >>> patch = Patch(Box((0, 0), (2, 3)), "w", (0,), ((0, 3), (0, 1)))
    >>> [str(box) for box, _ in meeting(patch, Box((2,), (4,)))]
    ['[0:1, 2:3]', '[1:2, 0:3]']
    """
    ways = [
        _intervals(patch, axis, low, high) for axis, (low, high) in enumerate(zip(held.offset, held.stop, strict=True))
    ]
    for chosen in itertools.product(*ways):
        offset, shape = list(patch.box.offset), list(patch.box.shape)
        start = list(patch.start)
        for place, (first, stop) in itertools.chain.from_iterable(way.items() for way in chosen):
            axis, step = patch.moves[place]
            offset[place] += first
            shape[place] = stop - first
            start[axis] += step * first
        yield Box(tuple(offset), tuple(shape)), tuple(start)


_Interval = dict[int, tuple[int, int]]
"""By fine dimension: which of a patch's indices in it, counted from its own first one."""


def _intervals(patch: Patch, axis: int, low: int, high: int) -> list[_Interval]:
    """Return which indices of a patch lead to indices ``[low, high)`` of a dimension of its source, as intervals."""
    steps = [
        (step, place, patch.box.shape[place])
        for place, (dim, step) in enumerate(patch.moves)
        if dim == axis and step and patch.box.shape[place] > 1
    ]
    return list(_within(sorted(steps, reverse=True), patch.start[axis], low, high))


def _within(steps: list[tuple[int, int, int]], start: int, low: int, high: int) -> Iterator[_Interval]:
    """Cut the slowest dimension into what lies inside for all indices of the faster ones, and single ones around."""
    if not steps:
        if low <= start < high:
            yield {}
        return
    (step, place, extent), *faster = steps
    reach = sum(other * (count - 1) for other, _, count in faster)
    touched = range(max(0, -((start + reach - low) // step)), min(extent, -((start - high) // step)))
    inside = range(max(0, -((start - low) // step)), min(extent, (high - 1 - reach - start) // step + 1))
    if not inside:
        for index in touched:
            yield from _single(place, index, _within(faster, start + step * index, low, high))
        return
    for index in range(touched.start, inside.start):
        yield from _single(place, index, _within(faster, start + step * index, low, high))
    yield {place: (inside.start, inside.stop), **{other: (0, count) for _, other, count in faster}}
    for index in range(inside.stop, touched.stop):
        yield from _single(place, index, _within(faster, start + step * index, low, high))


def _single(place: int, index: int, faster: Iterator[_Interval]) -> Iterator[_Interval]:
    return ({place: (index, index + 1), **interval} for interval in faster)
