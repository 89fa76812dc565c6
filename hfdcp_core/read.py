"""Read the elements of a shard, however they lie in the file.

A shard is opened into a *payload*: its elements as one row-major run of bytes, of which any part can be asked for.
Where the bytes in the file are that run already (nearly always), a part is one ranged read straight into place.
Otherwise a payload translates:

- a ``torch_save`` item may keep the strides of a transposed tensor, or a storage larger than the tensor;
- its bytes may be big-endian, or a complex tensor that is yet to be conjugated;
- the item may be compressed: then it is a stream (`hfdcp_core.zstd_stream`), read in order or from its start again.

What is read of an item is held against the CRC-32 that the item states. Parts are checked as they come and combined at
the end, so nothing is read twice; only an item of odd strides that is too large to be held is read once more.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hfdcp_core.box import boxes_of_run
from hfdcp_core.catalog import RAW, TORCH_SAVE_ZSTD, Shard, Span
from hfdcp_core.distcp_file import TorchItem, payload_at_a_glance, read_item
from hfdcp_core.errors import CorruptFile
from hfdcp_core.manifest import CrcPart, SourceCheck
from hfdcp_core.ops import combine_parts, crc32
from hfdcp_core.store import Ranges, Source, url_of
from hfdcp_core.windows import Lattice, Strides
from hfdcp_core.zstd_stream import ZstdStream

Array = npt.NDArray[np.unsignedinteger]
Fetch = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes from a position on."""

SPARSE = 16
"""A strided box is read with the bytes between its elements unless those are more than so many times its own."""

COMPARED_BYTES = 4 << 20
"""How much of two spans is held in memory while they are compared."""
MOST_OVERHEAD = 64 << 20
"""How much more than its elements a compressed item may hold: the archive around them, and the rest of a storage."""
_VERIFIED, _UNCHECKED = SourceCheck(verified=1), SourceCheck(unchecked=1)


def page_aligned(nbytes: int) -> memoryview:
    """Return a writable buffer that begins on a page.

    Where a buffer begins decides how fast the kernel fills it: 7.7 GB/s at the start of a page against 2.1 GB/s at 16
    bytes into it, which is where ``bytearray`` and ``numpy.empty`` put large ones (measured on Zen 3, page cache).
    """
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


class Payload(Protocol):
    """A shard's elements as one row-major run of little-endian bytes."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on; both fall on whole items.

        Raises:
            CorruptFile: The file is not what it says.
        """
        ...

    def check(self) -> SourceCheck:
        """Say how far what was read is known to be right: wholly, not at all, or in parts.

        Raises:
            CorruptFile: All of an item was read and its CRC-32 is not the one that it states.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Stored:
    """The bytes of a shard as they lie in its file, or in the stream that its file holds."""

    fetch: Fetch
    """Fills a buffer from a position in the payload on."""
    where: str
    """What it is, for messages."""
    span: str
    """Which bytes of which file."""
    item: TorchItem | None = None
    """What is known of the payload; nothing of raw bytes."""


def open_payload(source: Ranges, shard: Shard, *, scratch: memoryview, in_order: bool = True) -> Payload:
    """Open a shard for reading.

    Args:
        source: The store that it lies in.
        shard: Which one.
        scratch: Room for an item, or a part of one, whose bytes do not lie in order. Payloads that are read in turn
            may share it.
        in_order: Whether its bytes, or one run of them, will be read once and in order. Where they will not, their
            checksum cannot come with them, and the item is read once more for it.

    Raises:
        CorruptFile: What lies there is not the shard that the checkpoint describes.
    """
    where = _where(source, shard)
    if shard.encoding == RAW:
        return _Plain(_Stored(_fetch_from(source, shard.span), where, str(shard.span)))
    item, fetch = open_item(source, shard)
    stored = _Stored(_behind(fetch, item.start), where, str(shard.span), item)
    if item.row_major and item.storage_offset == 0 and item.storage_bytes == _lattice(shard).nbytes:
        if not in_order:
            _verify(stored, scratch)
        return _Plain(stored, checked=not in_order)
    return _Strided(stored, item, scratch)


def open_item(source: Ranges, shard: Shard) -> tuple[TorchItem, Fetch]:
    """Find the payload of a shard in its ``torch.save`` archive; no byte of the payload is looked at.

    Returns:
        The payload, and what fills a buffer with bytes of the archive.

    Raises:
        CorruptFile: What lies there is not the shard that the checkpoint describes.
        UnsafePickle: It is something else than a plain dense tensor.
        UnknownDtype: safetensors cannot hold its dtype.
    """
    where, span = _where(source, shard), shard.span

    def read(start: int, stop: int) -> bytes:
        return source.read(span.path, span.start + start, span.start + stop)

    if shard.encoding == TORCH_SAVE_ZSTD:
        stream = ZstdStream(read, span.length, most=_lattice(shard).nbytes + MOST_OVERHEAD, where=where)
        fetch: Fetch = stream.read_into
        item = read_item(stream.read, stream.length, where=where)
    else:
        fetch = _fetch_from(source, shard.span)
        item = read_item(read, span.length, where=where)
    if (item.dtype, item.shape) != (shard.dtype, shard.box.shape):
        found = f"{item.dtype}{list(item.shape)}"
        raise CorruptFile(f"{where}: the item holds {found}, expected {shard.dtype}{list(shard.box.shape)}")
    return item, fetch


def check_item(source: Source, shard: Shard, *, scratch: memoryview) -> None:
    """Read the payload of a shard's item once, a scratch full at a time, and hold it against the CRC-32 it states.

    Raises:
        CorruptFile: It is another one, or what lies there is not the shard that the checkpoint describes.
    """
    item, fetch = open_item(source, shard)
    _verify(_Stored(_behind(fetch, item.start), _where(source, shard), str(shard.span), item), scratch)


def same_bytes(source: Source, span: Span, other: Source, copy: Span) -> bool:
    """Whether two spans, perhaps of two stores, hold the same bytes."""
    fetches = _fetch_from(source, span), _fetch_from(other, copy)
    return span.length == copy.length and same_run(*fetches, span.length, step=COMPARED_BYTES)


def same_run(one: Fetch, other: Fetch, nbytes: int, *, step: int) -> bool:
    """Whether two runs of ``nbytes`` bytes are the same, of which ``step`` bytes are held in memory at a time."""
    buffers = [page_aligned(min(step, nbytes)) for _ in range(2)]
    for start in range(0, nbytes, step):
        first, second = (buffer[: nbytes - start] for buffer in buffers)
        one(start, first)
        other(start, second)
        if not np.array_equal(np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8)):
            return False
    return True


def placed(shard: Shard, span: memoryview, target: memoryview) -> SourceCheck | None:
    """Put the elements of a small shard in place, of whose span all bytes are at hand.

    Returns:
        How far they are known to be right; None where that takes a closer look, or where something is wrong with them:
        then nothing was done, and `open_payload` reads the shard or says what it is.
    """
    if shard.encoding == RAW:
        target[:] = span
        return _UNCHECKED
    found = payload_at_a_glance(bytes(span), shard.dtype, shard.box.shape)
    if found is None:
        return None
    start, stop, stated = found
    payload = span[start:stop]
    if stated is not None and crc32(payload) != stated:
        return None
    target[:] = payload
    return _UNCHECKED if stated is None else _VERIFIED


def _where(source: Ranges, shard: Shard) -> str:
    return f"{url_of(source, shard.span.path, shard.span.start)}: {shard}"


def _lattice(shard: Shard) -> Lattice:
    return Lattice.of(shard.dtype, shard.box.shape)


def _fetch_from(source: Ranges, span: Span) -> Fetch:
    def fetch(start: int, buffer: memoryview) -> None:
        source.read_into(span.path, span.start + start, buffer)

    return fetch


def _behind(fetch: Fetch, first: int) -> Fetch:
    """Count from ``first`` on."""

    def behind(start: int, buffer: memoryview) -> None:
        fetch(first + start, buffer)

    return behind


class _Plain:
    """Bytes that lie as they are wanted, but perhaps to be put right in place."""

    def __init__(self, stored: _Stored, *, checked: bool = False) -> None:
        self._stored, self._checked = stored, checked
        self._parts: list[tuple[int, int, int]] = []

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._stored.fetch(start, buffer)
        if (item := self._stored.item) is not None:
            if item.crc32 is not None and not self._checked:
                self._parts.append((start, start + len(buffer), crc32(buffer)))
            put_right(item, np.frombuffer(buffer, np.uint8))

    def check(self) -> SourceCheck:
        item = self._stored.item
        if item is None or item.crc32 is None:
            return SourceCheck(unchecked=1)
        if self._checked:
            return SourceCheck(verified=1)
        size, stated = item.storage_bytes, item.crc32
        parts = combine_parts(self._parts)
        if [part[:2] for part in parts] != [(0, size)]:
            return SourceCheck(parts=tuple(CrcPart(self._stored.span, *part, size, stated) for part in parts))
        compare_crc(parts[0][2], item, self._stored.where)
        return SourceCheck(verified=1)


def _verify(stored: _Stored, scratch: memoryview) -> None:
    """Read an item's whole payload for its CRC-32, a scratch full at a time.

    Raises:
        CorruptFile: It is not the one that the item states.
    """
    if stored.item is None or stored.item.crc32 is None:
        return
    crc = 0
    for start in range(0, stored.item.storage_bytes, len(scratch)):
        part = scratch[: stored.item.storage_bytes - start]
        stored.fetch(start, part)
        crc = crc32(part, crc)
    compare_crc(crc, stored.item, stored.where)


def compare_crc(found: int, item: TorchItem, where: str) -> None:
    """Refuse a payload whose CRC-32 is not the stated one."""
    if found != item.crc32:
        raise CorruptFile(
            f"{where}: CRC-32 of the data is {found:08x}, the file states {item.crc32:08x}: the bytes were damaged "
            "after they were saved; restore this file from a copy"
        )


def put_right(item: TorchItem, data: npt.NDArray[np.uint8]) -> None:
    """Make little-endian, resolved elements of the bytes as stored, in place."""
    if item.big_endian and item.unit_bytes > 1:
        width = item.unit_bytes // 2 if item.dtype.startswith("C") else item.unit_bytes
        data.view(f"u{width}").byteswap(inplace=True)
    if item.conjugate:
        imaginary = data.view(f"f{item.unit_bytes // 2}")[1::2]
        np.negative(imaginary, out=imaginary)


class _Strided:
    """Elements that lie in another order, or between others."""

    def __init__(self, stored: _Stored, item: TorchItem, scratch: memoryview) -> None:
        self._fetch, self._item, self._scratch = stored.fetch, item, scratch
        self._lattice = Lattice(item.unit_bytes, item.unit_shape)
        _verify(stored, scratch)

    def read_into(self, start: int, buffer: memoryview) -> None:
        size = self._lattice.itemsize
        out = np.frombuffer(buffer, f"u{size}")
        done = 0
        for offset, shape in boxes_of_run(self._lattice.shape, start // size, start // size + out.size):
            count = math.prod(shape)
            first = self._item.storage_offset + sum(map(math.prod, zip(offset, self._item.strides, strict=True)))
            view = Strides(first, shape, self._item.strides)
            gather_strided(self._fetch, view, out[done : done + count].reshape(shape), scratch=self._scratch)
            done += count
        put_right(self._item, out.view(np.uint8))

    def check(self) -> SourceCheck:
        return SourceCheck(unchecked=1) if self._item.crc32 is None else SourceCheck(verified=1)


def gather_strided(fetch: Fetch, view: Strides, out: Array, *, scratch: memoryview, gap_bytes: int = 0) -> None:
    """Fill an array with a strided box of items, reading no more at once than ``scratch`` holds.

    The box is read together with what lies between its items where that is little; else it is halved along its
    longest way through the file, down to single items.

    Args:
        fetch: Reads the file.
        view: Where the items lie.
        out: The array.
        scratch: Room for items and what lies between them.
        gap_bytes: What may lie between two runs of items and be read with them however short those are: what a
            request costs, where each of them is a round trip.
    """
    if out.size == 0:
        return
    nbytes = view.reach * out.itemsize
    if view.dense and out.flags.c_contiguous:
        fetch(view.offset * out.itemsize, out.reshape(-1).view(np.uint8).data)
    elif nbytes <= len(scratch) and (view.reach <= SPARSE * out.size or _has_small_gaps(view, out, gap_bytes)):
        fetch(view.offset * out.itemsize, scratch[:nbytes])
        run = np.frombuffer(scratch[:nbytes], out.dtype)
        steps = tuple(stride * out.itemsize for stride in view.strides)
        np.copyto(out, np.lib.stride_tricks.as_strided(run, view.shape, steps, writeable=False))
    else:
        for half, part in _halves(view, out):
            gather_strided(fetch, half, part, scratch=scratch, gap_bytes=gap_bytes)


def _has_small_gaps(view: Strides, out: Array, gap_bytes: int) -> bool:
    """Whether no more lies between the runs of a box, on average, than may be read for nothing."""
    between = view.reach * out.itemsize - out.nbytes
    return between <= gap_bytes * (_runs(view) - 1)


def _runs(view: Strides) -> int:
    """Return in how many runs of neighbouring items a box lies."""
    run, count = 1, 1
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if count == 1 and stride == run:
            run *= extent
        else:
            count *= extent
    return count


def _halves(view: Strides, out: Array) -> Iterator[tuple[Strides, Array]]:
    ways = [(extent - 1) * stride for extent, stride in zip(view.shape, view.strides, strict=True)]
    axis = ways.index(max(ways)) if any(ways) else view.shape.index(max(view.shape))
    middle = view.shape[axis] // 2
    for start, stop in ((0, middle), (middle, view.shape[axis])):
        shape = (*view.shape[:axis], stop - start, *view.shape[axis + 1 :])
        part = out[(*(slice(None),) * axis, slice(start, stop))]
        yield Strides(view.offset + start * view.strides[axis], shape, view.strides), part
