"""How a file is sent in chunks while it is made: one chunk on its way while the next one fills; part of the door.

Two page-aligned buffers take turns, so a file in flight takes two chunks of memory and whatever the library makes of
the one that it sends. The last chunk waits for the commit, since with it a file may show.
"""

from __future__ import annotations

import asyncio
import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from hfdcp_core.fsspec_upload import UploadTarget, require_whole

Reply = Mapping[str, Any]
"""What a storage says of a chunk."""


class ChunkedUpload(ABC):
    """A file on its way, chunk by chunk, by coroutines in the filesystem's own loop."""

    def __init__(self, target: UploadTarget, chunk_bytes: int) -> None:
        """Take room for chunks; nothing is sent yet."""
        self._target, self._fs = target, target.fs
        self._buffers = [memoryview(mmap.mmap(-1, chunk_bytes)) for _ in range(1 if target.size <= chunk_bytes else 2)]
        self._filled = self._sent = self._written = 0
        self._flight: Future[Reply] | None = None
        self._reply: Reply = {}

    @abstractmethod
    async def _deliver(self, chunk: memoryview, start: int) -> Reply:
        """Send the chunk that begins at ``start`` of the file."""

    @abstractmethod
    def commit(self) -> None:
        """Send what is left, and let the file show."""

    @abstractmethod
    def abort(self) -> None:
        """Give the upload up; nothing of it stays, and nothing happens after a commit."""

    def _passing(self, chunk: memoryview) -> None:  # noqa: B027 - nothing has to be looked at
        """Look at a chunk that will be sent next, while the one before is still on its way."""

    def write(self, buffer: memoryview) -> None:
        """Append bytes; a chunk that is full is sent while the next one fills."""
        rest = buffer.cast("B")
        self._written += len(rest)
        while rest and self._sent + self._filled < self._target.size:
            chunk = self._buffers[0]
            part = rest[: min(len(chunk) - self._filled, self._target.size - self._sent - self._filled)]
            # numpy lets the loop that sends the chunk before run meanwhile, as the slices of a memoryview do not.
            place = chunk[self._filled : self._filled + len(part)]
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(part, np.uint8))
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == len(chunk) and self._sent + self._filled < self._target.size:
                self._send()

    def _send_all(self) -> None:
        """Send the last chunk, and wait until everything has landed.

        Raises:
            ValidationError: More or fewer bytes came than were announced.
        """
        require_whole(self._target, self._written)
        if self._filled or not self._target.size:
            self._send()
        self._landed()

    def _give_up(self) -> None:
        """Let go of the chunk that is on its way."""
        if self._flight:
            self._flight.cancel()
            self._flight = None

    def _send(self) -> None:
        """Put the full buffer on its way once the one before has landed."""
        chunk = self._buffers[0][: self._filled]
        self._passing(chunk)
        self._landed()
        self._flight = asyncio.run_coroutine_threadsafe(self._deliver(chunk, self._sent), self._fs.loop)
        self._sent, self._filled = self._sent + len(chunk), 0
        self._buffers.reverse()
        if len(self._buffers) == 1:
            self._landed()

    def _landed(self) -> None:
        """Wait for the chunk that is on its way."""
        if self._flight:
            flight, self._flight = self._flight, None
            with self._target.faults("write"):
                try:
                    self._reply = flight.result()
                except CancelledError as error:
                    raise ConnectionAbortedError("the upload was given up") from error
