"""Pieces of tensors between the ranks of a save: each rank gives what it has, and reads of the others what it needs.

A request is twelve bytes: where a piece begins in the run of the rank that is asked, and how long it is. The answer is
the piece and its CRC-32, or what went wrong there. Nothing is copied on the way where a tensor's own memory can be
sent, and nothing is kept: a rank that reads has at most as much of others' tensors as it asked for.
"""

from __future__ import annotations

import io
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hfdcp_core import errors
from hfdcp_core.catalog import FileStamp
from hfdcp_core.dcp.box_run import BoxRun
from hfdcp_core.dcp.peers import PIECES, SILENCE_S, Address, as_storage_error, connect, hang_up
from hfdcp_core.errors import HfdcpError, StorageError, StorageNotFound
from hfdcp_core.ops import crc32
from hfdcp_core.store import Listing

BEGIN_S = 60.0
"""How long to wait for a rank to have its tensors at hand when another one asks for them already."""
PIECE_BYTES = 8 << 20
"""How much is asked for at once, at most."""
AT_ONCE = 2
"""Connections from one rank to another: one is filled while the other waits for its turn."""
GIVEN_AT_ONCE = 4
"""Pieces that one rank sends at the same time: each may need a copy, where a tensor's own memory cannot be sent."""
_ASKED = struct.Struct("<QI")
_ANSWER = struct.Struct("<BI")
_CRC = struct.Struct("<I")
_GIVEN, _FAILED = 0, 1


def told(fault: BaseException) -> dict[str, Any]:
    """Write a fault so that another rank can raise it."""
    if not isinstance(fault, HfdcpError):
        fault = HfdcpError(f"{type(fault).__name__}: {fault}")
    return {"kind": type(fault).__name__, "message": fault.message, "problems": list(fault.problems)}


def heard(fault: Mapping[str, Any]) -> HfdcpError:
    """Read what `told` writes."""
    found: object = getattr(errors, str(fault["kind"]), None)
    kind = found if isinstance(found, type) and issubclass(found, HfdcpError) else HfdcpError
    return kind(str(fault["message"]), map(str, fault["problems"]))


class Giver:
    """Gives pieces of what this rank has."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        """Have nothing yet; ``failed`` is called with what goes wrong while something is given."""
        self._failed = failed
        self._change = threading.Condition()
        self._run: BoxRun | None = None
        self._fault: BaseException | None = None
        self._turns = threading.Semaphore(GIVEN_AT_ONCE)

    def give(self, run: BoxRun) -> None:
        """Give pieces of a run from now on."""
        with self._change:
            self._run = run
            self._change.notify_all()

    def refuse(self, fault: BaseException) -> None:
        """Answer with a fault from now on."""
        with self._change:
            self._fault = self._fault or fault
            self._change.notify_all()

    def serve(self, sock: socket.socket) -> None:
        """Answer the requests of one connection until it ends.

        Raises:
            OSError: The connection failed.
        """
        with sock.makefile("rb") as stream:
            while True:
                sock.settimeout(None)  # who reads may be busy writing for long
                asked = stream.read(_ASKED.size)
                if len(asked) < _ASKED.size:
                    return
                sock.settimeout(SILENCE_S)
                start, length = _ASKED.unpack(asked)
                self._answer(sock, start, start + length)

    def _answer(self, sock: socket.socket, start: int, stop: int) -> None:
        run = self._ready()
        if not isinstance(run, BoxRun):
            said = json.dumps(told(run)).encode()
            sock.sendall(_ANSWER.pack(_FAILED, len(said)) + said + _CRC.pack(crc32(said)))
            return
        crc = 0
        sock.sendall(_ANSWER.pack(_GIVEN, stop - start))
        try:
            with self._turns:
                for part in run.parts(start, stop):
                    crc = crc32(part, crc)
                    sock.sendall(part)
        except (HfdcpError, RuntimeError) as error:  # a device may fail
            self._failed(error)
            raise ConnectionAbortedError(str(error)) from error  # the other end sees an answer that breaks off
        sock.sendall(_CRC.pack(crc))

    def _ready(self) -> BoxRun | BaseException:
        with self._change:
            if not self._change.wait_for(lambda: self._run or self._fault, BEGIN_S):
                return StorageError(f"had nothing to give after {BEGIN_S:.0f} s")
            return self._fault or self._run or StorageError("has nothing to give")


class PeerSource:
    """All ranks of a save as one store to read from: file ``rank N`` is the run of boxes that rank N has."""

    def __init__(self, rank: int, run: BoxRun, addresses: Sequence[Address]) -> None:
        """Take this rank's number and boxes, and where each rank listens."""
        self._names = {rank_name(number): number for number in range(len(addresses))}
        self._rank, self._run = rank, run
        self._ways = [_Way(number, address) for number, address in enumerate(addresses)]

    @property
    def url(self) -> str:
        """What it is called in messages."""
        return "the ranks of the save"

    @property
    def remote(self) -> bool:
        """Whether requests cost round trips: they do."""
        return True

    def list(self, folder: str = "") -> Listing:
        """Refuse: there are no folders."""
        raise StorageNotFound(f"{folder}: ranks have no folders")

    def stat(self, path: str) -> FileStamp:
        """Refuse: what ranks hold has no state."""
        raise StorageNotFound(f"{path}: what ranks hold has no stamp")

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Return none: what ranks hold does not change during a save."""
        del paths
        return {}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a run from ``start`` on."""
        rank = self._names[path]
        if rank == self._rank:
            self._run.read_into(start, buffer)
            return
        for at in range(0, len(buffer), PIECE_BYTES):
            part = buffer[at : at + PIECE_BYTES]
            part[:] = self._ways[rank].read(start + at, len(part))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` of a run."""
        rank = self._names[path]
        if rank != self._rank and stop - start <= PIECE_BYTES:
            return self._ways[rank].read(start, stop - start)
        data = bytearray(stop - start)
        self.read_into(path, start, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Let go of the other ranks; whoever is still reading fails."""
        for way in self._ways:
            way.close()


def rank_name(rank: int) -> str:
    """Return the name of the run of a rank.

    >>> rank_name(2)
    'rank 2'
    """
    return f"rank {rank}"


class _Way:
    """The way to one rank: a few connections that whoever reads uses in turn."""

    def __init__(self, rank: int, address: Address) -> None:
        self._rank, self._address = rank, address
        self._turns = threading.Semaphore(AT_ONCE)
        self._lock, self._closed = threading.Lock(), False
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()

    def read(self, start: int, length: int) -> bytes:
        with self._turns:
            try:
                connection = self._take()
                try:
                    data = connection.read(start, length)
                except BaseException:
                    self._put(connection, whole=False)
                    raise
            except OSError as error:
                raise as_storage_error(self._rank, error) from error
            except HfdcpError as error:
                raise error.within(rank_name(self._rank)) from error
            self._put(connection, whole=True)
            return data

    def _take(self) -> _Connection:
        with self._lock:
            if self._closed:
                raise ConnectionError("this save was given up")
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection
        connection = _Connection(self._address)
        with self._lock:
            self._busy.add(connection)
        if self._is_closed():
            connection.hang_up()
        return connection

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def _put(self, connection: _Connection, *, whole: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            keep = whole and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.hang_up()
        for connection in idle:
            connection.close()


class _Connection:
    """One connection to a rank that gives."""

    def __init__(self, address: Address) -> None:
        self._sock = connect(address, PIECES)
        self._sock.settimeout(SILENCE_S + BEGIN_S)
        self._stream = self._sock.makefile("rb")

    def read(self, start: int, length: int) -> bytes:
        self._sock.sendall(_ASKED.pack(start, length))
        kind, size = _ANSWER.unpack(self._exactly(_ANSWER.size))
        data = self._exactly(size)
        (crc,) = _CRC.unpack(self._exactly(_CRC.size))
        if crc32(data) != crc:
            raise StorageError(
                f"a piece of {size} bytes was damaged on its way: CRC-32 {crc32(data):08x}, sent {crc:08x}"
            )
        if kind == _FAILED:
            raise heard(json.loads(data))
        return data

    def _exactly(self, count: int) -> bytes:
        data = self._stream.read(count)  # into one object, with no copy in between
        if len(data) < count:
            raise ConnectionError("it ended the connection")
        return data

    def hang_up(self) -> None:
        hang_up(self._sock)

    def close(self) -> None:
        with suppress(OSError, ValueError, io.UnsupportedOperation):
            self._stream.close()
        self._sock.close()
