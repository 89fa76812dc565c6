"""Fill the windows of a file from the shards of a source: the reading half of consolidating.

A row-sharded part is read straight into its place; any other box is read whole and put there by one strided copy. The
payloads of a tensor stay open while its windows are filled, so that what was read of each is held against its own
checksum when the tensor is done.
"""

from __future__ import annotations

from types import EllipsisType

import numpy as np

from hfdcp_core.errors import PlanError
from hfdcp_core.manifest import SourceCheck
from hfdcp_core.plan import Copy, FilePlan
from hfdcp_core.read import Payload, gather_strided, open_payload, page_aligned
from hfdcp_core.store import Source
from hfdcp_core.windows import Copies, Lattice, Piece, Strides, Window, view_of


class Filler:
    """Fills windows from the source, in file order, in one thread."""

    def __init__(self, plan: FilePlan, source: Source) -> None:
        """Take the plan of a file and the store that its shards lie in; nothing is read yet."""
        self._plan, self._source = plan, source
        self._copies = Copies(plan)
        self._scratch = page_aligned(plan.window_bytes)
        self._item_scratch = page_aligned(plan.window_bytes)
        self._open: dict[int, Payload] = {}
        self._check = SourceCheck()
        self._tensor = 0

    def fill(self, window: Window, buffer: memoryview) -> None:
        """Fill a window; windows are asked for in file order.

        Raises:
            CorruptFile: The source is damaged.
            StorageError: Reading failed.
        """
        start = 0
        for piece in window:
            if piece.tensor != self._tensor:
                self._close()
                self._tensor = piece.tensor
            self._fill_piece(piece, buffer[start : start + piece.nbytes])
            start += piece.nbytes

    def check(self) -> SourceCheck:
        """Say how far the source's own checksums went, when everything was filled."""
        self._close()
        return self._check

    def _close(self) -> None:
        """Check the payloads of a tensor that is done: no later piece reads them."""
        for payload in self._open.values():
            self._check = joined(self._check, payload.check())
        self._open.clear()

    def _fill_piece(self, piece: Piece, buffer: memoryview) -> None:
        spec = self._plan.tensors[piece.tensor][1]
        itemsize = Lattice.of(spec.dtype, spec.shape).itemsize
        target = np.frombuffer(buffer, f"u{itemsize}").reshape(piece.box.shape)
        filled = 0
        for copy, box, shared in self._copies.meeting(piece):
            inside = shared.relative_to(piece.box)
            # The ellipsis keeps a 0-d part a view of the buffer; without it numpy returns a copy.
            where: tuple[slice | EllipsisType, ...] = (*map(slice, inside.offset, inside.stop), ...)
            out = target[where]
            view = view_of(copy, self._plan.shards[copy.read.shard])
            part = view.part(shared.relative_to(box).offset, shared.shape)
            gather_strided(self._payload(copy, view).read_into, part, out, scratch=self._scratch)
            filled += shared.volume
        if filled != piece.box.volume:
            raise PlanError(f"{self._plan.path}: the plan leaves {piece.box} of tensor {piece.tensor} unfilled")

    def _payload(self, copy: Copy, view: Strides) -> Payload:
        number = copy.read.shard
        if number not in self._open:
            shard = self._plan.shards[number]
            self._open[number] = open_payload(self._source, shard, scratch=self._item_scratch, in_order=view.dense)
        return self._open[number]


def joined(one: SourceCheck, other: SourceCheck) -> SourceCheck:
    """Add up what two parts of the work checked of the source."""
    return SourceCheck(one.verified + other.verified, one.unchecked + other.unchecked, (*one.parts, *other.parts))
