"""Which ranges of a remote source are fetched for a file, and when: requests are few, and no byte is fetched twice.

A request to a remote storage costs a round trip, whatever its size, so what a file needs is cut and joined before the
first byte moves:

1. the windows of the file are gone through in order, and for each shard that is read in its own order the bytes that
   a window takes of it are noted;
2. what consecutive windows take of one shard is one part, up to 8 MiB, or less where many shards are read side by side
   (columns): together they must not hold more than half of the budget;
3. parts that are neighbours in their file and wanted at about the same time are joined into one fetch, across gaps up
   to a limit: of all that is read, hardly more than a hundredth is read for nothing. Small parts may wait longer for
   their turn than large ones, so that a thousand small items of a file are a few requests.

The head and the tail of a ``torch.save`` item ride on its payload's own ranges; only the tail of one that is larger
than a fetch is a range of its own. Shards that are read against their order are left to be read as they are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, TORCH_SAVE_ZSTD, Shard, Span
from hfdcp_core.plan import Copy, FilePlan, row_major
from hfdcp_core.tiling import reads_of
from hfdcp_core.windows import Copies, Lattice, Piece, view_of, windows_of

FETCH_BYTES = 8 << 20
"""Most bytes of a fetch: larger requests cost more time and memory for each byte (measured with gcsfs)."""
GAP_BYTES = 1 << 20
"""Bytes that nobody wants between two parts may be as many: to skip them would take as long as to read them."""
SMALL_BYTES = 1 << 20
"""Parts below it may be fetched long before they are wanted."""
LEAST_WASTE_BYTES = 4 << 20
"""So much may be read for nothing in any case."""
END_BYTES = 4 << 10
"""What is read at an end of an item before its payload."""
WHOLE_BYTES = 64 << 10
"""Items up to it are read whole when they are opened."""
SPARSE = 16
"""A box whose bytes lie among so many times as many others is read in small pieces, as they are asked for."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One range of a file, and the windows that take from it."""

    path: str
    """The file."""
    start: int
    """First byte."""
    stop: int
    """Behind the last byte."""
    first: int
    """Number of the first window that takes from it."""
    last: int
    """Number of the last one, after which it can be forgotten."""

    @property
    def nbytes(self) -> int:
        """How many bytes are fetched."""
        return self.stop - self.start


def fetches_of(plan: FilePlan, *, budget_bytes: int) -> tuple[Fetch, ...]:
    """Return what is to be fetched for a file, in the order in which it is wanted.

    Args:
        plan: The file.
        budget_bytes: How many fetched bytes may be held at the same time.
    """
    parts = sorted(_Cutter(plan, budget_bytes).parts(), key=lambda part: (part.first, part.path, part.start))
    return tuple(sorted(joined(parts, budget_bytes=budget_bytes), key=lambda fetch: (fetch.first, fetch.last)))


# ---- what each shard gives ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Growing:
    """A part of a shard, counted in its span, that later windows may add to."""

    start: int
    stop: int
    first: int
    last: int


class _Cutter:
    """Goes through the windows of a file and notes what they take of each shard."""

    def __init__(self, plan: FilePlan, budget_bytes: int) -> None:
        self._plan, self._budget = plan, budget_bytes
        self._copies = Copies(plan)
        self._makings = {making.tensor: making for making in plan.makings}
        self._held: dict[int, Piece] = {}
        self._specs = [spec for _, spec in (*plan.tensors, *plan.operands)]
        self._growing: dict[int, _Growing] = {}
        self._opened: set[int] = set()
        self._row: tuple[int, ...] = ()
        self._count = 1
        self._parts: list[Fetch] = []

    def parts(self) -> list[Fetch]:
        """Return the parts of all shards."""
        tensor = 0
        for number, window in enumerate(windows_of(self._plan)):
            for piece in window:
                if piece.tensor != tensor:
                    self._end_tensor()
                    tensor = piece.tensor
                self._take_for(number, piece)
        self._end_tensor()
        return self._parts

    def _take_for(self, number: int, piece: Piece) -> None:
        """Take what a piece is read or made from; what is held already for an operation is not read again."""
        for read in reads_of(self._makings.get(piece.tensor), piece, self._plan.window_bytes):
            if self._held.get(read.tensor) != read:
                for finer, _ in self._copies.fine(read):
                    self._take(number, finer)
            if piece.tensor in self._makings:
                self._held[read.tensor] = read

    def _take(self, number: int, piece: Piece) -> None:
        most = min(FETCH_BYTES, self._budget // (2 * self._side_by_side(piece)))
        for copy, box, shared in self._copies.meeting(piece):
            wanted = _wanted(self._plan.shards[copy.read.shard], copy, box, shared)
            if wanted:
                self._grow(copy.read.shard, number, wanted, most)

    def _side_by_side(self, piece: Piece) -> int:
        """Return how many shards the rows of a piece lie in: all are read on and on until those rows are done."""
        row = (piece.tensor, *piece.box.offset[:1])
        if row != self._row:
            spec = self._specs[piece.tensor]
            shape = Lattice.of(spec.dtype, spec.shape).shape
            start, extent = piece.box.offset[:1], piece.box.shape[:1]
            whole = Box((*start, *(0 for _ in shape[1:])), (*extent, *shape[1:]))
            count = sum(1 for _ in self._copies.meeting(Piece(piece.tensor, whole, 0)))
            self._row, self._count = row, max(1, count)
        return self._count

    def _grow(self, shard: int, number: int, wanted: tuple[int, int], most: int) -> None:
        start, stop = wanted
        part = self._growing.get(shard)
        if part and part.start <= start <= part.stop and stop - part.start <= most:
            part.stop, part.last = max(stop, part.stop), number
            return
        if part:
            self._emit(shard, part)
        self._growing[shard] = _Growing(start, stop, number, number)

    def _end_tensor(self) -> None:
        for shard, part in self._growing.items():
            self._emit(shard, part)
        self._growing.clear()
        self._opened.clear()

    def _emit(self, number: int, part: _Growing) -> None:
        shard = self._plan.shards[number]
        if number not in self._opened and shard.encoding == TORCH_SAVE:
            self._open(shard, part)
        self._opened.add(number)
        self._add(shard.span, part.start, part.stop, (part.first, part.last))

    def _open(self, shard: Shard, part: _Growing) -> None:
        """Let the ends of an item, which are read when it is opened, come with its first part."""
        length, first = shard.span.length, (part.first, part.first)
        if length <= WHOLE_BYTES:
            part.start, part.stop = 0, length
            return
        if part.start:
            self._add(shard.span, 0, END_BYTES, first)
        part.stop = max(part.stop, min(part.start + END_BYTES, length))
        if part.stop < length:
            self._add(shard.span, length - END_BYTES, length, first)

    def _add(self, span: Span, start: int, stop: int, used: tuple[int, int]) -> None:
        self._parts.append(Fetch(span.path, span.start + start, span.start + stop, *used))


def _wanted(shard: Shard, copy: Copy, box: Box, shared: Box) -> tuple[int, int] | None:
    """Return which bytes of a shard's span hold a part of a copy; None where they are left to be read as asked for."""
    length, lattice = shard.span.length, Lattice.of(shard.dtype, shard.box.shape)
    if shard.encoding == TORCH_SAVE_ZSTD:
        return (0, length) if length <= FETCH_BYTES else None
    around = length - lattice.nbytes
    part = view_of(copy, shard).part(shared.relative_to(box).offset, shared.shape)
    in_order = copy.read.strides == row_major(shard.box.shape) or part.forward or part.solid
    if not in_order or not 0 <= around <= WHOLE_BYTES or part.reach > SPARSE * shared.volume:
        return None
    # Where in an item its payload begins is not known yet, but what lies around it is little.
    return part.offset * lattice.itemsize, (part.offset + part.reach) * lattice.itemsize + around


# ---- joining --------------------------------------------------------------------------------------------------------


def joined(parts: Sequence[Fetch], *, budget_bytes: int) -> list[Fetch]:
    """Join parts that are neighbours in their file and wanted at about the same time.

    >>> parts = [Fetch("a", 0, 10, 0, 0), Fetch("a", 12, 20, 0, 0), Fetch("b", 0, 5, 1, 1)]
    >>> [(fetch.path, fetch.start, fetch.stop) for fetch in joined(parts, budget_bytes=1 << 20)]
    [('a', 0, 20), ('b', 0, 5)]

    Args:
        parts: In the order in which they are wanted.
        budget_bytes: How many bytes may be held at the same time.
    """
    return _Joiner(parts, budget_bytes).fetches()


class _Joiner:
    """Joins parts, beginning with the one that is wanted first."""

    def __init__(self, parts: Sequence[Fetch], budget_bytes: int) -> None:
        self._parts = parts
        self._most = min(FETCH_BYTES, budget_bytes // 2)
        self._far = budget_bytes // 4
        self._all = list(itertools.accumulate((part.nbytes for part in parts), initial=0))
        self._small = list(itertools.accumulate((_small(part) for part in parts), initial=0))
        self._spare = max(min(LEAST_WASTE_BYTES, budget_bytes // 8), self._all[-1] // 100)
        self._in_file = sorted(range(len(parts)), key=lambda number: (parts[number].path, parts[number].start))
        self._place = {number: place for place, number in enumerate(self._in_file)}
        self._taken = [False] * len(parts)

    def fetches(self) -> list[Fetch]:
        """Return every part in one fetch."""
        return [self._around(number) for number in range(len(self._parts)) if not self._taken[number]]

    def _around(self, seed: int) -> Fetch:
        """Return the fetch that begins with a part and takes its neighbours along, first behind it, then before it."""
        self._taken[seed] = True
        fetch = self._parts[seed]
        for step in (1, -1):
            place = self._place[seed] + step
            while 0 <= place < len(self._in_file):
                other = self._in_file[place]
                grown = None if self._taken[other] else self._with(fetch, other, seed)
                if grown is None:
                    break
                self._taken[other] = True
                fetch, place = grown, place + step
        return fetch

    def _with(self, fetch: Fetch, other: int, seed: int) -> Fetch | None:
        """Return a fetch with another part; None where that would be too large, too soon, or read too much."""
        part = self._parts[other]
        start, stop = min(fetch.start, part.start), max(fetch.stop, part.stop)
        gap = max(part.start - fetch.stop, fetch.start - part.stop, 0)
        fits = part.path == fetch.path and stop - start <= self._most and gap <= min(GAP_BYTES, self._spare)
        if not fits or not self._are_near(seed, other):
            return None
        self._spare -= gap
        return Fetch(fetch.path, start, stop, min(fetch.first, part.first), max(fetch.last, part.last))

    def _are_near(self, seed: int, other: int) -> bool:
        """Tell whether what lies between two parts in the order of use, and waits with them, is little."""
        low, high = min(seed, other), max(seed, other)
        if self._all[high] - self._all[low] <= self._most:
            return True
        both_small = _small(self._parts[seed]) and _small(self._parts[other])
        return bool(both_small) and self._small[high] - self._small[low] <= self._far


def _small(part: Fetch) -> int:
    """Return how many bytes a part adds to those that may wait for long."""
    return part.nbytes if part.nbytes < SMALL_BYTES else 0
