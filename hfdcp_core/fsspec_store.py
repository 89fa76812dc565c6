"""A store on any storage that fsspec knows: with `hfdcp_core.fsspec_upload` the one door to fsspec.

What the filesystems have in common is little, and some of it is treacherous, so only a few calls are used: a listing
that no cache answers, ranges in pieces that are retried one by one, and the two ways of writing of that module.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import cached_property
from typing import Any

from fsspec.asyn import sync
from fsspec.config import conf
from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from hfdcp_core import gcs_upload, s3_upload
from hfdcp_core.catalog import FileStamp
from hfdcp_core.chunked_upload import ChunkedUpload
from hfdcp_core.errors import CorruptFile, StorageError, StorageNotFound, UsageError
from hfdcp_core.fsspec_upload import (
    CommittedUpload,
    MovedUpload,
    UploadTarget,
    can_commit,
    is_left_behind,
    temporary_name,
)
from hfdcp_core.gcs_layout import settled
from hfdcp_core.lease import hold_lease
from hfdcp_core.storage_options import merged_options, texts
from hfdcp_core.store_base import (
    STATE_FOLDER,
    TEMPORARY,
    Listing,
    checked_folder,
    checked_path,
    foreign_faults,
    foreign_reason,
    kind_of_foreign_error,
    stamps_one_by_one,
    storage_fault,
    without_secrets,
)

PIECE_BYTES = 8 << 20
"""Bytes of one request; larger ones cost more time and memory for each byte."""

PIECES_AT_ONCE = 8
"""Pieces of one large read that are asked for at the same time."""

READ_PAUSES_S = (0.05, 0.25, 1.0)
"""How long to wait before each further try of a piece that could not be read."""

PATIENCE_S = 20.0
"""After how long no further try is made: by then the library has tried again and again by itself, as gcsfs does."""

_EXTRAS = {"s3": "s3", "s3a": "s3"}
_USUAL = "a URL that begins with gs://, s3://, hf:// or https://"
_STATES = ("generation", "ETag", "etag", "blob_id", "md5Hash")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def open_fsspec_store(url: str, options: Mapping[str, object]) -> FsspecStore:
    """Make the filesystem for ``url`` with our defaults, then what is configured, then ``options``.

    Raises:
        UsageError: The protocol is not known or not installed, or an option is not one of its.
    """
    first, *others = (split_protocol(bit)[0] or bit for bit in url.split("::"))
    own = {name: value for name, value in options.items() if name not in others}
    merged = merged_options(first, own, conf.get(first, {}))
    for name in others:
        given = options.get(name)
        merged[name] = merged_options(name, given if isinstance(given, Mapping) else {}, conf.get(name, {}))
    hidden = texts(merged)
    shown = without_secrets(url)
    try:
        fs, root = url_to_fs(url, **merged)
    except ImportError as error:
        raise UsageError(_not_installed(shown, (first, *others), foreign_reason(error, hidden))) from error
    except TypeError as error:
        raise UsageError(f"{shown} cannot be opened: {foreign_reason(error, hidden)}") from error
    except ValueError as error:
        reason = without_secrets(str(error), hidden)
        raise UsageError(f"{shown} cannot be opened: {reason}{_known(reason)}") from error
    except Exception as error:  # whatever a storage library raises where credentials are looked up
        raise storage_fault(kind_of_foreign_error(error), f"open {shown}", foreign_reason(error, hidden)) from error
    return FsspecStore(fs, root, url=_without_last_slash(shown))


def _not_installed(shown: str, protocols: Iterable[str], reason: str) -> str:
    """Say what to install; S3 is an extra of ours, so that the versions fit."""
    ours = next((extra for protocol in protocols if (extra := _EXTRAS.get(protocol))), None)
    what = f"pip install 'hfdcp[{ours}]'" if ours else f"a package is not installed: {reason}"
    return f"{shown} cannot be opened: {what}"


def _known(reason: str) -> str:
    unknown = reason.startswith("Protocol not known")
    return f"; write a path of this machine, {_USUAL}, or install the fsspec package for it" if unknown else ""


def _without_last_slash(url: str) -> str:
    """Return how people write a folder; the two slashes behind a protocol belong to it.

    >>> _without_last_slash("gs://bucket/folder/"), _without_last_slash("memory://")
    ('gs://bucket/folder', 'memory://')
    """
    return url if url.endswith("://") else url.rstrip("/")


class FsspecStore:
    """Files below one path of an fsspec filesystem."""

    def __init__(self, fs: AbstractFileSystem, root: str, *, url: str = "") -> None:
        """Take the filesystem as it is; ``url`` is how people write its ``root``."""
        self._opened = fs
        self._root = root.rstrip("/")
        self._url = url or without_secrets(fs.unstrip_protocol(self._root))
        self._secrets = texts(getattr(fs, "storage_options", {}))
        self._commits: bool | None = None

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r})"

    @cached_property
    def _fs(self) -> AbstractFileSystem:
        with self._faults("open", ""):
            return settled(self._opened, self._root)

    @property
    def url(self) -> str:
        """The URL, without secrets."""
        return self._url

    @property
    def remote(self) -> bool:
        """Whether requests cost round trips: all filesystems count as remote but those of this machine."""
        return not isinstance(self._opened, LocalFileSystem | MemoryFileSystem)

    def list(self, folder: str = "") -> Listing:
        """List one folder with one request."""
        where = self._full(checked_folder(folder, self._url))
        with self._faults("list", folder):
            self._fs.invalidate_cache()
            entries = [entry for entry in self._fs.ls(where, detail=True) if not _is_itself(entry, where)]
            if not entries and not self._fs.isdir(where):
                raise StorageNotFound(f"cannot list {self._shown(folder)}: there is no such folder")
        prefix = f"{folder}/" if folder else ""
        files = [self._stamp(prefix + _name(entry), entry) for entry in entries if _is_shown(entry)]
        folders = {prefix + _name(entry) for entry in entries if entry["type"] == "directory"}
        return Listing(tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(folders)))

    def stat(self, path: str) -> FileStamp:
        """Return size and state of one file."""
        full = self._full(checked_path(path, self._url))
        with self._faults("look at", path):
            self._fs.invalidate_cache()
            info = _look(self._fs, full)
        if info["type"] != "file":
            raise StorageNotFound(f"cannot look at {self._shown(path)}: it is not a file")
        return self._stamp(path, info)

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Return the stamps of those files that are there, by one listing of each folder that holds several."""
        folders: dict[str, list[str]] = {}
        for path in paths:
            folders.setdefault(path.rpartition("/")[0], []).append(path)
        found: dict[str, FileStamp] = {}
        for folder, wanted in folders.items():
            if len(wanted) == 1:
                found |= stamps_one_by_one(self.stat, wanted)
                continue
            with suppress(StorageNotFound):
                listed = {stamp.path: stamp for stamp in self.list(folder).files}
                found |= {path: listed[path] for path in wanted if path in listed}
        return found

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` in pieces, several at once, each of which is tried a few times."""
        full = self._full(checked_path(path, self._url))
        whole = buffer.cast("B")

        def fill(offset: int) -> None:
            piece = whole[offset : offset + PIECE_BYTES]
            piece[:] = self._read_piece(path, full, start + offset, len(piece))

        offsets = range(0, len(whole), PIECE_BYTES)
        if len(offsets) < 2:
            deque(map(fill, offsets), maxlen=0)
            return
        with ThreadPoolExecutor(min(PIECES_AT_ONCE, len(offsets)), "hfdcp-pieces") as pool:
            deque(pool.map(fill, offsets), maxlen=0)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``."""
        if start < stop <= start + PIECE_BYTES:
            return self._read_piece(path, self._full(checked_path(path, self._url)), start, stop - start)
        data = bytearray(stop - start)
        self.read_into(path, start, memoryview(data))
        return bytes(data)

    def create(self, path: str, size: int) -> ChunkedUpload | CommittedUpload | MovedUpload:
        """Begin a file; its space is not reserved, since no remote storage can do that."""
        full = self._full(checked_path(path, self._url))
        target = UploadTarget(self._fs, full, size, self._shown(path), self._secrets)
        with self._faults("write", path):
            self._make_parent(full)
            to_gcs, to_s3 = gcs_upload.can_stream(self._fs, full), s3_upload.can_stream(self._fs)
        if to_gcs or to_s3:
            return gcs_upload.GcsUpload(target) if to_gcs else s3_upload.S3Upload(target)
        return CommittedUpload(target) if self._commits_files(full) else MovedUpload(target)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""
        upload = self.create(path, len(data))
        try:
            upload.write(memoryview(data))
            upload.commit()
        finally:
            upload.abort()

    def delete(self, path: str) -> None:
        """Remove a file; nothing happens where there is none."""
        full = self._full(checked_path(path, self._url))
        with self._faults("delete", path), suppress(FileNotFoundError):
            self._fs.rm_file(full)

    def sweep(self) -> None:
        """Remove what dead writers left in the root and in our own folder; this process's own stay."""
        with self._faults("sweep", ""):
            self._fs.invalidate_cache()
            for folder in (self._root, f"{self._root}/{STATE_FOLDER}"):
                with suppress(FileNotFoundError):
                    for entry in self._fs.ls(folder, detail=True):
                        if is_left_behind(name := f"{folder}/{_name(entry)}"):
                            self._fs.rm_file(name)

    def free_bytes(self) -> None:
        """Return None: remote storages do not say."""

    def hold(self, path: str, note: str) -> AbstractContextManager[None]:
        """Hold a lease; it is renewed while this process lives."""
        return hold_lease(self, checked_path(path, self._url), note)

    def local_path(self, path: str) -> None:
        """Return None: the file is not on this machine's disk, or not under a name that can be relied on."""

    def create_new(self, path: str, data: bytes) -> bool:
        """Make a small file unless there is one; for the lease."""
        full = self._full(path)
        with self._faults("create", path):
            self._make_parent(full)
            try:
                self._fs.pipe_file(full, data, mode="create")
            except FileExistsError:
                return False
        return True

    def read_whole(self, path: str) -> bytes:
        """Return all of a small file, with one request."""
        full = self._full(checked_path(path, self._url))

        def fetch() -> bytes:
            with self._faults("read", path):
                self._fs.invalidate_cache()
                return bytes(self._fs.cat_file(full))

        return _patiently(fetch)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _shown(self, path: str) -> str:
        return f"{self._url}/{path}" if path else self._url

    def _faults(self, verb: str, path: str) -> AbstractContextManager[None]:
        return foreign_faults(f"{verb} {self._shown(path)}", self._secrets)

    def _commits_files(self, full: str) -> bool:
        if self._commits is None:
            self._commits = can_commit(self._fs, temporary_name(full))
        return self._commits

    def _make_parent(self, full: str) -> None:
        if not self._commits_files(full):  # object storages have no folders, and some would make a bucket here
            self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)

    def _stamp(self, path: str, info: Mapping[str, Any]) -> FileStamp:
        size = info.get("size")
        if size is None:  # http listings
            return self.stat(path)
        return FileStamp(path, int(size), _state(info) or self._digest_of_ends(path, int(size)))

    def _digest_of_ends(self, path: str, size: int) -> str:
        """Tell one state of a file from another where the filesystem has nothing that does."""
        ends = {(0, min(size, 4096)), (max(0, size - 4096), size)}
        return hashlib.sha256(b"".join(self.read(path, *end) for end in sorted(ends))).hexdigest()[:16]

    def _read_piece(self, path: str, full: str, start: int, length: int) -> bytes:
        def refuse() -> None:
            self._refuse_beyond_the_end(path, start, length)

        return _patiently(lambda: self._fetch(path, full, start, length), after_failure=refuse)

    def _fetch(self, path: str, full: str, start: int, length: int) -> bytes:
        options = {"cache_type": "none"} if _opens_for_each_range(self._fs) else {}
        with self._faults("read", path):
            data: bytes = self._fs.cat_file(full, start=start, end=start + length, **options)
        if len(data) != length:
            where = f"bytes [{start}, {start + length})"
            raise StorageError(f"cannot read {self._shown(path)}: asked for {where}, {len(data)} bytes came")
        return data

    def _refuse_beyond_the_end(self, path: str, start: int, length: int) -> None:
        """Tell a file that is too short, which stays so, from a reply that is, which may pass."""
        try:
            size = self.stat(path).size
        except StorageError as error:
            if not error.retryable:
                raise
            return
        if start + length > size:
            wanted = f"expected bytes [{start}, {start + length})"
            raise CorruptFile(f"{self._shown(path)}: {wanted}, found the end of the file at byte {size}")


def _patiently(fetch: Callable[[], bytes], *, after_failure: Callable[[], None] = lambda: None) -> bytes:
    """Read, and try again what may pass; ``after_failure`` may find that it will not."""
    began = time.monotonic()
    for pause_s in READ_PAUSES_S:
        try:
            return fetch()
        except StorageError as error:
            if not error.retryable or time.monotonic() > began + PATIENCE_S:
                raise
            after_failure()
        time.sleep(pause_s)
    return fetch()


def _look(fs: AbstractFileSystem, full: str) -> Mapping[str, Any]:
    """Look at one file. gcsfs itself would ask up to three times, to tell files from folders; only files count here."""
    if hasattr(fs, "_get_object") and fs.async_impl:
        found: Mapping[str, Any] = sync(fs.loop, fs._get_object, full)  # noqa: SLF001 - `info` where there is none
        return found
    return fs.info(full)  # type: ignore[no-any-return]  # fsspec has no types


def _opens_for_each_range(fs: AbstractFileSystem) -> bool:
    """Tell whether a range comes from a file that is opened for it, with a read-ahead of 5 MiB unless that is declined.

    An asynchronous filesystem gets its own call on the instance, not on the class.
    """
    return not fs.async_impl and type(fs).cat_file is AbstractFileSystem.cat_file


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _is_itself(entry: Mapping[str, Any], where: str) -> bool:
    """Tell whether an entry is what was listed: some filesystems list a file, or a folder's own marker, so."""
    return str(entry["name"]).strip("/") == where.strip("/")


def _is_shown(entry: Mapping[str, Any]) -> bool:
    return entry["type"] == "file" and TEMPORARY not in _name(entry)


def _state(info: Mapping[str, Any]) -> str:
    """Return whatever changes with the content; the same from a listing as from a look at the file."""
    for name in _STATES:
        if info.get(name):
            return str(info[name]).strip('"')
    for name in _TIMES:
        if info.get(name):
            moment = info[name]
            stated = moment.timestamp() if isinstance(moment, datetime) else moment
            return f"{stated}-{info['ino']}" if "ino" in info else str(stated)
    return ""
