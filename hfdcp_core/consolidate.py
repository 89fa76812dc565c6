"""To consolidate is to carry out one file's copies from a source into a sink, hashing on the way.

The file is made in *windows*: consecutive bytes of it, a few MiB, each of whole rows of a tensor (or of a part of one
row where a row is larger, or of many small tensors). Three threads work on a file, each on another window:

- one fills windows: a row-sharded part is read straight into its place, any other box is read whole and put there by
  one strided copy;
- one hashes: SHA-256 of the file, digest of each tensor;
- one (the caller's) writes, in file order.

So each source byte is read once, checked, placed, hashed and written once, and a 100 GB tensor takes no more memory
than a small one. The file becomes visible only when everything in it was found right.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import numpy as np

from hfdcp_core.box import Box
from hfdcp_core.catalog import FileStamp, TensorSpec
from hfdcp_core.errors import PlanError, SourceChanged, StorageNotFound
from hfdcp_core.manifest import FileRecord, SourceCheck
from hfdcp_core.ops import EMPTY_DIGEST, digest_text, extend_digest
from hfdcp_core.plan import BUFFERS, Copy, FilePlan, row_major
from hfdcp_core.read import Lattice, Payload, Strides, gather_strided, open_payload, page_aligned
from hfdcp_core.state import SILENT, Cancellation, Progress
from hfdcp_core.store import Source, Upload


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of one tensor that are one box of it."""

    tensor: int
    """Index into `FilePlan.tensors`."""
    box: Box
    """Which items, on the tensor's lattice."""
    nbytes: int
    """How many bytes."""


class Creator(Protocol):
    """All that is asked of a sink here; it may be a disk, a bucket, the Hub, or nothing at all."""

    def create(self, path: str, size: int) -> Upload:
        """Begin a file; see `hfdcp_core.store.Sink.create`."""
        ...


Window = tuple[Piece, ...]
"""Consecutive pieces of a file that are made together."""


def consolidate(
    plan: FilePlan,
    source: Source,
    sink: Creator,
    *,
    progress: Progress = SILENT,
    cancellation: Cancellation | None = None,
) -> FileRecord:
    """Make one file.

    Args:
        plan: The file and the copies that fill it.
        source: The store that its shards lie in.
        sink: The store that it is written to.
        progress: Hears of every window.
        cancellation: Heeded between windows.

    Returns:
        What was written: size, SHA-256, the digest of each tensor, and how far the source's own checksums went.

    Raises:
        CorruptFile: The source is damaged; nothing appears in the sink.
        SourceChanged: The source is not what was gathered; nothing appears in the sink.
        StorageError: Reading or writing failed; nothing appears in the sink.
    """
    check_stamps(plan.stamps, source)
    upload = sink.create(plan.path, plan.size)
    try:
        record = _Work(plan, source, upload, progress, cancellation or Cancellation()).run()
        check_stamps(plan.stamps, source)
        upload.commit()
    except BaseException:
        upload.abort()
        raise
    return record


def check_stamps(stamps: Iterable[FileStamp], source: Source) -> None:
    """Hold files of the source against their stamps.

    Raises:
        SourceChanged: One of them is not what was gathered.
    """
    SourceChanged.raise_for(
        f"{source.url} changed since it was gathered; start again when nothing writes to it any more",
        [problem for stamp in stamps if (problem := _difference(stamp, source))],
    )


def _difference(stamp: FileStamp, source: Source) -> str | None:
    try:
        now = source.stat(stamp.path)
    except StorageNotFound:
        return f"{stamp.path} is gone"
    if now == stamp:
        return None
    return f"{stamp.path}: {now.size} bytes ({now.tag}), gathered with {stamp.size} bytes ({stamp.tag})"


# ---- windows: pure -------------------------------------------------------------------------------------------------


def windows(tensors: Iterable[TensorSpec], window_bytes: int) -> Iterator[Window]:
    """Cut the data of a file into windows of at most ``window_bytes`` (but at least one item each).

    >>> tensors = [TensorSpec("U8", (3, 4)), TensorSpec("U8", (2,))]
    >>> [[piece.nbytes for piece in window] for window in windows(tensors, 8)]
    [[8], [4, 2]]
    """
    window: list[Piece] = []
    size = 0
    for number, spec in enumerate(tensors):
        for piece in _pieces(number, Lattice.of(spec.dtype, spec.shape), window_bytes):
            if window and size + piece.nbytes > window_bytes:
                yield tuple(window)
                window, size = [], 0
            window.append(piece)
            size += piece.nbytes
    if window:
        yield tuple(window)


def _pieces(tensor: int, lattice: Lattice, window_bytes: int) -> Iterator[Piece]:
    """Cut a tensor along the first dimension whose rows fit a window; every dimension before it item by item."""
    shape = lattice.shape
    if lattice.nbytes == 0:
        return
    if lattice.nbytes <= window_bytes or not shape:
        yield Piece(tensor, Box.whole(shape), lattice.nbytes)
        return
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * lattice.itemsize > window_bytes:
        axis += 1
    row = math.prod(shape[axis + 1 :]) * lattice.itemsize
    step = max(1, window_bytes // row)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            rows = min(step, shape[axis] - start)
            offset = (*outer, start, *itertools.repeat(0, len(shape) - axis - 1))
            yield Piece(tensor, Box(offset, (*(1 for _ in outer), rows, *shape[axis + 1 :])), rows * row)


class _Copies:
    """Finds the copies that meet a box of a tensor, without looking at all of them."""

    def __init__(self, plan: FilePlan) -> None:
        self._tables = [_CopyTable(spec) for _, spec in plan.tensors]
        for copy in plan.copies:
            self._tables[copy.tensor].add(copy)
        for table in self._tables:
            table.sort()

    def meeting(self, piece: Piece) -> Iterator[tuple[Copy, Box, Box]]:
        """Yield each copy with its box and the part of it that lies in the piece, both on the tensor's lattice."""
        return self._tables[piece.tensor].meeting(piece.box)


class _CopyTable:
    """The copies of one tensor, by the start of their boxes in the first dimension."""

    def __init__(self, spec: TensorSpec) -> None:
        self._dtype = spec.dtype
        self._rows: list[tuple[Box, Copy]] = []
        self._starts: list[int] = []
        self._longest = 0

    def add(self, copy: Copy) -> None:
        self._rows.append((lattice_box(self._dtype, copy.box), copy))

    def sort(self) -> None:
        self._rows.sort(key=lambda row: row[0].offset)
        self._starts = [box.offset[0] if box.offset else 0 for box, _ in self._rows]
        self._longest = max((box.shape[0] for box, _ in self._rows if box.shape), default=1)

    def meeting(self, wanted: Box) -> Iterator[tuple[Copy, Box, Box]]:
        start, stop = (wanted.offset[0], wanted.stop[0]) if wanted.offset else (0, 1)
        low = bisect.bisect_right(self._starts, start - self._longest)
        for box, copy in self._rows[low : bisect.bisect_left(self._starts, stop)]:
            if shared := box.intersect(wanted):
                yield copy, box, shared


def lattice_box(dtype: str, box: Box) -> Box:
    """Return a box on the lattice of its dtype: sub-byte kinds count bytes in the last dimension."""
    lattice = Lattice.of(dtype, box.shape)
    if lattice.shape == box.shape:
        return box
    return Box((*box.offset[:-1], Lattice.of(dtype, box.offset).shape[-1]), lattice.shape)


# ---- work: threads and buffers -------------------------------------------------------------------------------------


class _Work:
    """One file being made."""

    def __init__(
        self, plan: FilePlan, source: Source, upload: Upload, progress: Progress, cancellation: Cancellation
    ) -> None:
        self._plan, self._upload = plan, upload
        self._progress, self._cancellation = progress, cancellation
        self._filler = _Filler(plan, source)
        self._hashes = _Hashes(plan)

    def run(self) -> FileRecord:
        header = memoryview(self._plan.header)
        self._hashes.header(header)
        self._upload.write(header)
        free = deque(page_aligned(self._plan.window_bytes) for _ in range(BUFFERS))
        with ThreadPoolExecutor(1, "hfdcp-fill") as fill, ThreadPoolExecutor(1, "hfdcp-hash") as hashing:
            ahead: deque[tuple[Window, memoryview, Future[None]]] = deque()
            try:
                for window in windows((spec for _, spec in self._plan.tensors), self._plan.window_bytes):
                    if not free:
                        free.append(self._finish(ahead.popleft(), hashing))
                    buffer = _fitting(free.popleft(), window)
                    ahead.append((window, buffer, fill.submit(self._filler.fill, window, buffer)))
                while ahead:
                    self._finish(ahead.popleft(), hashing)
            finally:
                for _, _, waiting in ahead:
                    waiting.cancel()
        return self._hashes.record(self._filler.check())

    def _finish(self, filled: tuple[Window, memoryview, Future[None]], hashing: ThreadPoolExecutor) -> memoryview:
        window, buffer, future = filled
        self._cancellation.check()
        future.result()
        data = buffer[: sum(piece.nbytes for piece in window)]
        hashed = hashing.submit(self._hashes.window, window, data)
        try:
            self._upload.write(data)
        finally:
            hashed.result()
        self._progress.advance(len(data))
        return buffer


def _fitting(buffer: memoryview, window: Window) -> memoryview:
    """Return the buffer, or a larger one where a single item does not fit it."""
    needed = sum(piece.nbytes for piece in window)
    return buffer if needed <= len(buffer) else page_aligned(needed)


class _Hashes:
    """What is hashed of a file while it passes."""

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan
        self._sha256 = hashlib.sha256()
        self._digests = [EMPTY_DIGEST] * len(plan.tensors)

    def header(self, data: memoryview) -> None:
        self._sha256.update(data)

    def window(self, window: Window, data: memoryview) -> None:
        self._sha256.update(data)
        start = 0
        for piece in window:
            part = data[start : start + piece.nbytes]
            self._digests[piece.tensor] = extend_digest(self._digests[piece.tensor], part)
            start += piece.nbytes

    def record(self, check: SourceCheck) -> FileRecord:
        names = (fqn for fqn, _ in self._plan.tensors)
        digests = dict(zip(names, map(digest_text, self._digests), strict=True))
        return FileRecord(self._plan.path, self._plan.size, self._sha256.hexdigest(), digests, check)


class _Filler:
    """Fills windows from the source, in file order, in one thread."""

    def __init__(self, plan: FilePlan, source: Source) -> None:
        self._plan, self._source = plan, source
        self._copies = _Copies(plan)
        self._scratch = page_aligned(plan.window_bytes)
        self._item_scratch = page_aligned(plan.window_bytes)
        self._open: dict[int, Payload] = {}
        self._check = SourceCheck()
        self._tensor = 0

    def fill(self, window: Window, buffer: memoryview) -> None:
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
            view = self._view(copy, box, shared, spec)
            gather_strided(self._payload(copy.read.shard).read_into, view, out, scratch=self._scratch)
            filled += shared.volume
        if filled != piece.box.volume:
            raise PlanError(f"{self._plan.path}: the plan leaves {piece.box} of tensor {piece.tensor} unfilled")

    def _view(self, copy: Copy, box: Box, shared: Box, spec: TensorSpec) -> Strides:
        """Return which items of the shard fill a part of a copy's box."""
        strides = copy.read.strides
        if box != copy.box:  # a sub-byte kind: only whole rows of bytes move
            if (copy.read.offset, strides) != (0, row_major(copy.box.shape)):
                raise PlanError(f"{self._plan.path}: {spec.dtype} can only be copied as it lies")
            strides = row_major(box.shape)
        local = shared.relative_to(box).offset
        first = copy.read.offset + sum(a * b for a, b in zip(local, strides, strict=True))
        return Strides(first, shared.shape, strides)

    def _payload(self, shard: int) -> Payload:
        if shard not in self._open:
            self._open[shard] = open_payload(self._source, self._plan.shards[shard], scratch=self._item_scratch)
        return self._open[shard]


def joined(one: SourceCheck, other: SourceCheck) -> SourceCheck:
    """Add up what two parts of the work checked of the source."""
    return SourceCheck(one.verified + other.verified, one.unchecked + other.unchecked, (*one.parts, *other.parts))
