"""A store on this machine's own file system.

Reads go by ``preadv`` straight into the caller's buffer, from a pool of open files; writes and locks are those of
`hfdcp_core.local_upload` and `hfdcp_core.file_lock`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hfdcp_core.catalog import FileStamp
from hfdcp_core.descriptors import DescriptorPool, affordable
from hfdcp_core.errors import CorruptFile, StorageNotFound
from hfdcp_core.file_lock import has_locks, locked
from hfdcp_core.lease import hold_lease
from hfdcp_core.local_upload import LocalUpload, is_temporary, kept_in_being, remove_if_dead, sync_folder
from hfdcp_core.store_base import (
    STATE_FOLDER,
    Listing,
    checked_folder,
    checked_path,
    os_fault,
    os_faults,
    stamps_one_by_one,
)


class LocalStore:
    """Files below one folder, which is made at the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Take the folder ``root``; ``~`` is the home folder, and nothing is touched yet."""
        self._root = Path(os.path.abspath(os.path.expanduser(root)))  # noqa: PTH100, PTH111 - keeps links as they are
        self._prefix = f"{self._root}/" if self._root != Path("/") else "/"
        self._pool = DescriptorPool(affordable())

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    @property
    def url(self) -> str:
        """The absolute path of the folder."""
        return str(self._root)

    @property
    def remote(self) -> bool:
        """No: a read is a call of the kernel."""
        return False

    def list(self, folder: str = "") -> Listing:
        """List one folder; files that are being written, sockets and the like are not shown."""
        where = self._root / checked_folder(folder, self.url)
        prefix = f"{folder}/" if folder else ""
        files, folders = [], []
        with os_faults(f"list {where}"), os.scandir(where) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(prefix + entry.name)
                elif entry.is_file() and not is_temporary(entry.name):
                    files.append(_stamp(prefix + entry.name, entry.stat()))
        return Listing(tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(folders)))

    def stat(self, path: str) -> FileStamp:
        """Return size, modification time and inode of a file."""
        full = self._full(path)
        with os_faults(f"look at {full}"):
            found = os.stat(full)  # noqa: PTH116 - the path is a plain string here, as for reads
        if not stat.S_ISREG(found.st_mode):
            raise StorageNotFound(f"cannot look at {full}: it is not a regular file")
        return _stamp(path, found)

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Return the stamps of those files that are there: a look at each costs next to nothing."""
        return stamps_one_by_one(self.stat, paths)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``start`` on."""
        if not buffer.nbytes:
            return
        full = self._full(path)
        try:
            file = self._pool.borrow(full)
            try:
                _fill(file.fd, start, buffer, full)
            finally:
                self._pool.give_back(full, file)
        except OSError as error:
            raise os_fault(error, f"read {full}") from error

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``."""
        data = bytearray(stop - start)
        self.read_into(path, start, memoryview(data))
        return bytes(data)

    def create(self, path: str, size: int) -> LocalUpload:
        """Begin a file and reserve its space."""
        full = self._full(path)
        self._pool.drop(full)  # an open descriptor would keep the space of the older file
        with os_faults(f"write {full} ({size} bytes)"):
            upload = LocalUpload(full, size)
            try:
                upload.reserve()
            except OSError:
                upload.abort()
                raise
        return upload

    def adopt(self, left: Mapping[str, str]) -> None:
        """Make files appear, one right after the other, that other processes wrote and left (`LocalUpload.leave`).

        Args:
            left: Path of each, by the name that it was left under.
        """
        moves = {temporary: self._full(path) for temporary, path in left.items()}
        for full in moves.values():
            self._pool.drop(full)
        with kept_in_being(moves.values()):
            for temporary, full in moves.items():
                with os_faults(f"write {full}"):
                    Path(temporary).replace(full)
        for folder in {os.path.dirname(full) for full in moves.values()}:  # noqa: PTH120
            with os_faults(f"write {folder}"):
                sync_folder(folder)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""
        upload = self.create(path, len(data))
        try:
            upload.write(memoryview(data))
            upload.commit()
        finally:
            upload.abort()

    def delete(self, path: str) -> None:
        """Remove a file, durably; nothing happens where there is none."""
        full = self._full(path)
        self._pool.drop(full)
        with os_faults(f"delete {full}"):
            try:
                os.unlink(full)  # noqa: PTH108 - the path is a plain string here, as for reads
            except FileNotFoundError:
                return
            sync_folder(os.path.dirname(full))  # noqa: PTH120

    def sweep(self) -> None:
        """Remove what dead writers left in the root and in our own folder; a living writer's file stays."""
        with os_faults(f"sweep {self.url}"):
            for folder in (self._root, *_folders(self._root / STATE_FOLDER)):
                if folder.is_dir() and has_locks(folder):  # without locks nothing tells the dead from the living
                    for name in filter(is_temporary, os.listdir(folder)):  # noqa: PTH208 - only names are needed
                        remove_if_dead(folder / name)

    def free_bytes(self) -> int:
        """Return how much an ordinary user can still write there."""
        with os_faults(f"measure free space at {self.url}"):
            existing = next(folder for folder in (self._root, *self._root.parents) if folder.exists())
            found = os.statvfs(existing)
        return found.f_bavail * found.f_frsize

    @contextmanager
    def hold(self, path: str, note: str) -> Iterator[None]:
        """Lock the file ``path``, or hold a lease where the file system has no locks."""
        full = Path(self._full(path))
        with os_faults(f"lock {full}"):
            full.parent.mkdir(parents=True, exist_ok=True)
            locks = has_locks(full.parent)
        with locked(full, note) if locks else hold_lease(self, path, note):
            yield

    def create_new(self, path: str, data: bytes) -> bool:
        """Make a small file unless there is one; for the lease."""
        full = self._full(path)
        with os_faults(f"create {full}"):
            upload = LocalUpload(full, len(data))
            try:
                upload.write(memoryview(data))
                return upload.commit_new()
            finally:
                upload.abort()

    def read_whole(self, path: str) -> bytes:
        """Return all of a small file; for the lease."""
        full = self.local_path(path)
        with os_faults(f"read {full}"):
            return full.read_bytes()

    def local_path(self, path: str) -> Path:
        """Return where the file lies."""
        return Path(self._full(path))

    def _full(self, path: str) -> str:
        return self._prefix + checked_path(path, self.url)


def _fill(fd: int, start: int, buffer: memoryview, shown: str) -> None:
    filled = os.preadv(fd, [buffer], start)
    if filled == buffer.nbytes:
        return
    rest = buffer.cast("B")
    while filled < len(rest):
        count = os.preadv(fd, [rest[filled:]], start + filled)
        if not count:
            wanted = f"expected bytes [{start}, {start + len(rest)})"
            raise CorruptFile(f"{shown}: {wanted}, found the end of the file at byte {os.fstat(fd).st_size}")
        filled += count


def _stamp(path: str, found: os.stat_result) -> FileStamp:
    return FileStamp(path, found.st_size, f"{found.st_mtime_ns}-{found.st_ino}")


def _folders(root: Path) -> Iterator[Path]:
    return (Path(folder) for folder, _, _ in os.walk(root))
