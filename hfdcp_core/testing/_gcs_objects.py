"""What a Google Cloud Storage on loopback holds: buckets, objects and uploads, as the JSON API's documents tell it.

Only values and bytes: `hfdcp_core.testing.gcs_server` puts it behind HTTP. Where emulators depart from the documents
and code could lean on it, this one keeps to them: preconditions hold, bytes of a resumable upload that are sent twice
count once, and the last chunk may be sent again. No object has an MD5, as those that were composed have none.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from awscrt import checksums

_CHUNK_UNIT = 256 << 10
_PAGE = 1000
_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o(?:/([^/]+)(?:/(moveTo/o|rewriteTo/b/[^/]+/o)/([^/]+))?)?")
_BUCKET = re.compile(r"/storage/v1/b(?:/([^/]+))?")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")

Document = dict[str, object]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    method: str
    """GET, POST, PUT or DELETE."""
    path: str
    """As it came, still quoted."""
    query: Mapping[str, str]
    """What stands behind the question mark."""
    headers: Mapping[str, str]
    """By name, whatever the case."""
    body: bytes
    """All of it."""
    host: str = ""
    """Where the server is reached."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int = 200
    """HTTP status."""
    body: bytes = b""
    """All of it."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Beside the usual ones."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object in one state."""

    data: bytes
    """Its content."""
    document: Document
    """What the API says of it."""


@dataclass(slots=True)
class _Session:
    """A resumable upload that is not finished, or was a moment ago."""

    bucket: str
    name: str
    query: Mapping[str, str]
    data: bytearray = field(default_factory=bytearray)
    done: Reply | None = None


class Buckets:
    """Everything that is stored."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.objects: dict[str, dict[str, StoredObject]] = {}
        """Content by bucket and name."""
        self.sessions: dict[str, _Session] = {}
        """Resumable uploads by id."""
        self._generations = itertools.count(int(time.time() * 1e6))

    def answer(self, ask: Ask) -> Reply:
        """Carry out one request."""
        path = ask.path.removeprefix("/download")
        if found := _UPLOAD.fullmatch(path):
            return self._upload(ask, found[1])
        if found := _OBJECT.fullmatch(path):
            return self._object(ask, *found.groups())
        if found := _BUCKET.fullmatch(path):
            return self._bucket(ask, found[1])
        return refusal(404, "no such path")

    # ---- buckets and listings ----

    def _bucket(self, ask: Ask, name: str | None) -> Reply:
        if ask.method == "POST":
            self.objects.setdefault(str(json.loads(ask.body)["name"]), {})
        elif name is not None and name not in self.objects:
            return refusal(404, "no such bucket")
        items = [{"kind": "storage#bucket", "name": each} for each in self.objects]
        return _said({"items": items} if name is None else {"name": name})

    def _list(self, bucket: str, query: Mapping[str, str]) -> Reply:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most, after = int(query.get("maxResults") or _PAGE), query.get("pageToken", "")
        shown: dict[str, Document | None] = {}
        for name in sorted(self.objects[bucket]):
            folder = _folder(name, prefix, delimiter) if name.startswith(prefix) else ""
            key = folder or name
            if not name.startswith(prefix) or key <= after or key in shown:
                continue
            if len(shown) == most:
                return _page(shown, next(reversed(shown)))
            shown[key] = None if folder else self.objects[bucket][name].document
        return _page(shown, None)

    # ---- objects ----

    def _object(self, ask: Ask, bucket: str, quoted: str | None, action: str | None, other: str | None) -> Reply:
        if bucket not in self.objects:
            return refusal(404, "no such bucket")
        if quoted is None:
            return self._list(bucket, ask.query)
        name = unquote(quoted)
        stored = self.objects[bucket].get(name)
        if stored is None or ask.query.get("generation") not in (None, stored.document["generation"]):
            return refusal(404, f"no such object: {bucket}/{name}")
        if action is not None and other is not None:
            return self._copy(stored, bucket, name, action, unquote(other))
        if ask.method == "DELETE":
            del self.objects[bucket][name]
            return Reply(204)
        return _content(stored, ask.headers.get("Range")) if ask.query.get("alt") == "media" else _said(stored.document)

    def _copy(self, stored: StoredObject, bucket: str, name: str, action: str, other: str) -> Reply:
        if action == "moveTo/o":
            del self.objects[bucket][name]
            return self.publish(bucket, other, stored.data)
        document = json.loads(self.publish(action.split("/")[2], other, stored.data).body)
        return _said({"done": True, "resource": document})

    def publish(self, bucket: str, name: str, data: bytes) -> Reply:
        """Let an object appear, and say what is known of it."""
        crc32c = base64.b64encode(checksums.crc32c(data).to_bytes(4, "big")).decode()
        generation = str(next(self._generations))
        document: Document = {
            "kind": "storage#object", "name": name, "bucket": bucket, "size": str(len(data)), "generation": generation,
            "crc32c": crc32c, "etag": generation,
            "timeCreated": "2026-01-01T00:00:00.000Z", "updated": "2026-01-01T00:00:00.000Z",
        }  # fmt: skip
        self.objects[bucket][name] = StoredObject(data, document)
        return _said(document)

    def _stands(self, bucket: str, name: str, query: Mapping[str, str]) -> bool:
        """Tell whether the object is in the generation that a request takes it to be in."""
        stored = self.objects[bucket].get(name)
        return query.get("ifGenerationMatch", "") in ("", stored.document["generation"] if stored else "0")

    # ---- uploads ----

    def _upload(self, ask: Ask, bucket: str) -> Reply:
        if bucket not in self.objects:
            return refusal(404, "no such bucket")
        if upload := ask.query.get("upload_id"):
            return self._continue(ask, upload)
        name, data = _named(ask)
        if not self._stands(bucket, name, ask.query):
            return refusal(412, "another generation is there")
        if ask.query.get("uploadType") != "resumable":
            return self.publish(bucket, name, data)
        upload = f"upload-{next(self._generations)}"
        self.sessions[upload] = _Session(bucket, name, dict(ask.query))
        where = f"http://{ask.host}{ask.path}?uploadType=resumable&upload_id={upload}"
        return Reply(headers={"Location": where})

    def _continue(self, ask: Ask, upload: str) -> Reply:
        session = self.sessions.get(upload)
        if session is None:
            return refusal(410, "the upload is gone")
        if ask.method == "DELETE":
            del self.sessions[upload]
            return Reply(499)
        return session.done or self._append(session, ask)

    def _append(self, session: _Session, ask: Ask) -> Reply:
        found = _CONTENT_RANGE.fullmatch(ask.headers.get("Content-Range", ""))
        total = found[3] if found else str(len(session.data) + len(ask.body))
        start = int(found[1]) if found and found[1] else len(session.data)
        if start > len(session.data) or (total == "*" and len(ask.body) % _CHUNK_UNIT):
            return refusal(
                400, f"byte {start}, {len(ask.body)} bytes: {len(session.data)} are here, of units of 256 KiB"
            )
        session.data += memoryview(ask.body)[len(session.data) - start :]
        if total == "*" or len(session.data) < int(total):
            kept = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
            return Reply(308, headers=kept)
        if not self._stands(session.bucket, session.name, session.query):
            return refusal(412, "another generation is there")
        session.done = self.publish(session.bucket, session.name, bytes(session.data))
        session.data = bytearray()
        return session.done


def refusal(status: int, message: str) -> Reply:
    """Return an error as the API writes it."""
    return Reply(status, json.dumps({"error": {"code": status, "message": message}}).encode())


def _said(document: Mapping[str, object]) -> Reply:
    return Reply(body=json.dumps(document).encode(), headers={"Content-Type": "application/json"})


def _folder(name: str, prefix: str, delimiter: str) -> str:
    inside = name[len(prefix) :]
    return prefix + inside.split(delimiter, 1)[0] + delimiter if delimiter and delimiter in inside else ""


def _page(shown: Mapping[str, Document | None], last: str | None) -> Reply:
    page: Document = {
        "kind": "storage#objects",
        "items": [document for document in shown.values() if document is not None],
        "prefixes": [name for name, document in shown.items() if document is None],
    }
    return _said(page if last is None else {**page, "nextPageToken": last})


def _content(stored: StoredObject, wanted: str | None) -> Reply:
    size = len(stored.data)
    hashed = {"x-goog-hash": f"crc32c={stored.document['crc32c']}"}
    found = _RANGE.fullmatch(wanted or "")
    if not found:
        return Reply(body=stored.data, headers=hashed)
    start, stop = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
    if start >= size:
        return refusal(416, "the object ends before the range")
    headers = {**hashed, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return Reply(206, stored.data[start:stop], headers)


def _named(ask: Ask) -> tuple[str, bytes]:
    """Return the name and the content that an upload begins with."""
    kind = ask.query.get("uploadType")
    if kind != "multipart":
        document = json.loads(ask.body) if kind == "resumable" and ask.body else {}
        return ask.query.get("name") or str(document["name"]), ask.body
    boundary = b"--" + ask.headers["Content-Type"].partition("boundary=")[2].strip("\"'").encode()
    _, head, rest = ask.body.split(boundary, 2)
    document = json.loads(re.split(rb"\r?\n\r?\n", head, maxsplit=1)[1])
    data = re.split(rb"\r?\n\r?\n", rest, maxsplit=1)[1]
    data = data[: data.rindex(boundary)]
    return str(document["name"]), re.sub(rb"\r?\n\Z", b"", data)
