"""Git LFS: the batch call and the storage behind it, which believes no digest that it has not computed."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from hfdcp_core.testing.hub.http import BLOCK_BYTES, Body, Refused, Request, Response, answer, receive
from hfdcp_core.testing.hub.state import State
from hfdcp_core.testing.hub.values import Repo

LFS_TYPE = "application/vnd.git-lfs+json"


@dataclass(slots=True)
class Upload:
    """An upload in parts that is not complete yet."""

    repo: Repo
    """Who may use the object."""
    sha256: str
    """What it has to be."""
    size: int
    """How large it has to be."""
    count: int
    """How many parts there have to be."""
    parts: dict[int, tuple[Path, str]] = field(default_factory=dict)
    """Where each part lies, and its ETag."""


class Lfs:
    """The LFS side of a Hub."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def batch(self, state: State, request: Request, name: str) -> Response:
        """Say for each object where its bytes are to be sent; nothing for those that are here."""
        repo = state.find(name)
        state.authorize(request, write=repo)
        body = request.json()
        if body.text("operation") != "upload" or body.text("hash_algo", "sha256") != "sha256":
            raise Refused(422, "unsupported")
        multipart = "multipart" in body.texts("transfers")
        answers = [self._object(request, repo, item, multipart=multipart) for item in body.parts("objects")]
        transfer = "multipart" if any("chunk_size" in json.dumps(item) for item in answers) else "basic"
        return Response(body=json.dumps({"transfer": transfer, "objects": answers}).encode(), content_type=LFS_TYPE)

    def _object(self, request: Request, repo: Repo, item: Body, *, multipart: bool) -> dict[str, object]:
        sha256, size = item.text("oid"), item.number("size")
        common: dict[str, object] = {"oid": sha256, "size": size}
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            return common | {"error": {"code": 422, "message": "invalid oid"}}
        if sha256 in repo.objects or sha256 in repo.pending:
            return common
        if multipart and size > self._state.settings.multipart_bytes:
            upload = self._multipart(request, Upload(repo, sha256, size, -(-size // self._state.settings.part_bytes)))
        else:
            upload = {"href": f"{request.away}/_lfs/put/{repo.id}/{sha256}/{size}?X-Amz-Signature=x"}
        verify = {"href": f"{request.base}/{repo.id}.git/info/lfs/verify", "header": {}}
        return common | {"actions": {"upload": upload, "verify": verify}, "authenticated": True}

    def _multipart(self, request: Request, upload: Upload) -> dict[str, object]:
        key = uuid.uuid4().hex
        with self._lock:
            self._uploads[key] = upload
        parts = {
            f"{number:05d}": f"{request.away}/_lfs/part/{key}/{number}?X-Amz-Signature=x"
            for number in range(1, upload.count + 1)
        }
        header = {"chunk_size": str(self._state.settings.part_bytes), **parts}
        return {"href": f"{request.base}/_lfs/complete/{key}", "header": header}

    def put(self, state: State, request: Request, name: str, sha256: str, size: str) -> Response:
        """Take an object in one piece. Its address is signed, so that no token is needed and none must come."""
        spool = state.spool()
        received = receive(request, spool)
        self._keep(state.find(name), spool, received.sha256, expected=(sha256, int(size)))
        return Response(headers={"ETag": received.etag})

    def part(self, state: State, request: Request, key: str, number: str) -> Response:
        """Take one part."""
        upload = self._upload(key)
        spool = state.spool()
        received = receive(request, spool)
        with self._lock:
            upload.parts[int(number)] = (spool, received.etag)
        return Response(headers={"ETag": received.etag})

    def complete(self, state: State, request: Request, key: str) -> Response:
        """Join the parts."""
        upload, body = self._upload(key), request.json()
        named = {part.number("partNumber"): part.text("etag") for part in body.parts("parts")}
        there = {number: etag for number, (_, etag) in upload.parts.items()}
        if body.text("oid") != upload.sha256 or named != there or len(there) != upload.count:
            raise Refused(400, "InvalidPart")
        spool = state.spool()
        digest = _join([upload.parts[number][0] for number in sorted(there)], spool)
        self._keep(upload.repo, spool, digest, expected=(upload.sha256, upload.size))
        with self._lock:
            self._uploads.pop(key, None)
        return answer({})

    def _upload(self, key: str) -> Upload:
        with self._lock:
            if key not in self._uploads:
                raise Refused(404, "NoSuchUpload")
            return self._uploads[key]

    def _keep(self, repo: Repo, spool: Path, sha256: str, *, expected: tuple[str, int]) -> None:
        found = (sha256, spool.stat().st_size)
        if found != expected:
            spool.unlink()
            raise Refused(400, f"BadDigest: sha256 and size are {found}, expected {expected}")
        spool.replace(self._state.lfs_path(sha256))
        with self._state.lock:
            repo.pending[sha256] = found[1]

    def verify(self, state: State, request: Request, name: str) -> Response:
        """Say whether an object has arrived."""
        repo = state.find(name)
        state.authorize(request, write=repo)
        body = request.json()
        known = repo.objects | repo.pending
        if known.get(body.text("oid")) != body.number("size"):
            raise Refused(404, "Object not found or of another size")
        return answer({})


def _join(parts: list[Path], path: Path) -> str:
    """Append the parts into one file and return its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                while block := piece.read(BLOCK_BYTES):
                    digest.update(block)
                    file.write(block)
            part.unlink()
    return digest.hexdigest()
