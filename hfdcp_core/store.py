"""A store holds named bytes: it can list, measure, read a span, and write.

The one door to fsspec. Local files have a fast path of their own; every other URL goes through its fsspec filesystem.
Foreign errors are mapped here and nowhere else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hfdcp_core.catalog import FileStamp


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies directly in one folder of a store."""

    files: tuple[FileStamp, ...]
    """Files, by name relative to the store, sorted."""
    folders: tuple[str, ...]
    """Sub-folders, by name relative to the store, sorted."""


class Source(Protocol):
    """A store that can be read from. Paths are relative to it and separated by ``/``."""

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        ...

    def list(self, folder: str = "") -> Listing:
        """List one folder, never from a cache, in one listing (not one call for each file).

        Raises:
            StorageNotFound: There is no such folder.
        """
        ...

    def stat(self, path: str) -> FileStamp:
        """Return the stamp of one file, never from a cache.

        Raises:
            StorageNotFound: There is no such file.
        """
        ...

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on, all of it. Safe to call from many threads.

        Raises:
            CorruptFile: The file ends before the buffer is full.
            StorageNotFound: There is no such file.
        """
        ...

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``, all of them; the errors are those of `read_into`."""
        ...


class Upload(Protocol):
    """One file while it is being written: invisible until `commit`."""

    def write(self, buffer: memoryview) -> None:
        """Append bytes; in order, from one thread at a time."""
        ...

    def commit(self) -> None:
        """Make the file appear, whole and durable, under its name."""
        ...

    def abort(self) -> None:
        """Leave nothing behind; may be called after any failure, and twice."""
        ...


class Sink(Source, Protocol):
    """A store that can be written to."""

    def create(self, path: str, size: int) -> Upload:
        """Begin a file of ``size`` bytes that becomes visible on `Upload.commit`, replacing an older one.

        Raises:
            NoSpace: The storage cannot hold that many bytes.
            StorageDenied: We may not write there.
        """
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a small file at once: it is visible whole or not at all."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file; nothing happens where there is none."""
        ...

    def sweep(self) -> None:
        """Remove temporary files that an interrupted run of ours left behind."""
        ...

    def free_bytes(self) -> int | None:
        """Return how much can still be written, or None where the storage does not say."""
        ...

    def hold(self, path: str, note: str) -> AbstractContextManager[None]:
        """Keep everybody else from holding ``path`` for as long as the context lasts, or until this process dies.

        Raises:
            SinkOccupied: Somebody holds it; the message repeats their ``note``.
        """
        ...

    def local_path(self, path: str) -> Path | None:
        """Return where the file lies on this machine's disk, or None."""
        ...
