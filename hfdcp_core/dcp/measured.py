"""What a load read: how many ranges, and how many bytes for how many that were needed.

Small neighbours of a remote file are read as one range: a model has hundreds of norms and biases, and a round trip
costs as much as a megabyte. What lies between them is read for nothing, of which there may be little.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hfdcp_core.catalog import FileStamp
from hfdcp_core.read import page_aligned
from hfdcp_core.store import Listing, Source

SMALL_BYTES = 1 << 20
"""Ranges below it are joined with their neighbours."""
JOINED_BYTES = 4 << 20
"""Most bytes of ranges that were joined."""
WASTE = 64
"""Of so many bytes that are needed, one may be read for nothing."""


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What this rank read for the tensors of its plan; headers and listings do not count."""

    ranges: int
    """Ranges of files. A remote one of more than 8 MiB is asked for in several requests."""
    read_bytes: int
    """Their bytes."""
    tensor_bytes: int
    """Bytes of the parts of tensors that were asked for, in the dtypes that the metadata states."""

    def __str__(self) -> str:
        return f"{self.read_bytes} bytes in {self.ranges} ranges, for {self.tensor_bytes} bytes of tensors"


@dataclass(frozen=True, slots=True)
class Range:
    """What a request reads of a file."""

    path: str
    """The file."""
    start: int
    """First byte."""
    stop: int
    """Behind the last byte."""

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.stop - self.start


def joined(ranges: Sequence[Range], *, spare_bytes: int) -> list[tuple[Range, list[int]]]:
    """Join small ranges that are neighbours in their file.

    >>> for whole, numbers in joined([Range("a", 0, 640), Range("b", 0, 9), Range("a", 650, 700)], spare_bytes=10):
    ...     print(whole, numbers)
    Range(path='a', start=0, stop=700) [0, 2]
    Range(path='b', start=0, stop=9) [1]

    Args:
        ranges: What is needed.
        spare_bytes: How much may be read for nothing.

    Returns:
        Each range that is to be read, and the numbers of those that lie in it.
    """
    spare = spare_bytes
    found: list[tuple[Range, list[int]]] = []
    for number, each in sorted(enumerate(ranges), key=lambda pair: (pair[1].path, pair[1].start)):
        if found:
            last, numbers = found[-1]
            gap, stop = max(each.start - last.stop, 0), max(each.stop, last.stop)
            small = each.nbytes < SMALL_BYTES and (len(numbers) > 1 or last.nbytes < SMALL_BYTES)
            if small and each.path == last.path and stop - last.start <= JOINED_BYTES and gap <= spare:
                spare -= gap
                found[-1] = Range(last.path, last.start, stop), [*numbers, number]
                continue
        found.append((each, [number]))
    return found


class MeasuredSource:
    """A store that counts what is read of it, and may hold a range for the reads of one thread."""

    def __init__(self, source: Source) -> None:
        """Take the store."""
        self._source = source
        self._lock = threading.Lock()
        self._held = threading.local()
        self.ranges = 0
        """Ranges that were read so far."""
        self.nbytes = 0
        """Their bytes."""

    def __getattr__(self, name: str) -> object:
        """Leave the rest to the store: one that joins several says of each file where it lies."""
        return getattr(self._source, name)

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        return self._source.url

    @property
    def remote(self) -> bool:
        """Whether each request costs a round trip."""
        return self._source.remote

    def list(self, folder: str = "") -> Listing:
        """List one folder."""
        return self._source.list(folder)

    def stat(self, path: str) -> FileStamp:
        """Return the stamp of one file."""
        return self._source.stat(path)

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Return the stamps of those files that are there."""
        return self._source.stamps(paths)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on."""
        held = self._in_hand(path, start, start + buffer.nbytes)
        if held is not None:
            buffer.cast("B")[:] = held
            return
        self._count(buffer.nbytes)
        self._source.read_into(path, start, buffer)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``."""
        held = self._in_hand(path, start, stop)
        if held is not None:
            return bytes(held)
        self._count(stop - start)
        return self._source.read(path, start, stop)

    @contextmanager
    def holding(self, whole: Range) -> Iterator[None]:
        """Read a range, and serve from it what this thread reads of it for as long as the context lasts."""
        buffer = page_aligned(whole.nbytes)
        self.read_into(whole.path, whole.start, buffer)
        self._held.range = whole, buffer
        try:
            yield
        finally:
            self._held.range = None

    def _in_hand(self, path: str, start: int, stop: int) -> memoryview | None:
        held: tuple[Range, memoryview] | None = getattr(self._held, "range", None)
        if held is None:
            return None
        whole, buffer = held
        inside = whole.path == path and whole.start <= start and stop <= whole.stop
        return buffer[start - whole.start : stop - whole.start] if inside else None

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.ranges += 1
            self.nbytes += nbytes
