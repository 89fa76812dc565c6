"""A proxy on loopback before any HTTP storage, which loses what it is told to lose.

::

    with LosingProxy(server.url) as proxy:
        proxy.fault(ProxyFault("POST", "uploadId=", "lost"))
        ...                                  # the storage completes the upload, and nobody hears of it
"""

from __future__ import annotations

import http.client
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

HELD_AT_MOST_S = 30.0
_OWN_HEADERS = {"connection", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True, slots=True)
class ProxyFault:
    """What goes wrong with one request."""

    method: str
    """Of the request."""
    within: str
    """What its path or query holds."""
    deed: Literal["dropped", "lost", "status", "held"]
    """The storage never hears of it, or its answer never arrives; the proxy answers 503 itself, or waits a while."""
    skip: int = 0
    """So many such requests pass before."""


@dataclass(slots=True)
class _Journal:
    asked: list[tuple[str, str]] = field(default_factory=list)
    faults: list[ProxyFault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)

    def met(self, method: str, path: str) -> str:
        """Note a request and return what goes wrong with it; nothing, mostly."""
        with self.lock:
            self.asked.append((method, path))
            for number, fault in enumerate(self.faults):
                if method == fault.method and fault.within in path:
                    if not fault.skip:
                        del self.faults[number]
                        return fault.deed
                    self.faults[number] = ProxyFault(fault.method, fault.within, fault.deed, fault.skip - 1)
            return ""


class _Handler(BaseHTTPRequestHandler):
    """Passes one connection's requests on."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            super().handle_one_request()

    def pass_on(self) -> None:
        deed = self.server.journal.met(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if deed == "held":
            self.server.journal.released.wait(HELD_AT_MOST_S)
        if deed == "status":
            self.answer(503, [], b"")
            return
        if deed != "dropped":
            self.forward(body, lost=deed == "lost")
        self.close_connection |= deed in {"dropped", "lost"}

    def forward(self, body: bytes, *, lost: bool) -> None:
        connection = http.client.HTTPConnection(self.server.target)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        connection.request(self.command, self.path, body, headers)
        reply = connection.getresponse()
        said = reply.read()
        connection.close()
        if not lost:
            length = reply.getheader("Content-Length") if self.command == "HEAD" else None
            self.answer(reply.status, reply.getheaders(), said, length)

    def answer(self, status: int, headers: list[tuple[str, str]], said: bytes, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _OWN_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815 - the base class' names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    def __init__(self, target: str, journal: _Journal) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.journal = urlsplit(target).netloc, journal


class LosingProxy:
    """Passes requests on, with their answers, but for those that a fault waits for."""

    def __init__(self, target: str) -> None:
        """Stand before the storage at a URL."""
        self._journal = _Journal()
        self._server = _Server(target, self._journal)
        self._thread = threading.Thread(target=self._server.serve_forever, name="losing-proxy")

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def fault(self, fault: ProxyFault) -> None:
        """Let one of the requests that follow go wrong."""
        with self._journal.lock:
            self._journal.faults.append(fault)

    def asked(self, method: str, within: str) -> list[str]:
        """Return the paths of the requests so far that used a method and hold a text."""
        with self._journal.lock:
            return [path for used, path in self._journal.asked if used == method and within in path]

    def release(self) -> None:
        """Let requests that are held go on."""
        self._journal.released.set()

    @property
    def waiting(self) -> list[ProxyFault]:
        """The faults that no request has met yet."""
        return list(self._journal.faults)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
