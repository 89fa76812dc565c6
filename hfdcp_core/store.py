"""A store holds named bytes: it can list, measure, read a span, and write.

Here are the protocols that the rest of the core is written against, and `open_store`, which makes the store for a URL.
Local files have a path of their own (`hfdcp_core.local_store`); every other URL goes through its fsspec filesystem
(`hfdcp_core.fsspec_store`, the one door to fsspec, imported when it is needed first).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from hfdcp_core.catalog import FileStamp
from hfdcp_core.errors import UsageError
from hfdcp_core.local_store import LocalStore
from hfdcp_core.local_upload import LocalUpload, kept_in_being, sync_folder
from hfdcp_core.storage_options import configure, configured
from hfdcp_core.store_base import Listing, os_faults, refuse_mangled_url, refuse_nameless_url

__all__ = [
    "Listing",
    "LocalStore",
    "Ranges",
    "Sink",
    "Source",
    "Upload",
    "commit_all",
    "configure",
    "configured",
    "name_in",
    "open_store",
    "os_faults",
    "url_of",
]


class Ranges(Protocol):
    """What ranges of files can be read from. Paths are relative to it and separated by ``/``."""

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
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


class Source(Ranges, Protocol):
    """A store that can be read from."""

    @property
    def remote(self) -> bool:
        """Whether each request costs a round trip, so that few large ones are better than many small ones."""
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

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Return the stamps of those files that are there, never from a cache, in as few requests as can be."""
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

    def read_whole(self, path: str) -> bytes:
        """Return all of a small file, with one request.

        Raises:
            StorageNotFound: There is none.
        """
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


def open_store(url: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None) -> Sink:
    """Return the store at ``url``: a local path, ``~/path``, ``file:///path`` or any URL that fsspec knows.

    Nothing is read or made yet. ``storage_options`` go before those of `configure`, which go before our defaults.

    >>> open_store("/data/checkpoint").url
    '/data/checkpoint'

    Raises:
        UsageError: The URL is empty, lost a slash, names no place, or is of a kind that is not installed.
    """
    address = os.fspath(url)
    refuse_mangled_url(address)
    if not address:
        raise UsageError("the URL of a store is empty; write . for the current folder")
    scheme, separator, path = address.partition("://")
    if scheme in {"file", "local"} and separator:
        return LocalStore(_absolute(path, address))
    if not separator and "::" not in address:
        return LocalStore(address)
    refuse_nameless_url(address)
    from hfdcp_core.fsspec_store import open_fsspec_store

    return open_fsspec_store(address, storage_options or {})


def commit_all(uploads: Collection[Upload]) -> None:
    """Let finished files appear, one right after the other: a process that dies meanwhile leaves only some of them.

    So where they are on this machine's disk, all are durable before the first gets its name.
    """
    local = [upload for upload in uploads if isinstance(upload, LocalUpload)]
    for upload in local:
        upload.settle()
    with kept_in_being(upload.final for upload in local):
        for upload in local:
            upload.appear()
    for folder in {upload.folder for upload in local}:
        with os_faults(f"write {folder}"):
            sync_folder(folder)
    for other in uploads:
        if not isinstance(other, LocalUpload):
            other.commit()


def url_of(source: Ranges, path: str, start: int = 0) -> str:
    """Return the URL of the place that a byte of a file is read from: where a source joins several, that one's."""
    find = getattr(source, "url_of", None)
    return source.url if find is None else str(find(path, start))


def name_in(source: Source, path: str) -> str:
    """Return the name of a file, for messages: with its place where the source joins several."""
    return path if getattr(source, "url_of", None) is None else f"{url_of(source, path)}/{path}"


def _absolute(path: str, url: str) -> str:
    if not path:
        raise UsageError(f"{url!r} names no folder; a file URL has three slashes, as in file:///data/checkpoint")
    if not path.startswith(("/", "~")):
        raise UsageError(f"{url!r} names a host; a file URL has three slashes, as in file:///data/checkpoint")
    return path
