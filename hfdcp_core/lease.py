"""A lock for storages that have none: a small object that says who holds it and until when.

It is made only where there is none, renewed while its holder lives, and removed at the end. Another process takes it
over when it has run out, or when its holder was a process of this machine that is no longer there. Between the reading
of an old lease and its removal lies a moment in which two takers could both succeed; each reads the lease back, and
whoever finds another's gives way.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from hfdcp_core.errors import SinkOccupied, StorageError, StorageNotFound

LEASE_S = 120.0
"""How long a lease lasts when it is not renewed."""

RENEWALS = 4
"""How many times a lease is renewed in that time."""

_TAKEOVERS = 3
_STOPS_WITHIN_S = 10.0  # a renewal that hangs in a dead network is left behind: its lease runs out
_HELD: set[str] = set()  # owners that live in this process
_HELD_LOCK = threading.Lock()


class LeaseStore(Protocol):
    """The little that a lease needs of a storage."""

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        ...

    def create_new(self, path: str, data: bytes) -> bool:
        """Make ``path``; return False where there is one already."""
        ...

    def read_whole(self, path: str) -> bytes:
        """Return all bytes of ``path``; `StorageNotFound` where there is none."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Replace ``path``."""
        ...

    def delete(self, path: str) -> None:
        """Remove ``path``."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """What the object says."""

    owner: str
    """A random name of this one holding."""
    host: str
    """Name of the machine."""
    pids: str
    """Which numbering of processes on that machine: containers have their own."""
    pid: int
    """The process."""
    note: str
    """What it is doing, for a person."""
    expires_at: float
    """When it runs out, in seconds since 1970."""

    @classmethod
    def of_this_process(cls, note: str, lasts_s: float) -> Lease:
        """Make a new lease for whoever calls."""
        return cls(uuid.uuid4().hex, socket.gethostname(), _numbering(), os.getpid(), note, time.time() + lasts_s)

    @classmethod
    def from_json(cls, raw: bytes) -> Lease:
        """Read a lease; what is none, or not one of ours, has run out long ago."""
        try:
            return cls(**json.loads(raw))
        except (ValueError, TypeError):
            return cls("", "", "", 0, "unreadable", 0.0)

    def to_json(self) -> bytes:
        """Write the lease."""
        return json.dumps(asdict(self)).encode()

    def is_over(self) -> bool:
        """Tell whether it has run out, or its holder was a process of this machine that is gone."""
        if time.time() >= self.expires_at:
            return True
        if (self.host, self.pids) != (socket.gethostname(), _numbering()):
            return False
        if self.pid == os.getpid():
            return self.owner not in _HELD
        return not _is_alive(self.pid)

    def __str__(self) -> str:
        left = max(0, round(self.expires_at - time.time()))
        return f"process {self.pid} on {self.host} ({self.note}); its lease runs out in {left} s unless it is renewed"


@contextmanager
def hold_lease(store: LeaseStore, path: str, note: str, *, lasts_s: float = LEASE_S) -> Iterator[None]:
    """Hold the lease at ``path`` for as long as the context lasts.

    Raises:
        SinkOccupied: Somebody else holds it, or took it over because it could not be renewed in time.
    """
    lease = Lease.of_this_process(note, lasts_s)
    renewal = _Renewal(store, path, lease, lasts_s)
    with _living(lease.owner):
        _acquire(store, path, lease)
        renewal.start()
        try:
            yield
        finally:
            renewal.stop()
            with suppress(StorageError):  # what cannot be removed now runs out by itself
                if (now := _current(store, path)) and now.owner == lease.owner:
                    store.delete(path)
    if renewal.lost:
        raise SinkOccupied(
            f"{store.url}/{path} was taken over by another process while this one was writing; run again"
        )


@contextmanager
def _living(owner: str) -> Iterator[None]:
    with _HELD_LOCK:
        _HELD.add(owner)
    try:
        yield
    finally:
        with _HELD_LOCK:
            _HELD.discard(owner)


def _acquire(store: LeaseStore, path: str, lease: Lease) -> None:
    """Make the lease, after the removal of one that is over."""
    found = None
    for _ in range(_TAKEOVERS):
        made = store.create_new(path, lease.to_json())
        found = _current(store, path)
        if found and found.owner == lease.owner:  # also where a reply was lost, and a second try found our own
            return
        if not made and found and found.is_over():
            store.delete(path)
    holder = str(found) if found else "a process that cannot be named"
    raise SinkOccupied(f"{store.url}/{path} is held by {holder}; wait for it or choose another sink")


def _current(store: LeaseStore, path: str) -> Lease | None:
    try:
        return Lease.from_json(store.read_whole(path))
    except StorageNotFound:
        return None


class _Renewal(threading.Thread):
    """Renews a lease from time to time until it is told to stop or finds that the lease is another's."""

    def __init__(self, store: LeaseStore, path: str, lease: Lease, lasts_s: float) -> None:
        super().__init__(name="hfdcp-lease", daemon=True)
        self._store, self._path, self._lease, self._lasts_s = store, path, lease, lasts_s
        self._stopped = threading.Event()
        self.lost = False

    def run(self) -> None:
        while not self.lost and not self._stopped.wait(self._lasts_s / RENEWALS):
            self._renew()

    def stop(self) -> None:
        self._stopped.set()
        self.join(_STOPS_WITHIN_S)

    def _renew(self) -> None:
        try:
            now = _current(self._store, self._path)
            self.lost = now is None or now.owner != self._lease.owner
            if not self.lost:
                self._store.put(self._path, self._renewed().to_json())
        except StorageError:
            return  # the storage is down for a moment: there are further tries before the lease runs out

    def _renewed(self) -> Lease:
        lease = self._lease
        return Lease(lease.owner, lease.host, lease.pids, lease.pid, lease.note, time.time() + self._lasts_s)


def _numbering() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a name in /proc, no path to walk
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
