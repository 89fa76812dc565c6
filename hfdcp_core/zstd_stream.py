"""Read a Zstandard stream as if it could be read anywhere, in bounded memory: the one door to ``zstandard``.

A compressed item has no directory of its own: what lies where is known only when all before it was decompressed. So a
stream is decompressed twice. The first pass finds its length and keeps its two ends, where a ``torch.save`` archive
says what it holds; the second delivers what is asked for, in order. A read that goes backwards starts again.

Memory stays bounded whatever the stream holds: output goes into the caller's buffer, frames that ask for a larger
window than any reader must support are refused, as is a stream that yields more than its item can be, and only a few
streams of a process hold a decompressor at a time. The one that rested longest gives its up, and starts again when it
is asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import IO, Protocol, cast

from hfdcp_core.errors import CorruptFile

MOST_LIVE = 8
"""Streams of this process that hold a decompressor: window and input of each take about 3 MiB as torch writes them."""
MOST_WINDOW_BYTES = 8 << 20
"""What RFC 8878 asks every reader to support; torch's frames need 2 MiB."""
KEPT_BYTES = 66 << 10
"""How much of each end is kept: a zip directory with the longest comment."""
_INPUT_BYTES = 512 << 10
_STEP_BYTES = 128 << 10


class _Decompressor(Protocol):
    """What is used of zstandard's stream reader."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the start of a buffer and return how much; 0 at the end."""
        ...


class ZstdStream:
    """One compressed item, measured when it is opened.

    Args:
        fetch: Returns the bytes ``[start, stop)`` of the compressed item.
        size: Bytes of the compressed item.
        most: How many bytes it may hold.
        where: What it is, for messages.

    Raises:
        CorruptFile: It is no sound stream, or holds more than it may.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, *, most: int, where: str) -> None:
        self._fetch, self._size, self._where = fetch, size, where
        self._busy = threading.Lock()
        self._reader: _Decompressor | None = None
        self._position = 0
        self._head, self._tail = b"", b""
        self.length = self._measured(most)
        """Bytes that it holds."""

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``."""
        buffer = bytearray(stop - start)
        self.read_into(start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            CorruptFile: The stream is damaged, or ends before the buffer is full.
        """
        for first, piece in ((0, self._head), (self.length - len(self._tail), self._tail)):
            if first <= start and start + len(buffer) <= first + len(piece):
                buffer[:] = piece[start - first : start - first + len(buffer)]
                return
        with self._busy:
            self._go_to(start)
            self._fill(buffer)
            if self._position == self.length:
                self._reader = None

    def rest(self) -> None:
        """Give up the decompressor, unless it is at work in another thread."""
        if self._busy.acquire(blocking=False):
            try:
                self._reader = None
            finally:
                self._busy.release()

    def _measured(self, most: int) -> int:
        """Run through the stream once and keep its two ends."""
        step = memoryview(bytearray(_STEP_BYTES))
        with self._busy:
            self._restart()
            while count := self._more(step):
                self._head += bytes(step[: max(0, min(count, KEPT_BYTES - len(self._head)))])
                self._tail = (self._tail + bytes(step[:count]))[-KEPT_BYTES:]
                if self._position > most:
                    raise CorruptFile(
                        f"{self._where}: {self._size} compressed bytes hold more than {most}, which is more than such "
                        "an item can be"
                    )
            self._reader = None
        return self._position

    def _go_to(self, start: int) -> None:
        if self._reader is None or start < self._position:
            self._restart()
        skipped = memoryview(bytearray(min(_STEP_BYTES, start - self._position)))
        while self._position < start:
            self._fill(skipped[: start - self._position])

    def _fill(self, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = self._more(buffer[done:])
            if not count:
                raise CorruptFile(f"{self._where}: the compressed data end at byte {self._position} of their content")
            done += count

    def _restart(self) -> None:
        import zstandard

        _make_room(self)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
        source = cast("IO[bytes]", _Input(self._fetch, self._size))  # only `read` is ever called
        self._reader = decompressor.stream_reader(source, read_size=_INPUT_BYTES, read_across_frames=True)
        self._position = 0

    def _more(self, buffer: memoryview) -> int:
        import zstandard

        assert self._reader is not None
        try:
            count = self._reader.readinto(buffer)
        except zstandard.ZstdError as broken:
            raise CorruptFile(
                f"{self._where}: not sound Zstandard data behind byte {self._position} of their content: {broken}"
            ) from broken
        self._position += count
        return count


class _Input:
    """The compressed bytes as the file that zstandard reads from."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch, self._size = fetch, size
        self._position = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, nothing at the end."""
        start, self._position = self._position, min(self._position + size, self._size)
        return self._fetch(start, self._position) if start < self._position else b""


_live: dict[ZstdStream, None] = {}
_live_lock = threading.Lock()


def _make_room(stream: ZstdStream) -> None:
    """Enter a stream among those with a decompressor, and let those rest that were entered longest ago."""
    with _live_lock:
        _live.pop(stream, None)
        _live[stream] = None
        resting = list(_live)[:-MOST_LIVE]
        for other in resting:
            del _live[other]
    for other in resting:
        other.rest()
