"""An arrangement says which element of which source tensor stands where in a target tensor: an index map, no byte.

Renaming, slicing, splitting, joining, stacking, transposing, reshaping and interleaving only move elements. So a target
tensor, however it was put together, is a few *patches*: a box of the target, and the affine way that leads from each of
its elements to one of a source tensor. That is all a plan needs to pull any box of the target back to boxes of shards.

How it is kept:

1. each dimension of the target is a *group* of finer extents whose product it is. The rows of attention heads, for
   example, are ``(heads, 2, half)``. All extents in a row are the *fine shape*; its row-major order is the target's;
2. a patch is a box of the fine shape. Along each fine dimension one dimension of its source goes on by a fixed step;
3. no two patches share an element, and together they are everything: every function here keeps that.

A dimension is refined where a boundary asks for it (`regrouped`), and patches are cut there. Where parts with different
boundaries come together, a dimension is made one again (`coarse`), which may take a patch for each of its rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hfdcp_core.box import Box, boxes_of_run
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import PlanError

MOST_PATCHES = 1 << 20
"""An arrangement of more patches is refused: it moves single elements, and would take hours."""


STILL = (0, 0)  # along a dimension of one element nothing goes on


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of a target tensor, and where its elements lie in a source tensor."""

    box: Box
    """Which elements of the target, in its fine shape."""
    source: str
    """Name of the source tensor, as saved; empty where there is none and the elements are zero."""
    start: tuple[int, ...]
    """Index of the first element in the source, one number per dimension of it."""
    moves: tuple[tuple[int, int], ...]
    """For each fine dimension of the target: which dimension of the source goes on, and by how many indices."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A target tensor as patches of source tensors."""

    dtype: str
    """Safetensors name of its dtype, and of all its sources'."""
    groups: tuple[tuple[int, ...], ...]
    """The finer extents of each dimension, whose product it is."""
    patches: tuple[Patch, ...]
    """What it is made of."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the target."""
        return tuple(map(math.prod, self.groups))

    @property
    def fine(self) -> tuple[int, ...]:
        """The extents in which patches are boxes."""
        return tuple(itertools.chain.from_iterable(self.groups))

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of the target."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source tensors, each once."""
        return tuple(dict.fromkeys(patch.source for patch in self.patches if patch.source))


def arranged(fqn: str, spec: TensorSpec) -> Arrangement:
    """Return the arrangement that is a source tensor as it is.

    >>> arranged("w", TensorSpec("F32", (4, 2))).shape
    (4, 2)
    """
    moves = tuple((axis, 1) if extent > 1 else STILL for axis, extent in enumerate(spec.shape))
    whole = Patch(Box.whole(spec.shape), fqn, (0,) * len(spec.shape), moves)
    groups = tuple((extent,) for extent in spec.shape)
    return Arrangement(spec.dtype, groups, (whole,) if 0 not in spec.shape else ())


def is_plain(arrangement: Arrangement, spec: TensorSpec) -> bool:
    """Whether it is one source tensor, of a given kind, as it is."""
    if arrangement.spec != spec or len(arrangement.patches) != 1:
        return False
    [patch] = arrangement.patches
    return bool(patch.source) and merged(arrangement) == arranged(patch.source, spec)


# ---- as few fine dimensions as can be -------------------------------------------------------------------------------


def merged(given: Arrangement) -> Arrangement:
    """Return the same with as few fine dimensions as its patches allow.

    >>> from hfdcp_core.rearrange import regrouped
    >>> fine = regrouped(arranged("w", TensorSpec("F32", (6, 4))), (2, 3, 4))
    >>> merged(regrouped(fine, (6, 4))).groups
    ((6,), (4,))
    """
    for axis in range(len(given.groups)):
        given = _merged_in(given, axis)
    return given


def _merged_in(given: Arrangement, axis: int) -> Arrangement:
    """Return the same with as few fine dimensions as can be in one of its dimensions."""
    for inner in reversed(range(len(given.groups[axis]) - 1)):
        place = sum(map(len, given.groups[:axis])) + inner
        extent = given.fine[place + 1]
        if all(_can_merge(patch, place, extent) for patch in given.patches):
            patches = [_merge(patch, place, extent) for patch in given.patches]
            now = given.groups[axis]
            groups = with_group(given, axis, [*now[:inner], now[inner] * now[inner + 1], *now[inner + 2 :]])
            given = put_together(given.dtype, groups, patches)
    return given


def _can_merge(patch: Patch, place: int, extent: int) -> bool:
    if patch.box.shape[place] == 1:
        return True
    (outer_dim, outer), (inner_dim, inner) = patch.moves[place : place + 2]
    if patch.box.shape[place + 1] != extent:
        return False
    return not patch.source or extent == 1 or (outer_dim == inner_dim and outer == inner * extent)


def _merge(patch: Patch, place: int, extent: int) -> Patch:
    offset, shape = patch.box.offset, patch.box.shape
    box = Box(
        (*offset[:place], offset[place] * extent + offset[place + 1], *offset[place + 2 :]),
        (*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :]),
    )
    move = patch.moves[place + 1] if shape[place + 1] > 1 else patch.moves[place]
    return Patch(box, patch.source, patch.start, (*patch.moves[:place], move, *patch.moves[place + 2 :]))


def coarse(given: Arrangement, axis: int) -> Arrangement:
    """Make one dimension a single fine one, with a patch for every run of it."""
    given = _merged_in(given, axis)
    while len(group := given.groups[axis]) > 1:
        place = places_of(given)[axis][-2]
        extent = group[-1]
        patches = [part for patch in given.patches for part in _rows(patch, place, extent)]
        refuse_too_many(patches)
        groups = with_group(given, axis, [*group[:-2], group[-2] * extent])
        given = put_together(given.dtype, groups, [_merge(patch, place, extent) for patch in patches])
    return given


def _rows(patch: Patch, place: int, extent: int) -> Iterator[Patch]:
    """Cut a patch until its indices of a fine dimension follow one another in the next one."""
    if _can_merge(patch, place, extent):
        yield patch
        return
    low = patch.box.offset[place]
    for index in range(low, low + patch.box.shape[place]):
        for part in clipped([patch], place, index, index + 1):
            yield shifted(part, place, index)


def clipped(patches: Sequence[Patch], place: int, start: int, stop: int) -> Iterator[Patch]:
    """Yield what patches have in an interval of a fine dimension, counted from its start."""
    for patch in patches:
        low, high = patch.box.offset[place], patch.box.offset[place] + patch.box.shape[place]
        first, last = max(low, start), min(high, stop)
        if first < last:
            box = Box(put(patch.box.offset, place, first - start), put(patch.box.shape, place, last - first))
            move = patch.moves[place] if last - first > 1 else STILL
            began = moved(patch.start, patch.moves[place], first - low)
            yield Patch(box, patch.source, began, (*patch.moves[:place], move, *patch.moves[place + 1 :]))


def refuse_too_many(patches: Sequence[Patch]) -> None:
    """Refuse what moves single elements."""
    if len(patches) > MOST_PATCHES:
        raise PlanError(f"it would take {len(patches)} patches: single elements change places, more than is practical")


# ---- finer ----------------------------------------------------------------------------------------------------------


def refined(given: Arrangement, cuts: set[int]) -> Arrangement:
    """Cut fine dimensions until each of the given numbers of elements is the product of the last few of them."""
    groups, patches = [list(group) for group in given.groups], list(given.patches)
    place, behind = len(given.fine) - 1, 1
    for axis in reversed(range(len(groups))):
        for inner in reversed(range(len(groups[axis]))):
            extent = groups[axis][inner]
            inside = sorted(cut // behind for cut in cuts if behind < cut < behind * extent)
            crossing = [
                cut for cut in cuts if behind < cut < behind * extent and (cut % behind or extent % (cut // behind))
            ]
            if crossing or any(b % a for a, b in itertools.pairwise(inside)):
                raise PlanError(f"{given.spec} cannot be reshaped: the boundaries of both shapes cross")
            bounds = [1, *inside, extent]
            pieces = [b // a for a, b in itertools.pairwise(bounds)][::-1]
            if len(pieces) > 1:
                groups[axis][inner : inner + 1] = pieces
                patches = [part for patch in patches for part in _cut_patch(patch, place, pieces)]
            behind *= extent
            place -= 1
    return put_together(given.dtype, groups, patches)


def _cut_patch(patch: Patch, place: int, pieces: Sequence[int]) -> Iterator[Patch]:
    """Cut a patch where one of its fine dimensions becomes several."""
    source_dim, step = patch.moves[place]
    inner = [math.prod(pieces[number + 1 :]) for number in range(len(pieces))]
    start, length = patch.box.offset[place], patch.box.shape[place]
    for offset, shape in boxes_of_run(tuple(pieces), start, start + length):
        first = sum(map(math.prod, zip(offset, inner, strict=True)))
        moves = [(source_dim, step * many) if extent > 1 else STILL for many, extent in zip(inner, shape, strict=True)]
        box = Box(
            (*patch.box.offset[:place], *offset, *patch.box.offset[place + 1 :]),
            (*patch.box.shape[:place], *shape, *patch.box.shape[place + 1 :]),
        )
        began = moved(patch.start, patch.moves[place], first - start)
        yield Patch(box, patch.source, began, (*patch.moves[:place], *moves, *patch.moves[place + 1 :]))


# ---- small steps ----------------------------------------------------------------------------------------------------


def axis_of(axis: int, axes: int) -> int:
    """Return the number of a dimension that may be counted from the last."""
    if not -axes <= axis < axes:
        raise PlanError(f"there is no dimension {axis} of {axes}")
    return axis % axes


def places_of(given: Arrangement) -> list[range]:
    """Return where the fine dimensions of each dimension stand."""
    ends = list(itertools.accumulate(map(len, given.groups), initial=0))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def put_together(
    dtype: str, groups: Sequence[Sequence[int]], patches: Sequence[Patch] | Iterator[Patch]
) -> Arrangement:
    """Return an arrangement, of whatever sequences."""
    return Arrangement(dtype, tuple(map(tuple, groups)), tuple(patches))


def with_group(given: Arrangement, axis: int, group: Sequence[int]) -> list[Sequence[int]]:
    """Return the groups, with another one for a dimension."""
    return [*given.groups[:axis], group, *given.groups[axis + 1 :]]


def picked(patch: Patch, places: Sequence[int]) -> Patch:
    """Return a patch with some of its fine dimensions, in a given order; those left out have one element."""
    offset, shape = patch.box.offset, patch.box.shape
    box = Box(tuple(offset[place] for place in places), tuple(shape[place] for place in places))
    return Patch(box, patch.source, patch.start, tuple(patch.moves[place] for place in places))


def with_unit(patch: Patch, place: int) -> Patch:
    """Return a patch with one more fine dimension, of one element."""
    offset, shape = patch.box.offset, patch.box.shape
    box = Box((*offset[:place], 0, *offset[place:]), (*shape[:place], 1, *shape[place:]))
    return Patch(box, patch.source, patch.start, (*patch.moves[:place], STILL, *patch.moves[place:]))


def without_units(given: Arrangement) -> Arrangement:
    """Return it without fine dimensions of one element, whatever dimension they belong to."""
    left = [place for place, extent in enumerate(given.fine) if extent != 1]
    groups = [tuple(extent for extent in group if extent != 1) for group in given.groups]
    return put_together(given.dtype, groups, [picked(patch, left) for patch in given.patches])


def shifted(patch: Patch, place: int, by: int) -> Patch:
    """Return a patch that fills a box further along a fine dimension."""
    offset = patch.box.offset
    return replace(patch, box=Box(put(offset, place, offset[place] + by), patch.box.shape))


def put(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    """Return numbers with another one in a place."""
    return (*numbers[:place], number, *numbers[place + 1 :])


def moved(start: tuple[int, ...], move: tuple[int, int], count: int) -> tuple[int, ...]:
    """Return the index in a source to which so many steps lead."""
    axis, step = move
    return put(start, axis, start[axis] + step * count) if count and step else start
