"""Fill the windows of a file from the shards of a source: the reading half of consolidating.

A row-sharded part is read straight into its place; any other box is read whole and put there by one strided copy. The
payloads of a tensor stay open while its windows are filled, so that what was read of each is held against its own
checksum when the tensor is done.

What an operation makes is worked off in tiles: the boxes of its operands that a tile needs are read as any other box
is, into room of their own, and stay there for the tiles that follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType

import numpy as np

from hfdcp_core.box import Box
from hfdcp_core.catalog import Span
from hfdcp_core.errors import PlanError
from hfdcp_core.manifest import CrcPart, SourceCheck
from hfdcp_core.numeric import CHUNK, Bits, Workspace
from hfdcp_core.operate import operate
from hfdcp_core.plan import Copy, FilePlan, Making
from hfdcp_core.read import Payload, gather_strided, open_payload, page_aligned
from hfdcp_core.state import Cancellation
from hfdcp_core.store import Source
from hfdcp_core.tiling import Held, rooms_of, tiles_of
from hfdcp_core.windows import Copies, Lattice, Piece, Window, carried_whole, view_of

COPIED_BYTES = 256 << 10
"""Neighbours in the source that are apart in the output are read at once, and then copied, up to so many bytes."""


class Filler:
    """Fills windows from the source, in file order, in one thread."""

    def __init__(self, plan: FilePlan, source: Source, cancellation: Cancellation) -> None:
        """Take a file's plan, the store that its shards lie in, and who may wish for a stop; nothing is read yet."""
        self._plan, self._source, self._cancellation = plan, source, cancellation
        self._copies = Copies(plan)
        self._whole = {} if source.remote else carried_whole(plan)
        self._scratch = page_aligned(plan.window_bytes)
        self._item_scratch = page_aligned(plan.window_bytes)
        self._carried = _Carried(source, cancellation, self._scratch)
        self._open: dict[int, Payload] = {}
        self._checks = _Checks()
        self._tensor = 0
        self._makings = {making.tensor: making for making in plan.makings}
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
            span = self._whole.get(piece.tensor)
            if span is not None and span.length == piece.nbytes:
                self._carried.add(span, start)
                self._checks.unchecked()
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
        for payload in self._open.values():
            self._checks.add(payload.check())
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
            self._read_piece(held.piece, array, in_order=held.in_order)
            self._room.held[place] = found = (held.piece, array)
        return found[1][part_of(held.needed.relative_to(held.piece.box))]

    def _dtype_of(self, number: int) -> str:
        return self._plan.operands[number - len(self._plan.tensors)][1].dtype

    def _read_piece(self, piece: Piece, target: Bits, *, in_order: bool = True) -> None:
        """Read a piece of a plain tensor, or a box of an operand."""
        filled = 0
        for copy, box, shared in self._copies.meeting(piece):
            out = target[part_of(shared.relative_to(piece.box))]
            view = view_of(copy, self._plan.shards[copy.read.shard])
            part = view.part(shared.relative_to(box).offset, shared.shape)
            payload = self._payload(copy, in_order=in_order and view.dense)
            gather_strided(payload.read_into, part, out, scratch=self._scratch)
            filled += shared.volume
        if filled != piece.box.volume:
            raise PlanError(f"{self._plan.path}: the plan leaves {piece.box} of tensor {piece.tensor} unfilled")

    def _payload(self, copy: Copy, *, in_order: bool) -> Payload:
        number = copy.read.shard
        if number not in self._open:
            shard = self._plan.shards[number]
            self._open[number] = open_payload(self._source, shard, scratch=self._item_scratch, in_order=in_order)
        return self._open[number]


class _Carried:
    """Small tensors whose bytes a window takes as they lie in the source; neighbours there are read at once.

    What each range costs is the call, and in Python the threads that wait for one another around it: 20,000 tensors of
    4 KB took two threads twice the time that they took one.
    """

    def __init__(self, source: Source, cancellation: Cancellation, scratch: memoryview) -> None:
        self._source, self._cancellation, self._scratch = source, cancellation, scratch
        self._spans: list[tuple[str, int, int, int]] = []

    def add(self, span: Span, start: int) -> None:
        """Wish for a span at a place in the window."""
        self._spans.append((span.path, span.start, span.stop, start))

    def read_into(self, buffer: memoryview) -> None:
        """Read what was wished for, and wish for nothing."""
        self._spans.sort()
        for run in _runs(self._spans):
            self._cancellation.check()
            path, first, _, place = run[0]
            nbytes = run[-1][2] - first
            in_place = len({at - start for _, start, _, at in run}) == 1
            target = buffer[place : place + nbytes] if in_place else self._scratch[:nbytes]
            self._source.read_into(path, first, target)
            for _, start, stop, at in () if in_place else run:
                buffer[at : at + stop - start] = target[start - first : stop - first]
        self._spans.clear()


def _runs(spans: Sequence[tuple[str, int, int, int]]) -> Iterator[list[tuple[str, int, int, int]]]:
    """Put spans together that follow one another, and keep their distance in the window or are few bytes."""
    run: list[tuple[str, int, int, int]] = []
    keeps = True
    for span in spans:
        path, start, stop, place = span
        if run:
            first, last = run[0], run[-1]
            keeps = keeps and place - start == first[3] - first[1]
            if last[0] != path or last[2] != start or not (keeps or stop - first[1] <= COPIED_BYTES):
                yield run
                run, keeps = [], True
        run.append(span)
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

    def unchecked(self) -> None:
        self._unchecked += 1

    def add(self, check: SourceCheck) -> None:
        self._verified += check.verified
        self._unchecked += check.unchecked
        self._parts += check.parts

    def sum(self) -> SourceCheck:
        return SourceCheck(self._verified, self._unchecked, tuple(self._parts))
