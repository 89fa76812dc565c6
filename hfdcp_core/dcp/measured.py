"""What a load read: how many ranges, and how many bytes for how many that were needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfdcp_core.catalog import FileStamp
from hfdcp_core.store import Listing, Source


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


class MeasuredSource:
    """A store that counts what is read of it."""

    def __init__(self, source: Source) -> None:
        """Take the store."""
        self._source = source
        self._lock = threading.Lock()
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
        self._count(buffer.nbytes)
        self._source.read_into(path, start, buffer)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``."""
        self._count(stop - start)
        return self._source.read(path, start, stop)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.ranges += 1
            self.nbytes += nbytes
