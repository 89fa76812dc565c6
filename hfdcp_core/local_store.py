"""A store on this machine's own file system.

Reads go by ``preadv`` straight into the caller's buffer. A file that is written has a temporary name in the same folder
and all of its space from the start, so that a full disk is known at once; it is renamed when it is whole and on the
disk. The kernel's own file locks tell the living from the dead: a temporary file that nobody has locked was left by a
process that died, and a lock file that nobody has locked is free.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from hfdcp_core.catalog import FileStamp
from hfdcp_core.descriptors import DescriptorPool, affordable
from hfdcp_core.errors import CorruptFile, SinkOccupied, StorageNotFound, ValidationError
from hfdcp_core.store_base import STATE_FOLDER, TEMPORARY, Listing, checked_folder, checked_path, os_fault, os_faults

_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_NAME_CHARACTERS = 60  # of the final name within the temporary one: 255 bytes must hold both


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

    def list(self, folder: str = "") -> Listing:
        """List one folder; files that are being written, sockets and the like are not shown."""
        where = self._root / checked_folder(folder, self.url)
        prefix = f"{folder}/" if folder else ""
        files, folders = [], []
        with os_faults(f"list {where}"), os.scandir(where) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(prefix + entry.name)
                elif entry.is_file() and not _is_temporary(entry.name):
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
        with os_faults(f"write {full} ({size} bytes)"):
            upload = LocalUpload(full, size, self._pool)
            try:
                upload.reserve()
            except OSError:
                upload.abort()
                raise
        return upload

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
            _sync_folder(os.path.dirname(full))  # noqa: PTH120

    def sweep(self) -> None:
        """Remove what dead writers left in the root and in our own folder; a living writer's file stays."""
        with os_faults(f"sweep {self.url}"):
            for folder in (self._root, *_folders(self._root / STATE_FOLDER)):
                for name in os.listdir(folder) if folder.is_dir() else ():  # noqa: PTH208 - only names are needed
                    if _is_temporary(name):
                        _remove_if_dead(folder / name)

    def free_bytes(self) -> int:
        """Return how much an ordinary user can still write there."""
        with os_faults(f"measure free space at {self.url}"):
            existing = next(folder for folder in (self._root, *self._root.parents) if folder.exists())
            found = os.statvfs(existing)
        return found.f_bavail * found.f_frsize

    @contextmanager
    def hold(self, path: str, note: str) -> Iterator[None]:
        """Keep the lock file ``path`` locked; the kernel lets go of it when this process dies."""
        full = Path(self._full(path))
        with os_faults(f"lock {full}"):
            fd = _lock(full)
        try:
            with os_faults(f"lock {full}"):
                os.ftruncate(fd, 0)
                os.pwrite(fd, _holder(note), 0)
            yield
        finally:
            full.unlink(missing_ok=True)  # before the lock goes: whoever waits for it sees that the name is gone
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may share the descriptor, so closing alone may not do
            os.close(fd)

    def local_path(self, path: str) -> Path:
        """Return where the file lies."""
        return Path(self._full(path))

    def _full(self, path: str) -> str:
        return self._prefix + checked_path(path, self.url)


class LocalUpload:
    """One file under its temporary name."""

    def __init__(self, final: str, size: int, pool: DescriptorPool) -> None:
        """Make the file, locked so that no sweep takes it for dead."""
        self._final, self._size, self._pool = final, size, pool
        self._written = 0
        self._temporary, self._fd = _make_temporary(Path(final))

    def reserve(self) -> None:
        """Take all of the space, where the file system can do that.

        Raises:
            OSError: There is not enough.
        """
        try:
            if self._size:
                os.posix_fallocate(self._fd, 0, self._size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise

    def write(self, buffer: memoryview) -> None:
        """Append bytes."""
        rest = buffer.cast("B")
        with os_faults(f"write {self._final}"):
            while rest:
                count = os.pwrite(self._fd, rest, self._written)
                rest, self._written = rest[count:], self._written + count

    def commit(self) -> None:
        """Make the file durable, then visible.

        Raises:
            ValidationError: More or fewer bytes came than were announced.
        """
        if self._written != self._size:
            raise ValidationError(f"{self._final}: {self._size} bytes were announced, {self._written} were written")
        with os_faults(f"write {self._final}"):
            os.fsync(self._fd)
            self._temporary.replace(self._final)
            self._close()
            _sync_folder(os.path.dirname(self._final))  # noqa: PTH120
        self._pool.drop(self._final)

    def abort(self) -> None:
        """Remove the temporary file; nothing happens after a commit or a second time."""
        if self._fd >= 0:
            with suppress(OSError):  # whatever failed before is the news; a later sweep finds what stays
                self._temporary.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


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


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and TEMPORARY in name


def _make_temporary(final: Path) -> tuple[Path, int]:
    """Make an empty, locked file beside ``final``."""
    final.parent.mkdir(parents=True, exist_ok=True)
    while True:
        temporary = final.parent / f".{final.name[:_NAME_CHARACTERS]}{TEMPORARY}{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if _try_lock(fd) and os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)  # a sweep came between the two calls, took the file for dead and removed it


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_dead(temporary: Path) -> None:
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # its writer has just finished
    try:
        if _try_lock(fd):
            temporary.unlink(missing_ok=True)
    finally:
        os.close(fd)


def _folders(root: Path) -> Iterator[Path]:
    return (Path(folder) for folder, _, _ in os.walk(root))


def _lock(path: Path) -> int:
    """Lock the file at ``path``, made if need be.

    Raises:
        SinkOccupied: Somebody holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not _try_lock(fd):
            held = os.pread(fd, 4096, 0)
            os.close(fd)
            raise SinkOccupied(f"{path} is held by {described_holder(held)}; wait for it or choose another sink")
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # its holder removed the file between the two calls


def _holder(note: str) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": now, "note": note}).encode()


def described_holder(raw: bytes) -> str:
    """Say in words who wrote ``raw`` into a lock.

    >>> described_holder(b'{"host": "a", "pid": 7, "time": "2026-01-01T00:00:00+00:00", "note": "publish"}')
    'process 7 on a since 2026-01-01T00:00:00+00:00 (publish)'
    """
    try:
        held = json.loads(raw)
        return f"process {held['pid']} on {held['host']} since {held['time']} ({held['note']})"
    except (ValueError, KeyError, TypeError):
        return "another process that has just begun"


def _sync_folder(folder: str) -> None:
    fd = os.open(folder or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
