"""How a file goes to S3: the parts of one multipart upload, each sent while the next one fills; part of the door.

s3fs' own file objects hold up their writer while a part is sent. Here reading and hashing go on meanwhile. Each part is
sent with the checksum that botocore takes of it, and may be sent again; only the last call makes the file show. Where
that call's answer is lost the second one finds no upload any more: then the object is looked at, and is ours when it
has the size and the ETag that follow from our parts. Giving up aborts the upload, so nothing of it is kept.

It leans on one name of s3fs that is not promised; where it is missing, `can_stream` says no and the file is written as
any other storage's.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from fsspec.spec import AbstractFileSystem

from hfdcp_core.chunked_upload import ChunkedUpload, Reply
from hfdcp_core.errors import StorageError
from hfdcp_core.fsspec_upload import UploadTarget, block_bytes, require_kept

_MD5 = re.compile(r"[0-9a-f]{32}", re.ASCII)


def can_stream(fs: AbstractFileSystem) -> bool:
    """Tell whether a file of this filesystem can be written so."""
    core = sys.modules.get("s3fs.core")
    return core is not None and isinstance(fs, core.S3FileSystem) and hasattr(fs, "_call_s3")


class S3Upload(ChunkedUpload):
    """One file on its way to S3."""

    def __init__(self, target: UploadTarget) -> None:
        """Begin the upload; a file of one part needs none."""
        part = block_bytes(target.size)
        super().__init__(target, min(part, max(target.size, 1)))
        self._part_bytes = part
        self._etags: list[str] = []
        self._upload: str | None = None
        bucket, key, _ = self._fs.split_path(target.full)
        self._place = {"Bucket": bucket, "Key": key}
        if target.size > part:
            with target.faults("write"):
                self._upload = self._fs.call_s3("create_multipart_upload", **self._place)["UploadId"]

    def commit(self) -> None:
        """Send the last part and let the file show.

        Raises:
            StorageError: The storage keeps another number of bytes; they are removed.
            ValidationError: More or fewer bytes came than were announced.
        """
        self._send_all()
        if self._upload is not None:
            with self._target.faults("write"):
                self._complete(self._upload)
            self._upload = None
        require_kept(self._target)

    def abort(self) -> None:
        """Abort the upload with all that was sent."""
        self._give_up()
        upload, self._upload = self._upload, None
        if upload is not None:
            with suppress(StorageError), self._target.faults("discard"):
                self._fs.call_s3("abort_multipart_upload", **self._place, UploadId=upload)

    async def _deliver(self, chunk: memoryview, start: int) -> Reply:
        if self._upload is None:
            return await self._call("put_object", Body=bytes(chunk))
        number = start // self._part_bytes + 1
        reply = await self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=bytes(chunk))
        self._etags.append(reply["ETag"])
        return reply

    async def _call(self, method: str, **given: object) -> Reply:
        reply: Reply = await self._fs._call_s3(method, **self._place, **given)  # noqa: SLF001
        return reply

    def _complete(self, upload: str) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(self._etags, 1)]
        try:
            self._fs.call_s3(
                "complete_multipart_upload", **self._place, UploadId=upload, MultipartUpload={"Parts": parts}
            )
        except Exception:
            if not self._is_complete():
                raise

    def _is_complete(self) -> bool:
        """Tell whether a completion that failed was carried out: the answer was lost, and nothing was left to complete.

        Raises:
            Exception: The storage does not answer.
        """
        expected = etag_of_parts(self._etags)
        self._fs.invalidate_cache()
        try:
            found: dict[str, Any] = self._fs.info(self._target.full)
        except FileNotFoundError:
            return False
        return expected is not None and (found["size"], found["ETag"].strip('"')) == (self._target.size, expected)


def etag_of_parts(etags: Collection[str]) -> str | None:
    """Return the ETag of an object of such parts; None where those are no MD5, as with keys of one's own.

    >>> etag_of_parts(['"d41d8cd98f00b204e9800998ecf8427e"']), etag_of_parts(["opaque"])
    ('59adb24ef3cdbe0297f05b395827453f-1', None)
    """
    digests = [etag.strip('"') for etag in etags]
    if not all(map(_MD5.fullmatch, digests)):
        return None
    return f"{hashlib.md5(bytes.fromhex(''.join(digests)), usedforsecurity=False).hexdigest()}-{len(digests)}"
