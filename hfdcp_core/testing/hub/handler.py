"""The sockets: reads a request, lets a fault strike, sends the answer, keeps the journal."""

from __future__ import annotations

import socket
import socketserver
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hfdcp_core.testing.hub.http import BLOCK_BYTES, Refused, Request, Response
from hfdcp_core.testing.hub.journal import Call, Fault, Journal

Answer = Callable[[Request], Response]
NO_FAULT = Fault(times=0)


class Server(ThreadingHTTPServer):
    """An HTTP server on loopback whose threads all end when it is closed."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, port: int, answer: Answer, journal: Journal) -> None:
        self.closing = threading.Event()
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), partial(Handler, answer=answer, journal=journal, closing=self.closing))

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Serve a connection in a thread of its own, and remember it."""
        if isinstance(request, socket.socket):
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Close a connection."""
        if isinstance(request, socket.socket):
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close every connection that a client keeps alive, and wait for the threads."""
        self.closing.set()
        for connection in tuple(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the client was faster
        super().server_close()


def _flipped(block: bytes) -> bytes:
    """Flip one bit in the middle, where content is and not a header."""
    middle = len(block) // 2
    return block[:middle] + bytes([block[middle] ^ 1]) + block[middle + 1 :]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "hfdcp-test-hub"
    disable_nagle_algorithm = True

    def __init__(
        self,
        request: socket.socket,
        client_address: tuple[str, int],
        server: socketserver.BaseServer,
        *,
        answer: Answer,
        journal: Journal,
        closing: threading.Event,
    ) -> None:
        self._answer_request = answer
        self._journal = journal
        self._closing = closing
        self._received = 0
        super().__init__(request, client_address, server)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
        """Keep quiet: the journal has it all."""

    def handle_one_request(self) -> None:
        """Serve one request; a client that goes away is nothing to report."""
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _serve(self) -> None:
        fault = self._journal.take(self.command, self.path) or NO_FAULT
        try:
            response = self._respond(fault)
        except ConnectionError:
            self._note(0, fault)
            raise
        # The journal is written before the answer, so that who has the answer finds the call.
        self._note(response.status, fault, 0 if self.command == "HEAD" else response.length)
        self._send(response)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815  # the base class looks for these names

    def _respond(self, fault: Fault) -> Response:
        self._received = 0
        self._closing.wait(fault.delay_s)
        blocks = self._blocks(fault)
        port = int(self.connection.getsockname()[1])
        request = Request(self.command, self.path, self.headers, blocks=blocks, port=port)
        if fault.status is not None:
            response = Response(fault.status, fault.body.encode(), fault.headers)
        else:
            response = self._ask(request)
        for _ in blocks:
            pass  # what nobody read must leave the connection
        if fault.after:
            raise ConnectionResetError
        return response

    def _ask(self, request: Request) -> Response:
        try:
            return self._answer_request(request)
        except Refused as refusal:
            return refusal.response()
        except ConnectionError:
            raise
        except Exception as bug:  # noqa: BLE001  # a mistake in this server must show in the test, not hang it
            traceback.print_exc()
            return Refused(500, f"the test Hub itself failed: {bug!r}").response()

    def _blocks(self, fault: Fault) -> Iterator[bytes]:
        """Yield the request's body, with what a fault does to it."""
        flip = fault.corrupt
        for block in self._raw_blocks():
            self._received += len(block)
            if fault.drop_after is not None and self._received >= fault.drop_after:
                raise ConnectionResetError
            yield _flipped(block) if flip else block
            flip = False

    def _raw_blocks(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield from self._exactly(int(self.headers.get("Content-Length") or 0))
            return
        while length := int(self.rfile.readline().split(b";")[0], 16):
            yield from self._exactly(length)
            self.rfile.readline()
        self.rfile.readline()

    def _exactly(self, length: int) -> Iterator[bytes]:
        while length:
            block = self.rfile.read(min(length, BLOCK_BYTES))
            if not block:
                raise ConnectionResetError  # the client died in the middle
            length -= len(block)
            yield block

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        fixed = {"Content-Type": response.content_type, "X-Request-Id": f"req-{uuid.uuid4().hex[:12]}"}
        for name, value in {**fixed, "Content-Length": str(response.length), **response.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(response)

    def _send_body(self, response: Response) -> None:
        if response.file is None:
            self.wfile.write(response.body)
            return
        left = response.length
        with response.file.open("rb") as file:
            file.seek(response.start)
            while left:
                block = file.read(min(left, BLOCK_BYTES))
                self.wfile.write(block)
                left -= len(block)

    def _note(self, status: int, fault: Fault, sent_bytes: int = 0) -> None:
        self._journal.note(
            Call(
                method=self.command,
                path=self.path,
                status=status,
                received_bytes=self._received,
                authorized="authorization" in self.headers,
                faulted=fault is not NO_FAULT,
                sent_bytes=sent_bytes,
            )
        )
