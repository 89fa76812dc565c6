"""Arrange tensors anew: what ``torch.permute``, ``reshape`` and ``cat`` do, on arrangements instead of numbers.

Every function returns another `hfdcp_core.arrangement.Arrangement`; no two of its patches share an element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hfdcp_core.arrangement import (
    STILL,
    Arrangement,
    Patch,
    axis_of,
    clipped,
    coarse,
    merged,
    picked,
    places_of,
    put,
    put_together,
    refined,
    refuse_too_many,
    shifted,
    with_group,
    with_unit,
    without_units,
)
from hfdcp_core.box import Box
from hfdcp_core.errors import PlanError

# ---- what only renumbers dimensions ---------------------------------------------------------------------------------


def permuted(given: Arrangement, order: Sequence[int]) -> Arrangement:
    """Put dimensions into another order, as ``torch.permute`` does.

    >>> from hfdcp_core.arrangement import arranged
    >>> from hfdcp_core.catalog import TensorSpec
    >>> permuted(arranged("w", TensorSpec("F32", (4, 2, 3))), (2, 0, 1)).shape
    (3, 4, 2)
    """
    axes = len(given.groups)
    order = [axis_of(axis, axes) for axis in order]
    if sorted(order) != list(range(axes)):
        raise PlanError(f"{order} is no order of the {axes} dimensions of {given.spec}")
    places = places_of(given)
    fine = [place for axis in order for place in places[axis]]
    patches = tuple(picked(patch, fine) for patch in given.patches)
    return Arrangement(given.dtype, tuple(given.groups[axis] for axis in order), patches)


def regrouped(given: Arrangement, shape: Sequence[int]) -> Arrangement:
    """Give the elements, in their row-major order, another shape, as ``torch.reshape`` does.

    Raises:
        PlanError: It holds another number of elements, or its boundaries cross those of this shape.

    >>> from hfdcp_core.arrangement import arranged
    >>> from hfdcp_core.catalog import TensorSpec
    >>> regrouped(arranged("w", TensorSpec("F32", (6, 4))), (3, -1)).shape
    (3, 8)
    """
    wanted = _inferred(given, shape)
    if 0 in given.shape or 0 in wanted:
        return Arrangement(given.dtype, tuple((extent,) for extent in wanted), ())
    finer = without_units(refined(given, {math.prod(wanted[axis:]) for axis in range(len(wanted) + 1)}))
    rest, patches = list(finer.fine), finer.patches
    groups: list[tuple[int, ...]] = []
    for extent in wanted:
        group: list[int] = []
        while math.prod(group) < extent:
            group.append(rest.pop(0))
        if not group:
            patches = tuple(with_unit(patch, sum(map(len, groups))) for patch in patches)
        groups.append(tuple(group or (1,)))
    return merged(put_together(given.dtype, groups, patches))


def _inferred(given: Arrangement, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with its -1 replaced."""
    total, known = math.prod(given.shape), math.prod(extent for extent in shape if extent != -1)
    unknown = [axis for axis, extent in enumerate(shape) if extent == -1]
    wanted = tuple(total // known if extent == -1 and known else extent for extent in shape)
    if len(unknown) > 1 or min(shape, default=0) < -1 or math.prod(wanted) != total:
        raise PlanError(f"{given.spec} cannot be given the shape {list(shape)}: it has {total} elements")
    return wanted


# ---- parts, and what is put together of them ------------------------------------------------------------------------


def sliced(given: Arrangement, axis: int, start: int, stop: int) -> Arrangement:
    """Return the indices ``[start, stop)`` of one dimension.

    >>> from hfdcp_core.arrangement import arranged
    >>> from hfdcp_core.catalog import TensorSpec
    >>> sliced(arranged("w", TensorSpec("F32", (4, 2))), 0, 1, 3).patches[0].start
    (1, 0)
    """
    axis = axis_of(axis, len(given.groups))
    extent = given.shape[axis]
    if not 0 <= start <= stop <= extent:
        raise PlanError(f"[{start}:{stop}] is outside of dimension {axis} of {given.spec}")
    if start == stop:
        return put_together(given.dtype, with_group(given, axis, [0]), ())
    group = given.groups[axis]
    if stop - start == 1:
        return _at_index(given, axis, start)
    inner = math.prod(group[1:])
    if start % inner or stop % inner:
        given, inner = coarse(given, axis), 1
        group = given.groups[axis]
    place = places_of(given)[axis][0]
    kept = clipped(given.patches, place, start // inner, stop // inner)
    return put_together(given.dtype, with_group(given, axis, [(stop - start) // inner, *group[1:]]), kept)


def _at_index(given: Arrangement, axis: int, index: int) -> Arrangement:
    """Return one index of a dimension, which keeps that dimension."""
    patches = given.patches
    group = given.groups[axis]
    for place, inner in zip(places_of(given)[axis], range(len(group)), strict=True):
        number = index // math.prod(group[inner + 1 :]) % group[inner]
        patches = tuple(clipped(patches, place, number, number + 1))
    places = places_of(given)[axis]
    left = [place for place in range(len(given.fine)) if place not in places[1:]]
    return put_together(given.dtype, with_group(given, axis, [1]), [picked(patch, left) for patch in patches])


def selected(given: Arrangement, axis: int, index: int) -> Arrangement:
    """Return one index of a dimension, which is gone then, as ``torch.select`` does.

    >>> from hfdcp_core.arrangement import arranged
    >>> from hfdcp_core.catalog import TensorSpec
    >>> selected(arranged("w", TensorSpec("F32", (4, 2))), 0, 3).shape
    (2,)
    """
    axis = axis_of(axis, len(given.groups))
    if not 0 <= index < given.shape[axis]:
        raise PlanError(f"index {index} is outside of dimension {axis} of {given.spec}")
    one = _at_index(given, axis, index)
    place = places_of(one)[axis][0]
    left = [other for other in range(len(one.fine)) if other != place]
    groups = [group for number, group in enumerate(one.groups) if number != axis]
    return put_together(given.dtype, groups, [picked(patch, left) for patch in one.patches])


def unsqueezed(given: Arrangement, axis: int) -> Arrangement:
    """Return it with one more dimension, of extent 1, as ``torch.unsqueeze`` does."""
    axis = axis_of(axis, len(given.groups) + 1)
    place = sum(map(len, given.groups[:axis]))
    groups = [*given.groups[:axis], (1,), *given.groups[axis:]]
    return put_together(given.dtype, groups, [with_unit(patch, place) for patch in given.patches])


def joined(parts: Sequence[Arrangement], axis: int) -> Arrangement:
    """Put tensors one behind the other along a dimension, as ``torch.cat`` does.

    Raises:
        PlanError: They are of different dtypes, or of different extents in another dimension.

    >>> from hfdcp_core.arrangement import arranged
    >>> from hfdcp_core.catalog import TensorSpec
    >>> joined([arranged(n, TensorSpec("F32", (k, 2))) for n, k in (("a", 3), ("b", 4))], 0).shape
    (7, 2)
    """
    first, axis = parts[0], axis_of(axis, len(parts[0].groups))
    for part in parts[1:]:
        others = [a == b for number, (a, b) in enumerate(zip(first.shape, part.shape, strict=False)) if number != axis]
        if part.dtype != first.dtype or len(part.shape) != len(first.shape) or not all(others):
            raise PlanError(f"{first.spec} and {part.spec} cannot be joined along dimension {axis}")
    fitted = _fitted([part for part in parts if 0 not in part.shape])
    if not fitted:
        total = sum(part.shape[axis] for part in parts)
        return put_together(first.dtype, with_group(first, axis, [total]), ())
    inner = math.prod(fitted[0].groups[axis][1:])
    place = places_of(fitted[0])[axis][0]
    patches: list[Patch] = []
    behind = 0
    for part in fitted:
        patches += [shifted(patch, place, behind) for patch in part.patches]
        behind += part.groups[axis][0]
    refuse_too_many(patches)
    assert behind * inner == sum(part.shape[axis] for part in parts)
    groups = with_group(fitted[0], axis, [behind, *fitted[0].groups[axis][1:]])
    return merged(put_together(first.dtype, groups, patches))


def _fitted(parts: list[Arrangement]) -> list[Arrangement]:
    """Cut parts that come together so that their fine dimensions agree, but for the first one of each dimension."""
    for number in range(len(parts[0].groups) if parts else 0):
        cuts = {math.prod(part.groups[number][at:]) for part in parts for at in range(1, len(part.groups[number]))}
        chain = sorted(cuts)
        whole = {part.shape[number] for part in parts}
        agree = all(b % a == 0 for a, b in itertools.pairwise(chain)) and all(w % c == 0 for w in whole for c in chain)
        parts = [_cut_at(part, number, chain) if agree else coarse(part, number) for part in parts]
    return parts


def _cut_at(given: Arrangement, axis: int, chain: Sequence[int]) -> Arrangement:
    """Refine one dimension at the given numbers of its own elements."""
    behind = math.prod(given.shape[axis + 1 :])
    finer = refined(given, {cut * behind for cut in chain if cut < given.shape[axis]})
    if given.shape[axis] not in chain:
        return finer
    # A boundary at the very extent: the part is a single one of what others have several of.
    place = sum(map(len, finer.groups[:axis]))
    groups = with_group(finer, axis, [1, *finer.groups[axis]])
    return put_together(finer.dtype, groups, [with_unit(patch, place) for patch in finer.patches])


def stacked(parts: Sequence[Arrangement], axis: int) -> Arrangement:
    """Put tensors one behind the other along a new dimension, as ``torch.stack`` does.

    >>> from hfdcp_core.arrangement import arranged
    >>> from hfdcp_core.catalog import TensorSpec
    >>> stacked([arranged(name, TensorSpec("F32", (2,))) for name in "ab"], 0).shape
    (2, 2)
    """
    return joined([unsqueezed(part, axis) for part in parts], axis_of(axis, len(parts[0].groups) + 1))


def zeros(dtype: str, shape: Sequence[int]) -> Arrangement:
    """Return a tensor of zeros, which nothing is read for."""
    box = Box.whole(tuple(shape))
    patches = (Patch(box, "", (), tuple(STILL for _ in shape)),) if box.volume else ()
    return Arrangement(dtype, tuple((extent,) for extent in shape), patches)


def padded(given: Arrangement, axis: int, extent: int) -> Arrangement:
    """Return it with zeros behind its last index, up to an extent.

    >>> from hfdcp_core.arrangement import arranged
    >>> from hfdcp_core.catalog import TensorSpec
    >>> padded(arranged("w", TensorSpec("F32", (3, 2))), 0, 4).shape
    (4, 2)
    """
    axis = axis_of(axis, len(given.groups))
    more = extent - given.shape[axis]
    if more < 0:
        raise PlanError(f"{given.spec} is longer than {extent} in dimension {axis}: it cannot be padded to that")
    if not more:
        return given
    return joined([given, zeros(given.dtype, put(given.shape, axis, more))], axis)
