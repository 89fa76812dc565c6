"""A Google Cloud Storage on loopback that the real gcsfs talks to, and that fails as it is told.

For tests and benchmarks; it protects nothing and keeps nothing. Every request stands in a journal with the bytes that
went each way, so a test can say how many requests a thing may take::

    with GcsServer() as gcs:
        configure("gs", gcs.options)
        gcs.fault(GcsFault("POST", "upload_id=", "lost"))
        open_store("gs://bucket/model").put("config.json", b"{}")

``python -m hfdcp_core.testing.gcs_server`` serves in a process of its own; there ``GET /journal`` gives the sums.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal, Self

from aiohttp import web

from hfdcp_core.testing._gcs_objects import Ask, Buckets, Reply, refusal

BUCKET = "bucket"
"""A bucket that is there from the start."""

Deed = Literal["status", "reset", "lost", "corrupt", "shortfall", "truncate", "hold", "silence"]
"""What goes wrong: an error; the connection dropped before or after the request is carried out; a byte of the content
changed on its way; only the first half of a chunk kept; an answer that breaks off; one that waits for others; or never
comes."""


@dataclass(frozen=True, slots=True)
class GcsFault:
    """One thing that goes wrong."""

    method: str
    """At requests of this method."""
    path: str
    """At which paths, with their queries: a regular expression that is searched for."""
    deed: Deed
    """What goes wrong."""
    status: int = 503
    """With which status, where it is an error."""
    skip: int = 0
    """How many requests that fit pass before."""
    times: int = 1
    """At how many it happens."""
    together: int = 1
    """How many requests must be waiting at once before those that are held are answered."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that was answered."""

    method: str
    """Its method."""
    path: str
    """Its path and query, as they came."""
    received: int
    """Bytes of its body."""
    sent: int
    """Bytes of the answer's body."""
    status: int
    """Status of the answer."""
    wanted: str
    """Its ``Range``, or ``Content-Range``."""


class GcsServer:
    """The server, in a thread of this process."""

    def __init__(self, port: int = 0) -> None:
        """Hold an empty bucket named `BUCKET`; nothing is served yet."""
        self.buckets = Buckets()
        """What is stored; may be looked at and changed while nothing is asked."""
        self.buckets.objects[BUCKET] = {}
        self.journal: list[Asked] = []
        """Every request, in the order in which they were answered."""
        self.most_at_once = 0
        """How many ranges were being asked for at the same time at most."""
        self._port = port
        self._faults: list[tuple[GcsFault, Counter[str]]] = []
        self._ranges = 0
        self._waiting = 0
        self._stopped = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gcs-server", daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def options(self) -> Mapping[str, object]:
        """Storage options that lead gcsfs here; another server has others, so no instance is shared."""
        return {"token": "anon", "project": "test", "endpoint_url": self.url}

    def fault(self, fault: GcsFault) -> None:
        """Let something go wrong from now on."""
        self._faults.append((fault, Counter()))

    def forget(self) -> None:
        """Let nothing go wrong from now on, and begin the journal anew."""
        self._faults.clear()
        self.journal.clear()
        self.most_at_once = 0

    def empty(self) -> None:
        """Hold nothing, let nothing go wrong, and begin the journal anew."""
        self.buckets.objects[BUCKET].clear()
        self.buckets.sessions.clear()
        self.forget()

    def asked(self, method: str, path: str = "") -> Sequence[Asked]:
        """Return the requests of a method whose path fits a regular expression."""
        return [each for each in self.journal if each.method == method and re.search(path, each.path)]

    def put(self, name: str, data: bytes) -> None:
        """Let an object appear, as if another process had written it."""
        self.buckets.publish(BUCKET, name, data)

    def content(self, name: str) -> bytes | None:
        """Return what an object holds; None where there is none."""
        stored = self.buckets.objects[BUCKET].get(name)
        return stored.data if stored else None

    @property
    def unfinished(self) -> int:
        """How many uploads were begun and neither finished nor deleted."""
        return sum(session.done is None for session in self.buckets.sessions.values())

    def names(self) -> Sequence[str]:
        """Return the names of all objects, sorted."""
        return sorted(self.buckets.objects[BUCKET])

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        self._loop.call_soon_threadsafe(self._stopped.set)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 40)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/journal":
            return self._sums(request)
        wanted = request.headers.get("Range", "")
        self._ranges += bool(wanted)
        self.most_at_once = max(self.most_at_once, self._ranges)
        try:
            return await self._answered(request, await request.read(), wanted)
        finally:
            self._ranges -= bool(wanted)

    async def _answered(self, request: web.Request, body: bytes, wanted: str) -> web.StreamResponse:
        fault = self._next(request)
        deed = fault.deed if fault else None
        if fault and deed == "hold":
            await self._gathered(fault.together)
        if deed == "silence":
            await self._stopped.wait()
        if deed == "corrupt" and body:
            body = _flipped(body)
        if deed == "shortfall":
            body = body[: len(body) // 2]
        path, query = request.raw_path.partition("?")[0], dict(request.query)
        ask = Ask(request.method, path, query, request.headers, body, request.host)
        before = {"status": refusal(fault.status, "injected") if fault else None, "reset": Reply(500)}.get(deed or "")
        reply = before or self.buckets.answer(ask)
        span = wanted or request.headers.get("Content-Range", "")
        self.journal.append(Asked(request.method, request.raw_path, len(body), len(reply.body), reply.status, span))
        return await _sent(request, reply, deed)

    async def _gathered(self, together: int) -> None:
        """Wait until so many requests wait; who waits for longer than any test should is answered all the same."""
        self._waiting += 1
        for _ in range(500):
            if self._waiting >= together:
                return
            await asyncio.sleep(0.02)
        self._waiting -= 1

    def _next(self, request: web.Request) -> GcsFault | None:
        for fault, met in self._faults:
            if fault.method == request.method and re.search(fault.path, request.raw_path):
                met["all"] += 1
                if fault.skip < met["all"] <= fault.skip + fault.times:
                    return fault
        return None

    def _sums(self, request: web.Request) -> web.Response:
        """Tell how much was asked for since the last time that the journal was deleted."""
        if request.method == "DELETE":
            self.forget()
        sums: Counter[str] = Counter(most_at_once=self.most_at_once)
        for each in self.journal:
            sums[each.method] += 1
            sums["received"] += each.received
            sums["sent"] += each.sent
        return web.json_response({**sums, "last": [asdict(each) for each in self.journal[-20:]]})


async def _sent(request: web.Request, reply: Reply, deed: Deed | None) -> web.StreamResponse:
    if deed in ("reset", "lost") and request.transport is not None:
        request.transport.abort()
    body = _flipped(reply.body) if deed == "corrupt" and request.method == "GET" else reply.body
    if deed != "truncate":
        return web.Response(status=reply.status, body=body, headers=reply.headers)
    response = web.StreamResponse(status=reply.status, headers={**reply.headers, "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return response


def _flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


def main() -> None:
    """Serve until the process is ended; where it is reached stands in the first line."""
    with GcsServer() as server:
        print(json.dumps({"url": server.url, "bucket": BUCKET}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
