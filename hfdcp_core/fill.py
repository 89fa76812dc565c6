"""Fill the windows of a file from the shards of a source: the reading half of consolidating.

A row-sharded part is read straight into its place; any other box is read whole and put there by one strided copy. The
payloads of a tensor stay open while its windows are filled, so that what was read of each is held against its own
checksum when the tensor is done.

What an operation makes is worked off in tiles: the boxes of its operands that a tile needs are read as any other box
is, into room of their own, and stay there for the tiles that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import EllipsisType
from typing import NamedTuple

import numpy as np

from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, Shard
from hfdcp_core.errors import PlanError, SourceError, StorageError
from hfdcp_core.manifest import CrcPart, SourceCheck
from hfdcp_core.numeric import CHUNK, Bits, Workspace
from hfdcp_core.operate import operate
from hfdcp_core.plan import Copy, FilePlan, Making
from hfdcp_core.read import Payload, check_item, gather_strided, open_payload, page_aligned, placed
from hfdcp_core.state import Cancellation
from hfdcp_core.store import Source, url_of
from hfdcp_core.tiling import Held, rooms_of, tiles_of
from hfdcp_core.windows import Copies, Lattice, Piece, Strung, Window, strung_shards, view_of

COPIED_BYTES = 256 << 10
"""Neighbours in the source that are apart in the output are read at once, and then copied, up to so many bytes."""
SMALL_BYTES = 64 << 10
"""Archives up to it are read whole, and with their neighbours."""


class Filler:
    """Fills windows from the source, in file order, in one thread."""

    def __init__(self, plan: FilePlan, source: Source, cancellation: Cancellation) -> None:
        """Take a file's plan, the store that its shards lie in, and who may wish for a stop; nothing is read yet."""
        self._plan, self._source, self._cancellation = plan, source, cancellation
        self._copies = Copies(plan)
        self._strung = strung_shards(plan, most=min(SMALL_BYTES, plan.window_bytes))
        self._scratch = page_aligned(plan.window_bytes)
        self._item_scratch = page_aligned(plan.window_bytes)
        self._open: dict[int, Payload] = {}
        self._checks = _Checks()
        self._carried = _Carried(source, cancellation, self._scratch, self._item_scratch, self._checks)
        self._tensor = 0
        self._makings = {making.tensor: making for making in plan.makings}
        self._zeros: dict[int, list[Box]] = {}
        for zeros in plan.zeros:
            self._zeros.setdefault(zeros.tensor, []).append(zeros.box)
        self._taken = _taken(plan)
        self._room = _Room(plan)

    def fill(self, window: Window, buffer: memoryview) -> None:
        """Fill a window; windows are asked for in file order.

        Raises:
            Cancelled: A stop was asked for.
            CorruptFile: The source is damaged.
            StorageError: Reading failed.
        """
        start = 0
        for piece in window:  # of which there may be as many thousands as tensors are small
            stop = start + piece.nbytes
            strung = self._strung.get(piece.tensor)
            if strung and strung.nbytes == piece.nbytes:
                self._carried.add(strung, start)
            else:
                self._cancellation.check()
                if piece.tensor != self._tensor:
                    self._close()
                    self._tensor = piece.tensor
                self._fill_piece(piece, buffer[start:stop])
            start = stop
        self._carried.read_into(buffer)

    def check(self) -> SourceCheck:
        """Say how far the source's own checksums went, when everything was filled."""
        self._close()
        return self._checks.sum()

    def _close(self) -> None:
        """Check the payloads of a tensor that is done: no later piece reads them."""
        self._room.forget()
        for number, payload in self._open.items():
            check = payload.check()
            if check.parts and self._taken.get(number):  # all of it was read, though not in a way that adds up
                check_item(self._source, self._plan.shards[number], scratch=self._item_scratch)
                check = SourceCheck(verified=1)
            self._checks.add(check)
        self._open.clear()

    def overflowed(self) -> Mapping[str, int]:
        """Say how many numbers of each tensor its dtype cannot hold, of those that have any."""
        return {self._plan.tensors[number][0]: lost for number, lost in self._room.lost.items() if lost}

    def _fill_piece(self, piece: Piece, buffer: memoryview) -> None:
        making = self._makings.get(piece.tensor)
        dtype = self._plan.tensors[piece.tensor][1].dtype
        if making is None:
            self._read_piece(piece, array_of(buffer, dtype, piece.box))
        else:
            self._make_piece(making, piece, array_of(buffer, dtype, piece.box))

    def _make_piece(self, making: Making, piece: Piece, target: Bits) -> None:
        """Let an operation make a piece, tile by tile."""
        for tile in tiles_of(making, piece, self._plan.window_bytes):
            operands = [self._operand(held, place) for place, held in enumerate(tile.held)]
            out = target[part_of(tile.inside)]
            self._room.lost[piece.tensor] = self._room.lost.get(piece.tensor, 0) + operate(
                making.operation, tile.box, operands, out, self._room.workspace
            )

    def _operand(self, held: Held, place: int) -> Bits:
        """Return a box of an operand, from what is held of it already, or else read."""
        number = held.piece.tensor
        found = self._room.held.get(place)
        if found is None or found[0] != held.piece:
            array = array_of(self._room.of(place, held.piece.nbytes), self._dtype_of(number), held.piece.box)
            for finer, part in self._copies.fine(held.piece):
                view = array[part_of(part)].reshape(finer.box.shape)  # which cuts dimensions, and copies nothing
                self._read_piece(finer, view, in_order=held.in_order)
            self._room.held[place] = found = (held.piece, array)
        return found[1][part_of(held.needed.relative_to(held.piece.box))]

    def _dtype_of(self, number: int) -> str:
        return self._plan.operands[number - len(self._plan.tensors)][1].dtype

    def _read_piece(self, piece: Piece, target: Bits, *, in_order: bool = True) -> None:
        """Read a piece of a plain tensor, or a box of an operand."""
        filled = self._fill_with_zeros(piece, target)
        for copy, box, shared in self._copies.meeting(piece):
            out = target[part_of(shared.relative_to(piece.box))]
            view = view_of(copy, self._plan.shards[copy.read.shard])
            part = view.part(shared.relative_to(box).offset, shared.shape)
            payload = self._payload(copy, in_order=in_order and (view.dense or part.solid))
            gather_strided(payload.read_into, part, out, scratch=self._scratch)
            filled += shared.volume
        if filled != piece.box.volume:
            raise PlanError(f"{self._plan.path}: the plan leaves {piece.box} of tensor {piece.tensor} unfilled")

    def _fill_with_zeros(self, piece: Piece, target: Bits) -> int:
        """Fill what nothing is read for; return how many elements that were."""
        filled = 0
        for box in self._zeros.get(piece.tensor, ()):
            if shared := box.intersect(piece.box):
                target[part_of(shared.relative_to(piece.box))] = 0
                filled += shared.volume
        return filled

    def _payload(self, copy: Copy, *, in_order: bool) -> Payload:
        number = copy.read.shard
        if number not in self._open:
            shard = self._plan.shards[number]
            self._open[number] = open_payload(self._source, shard, scratch=self._item_scratch, in_order=in_order)
        return self._open[number]


def _taken(plan: FilePlan) -> dict[int, bool]:
    """Say of the shards that are taken apart whether all of them is taken."""
    volumes: dict[int, int] = {}
    for copy in plan.copies:
        volumes[copy.read.shard] = volumes.get(copy.read.shard, 0) + copy.box.volume
    several = len(volumes) < len(plan.copies)
    return {n: volume == plan.shards[n].box.volume for n, volume in volumes.items()} if several else {}


class _Wanted(NamedTuple):
    """A shard whose elements are wanted at a place in the window; sorted by where the shard lies."""

    path: str
    start: int
    stop: int
    place: int
    nbytes: int
    shard: Shard


class _Carried:
    """Shards whose elements a window takes as they lie in the source; neighbours there are read at once.

    What each range costs is the call, and in Python the threads that wait for one another around it: 20,000 tensors of
    4 KB took two threads twice the time that they took one. To open a small ``torch.save`` archive costs more than to
    read it, so one that is like those before it is put in place at a glance.
    """

    def __init__(
        self,
        source: Source,
        cancellation: Cancellation,
        scratch: memoryview,
        item_scratch: memoryview,
        checks: _Checks,
    ) -> None:
        self._source, self._cancellation, self._checks = source, cancellation, checks
        self._scratch, self._item_scratch = scratch, item_scratch
        self._wanted: list[_Wanted] = []

    def add(self, strung: Strung, place: int) -> None:
        """Wish for shards, one behind the other from a place in the window on."""
        for shard, nbytes in strung.shards:
            span = shard.span
            self._wanted.append(_Wanted(span.path, span.start, span.stop, place, nbytes, shard))
            place += nbytes

    def read_into(self, buffer: memoryview) -> None:
        """Read what was wished for, and wish for nothing."""
        self._wanted.sort(key=itemgetter(0, 1))
        alone = ([one] for one in self._wanted)  # of a remote source, neighbours were fetched together before
        for run in alone if self._source.remote else _runs(self._wanted, min(COPIED_BYTES, len(self._scratch))):
            self._read_run(run, buffer)
        self._wanted.clear()

    def _read_run(self, run: list[_Wanted], buffer: memoryview) -> None:
        """Read neighbours; where that fails, one by one, so that whichever is at fault says so itself."""
        self._cancellation.check()
        first, stop = run[0], run[-1].stop
        in_place = _keep_distance(run)
        at = first.place if in_place else 0
        held = (buffer if in_place else self._scratch)[at : at + stop - first.start]
        try:
            self._source.read_into(first.path, first.start, held)
        except (SourceError, StorageError):
            if len(run) == 1:
                raise
            for one in run:
                self._read_run([one], buffer)
            return
        if in_place:
            self._checks.add(SourceCheck(unchecked=len(run)))
            return
        for one in run:
            span = held[one.start - first.start : one.stop - first.start]
            target = buffer[one.place : one.place + one.nbytes]
            self._checks.add(placed(one.shard, span, target) or self._opened(one.shard, span, target))

    def _opened(self, shard: Shard, span: memoryview, target: memoryview) -> SourceCheck:
        """Open a shard as others are, but from its bytes, which are at hand."""
        payload = open_payload(_AtHand(self._source, shard.span.start, span), shard, scratch=self._item_scratch)
        payload.read_into(0, target)
        return payload.check()


class _AtHand:
    """A span of a source that was read already."""

    def __init__(self, source: Source, start: int, held: memoryview) -> None:
        self._source, self._start, self._held = source, start, held
        self.url = source.url

    def url_of(self, path: str, start: int) -> str:
        return url_of(self._source, path, start)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        buffer.cast("B")[:] = self.read(path, start, start + buffer.nbytes)

    def read(self, _path: str, start: int, stop: int) -> bytes:
        return bytes(self._held[start - self._start : stop - self._start])


def _keep_distance(run: Sequence[_Wanted]) -> bool:
    """Whether shards lie in the window as they lie in their file."""
    distance = run[0].place - run[0].start
    return all(one.shard.encoding == RAW and one.place - one.start == distance for one in run)


def _runs(wanted: Iterable[_Wanted], most: int) -> Iterator[list[_Wanted]]:
    """Put shards together that follow one another, and keep their distance in the window or are few bytes."""
    run: list[_Wanted] = []
    keeps = True
    for one in wanted:
        if run:
            first, last = run[0], run[-1]
            keeps = keeps and _keep_distance((first, one))
            if last.path != one.path or last.stop != one.start or not (keeps or one.stop - first.start <= most):
                yield run
                run, keeps = [], True
        run.append(one)
    if run:
        yield run


class _Room:
    """Room for what operations work on; none is taken where there is nothing to do."""

    def __init__(self, plan: FilePlan) -> None:
        self.held: dict[int, tuple[Piece, Bits]] = {}
        self.lost: dict[int, int] = {}
        most = max((rooms_of(making.operation, plan.window_bytes) for making in plan.makings), key=len, default=())
        self._buffers = [page_aligned(nbytes) for nbytes in most]
        self.workspace = Workspace(CHUNK if plan.makings else 0)

    def of(self, place: int, nbytes: int) -> memoryview:
        """Return room for an operand; more than was planned where the smallest tile needs it."""
        buffer = self._buffers[place]
        return buffer[:nbytes] if nbytes <= len(buffer) else page_aligned(nbytes)

    def forget(self) -> None:
        """Hold nothing any more: other tensors come."""
        self.held.clear()


def array_of(buffer: memoryview, dtype: str, box: Box) -> Bits:
    """Return the items of a buffer as an array of a box's shape, on the lattice of the dtype."""
    return np.frombuffer(buffer, f"u{Lattice.of(dtype, (0,)).itemsize}").reshape(box.shape)


def part_of(inside: Box) -> tuple[slice | EllipsisType, ...]:
    """Return the index of a part; the ellipsis keeps a 0-d part a view, where numpy would return a copy."""
    return (*map(slice, inside.offset, inside.stop), ...)


class _Checks:
    """Adds up what parts of the work checked of the source; there may be one for each of very many tensors."""

    def __init__(self) -> None:
        self._verified = self._unchecked = 0
        self._parts: list[CrcPart] = []

    def add(self, check: SourceCheck) -> None:
        self._verified += check.verified
        self._unchecked += check.unchecked
        self._parts += check.parts

    def sum(self) -> SourceCheck:
        return SourceCheck(self._verified, self._unchecked, tuple(self._parts))
