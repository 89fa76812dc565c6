"""A storage that fails as it is told: an fsspec filesystem, ``faulty://NAME/path``, in front of a real one.

It behaves as object storages do: a file that is written goes up in parts and appears when it is committed. What is to
go wrong is kept in this process under the store's name, so any thread that opens the URL meets it; every call is kept
in a journal.

>>> from hfdcp_core.store import open_store
>>> with faulty_store("memory://faulty-example") as faults:
...     store = open_store(faults.url)
...     store.put("a", b"0123")
...     faults.add(Fault("read", error=PermissionError("not yours")))
...     try:
...         store.read("a", 0, 4)
...     except StorageDenied:
...         print("denied, then", store.read("a", 0, 4), "after", faults.attempts("read"))
denied, then b'0123' after 2
"""

from __future__ import annotations

import errno
import io
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import fsspec
from fsspec.core import url_to_fs
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from hfdcp_core.errors import CorruptFile, HfdcpError, NoSpace, StorageDenied, StorageError, StorageNotFound
from hfdcp_core.fsspec_store import READ_PAUSES_S

Operation = Literal["list", "stat", "read", "create", "write", "commit", "delete"]
"""What can go wrong: ``create`` opens a file, ``write`` sends one part of it, ``commit`` makes it appear."""

FOREVER = 1 << 62
"""For `Fault.times`."""

FOREIGN_ERRORS: Mapping[type[HfdcpError], Callable[[], Exception]] = {
    StorageError: lambda: ConnectionResetError(errno.ECONNRESET, "connection reset by peer"),
    StorageDenied: lambda: PermissionError(errno.EACCES, "permission denied"),
    StorageNotFound: lambda: FileNotFoundError(errno.ENOENT, "no such file"),
    NoSpace: lambda: OSError(errno.ENOSPC, "no space left on device"),
}
"""For each class of ours an error such as storages raise, which a store translates into it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    operation: Operation
    """At which operation."""
    path: str = ""
    """At which paths within the store: a regular expression that is searched for."""
    nth: int = 1
    """At which of the calls that fit, counted from 1 and from when the fault was added."""
    times: int = 1
    """At how many calls in a row from that one on."""
    error: Exception | Callable[[], Exception] | None = None
    """What is raised: an error, or what makes one."""
    lost: bool = False
    """Whether the error comes after the operation was carried out: a reply that was lost."""
    short: int | None = None
    """A read gives at most so many bytes."""
    ends_at: int | None = None
    """A read gives nothing from this byte of the file on, and the next look at the file agrees."""
    flip: int | None = None
    """A read that covers this byte of the file gives it with all bits inverted; only such reads fit."""
    delay_s: float = 0.0
    """How long the operation waits before it begins."""
    then: Callable[[], object] | None = None
    """What is called before the operation begins."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the storage met."""

    operation: Operation
    """What was asked for."""
    path: str
    """Of which path within the store."""
    start: int = 0
    """First byte of a read, or of a part."""
    stop: int = 0
    """Byte after its last."""
    outcome: str = "ok"
    """``ok``, or the class of the error that was raised."""


class Faults:
    """What is to go wrong at one faulty store, and what has been asked of it."""

    def __init__(self, name: str, target_url: str) -> None:
        """Stand in front of the storage at ``target_url``."""
        self.url = f"faulty://{name}"
        """Where the faulty store is, for any thread of this process."""
        self.target, root = url_to_fs(target_url)
        self.root = root.rstrip("/")
        self._lock = threading.Lock()
        self._faults: list[tuple[Fault, list[int]]] = []
        self._ends: dict[str, int] = {}
        self._journal: list[Call] = []

    def __repr__(self) -> str:
        return f"Faults({self.url!r})"

    @property
    def journal(self) -> tuple[Call, ...]:
        """Every call so far, in the order in which they ended."""
        with self._lock:
            return tuple(self._journal)

    def attempts(self, operation: Operation, path: str = "") -> int:
        """Return how often an operation was asked for on paths that fit a regular expression."""
        return sum(call.operation == operation and bool(re.search(path, call.path)) for call in self.journal)

    def add(self, fault: Fault) -> None:
        """Let something go wrong from now on; of several faults that fit a call, the first added comes first."""
        with self._lock:
            self._faults.append((fault, [0]))

    def fail_once(self, kind: type[HfdcpError], operation: Operation = "read", path: str = "") -> None:
        """Let one call of a store raise ``kind``: one of `FOREIGN_ERRORS`, or `CorruptFile` for a file cut short.

        A store tries a read that may pass again by itself, so that one takes several errors in a row.
        """
        if kind is CorruptFile:
            self.add(Fault("read", path, ends_at=0))
            return
        patient = operation == "read" and kind.retryable
        times = len(READ_PAUSES_S) + 1 if patient else 1
        self.add(Fault(operation, path, times=times, error=FOREIGN_ERRORS[kind]))

    def clear(self) -> None:
        """Let nothing go wrong from now on, and forget the journal."""
        with self._lock:
            self._faults.clear()
            self._ends.clear()
            self._journal.clear()

    def meet(self, call: Call, act: Callable[[], Any]) -> Any:
        """Carry out a call, with whatever is to go wrong with it."""
        outcome = "ok"
        try:
            fault = self._next(call)
            if fault is None:
                return act()
            return self._go_wrong(fault, call, act)
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            with self._lock:
                self._journal.append(Call(call.operation, call.path, call.start, call.stop, outcome))

    def told_size(self, path: str) -> int | None:
        """Return the size that the next look at a file is to tell, if not the true one."""
        with self._lock:
            return self._ends.pop(path, None)

    def _next(self, call: Call) -> Fault | None:
        with self._lock:
            for fault, met in self._faults:
                if _fits(fault, call):
                    met[0] += 1
                    if fault.nth <= met[0] < fault.nth + fault.times:
                        return fault
        return None

    def _go_wrong(self, fault: Fault, call: Call, act: Callable[[], Any]) -> Any:
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if fault.then:
            fault.then()
        if fault.error and not fault.lost:
            raise _made(fault.error)
        answer = act()
        if fault.error:
            raise _made(fault.error)
        return self._damaged(fault, call, answer) if call.operation == "read" else answer

    def _damaged(self, fault: Fault, call: Call, data: bytes) -> bytes:
        if fault.flip is not None:
            at = fault.flip - call.start
            data = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        if fault.ends_at is not None:
            with self._lock:
                self._ends[call.path] = fault.ends_at
            data = data[: max(0, fault.ends_at - call.start)]
        return data if fault.short is None else data[: fault.short]


def _fits(fault: Fault, call: Call) -> bool:
    if fault.operation != call.operation or not re.search(fault.path, call.path):
        return False
    return fault.flip is None or call.start <= fault.flip < call.stop


def _made(error: Exception | Callable[[], Exception]) -> Exception:
    return error if isinstance(error, Exception) else error()


_STORES: dict[str, Faults] = {}


@contextmanager
def faulty_store(target_url: str) -> Iterator[Faults]:
    """Put a faulty store in front of the storage at ``target_url`` for as long as the context lasts."""
    register()
    name = secrets.token_hex(8)
    _STORES[name] = Faults(name, target_url)
    try:
        yield _STORES[name]
    finally:
        del _STORES[name]


def register() -> None:
    """Make fsspec know ``faulty://``; may be called again and again."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The filesystem behind ``faulty://NAME/path``."""

    protocol = "faulty"
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:  # noqa: FBT001, FBT002 - fsspec's signature
        """List one folder."""
        faults, inner = self._behind(path)
        found = faults.meet(Call("list", inner), lambda: faults.target.ls(_under(faults, inner), detail=True))
        entries = [{**entry, "name": self._outer(path, faults, entry)} for entry in found]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: object) -> dict[str, Any]:
        """Look at one file or folder."""
        faults, inner = self._behind(path)
        found = faults.meet(Call("stat", inner), lambda: faults.target.info(_under(faults, inner)))
        told = faults.told_size(inner)
        size = found["size"] if told is None else told
        return {**found, "size": size, "name": self._outer(path, faults, found)}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        """Read a range."""
        faults, inner = self._behind(path)
        full = _under(faults, inner)
        stop = faults.target.size(full) if end is None else end
        call = Call("read", inner, start or 0, stop)
        data: bytes = faults.meet(call, lambda: faults.target.cat_file(full, start=call.start, end=stop))
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        """Write a small file with one request."""
        faults, inner = self._behind(path)
        call = Call("create" if mode == "create" else "commit", inner, 0, len(value))
        faults.meet(call, lambda: _publish(faults, inner, value, mode))

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        faults, inner = self._behind(path)
        faults.meet(Call("delete", inner), lambda: faults.target.rm_file(_under(faults, inner)))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - fsspec's signature
        """Do nothing: there are no folders but those of files."""

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> FaultyFile:
        if "b" in mode and "r" not in mode:
            faults, inner = self._behind(path)
            faults.meet(Call("create", inner), lambda: None)
        return FaultyFile(self, path, mode, block_size or "default", **options)

    def _behind(self, path: str) -> tuple[Faults, str]:
        name, _, inner = self._strip_protocol(path).partition("/")
        if name not in _STORES:
            raise ValueError(f"there is no faulty store {name!r} in this process")
        return _STORES[name], inner

    def _outer(self, path: str, faults: Faults, entry: Mapping[str, Any]) -> str:
        """Return the name under which an entry of the storage behind is known here."""
        name = self._strip_protocol(path).partition("/")[0]
        return f"{name}/{str(entry['name']).removeprefix(faults.root).strip('/')}"


class FaultyFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file that keeps its parts until it is committed."""

    def commit(self) -> None:
        """Make the file appear."""
        self.closed = True
        faults, inner = self.fs._behind(self.path)  # noqa: SLF001 - the filesystem's own file
        data = self._parts.getvalue()
        faults.meet(Call("commit", inner, 0, len(data)), lambda: _publish(faults, inner, data, "overwrite"))

    def discard(self) -> None:
        """Forget the parts."""
        self.closed = True
        self._parts = io.BytesIO()

    def _initiate_upload(self) -> None:
        self._parts = io.BytesIO()

    def _upload_chunk(self, final: bool = False) -> bool:  # noqa: FBT001, FBT002 - fsspec's signature
        faults, inner = self.fs._behind(self.path)  # noqa: SLF001 - the filesystem's own file
        part = self.buffer.getvalue()
        call = Call("write", inner, self.offset, self.offset + len(part))
        faults.meet(call, lambda: self._parts.write(part))
        if final and self.autocommit:
            self.commit()
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start=start, end=end)
        return data


def _under(faults: Faults, inner: str) -> str:
    return f"{faults.root}/{inner}" if inner else faults.root


def _publish(faults: Faults, inner: str, data: bytes, mode: str) -> None:
    full = _under(faults, inner)
    faults.target.makedirs(full.rpartition("/")[0], exist_ok=True)
    faults.target.pipe_file(full, data, mode=mode)
