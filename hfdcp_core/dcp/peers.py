"""How the ranks of a save reach one another while it lasts: sockets with a token, and lines for short messages.

Each rank listens on loopback and, where it has one, on the address by which it reaches the others. It answers only
whoever knows the random token that it put into its plan, and hence belongs to the same process group; no message is
ever unpickled. What is said is not encrypted, as with gloo and NCCL: the network between ranks must be trusted.

A connection that ends, or over which nothing is heard for a minute, counts as the loss of the rank behind it.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import platform
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hfdcp_core.errors import StorageError

CONNECT_S = 10.0
"""How long to wait for a rank to answer a connection."""
BEAT_S = 5.0
"""How often each end of a line says that it lives."""
SILENCE_S = 60.0
"""After how long without a sign of life a rank counts as lost."""
_HELLO = b"hfdcp hand-over 1 "
_YES = b"+"
_TOKEN_BYTES = 16
_LENGTH = struct.Struct("<I")
PIECES, LINE, TRIAL = b"P", b"L", b"T"
"""What a connection is for: pieces of tensors, short messages, or only to see whether it can be made."""
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens, and what it wants to hear."""

    host: str
    """Its address."""
    port: int
    """Its port."""
    token: str
    """In hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What a rank says of itself in its plan."""

    host: str
    """Name of the machine it runs on."""
    near: Address | None = None
    """Where ranks on the same machine reach it; None where it does not listen."""
    far: Address | None = None
    """Where the others do."""


class Listener:
    """Lets other ranks connect to this one; each connection is served in a thread of its own."""

    def __init__(self, serve: Callable[[bytes, socket.socket], None]) -> None:
        """Begin to listen.

        Args:
            serve: Called with the purpose of a connection and its socket, which is closed when it returns.

        Raises:
            OSError: There is no loopback.
        """
        self._serve, self._token = serve, secrets.token_hex(_TOKEN_BYTES)
        self._lock, self._closed = threading.Lock(), False
        self._served: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        near = _listening("127.0.0.1")
        outward = _outward()
        far = None
        with suppress(OSError):
            far = _listening(outward) if outward else None
        self._doors = [door for door in (near, far) if door]
        self.peer = Peer(platform.node(), self._address_of(near), self._address_of(far) if far else None)
        """What others need to know."""
        self._thread = threading.Thread(target=self._accept, name="hfdcp-listen", daemon=True)
        self._thread.start()

    def _address_of(self, door: socket.socket) -> Address:
        host, port, *_ = door.getsockname()
        return Address(str(host), int(port), self._token)

    def _accept(self) -> None:
        with selectors.DefaultSelector() as ready:
            for door in (*self._doors, self._woken):
                ready.register(door, selectors.EVENT_READ)
            woken = False
            while not woken:  # and not before: who closes this listener has still to say so
                for key, _ in ready.select():
                    if key.fileobj is self._woken:
                        woken = True
                    else:
                        self._admit(key.fileobj)  # type: ignore[arg-type]  # only sockets are registered
        for door in (*self._doors, self._woken, self._wake):
            door.close()

    def _admit(self, door: socket.socket) -> None:
        with suppress(OSError):
            sock, _ = door.accept()
            threading.Thread(target=self._attend, args=(sock,), name="hfdcp-serve", daemon=True).start()

    def _attend(self, sock: socket.socket) -> None:
        try:
            with suppress(OSError):
                purpose = self._greeted(sock)
                if purpose and self._keeps(sock, purpose):
                    self._serve(purpose, sock)
        finally:
            with self._lock:
                self._served.discard(sock)
            sock.close()

    def _keeps(self, sock: socket.socket, purpose: bytes) -> bool:
        """Remember a connection that ends when this listener does; a line ends by itself, when both ends are done."""
        with self._lock:
            if purpose != LINE:
                self._served.add(sock)
            return not self._closed

    def _greeted(self, sock: socket.socket) -> bytes:
        """Return what a connection is for; nothing where whoever made it does not know the token."""
        _prepare(sock, CONNECT_S)
        said = _exactly(sock, len(_HELLO) + 2 * _TOKEN_BYTES + 1)
        if not hmac.compare_digest(said[:-1], _HELLO + self._token.encode()):
            return b""
        sock.sendall(_YES)
        return said[-1:]

    def close(self) -> None:
        """Listen no more, and end every connection that was made here but lines."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            served = [*self._served]
        self._wake.sendall(_YES)
        for sock in served:
            hang_up(sock)
        if threading.current_thread() is not self._thread:  # as the collector of garbage may have it
            self._thread.join()


def connect(address: Address, purpose: bytes) -> socket.socket:
    """Connect to a rank.

    Raises:
        OSError: It cannot be reached.
    """
    sock = socket.create_connection((address.host, address.port), CONNECT_S)
    try:
        _prepare(sock, CONNECT_S)
        sock.sendall(_HELLO + address.token.encode() + purpose)
        _expect_yes(sock)
        sock.settimeout(SILENCE_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _expect_yes(sock: socket.socket) -> None:
    if _exactly(sock, 1) != _YES:
        raise ConnectionError("somebody else listens there")


def hang_up(sock: socket.socket) -> None:
    """End a connection that another thread may be waiting on; that thread closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _prepare(sock: socket.socket, timeout_s: float) -> None:
    sock.settimeout(timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was closed at once")
        data += more
    return data


def _listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.bind((host, 0))
        door.listen(256)
    except BaseException:
        door.close()
        raise
    return door


def _outward() -> str | None:
    """Return this machine's address on the way to the first rank; else the one on its way to anywhere."""
    for target in (os.environ.get("MASTER_ADDR"), "192.0.2.1"):  # the latter is nobody's, and nothing is sent to it
        with suppress(OSError, ValueError):
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                host = str(probe.getsockname()[0])
            if target and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
                return host
    return None


class Line:
    """Short messages both ways over one connection, and a beat that says that this end lives."""

    def __init__(self, sock: socket.socket, hear: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Take a connection.

        Args:
            sock: The connection; it is closed when `listen` returns.
            hear: Called with each message.
            lost: Called with the reason where the other end is gone before this one said that it is done.
        """
        self._sock, self._hear, self._lost = sock, hear, lost
        self._lock, self._done = threading.Lock(), False
        sock.settimeout(SILENCE_S)

    def say(self, message: Message) -> None:
        """Send a message; where that fails, whoever listens hears of it."""
        data = json.dumps(message).encode()
        try:
            with self._lock:
                self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            hang_up(self._sock)

    def done(self) -> None:
        """Say nothing more; what was said still arrives."""
        self._done = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def listen(self) -> None:
        """Hear the other end until it is done."""
        try:
            for message in self._messages():
                if message:  # a beat is empty
                    self._hear(message)
            reason = "the connection ended"
        except OSError as error:
            reason = str(error)
        finally:
            self._sock.close()
        if not self._done:
            self._lost(reason)

    def _messages(self) -> Iterator[Message]:
        data = bytearray()
        for received in self._received():
            data += received
            while len(data) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
                if len(data) < end:
                    break
                message: Message = json.loads(data[_LENGTH.size : end])
                del data[:end]
                yield message

    def _received(self) -> Iterator[bytes]:
        heard = beat = time.monotonic()
        with selectors.DefaultSelector() as ready:
            ready.register(self._sock, selectors.EVENT_READ)
            while True:
                came = ready.select(max(0.0, beat - time.monotonic()))
                now = time.monotonic()
                if now >= beat and not self._done:
                    self.say({})
                if now >= beat:
                    beat = now + BEAT_S
                if came:
                    heard, received = now, self._sock.recv(1 << 16)
                    if not received:
                        return
                    yield received
                elif now - heard > SILENCE_S:
                    raise TimeoutError(f"nothing was heard for {SILENCE_S:.0f} s")


def unreached(address: Address) -> str | None:
    """Try to reach a rank, and say why that is not possible; None where it is."""
    try:
        connect(address, TRIAL).close()
    except OSError as error:
        return f"{address.host}:{address.port}: {error}"
    return None


def as_storage_error(rank: int, error: OSError) -> StorageError:
    """Say that the connection to a rank failed."""
    return StorageError(f"rank {rank} is gone, or cannot be reached any more: {error}")
