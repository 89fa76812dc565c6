"""A request and a response as values, without sockets: what the Hub's functions take and give."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path

BLOCK_BYTES = 1 << 20
JSON_TYPE = "application/json; charset=utf-8"


class Refused(Exception):
    """An answer that says no."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message)

    def response(self) -> Response:
        """Say no as the Hub does: the client reads the headers before the body."""
        named = {"X-Error-Code": self.code} if self.code else {}
        headers = {**self.headers, **named, "X-Error-Message": self.message.replace("\n", " ")}
        return answer({"error": self.message}, status=self.status, headers=headers)


@dataclass(frozen=True, slots=True)
class Response:
    """An answer: bytes in memory, or a part of a file."""

    status: int = 200
    """HTTP status."""
    body: bytes = b""
    """The body, where it is not a file."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers; ``Content-Length`` is computed unless it is among them."""
    content_type: str = JSON_TYPE
    """Media type."""
    file: Path | None = None
    """The file to send, where it is one."""
    start: int = 0
    """First byte of the file to send."""
    stop: int = 0
    """Behind the last byte of the file to send."""

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return self.stop - self.start if self.file else len(self.body)


def answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with JSON."""
    return Response(status, json.dumps(value).encode(), headers or {})


class Body:
    """A JSON object that came in; what it lacks, or has of another type, is refused."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise Refused(400, "expected a JSON object")
        self._value: dict[str, object] = value

    def __contains__(self, key: str) -> bool:
        return key in self._value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise Refused(400, f'"{key}" must be a string')
        return value

    def number(self, key: str) -> int:
        """Return an integer."""
        value = self._value.get(key)
        if not isinstance(value, int):
            raise Refused(400, f'"{key}" must be an integer')
        return value

    def flag(self, key: str) -> bool:
        """Return whether something is set."""
        return bool(self._value.get(key))

    def parts(self, key: str) -> list[Body]:
        """Return a list of objects."""
        value = self._value.get(key, [])
        if not isinstance(value, list):
            raise Refused(400, f'"{key}" must be a list')
        return [Body(item) for item in value]

    def part(self, key: str) -> Body:
        """Return an object."""
        return Body(self._value.get(key))

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        value = self._value.get(key, [])
        return [str(item) for item in value] if isinstance(value, list) else []


class Request:
    """What a client asks. The body comes in blocks and is read once."""

    def __init__(self, method: str, target: str, headers: Message, *, blocks: Iterator[bytes], port: int) -> None:
        url = urllib.parse.urlsplit(target)
        self.method = method
        self.path = url.path
        """Path without query, still quoted, so that a quoted slash is no separator."""
        self.query = urllib.parse.parse_qs(url.query, keep_blank_values=True)
        self.headers = headers
        self.blocks = blocks
        self.base = f"http://{headers.get('Host')}"
        """The origin by which the client came."""
        self.away = f"http://localhost:{port}"
        """Another origin, as storage and CDN have: the client must not send its token there."""

    def param(self, name: str, default: str = "") -> str:
        """Return one value from the query."""
        return self.query.get(name, [default])[0]

    def switch(self, name: str) -> bool:
        """Whether a value of the query says yes."""
        return self.param(name).lower() in ("true", "1")

    def header(self, name: str) -> str:
        """Return a header, or an empty string."""
        return str(self.headers.get(name, ""))

    def body(self) -> bytes:
        """Return the whole body."""
        return b"".join(self.blocks)

    def json(self) -> Body:
        """Return the body as a JSON object; no body is an empty one."""
        return parse_json(self.body() or b"{}")

    def form(self) -> tuple[list[str], bool]:
        """Return ``paths`` and ``expand``, sent as a form or as JSON."""
        raw = self.body()
        if "json" in self.header("Content-Type"):
            body = parse_json(raw)
            return body.texts("paths"), body.flag("expand")
        fields = urllib.parse.parse_qs(raw.decode())
        return fields.get("paths", []), fields.get("expand", [""])[0].lower() in ("true", "1")


def parse_json(raw: bytes) -> Body:
    """Read one JSON object."""
    try:
        return Body(json.loads(raw))
    except ValueError as fault:
        raise Refused(400, "invalid JSON") from fault


@dataclass(frozen=True, slots=True)
class Received:
    """A body that was written to a file."""

    sha256: str
    """Digest of the body."""
    etag: str
    """MD5 in quotes, as a storage answers."""
    size: int
    """Bytes."""


def receive(request: Request, path: Path) -> Received:
    """Write the body of a request to a file, hashing on the way."""
    sha256, md5, size = hashlib.sha256(), hashlib.md5(), 0
    with path.open("wb") as file:
        for block in request.blocks:
            sha256.update(block)
            md5.update(block)
            size += file.write(block)
    return Received(sha256.hexdigest(), f'"{md5.hexdigest()}"', size)


def send_file(request: Request, path: Path, etag: str, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a file, or with the range of it that was asked for."""
    size = path.stat().st_size
    common = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", **(headers or {})}
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.header("Range").strip())
    if asked is None:
        return Response(200, headers=common, content_type="application/octet-stream", file=path, stop=size)
    start, stop = _range(asked[1], asked[2], size)
    if start >= size:
        return Response(416, headers={**common, "Content-Range": f"bytes */{size}"})
    common["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Response(206, headers=common, content_type="application/octet-stream", file=path, start=start, stop=stop)


def _range(first: str, last: str, size: int) -> tuple[int, int]:
    """Return start and stop of an HTTP range; ``-n`` means the last n bytes."""
    if not first:
        return max(0, size - int(last or 0)), size
    return int(first), min(int(last) + 1 if last else size, size)
