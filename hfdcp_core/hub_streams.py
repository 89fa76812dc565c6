"""Bytes on their way to the Hub as they are made: nothing of them lies on a disk, and none is read twice.

Two ways. By Xet the client cuts a stream into chunks, sends those that the storage does not have, and says at the end
what the SHA-256 of the bytes was that it saw. By LFS the SHA-256 is stated before the first byte, and each part is one
request with a body of a known length. Either is an `hfdcp_core.store.Upload`: whoever makes a file writes into it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING

from hfdcp_core.errors import HubError, HubRejected, HubUnavailable, ValidationError
from hfdcp_core.hub_calls import CONNECT_S, Calls
from hfdcp_core.state import Cancellation

if TYPE_CHECKING:
    import hf_xet

STALL_S = 180.0
"""How long nothing may move before an upload is given up; the client's own default is to wait for ever."""
TICK_S = 0.5
"""How often it is looked at."""
QUEUED_BLOCKS = 4
"""Blocks that wait for the network at most, in an upload by LFS."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What an upload has done."""

    sha256: str
    """Digest of the bytes as whoever sent them saw them; by LFS the one that was stated."""
    xet: str = ""
    """Content address in the Xet storage; empty by LFS."""
    moved_bytes: int = 0
    """Bytes that went over the network."""
    deduplicated_bytes: int = 0
    """Bytes that the storage had already."""


class XetUpload:
    """One file as a stream of hf_xet."""

    def __init__(self, group: hf_xet.XetUploadCommit, name: str, calls: Calls, what: str, *, stall_s: float) -> None:
        import hf_xet

        self._group, self._calls, self._what = group, calls, what
        self._written = 0
        with calls.making(what):
            self._stream = group.start_upload_stream(name=name, sha256=hf_xet.COMPUTE_SHA256)
        self._watch = _Watch(self._moved, self._give_up, stall_s, calls.cancellation)
        self.sent: Sent | None = None
        """What it has done, once it is committed."""

    def write(self, buffer: memoryview) -> None:
        """Append bytes; waits while the network is slower than whoever makes them."""
        data = bytes(buffer)  # hf_xet takes nothing else
        with self._moving():
            self._stream.write(data)
        self._written += len(data)

    def commit(self) -> None:
        """Send what is left, and let the storage know the file."""
        with self._moving():
            meta = self._stream.finish()
            report = self._group.wait_to_finish()
        self._watch.close()
        metrics = report.dedup_metrics
        self.sent = Sent(
            meta.xet_info.sha256 or "",
            meta.xet_info.hash,
            moved_bytes=metrics.total_bytes_uploaded,
            deduplicated_bytes=metrics.deduped_bytes,
        )

    def abort(self) -> None:
        """Give the upload up; chunks that were sent stay known to the storage."""
        self._watch.close()
        if self.sent is None:
            self._give_up()

    def _give_up(self) -> None:
        for one in (self._stream, self._group):
            with suppress(Exception):  # one that has ended cannot be given up, and that is all right
                one.abort()

    def _moved(self) -> object:
        progress = self._group.progress()
        return self._written, progress.total_bytes_completed, progress.total_transfer_bytes_completed

    @contextmanager
    def _moving(self) -> Iterator[None]:
        try:
            with self._watch.waiting(), self._calls.making(self._what):
                yield
        except HubError as error:
            self._calls.cancellation.check()
            if self._watch.struck:
                raise HubUnavailable(f"{self._what}: nothing moved for {self._watch.stall_s:g} s") from error
            raise


class _Watch:
    """Ends a call that waits for something that no longer moves, or that a person waits for to stop."""

    def __init__(
        self, moved: Callable[[], object], strike: Callable[[], None], stall_s: float, cancellation: Cancellation
    ) -> None:
        self.stall_s = stall_s
        self.struck = False
        self._cancellation = cancellation
        self._moved, self._strike = moved, strike
        self._since: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="hfdcp-watch", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that is spent inside."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _look(self) -> None:
        seen, seen_s = self._moved(), time.monotonic()
        while not self._closed.wait(min(TICK_S, self.stall_s / 4)):
            now, since, moved = time.monotonic(), self._since, self._moved()
            if since is None or (moved != seen and not self._cancellation.wished):
                seen, seen_s = moved, now
            elif self._cancellation.wished or now - max(since, seen_s) > self.stall_s:
                self.struck = True
                self._strike()
                return


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the bytes of one LFS object go, as the Hub answered."""

    urls: Sequence[str]
    """Addresses of the parts, in order."""
    part_bytes: int
    """Bytes of each part but the last."""
    complete: Callable[[Sequence[str]], None]
    """Makes the object of its parts, whose tags are given, and asks the Hub to look for it."""

    @classmethod
    def of(cls, action: Mapping[str, object], size: int, complete: Callable[[Sequence[str]], None]) -> Parts:
        """Read the answer of the Hub.

        Raises:
            HubRejected: It is not one that git-lfs describes.
        """
        header = action.get("header") or {}
        if not isinstance(header, Mapping):
            raise HubRejected(f"the Hub answered with headers that are none: {header!r}")
        if "chunk_size" not in header:
            return cls([str(action["href"])], size, complete)
        part_bytes = int(header["chunk_size"])
        numbered = {int(key): str(url) for key, url in header.items() if key.isdigit()}
        urls = [numbered[number] for number in sorted(numbered)]
        if part_bytes < 1 or len(urls) != -(-size // part_bytes):
            raise HubRejected(f"the Hub answered with {len(urls)} parts of {part_bytes} bytes for {size} bytes")
        return cls(urls, part_bytes, complete)


class LfsUpload:
    """One file as the requests of an LFS object, whose SHA-256 was stated before."""

    def __init__(self, parts: Parts, sha256: str, size: int, calls: Calls, what: str, *, stall_s: float) -> None:
        self._parts, self._sha256, self._size = parts, sha256, size
        self._calls, self._what, self._stall_s = calls, what, stall_s
        self._blocks: Queue[bytes | None] = Queue(QUEUED_BLOCKS)
        self._hash, self._last = hashlib.sha256(), b""
        self._rest = b""
        self._given_up = False
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hfdcp-lfs", daemon=True)
        self._thread.start()
        self.sent: Sent | None = None
        """What it has done, once it is committed."""

    def write(self, buffer: memoryview) -> None:
        """Append bytes; waits while the network is slower than whoever makes them."""
        if self._last:
            self._put(self._last)
        self._last = bytes(buffer)
        self._hash.update(self._last)

    def commit(self) -> None:
        """Wait until all is sent, and let the Hub make the object.

        Raises:
            ValidationError: The bytes are not those of the stated SHA-256; the last of them are not sent, so that
                nobody takes the object for whole.
        """
        if (found := self._hash.hexdigest()) != self._sha256:
            problem = f"sha256 is {found}, expected {self._sha256}"
            raise ValidationError(f"{self._what}: its bytes are not those that were hashed before", [problem])
        self._put(self._last)
        self._put(None)
        while self._thread.is_alive():
            self._calls.cancellation.check()
            self._thread.join(TICK_S)
        self._raise()
        self.sent = Sent(self._sha256, moved_bytes=self._size)

    def abort(self) -> None:
        """Break the request off."""
        self._given_up = True
        self._thread.join(4 * TICK_S)  # one that waits for an answer ends when that comes, or by its timeout

    def _put(self, block: bytes | None) -> None:
        while True:
            self._raise()
            self._calls.cancellation.check()
            try:
                return self._blocks.put(block, timeout=TICK_S)
            except Full:
                continue

    def _raise(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            self._send()
        except Exception as fault:  # noqa: BLE001  # it is raised where it is waited for
            self._fault = fault

    def _send(self) -> None:
        import httpx2
        from huggingface_hub import get_session, hf_raise_for_status

        timeout = httpx2.Timeout(self._stall_s, connect=CONNECT_S, pool=CONNECT_S)
        tags = []
        for number, url in enumerate(self._parts.urls):
            length = min(self._parts.part_bytes, self._size - number * self._parts.part_bytes)
            with self._calls.making(self._what):
                headers = {"Content-Length": str(length)}
                response = get_session().put(url, content=self._body(length), headers=headers, timeout=timeout)
                hf_raise_for_status(response)
            tags.append(response.headers.get("etag", ""))
        self._parts.complete(tags)

    def _body(self, length: int) -> Iterator[bytes]:
        """Give so many of the bytes that are written."""
        while length:
            block = self._rest or self._next()
            yield block[:length]
            self._rest = block[length:]
            length -= min(length, len(block))

    def _next(self) -> bytes:
        while not self._given_up:
            try:
                block = self._blocks.get(timeout=TICK_S)
            except Empty:
                continue
            if block is None:
                raise HubRejected(f"{self._what}: it ends before its {self._size} bytes")
            return block
        raise HubUnavailable(f"{self._what}: given up")
