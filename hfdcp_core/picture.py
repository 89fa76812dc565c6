"""A picture of the boxes of a tensor, in characters: which shard holds what, what nobody holds, what several hold.

1. Two dimensions are drawn, one down and one across: those that are cut. What else is cut is shown at one place, where
   something is wrong if there is such a place; dimensions that are not cut need no picture.
2. The two are divided into cells, to scale. A cell shows the letter of the shard that has the most of it. A hole or an
   overlap anywhere in a cell is what the cell shows, however small it is: damage is never too thin to be seen.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hfdcp_core.box import Box

HOLE, OVERLAP = ".", "!"
"""What stands for elements that no box holds, and for those that several hold."""
LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits
"""What stands for the boxes, in turn, again from the first where there are more."""
COLUMNS, ROWS = 78, 20
"""How large a picture is at most, with everything around it."""
_MOST_PLACES = 256
"""At how many places of the further dimensions damage is looked for."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The boxes of one tensor, drawn."""

    lines: tuple[str, ...]
    """The picture; none where the tensor has no element."""
    letters: tuple[str, ...]
    """What stands for each box, in their order; equal boxes share one, and a box without elements has a blank."""


_Held = tuple[Box, str]
"""A box and its letter."""


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a tensor that is drawn, in two dimensions."""

    down: int
    """The dimension that runs down."""
    across: int
    """The dimension that runs across."""
    region: Box
    """Which elements are shown: all in these two dimensions, some in the others."""


def draw(shape: tuple[int, ...], boxes: Sequence[Box]) -> Picture:
    r"""Draw the boxes of a tensor of some shape; they lie inside of it.

    >>> picture = draw((4, 6), [Box((0, 0), (2, 6)), Box((2, 0), (2, 3))])
    >>> print(*(line.rstrip() for line in picture.lines[1:]), sep="\n")
       0                                   3
      ┌────────────────────────────────────────────────────────────────────────┐
    0 │aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa│
      │aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa│
    2 │bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb....................................│
      │bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb....................................│
      └────────────────────────────────────────────────────────────────────────┘
    """
    flat = max(0, 2 - len(shape))  # a vector is a row, a scalar a row of one
    letters = _letters(boxes)
    if 0 in shape:
        return Picture((), letters)
    whole = Box.whole((1,) * flat + shape)
    held = {_raised(box, flat): letter for box, letter in zip(boxes, letters, strict=True) if box.volume}
    ordered = sorted(held.items(), key=lambda one: one[0].offset)  # neighbours in turn leave few pieces between them
    view = _view(whole, [box for box, _ in ordered])
    return Picture((*_told(view, whole, flat), *_frame(view, ordered)), letters)


def _raised(box: Box, flat: int) -> Box:
    return Box((0,) * flat + box.offset, (1,) * flat + box.shape)


def _letters(boxes: Sequence[Box]) -> tuple[str, ...]:
    different = dict.fromkeys(box for box in boxes if box.volume)
    letter_of = dict(zip(different, itertools.cycle(LETTERS)))
    return tuple(letter_of.get(box, " ") for box in boxes)


# ---- what is shown --------------------------------------------------------------------------------------------------


def _view(whole: Box, boxes: Sequence[Box]) -> _View:
    axes = range(len(whole.shape))
    cut = [axis for axis in axes if any(box.shape[axis] < whole.shape[axis] for box in boxes)]
    rest = sorted((axis for axis in axes if axis not in cut), key=lambda axis: -whole.shape[axis])
    down, across = sorted((cut + rest)[:2])
    if len(cut) <= 2:
        return _View(down, across, whole)
    places = list(itertools.islice(_places(whole, boxes, cut[2:]), _MOST_PLACES))
    odd = (place for place in places if any(_faults(place, boxes)))
    return _View(down, across, next(odd, places[0]))


def _places(whole: Box, boxes: Sequence[Box], axes: Sequence[int]) -> Iterator[Box]:
    """Yield the tensor's parts between all cuts of some dimensions."""
    steps = [itertools.pairwise(_cuts(whole, boxes, axis)) for axis in axes]
    for ends in itertools.product(*steps):
        offset, shape = list(whole.offset), list(whole.shape)
        for axis, (start, stop) in zip(axes, ends, strict=True):
            offset[axis], shape[axis] = start, stop - start
        yield Box(tuple(offset), tuple(shape))


def _cuts(whole: Box, boxes: Sequence[Box], axis: int) -> list[int]:
    ends = {end for box in boxes for end in (box.offset[axis], box.stop[axis])}
    return sorted(ends | {0, whole.shape[axis]})


def _faults(region: Box, boxes: Sequence[Box]) -> tuple[bool, bool]:
    """Say whether some element of a region is held by none of the boxes, and whether one is held by several."""
    left, several = [region], False
    for box in boxes:
        shared = region.intersect(box)
        if shared is None:
            continue
        before = sum(part.volume for part in left)
        left = [part for hole in left for part in hole.minus(shared)]
        several = several or before - sum(part.volume for part in left) < shared.volume
    return bool(left), several


def _told(view: _View, whole: Box, flat: int) -> Iterator[str]:
    """Say which dimensions are shown, and at which place of the others."""
    shown = [("down", view.down), ("across", view.across)]
    said = [f"{way}: dimension {axis - flat} of {whole.shape[axis]}" for way, axis in shown if axis >= flat]
    yield ", ".join(said) or "one element"
    others = [axis for axis in range(len(whole.shape)) if axis not in (view.down, view.across)]
    places = [(axis, view.region.offset[axis], view.region.stop[axis]) for axis in others]
    if places:
        yield "at " + ", ".join(
            f"{start}:{stop} of {whole.shape[axis]} in dimension {axis}" for axis, start, stop in places
        )


# ---- the drawing ----------------------------------------------------------------------------------------------------


def _frame(view: _View, held: Sequence[_Held]) -> Iterator[str]:
    """Yield the drawing: where boxes begin above it and beside it."""
    boxes = [box for box, _ in held]
    down, across = _cuts(view.region, boxes, view.down), _cuts(view.region, boxes, view.across)
    margin = len(str(down[-1] - 1))
    height, _ = _scale(down, ROWS - 5)
    width, each = _scale(across, COLUMNS - margin - 3)
    rows = _cells(view, held, (height, width))
    yield " " * (margin + 2) + _ruler(rows, across, each)
    yield f"{'':{margin}} ┌{'─' * (width * each)}┐"
    before = ""
    for number, row in enumerate(rows):
        begins = down[-1] > 1 and (number == 0 or row != rows[number - 1])
        label = _cut_at(number, height, down) if begins else before
        yield f"{label if label != before else '':>{margin}} │{''.join(cell * each for cell in row)}│"
        before = label
    yield f"{'':{margin}} └{'─' * (width * each)}┘"


def _scale(cuts: Sequence[int], room: int) -> tuple[int, int]:
    """Return how many cells there are and how many characters each takes; cells end where boxes do, if that is near.

    >>> _scale([0, 1000], 70), _scale([0, 500, 1000], 71), _scale([0, 3], 70)
    ((70, 1), (70, 1), (3, 23))
    """
    extent = cuts[-1]
    if extent <= room:
        return extent, room // extent
    fitting = (cells for cells in range(room, room // 2, -1) if all(cut * cells % extent == 0 for cut in cuts))
    return next(fitting, room), 1


def _cut_at(number: int, cells: int, cuts: Sequence[int]) -> str:
    """Return where, about the beginning of a cell, a box begins or ends."""
    return str(min(cuts, key=lambda cut: abs(cut * cells - number * cuts[-1])))


def _cells(view: _View, held: Sequence[_Held], size: tuple[int, int]) -> list[str]:
    """Return what each cell shows, row by row."""
    height, width = size
    touching: dict[tuple[int, int], list[_Held]] = {}
    for box, letter in held:
        if shared := box.intersect(view.region):
            rows = _touched(shared, view.down, view.region.shape[view.down], height)
            for cell in itertools.product(rows, _touched(shared, view.across, view.region.shape[view.across], width)):
                touching.setdefault(cell, []).append((box, letter))
    bands = [_part(view.region, view.down, (row, height)) for row in range(height)]
    return [
        "".join(
            _cell(_part(band, view.across, (column, width)), touching.get((row, column), ())) for column in range(width)
        )
        for row, band in enumerate(bands)
    ]


def _touched(box: Box, axis: int, extent: int, cells: int) -> range:
    """Return which of the equal parts of a dimension a box touches.

    >>> _touched(Box((3,), (4,)), 0, extent=10, cells=5)
    range(1, 4)
    """
    first, last = box.offset[axis], box.stop[axis] - 1
    return range(((first + 1) * cells - 1) // extent, ((last + 1) * cells - 1) // extent + 1)


def _part(region: Box, axis: int, cell: tuple[int, int]) -> Box:
    """Return one of so many equal parts of a region."""
    number, count = cell
    extent = region.shape[axis]
    start, stop = number * extent // count, (number + 1) * extent // count
    offset = (*region.offset[:axis], start, *region.offset[axis + 1 :])
    return Box(offset, (*region.shape[:axis], stop - start, *region.shape[axis + 1 :]))


def _cell(cell: Box, held: Sequence[_Held]) -> str:
    if len(held) == 1 and cell.within(held[0][0]):
        return held[0][1]  # most cells are so
    hole, several = _faults(cell, [box for box, _ in held])
    if several:
        return OVERLAP
    shares = [(shared.volume, letter) for box, letter in held if (shared := cell.intersect(box))]
    return HOLE if hole else max(shares, key=lambda share: share[0])[1]


def _ruler(rows: Sequence[str], cuts: Sequence[int], each: int) -> str:
    """Write where boxes begin above the columns, as far as there is room."""
    columns = list(zip(*rows, strict=True))
    ruler = label = "0"
    for number, (before, column) in enumerate(itertools.pairwise(columns), 1):
        if column != before and (cut := _cut_at(number, len(columns), cuts)) != label:
            label = cut
            fits = len(ruler) < number * each <= len(columns) * each - len(label)
            ruler = f"{ruler:<{number * each}}{label}" if fits else ruler
    return ruler
