"""A box: a rectangular part of a tensor."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add
from typing import Self


@dataclass(frozen=True, slots=True)
class Box:
    """Where a part of a tensor starts and how large it is, in logical elements.

    A 0-d tensor has the one box ``Box((), ())`` of volume 1. Extents may be 0: such a box holds no element and meets
    no other.

    >>> Box((0, 2), (4, 2)).intersect(Box((3, 0), (4, 3)))
    Box(offset=(3, 2), shape=(1, 1))
    >>> str(Box((0, 2), (4, 2)))
    '[0:4, 2:4]'
    """

    offset: tuple[int, ...]
    """Index of the first element, one number per dimension."""
    shape: tuple[int, ...]
    """Extent in each dimension."""

    def __post_init__(self) -> None:
        """Refuse what is not a box."""
        if len(self.offset) != len(self.shape):
            raise ValueError(f"a box has as many offsets as extents, not {self.offset} and {self.shape}")
        if self.offset and (min(self.offset) < 0 or min(self.shape) < 0):
            raise ValueError(f"a box has no negative numbers: {self.offset}, {self.shape}")

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """Return the box of an entire tensor; most tensors of a model have one of a few shapes."""
        return cls((0,) * len(shape), shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """Index behind the last element, one number per dimension."""
        return tuple(map(add, self.offset, self.shape))

    @property
    def volume(self) -> int:
        """How many elements it holds."""
        return math.prod(self.shape)

    def within(self, other: Box) -> bool:
        """Whether it lies inside ``other``, of the same number of dimensions."""
        return len(self.offset) == len(other.offset) and all(
            there <= here and here + extent <= there + room
            for here, extent, there, room in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """Return the elements that both hold, or None where there are none."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(stop - first for stop, first in zip(map(min, self.stop, other.stop), start, strict=True))
        return Box(start, shape) if all(extent > 0 for extent in shape) else None

    def relative_to(self, other: Box) -> Box:
        """Return the same elements, counted from the first element of ``other``."""
        if not any(other.offset):
            return self
        return Box(tuple(a - b for a, b in zip(self.offset, other.offset, strict=True)), self.shape)

    def minus(self, other: Box) -> Iterator[Box]:
        """Yield disjoint boxes that hold what is here and not in ``other``.

        >>> [str(part) for part in Box((0,), (6,)).minus(Box((2,), (2,)))]
        ['[0:2]', '[4:6]']
        """
        shared = self.intersect(other)
        if shared is None:
            if self.volume:
                yield self
            return
        offset, shape = list(self.offset), list(self.shape)
        for axis, (low, extent) in enumerate(zip(shared.offset, shared.shape, strict=True)):
            below, above = low - offset[axis], offset[axis] + shape[axis] - low - extent
            if below:
                yield Box(tuple(offset), (*shape[:axis], below, *shape[axis + 1 :]))
            if above:
                start = (*offset[:axis], low + extent, *offset[axis + 1 :])
                yield Box(start, (*shape[:axis], above, *shape[axis + 1 :]))
            offset[axis], shape[axis] = low, extent

    def __str__(self) -> str:
        """Write it as slices: ``[0:4, 2:4]``."""
        return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(self.offset, self.shape, strict=True))}]"


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a run ``[start, stop)`` of row-major items into boxes, in order.

    Yields:
        Offset and shape of each box.

    >>> list(boxes_of_run((4, 3), 1, 11))
    [((0, 1), (1, 2)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    """
    if not shape:
        if start < stop:
            yield (), ()
        return
    row = math.prod(shape[1:])
    while start < stop:
        first, inside = divmod(start, row)
        rows = (stop - start) // row
        if inside == 0 and rows:
            yield (first, *itertools.repeat(0, len(shape) - 1)), (rows, *shape[1:])
            start += rows * row
            continue
        end = min(stop, (first + 1) * row)
        for offset, part in boxes_of_run(shape[1:], inside, end - first * row):
            yield (first, *offset), (1, *part)
        start = end
