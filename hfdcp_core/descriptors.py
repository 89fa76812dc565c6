"""A pool of open files, so that 2,000 of them can be read with 256 descriptors.

A descriptor that is lent is never closed; of those that rest, the one that was used longest ago goes first. Each loan
looks at the name again (one ``stat``, about a microsecond), so that a file that was replaced is never served from the
descriptor of the one before.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict

MOST_OPEN = 64
"""Open files that one pool keeps at most."""


def affordable() -> int:
    """Return how many files one pool may keep open: an eighth of what this process may open, at most `MOST_OPEN`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, soft // 8))


class OpenFile:
    """One open file: its descriptor, which file it is, and by how many it is being used."""

    __slots__ = ("fd", "identity", "users")

    def __init__(self, fd: int, identity: tuple[int, int]) -> None:
        self.fd = fd
        self.identity = identity
        self.users = 0


class DescriptorPool:
    """Lends descriptors of files that are open for reading; safe to use from many threads."""

    def __init__(self, limit: int) -> None:
        """Keep at most ``limit`` files open, and more only while they are all in use at once."""
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        weakref.finalize(self, _close_all, self._open)

    def borrow(self, path: str) -> OpenFile:
        """Lend the regular file that ``path`` names now; whoever borrows it must `give_back`.

        Raises:
            OSError: It cannot be opened; a folder or a device counts as absent.
        """
        identity = _identity(path)
        with self._lock:
            entry = self._open.get(path)
            if entry is not None and entry.identity == identity:
                self._open.move_to_end(path)
                entry.users += 1
                return entry
        fresh = self._open_file(path)
        with self._lock:
            self._forget(path)  # another thread's fresh one too: who borrowed it closes it
            fresh.users = 1
            self._open[path] = fresh
            self._close_idle(self._limit)
        return fresh

    def give_back(self, path: str, entry: OpenFile) -> None:
        """Take back what was lent for ``path``."""
        with self._lock:
            entry.users -= 1
            if self._open.get(path) is not entry and not entry.users:
                os.close(entry.fd)
            self._close_idle(self._limit)

    def drop(self, path: str) -> None:
        """Forget ``path``: it was replaced or removed."""
        with self._lock:
            self._forget(path)

    def _open_file(self, path: str) -> OpenFile:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
            with self._lock:
                self._close_idle(0)
            fd = os.open(path, flags)
        opened = os.fstat(fd)
        return OpenFile(fd, (opened.st_dev, opened.st_ino))

    def _forget(self, path: str) -> None:
        entry = self._open.pop(path, None)
        if entry is not None and not entry.users:
            os.close(entry.fd)

    def _close_idle(self, keep: int) -> None:
        excess = len(self._open) - keep
        if excess > 0:
            for path in [path for path, entry in self._open.items() if not entry.users][:excess]:
                self._forget(path)


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - a Path for each read costs more than the call
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "it is not a regular file", path)
    return found.st_dev, found.st_ino


def _close_all(entries: OrderedDict[str, OpenFile]) -> None:
    for entry in entries.values():
        os.close(entry.fd)
    entries.clear()
