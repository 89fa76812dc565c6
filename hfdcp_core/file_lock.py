"""Locks on files of this machine's file systems, which the kernel lets go of when their holder dies.

Some shared file systems are mounted without such locks; `has_locks` tells.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from hfdcp_core.errors import SinkOccupied
from hfdcp_core.store_base import os_faults

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


def has_locks(folder: Path) -> bool:
    """Tell whether files in ``folder`` can be locked.

    Raises:
        OSError: There is no such folder, or we may not look into it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    finally:
        os.close(fd)
    return True


def try_lock(fd: int) -> bool:
    """Lock an open file, or return False where somebody else has locked it.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, note: str) -> Iterator[None]:
    """Keep the lock file ``path``, which says who we are, for as long as the context lasts.

    Raises:
        SinkOccupied: Somebody holds it, also another thread of this process.
    """
    with os_faults(f"lock {path}"):
        fd = _lock(path)
    try:
        with os_faults(f"lock {path}"):
            os.ftruncate(fd, 0)
            os.pwrite(fd, _holder(note), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock goes: whoever opened the file in between sees that it is gone
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may share the descriptor, so closing alone may not do
        os.close(fd)


def _lock(path: Path) -> int:
    """Lock the file at ``path``, made if need be.

    Raises:
        SinkOccupied: Somebody holds it.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not try_lock(fd):
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
