"""How a file goes to Google Cloud Storage: one resumable upload, in little memory; part of the door to fsspec.

gcsfs' own file objects take three to four times their block, copy each byte several times, and check an MD5 (0.66 GB/s)
only after the object can be seen, or not at all where the size is a multiple of the block. Here

- one chunk is sent while the next one fills (`hfdcp_core.chunked_upload`);
- a CRC-32C runs along (6 GB/s) and is held against the one that the storage states of what it keeps;
- a chunk whose reply was lost is sent again: it says where it lies, and bytes that are there do not count twice;
- giving up deletes the upload, so nothing of it ever shows.

It leans on two names of gcsfs that are not promised: where either is missing, or the bucket is one of those that are
written by another protocol, `can_stream` says no and the file is written as any other storage's.
"""

from __future__ import annotations

import base64
import json
import sys
from contextlib import suppress

import aiohttp
from awscrt import checksums
from fsspec.asyn import sync
from fsspec.spec import AbstractFileSystem

from hfdcp_core.chunked_upload import ChunkedUpload, Reply
from hfdcp_core.errors import StorageError
from hfdcp_core.fsspec_upload import UploadTarget

CHUNK_BYTES = 16 << 20
"""Each chunk waits for a round trip and the storage's own commit: smaller ones lose time, larger ones take memory."""
_CHUNK_UNIT = 256 << 10
_STEP_BYTES = 256 << 10
_TRIES = 8  # of a chunk that is not kept, or whose reply does not come in time


def can_stream(fs: AbstractFileSystem, full: str) -> bool:
    """Tell whether a file of this filesystem can be written so."""
    core = sys.modules.get("gcsfs.core")
    if core is None or not isinstance(fs, core.GCSFileSystem):
        return False
    if not (hasattr(core, "initiate_upload") and hasattr(fs, "_call")):
        return False
    is_zonal = getattr(fs, "_is_zonal_bucket", None)
    return is_zonal is None or not sync(fs.loop, is_zonal, fs.split_path(full)[0])


class GcsUpload(ChunkedUpload):
    """One file on its way to Google Cloud Storage."""

    def __init__(self, target: UploadTarget) -> None:
        """Begin the upload, of which nothing shows before its last byte."""
        super().__init__(target, min(CHUNK_BYTES, -(-max(target.size, 1) // _CHUNK_UNIT) * _CHUNK_UNIT))
        self._crc32c = 0
        self._location: str | None = None
        bucket, key, _ = self._fs.split_path(target.full)
        with target.faults("write"):
            self._location = sync(self._fs.loop, sys.modules["gcsfs.core"].initiate_upload, self._fs, bucket, key)

    def commit(self) -> None:
        """Send the last chunk, upon which the file shows, and hold what the storage states of it against what was sent.

        Raises:
            StorageError: The storage keeps other bytes; they are removed.
        """
        self._send_all()
        self._location = None
        expected = base64.b64encode(self._crc32c.to_bytes(4, "big")).decode()
        found = (int(self._reply.get("size", -1)), self._reply.get("crc32c"))
        if found != (self._target.size, expected):
            with suppress(StorageError), self._target.faults("remove"):
                self._fs.rm_file(self._target.full)
            raise StorageError(
                f"cannot write {self._target.shown}: sent {self._target.size} bytes with CRC-32C {expected}, kept were "
                f"{found[0]} bytes with {found[1]}: they were damaged on their way, and were removed; run again"
            )
        self._fs.invalidate_cache(self._fs._parent(self._target.full))  # noqa: SLF001 - fsspec's own name for it

    def abort(self) -> None:
        """Delete the upload with all that was sent."""
        location, self._location = self._location, None
        if location is None:
            return
        self._give_up()
        with suppress(StorageError), self._target.faults("discard"):
            self._fs.call("DELETE", location)

    def _passing(self, chunk: memoryview) -> None:
        self._crc32c = checksums.crc32c(chunk, self._crc32c)

    async def _deliver(self, chunk: memoryview, start: int) -> Reply:
        """Send a chunk, and what the storage did not keep of it again."""
        stop = start + len(chunk)
        for _ in range(_TRIES):
            where = f"bytes {start}-{stop - 1}/{self._target.size}" if chunk else f"bytes */{self._target.size}"
            head = {
                "Content-Range": where,
                "Content-Length": str(len(chunk)),
                "Content-Type": "application/octet-stream",
            }
            try:
                headers, said = await self._fs._call("POST", self._location, headers=head, data=_Body(chunk))  # noqa: SLF001
            except TimeoutError:  # the one failure that gcsfs does not try again
                continue
            if said:
                reply: Reply = json.loads(said)
                return reply
            kept = int(headers["Range"].rpartition("-")[2]) + 1 if "Range" in headers else 0
            if kept >= stop:
                return {}
            chunk, start = chunk[max(0, kept - start) :], max(kept, start)
        raise ConnectionError(f"bytes {start} to {stop} were sent {_TRIES} times, and not kept")


class _Body(aiohttp.payload.Payload):
    """Bytes that go out in small steps, as often as asked.

    aiohttp copies what cannot be sent at once of bytes, reads 64 KiB of a file at a time in another thread, and cannot
    send an iterator twice.
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__(data, content_type="application/octet-stream")
        self._data = data
        self._size = len(data)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return it as text, as the base class wants."""
        return str(self._data, encoding, errors)

    async def write(self, writer: aiohttp.abc.AbstractStreamWriter) -> None:
        """Send all of it."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: aiohttp.abc.AbstractStreamWriter, content_length: int | None) -> None:
        """Send all of it, or its first bytes."""
        for start in range(0, len(self._data) if content_length is None else content_length, _STEP_BYTES):
            await writer.write(self._data[start:content_length][:_STEP_BYTES])
