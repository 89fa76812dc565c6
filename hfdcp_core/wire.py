"""Every value ⇄ JSON, with a version: what rests under ``.hfdcp/``, and the manifest.

One generic codec reads the fields and types of our dataclasses, so that a value and its document cannot drift apart.
Catalogs and file plans, which hold a row for every shard, are written as tables (names and paths once, rows that
point to them) and compressed; everything else is plain, indented JSON for people.

A document that is not what it says is a `ValidationError`: it was written by us, and is no longer what we wrote.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
import types
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, FileStamp, Shard, Skipped, Span, TensorSpec
from hfdcp_core.errors import HfdcpError, ValidationError
from hfdcp_core.manifest import Manifest
from hfdcp_core.plan import Copy, FilePlan, Read, row_major

VERSION = 1
"""Version of all our documents; another one is refused by name."""

Json = None | bool | int | str | list["Json"] | dict[str, "Json"]
Value = TypeVar("Value")
_BAD = (KeyError, TypeError, ValueError, IndexError, AttributeError, HfdcpError)
"""What reading a document of another shape runs into; all of it means that the document is not ours any more."""


def dumps(kind: str, value: object) -> bytes:
    """Write a value as a document of a kind, for a person to read.

    >>> loads("span", Span, dumps("span", Span("a", 0, 4)))
    Span(path='a', start=0, stop=4)
    """
    return (json.dumps(_wrap(kind, encode(value)), indent=1, ensure_ascii=False) + "\n").encode()


def loads(kind: str, cls: type[Value], raw: bytes) -> Value:
    """Read a value from a document.

    Raises:
        ValidationError: It is of another kind or version, or not what `dumps` writes.
    """
    return decode_as(cls, _unwrap(kind, raw))


def dump_manifest(manifest: Manifest) -> bytes:
    """Write a manifest."""
    return dumps("manifest", manifest)


def load_manifest(raw: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        ValidationError: It is not one.
    """
    return loads("manifest", Manifest, raw)


def _wrap(kind: str, body: Json) -> dict[str, Json]:
    return {"hfdcp": kind, "version": VERSION, "value": body}


def _unwrap(kind: str, raw: bytes) -> Json:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"not a {kind}: {error}") from error
    if not isinstance(document, dict) or document.get("hfdcp") != kind:
        raise ValidationError(f"not a {kind} of hfdcp")
    if document.get("version") != VERSION:
        raise ValidationError(f"{kind} of version {document.get('version')!r}; this hfdcp reads version {VERSION}")
    body: Json = document.get("value")
    return body


def encode(value: object) -> Json:
    """Turn a value into JSON's types."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no place in a document")


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls)


def decode(kind: Any, data: Any) -> Any:
    """Turn JSON's types back into a value of ``kind``, refusing what is not of its form."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data)
    if kind is bytes:
        return base64.b64decode(_expect(str, data), validate=True)
    origin, args = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if data is None else decode(next(arg for arg in args if arg is not type(None)), data)
    if origin is tuple:
        return _decode_tuple(args, _expect(list, data))
    if origin is not None and issubclass(origin, Mapping):
        return {key: decode(args[1], item) for key, item in _expect(dict, data).items()}
    return _expect(kind, data)


def decode_as(cls: type[Value], data: Json) -> Value:
    """Turn JSON's types back into a value.

    Raises:
        ValidationError: They are not of its form.
    """
    try:
        value: Value = decode(cls, data)
    except _BAD as error:
        raise ValidationError(f"not a {cls.__name__}: {error}") from error
    return value


def _decode_dataclass(cls: type, data: Any) -> object:
    hints, fields = _hints(cls), _expect(dict, data)
    if fields.keys() != hints.keys():
        odd = sorted(fields.keys() ^ hints.keys())
        raise ValueError(f"{cls.__name__} does not have exactly its fields: {', '.join(odd)}")
    return cls(**{name: decode(hints[name], item) for name, item in fields.items()})


def _decode_tuple(args: tuple[Any, ...], items: list[Any]) -> tuple[object, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(decode(args[0], item) for item in items)
    return tuple(decode(arg, item) for arg, item in zip(args, items, strict=True))


def _expect(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(data).__name__}")
    return data


# ---- tables: catalogs and file plans --------------------------------------------------------------------------------


class _Interned:
    """Strings in the order in which they were first met, and their numbers."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.number.setdefault(text, len(self.number))


def _shard_table(shards: Iterable[Shard]) -> dict[str, Json]:
    strings = _Interned()
    rows: list[Json] = [
        [
            *(strings(text) for text in (shard.fqn, shard.dtype, shard.span.path, shard.encoding)),
            shard.span.start,
            shard.span.stop,
            *shard.box.offset,
            *shard.box.shape,
        ]
        for shard in shards
    ]
    return {"strings": list(strings.number), "rows": rows}


def _shards(table: Mapping[str, Any]) -> tuple[Shard, ...]:
    strings: Sequence[str] = table["strings"]
    return tuple(_shard(strings, row) for row in table["rows"])


def _shard(strings: Sequence[str], row: list[int]) -> Shard:
    fqn, dtype, path, encoding, start, stop, *numbers = row
    axes = len(numbers) // 2
    box = Box(tuple(numbers[:axes]), tuple(numbers[axes:]))
    return Shard(strings[fqn], strings[dtype], box, Span(strings[path], start, stop), strings[encoding])


def _compress(kind: str, body: Json) -> bytes:
    raw = json.dumps(_wrap(kind, body), separators=(",", ":"), ensure_ascii=False).encode()
    return gzip.compress(raw, compresslevel=3, mtime=0)


def _decompress(kind: str, raw: bytes) -> dict[str, Any]:
    try:
        body: dict[str, Any] = _expect(dict, _unwrap(kind, gzip.decompress(raw)))
    except (OSError, EOFError, zlib.error, TypeError) as error:
        raise ValidationError(f"not a readable {kind}: {error}") from error
    return body


def dump_catalog(catalog: Catalog) -> bytes:
    """Write a catalog, compressed."""
    plain = {name: encode(getattr(catalog, name)) for name in ("format", "tensors", "files", "skipped")}
    rest = {name: encode(getattr(catalog, name)) for name in ("nesting", "unproved", "unsupported")}
    return _compress("catalog", {**plain, **rest, "shards": _shard_table(catalog.shards)})


def load_catalog(raw: bytes) -> Catalog:
    """Read a catalog.

    Raises:
        ValidationError: It is not one.
    """
    body = _decompress("catalog", raw)
    try:
        return Catalog(
            format=body["format"],
            tensors=decode(Mapping[str, TensorSpec], body["tensors"]),
            shards=_shards(body["shards"]),
            files=decode(tuple[FileStamp, ...], body["files"]),
            skipped=decode(tuple[Skipped, ...], body["skipped"]),
            nesting={name: tuple(path) for name, path in body["nesting"].items()},
            unproved=body["unproved"],
            unsupported=body["unsupported"],
        )
    except _BAD as error:
        raise ValidationError(f"not a readable catalog: {error}") from error


def dump_file_plan(plan: FilePlan) -> bytes:
    """Write a file plan, compressed: a few bytes for each shard."""
    rows: list[Json] = [_copy_row(copy, plan.shards[copy.read.shard]) for copy in plan.copies]
    plain = {name: encode(getattr(plan, name)) for name in ("path", "header", "size", "tensors", "stamps")}
    return _compress(
        "file plan",
        {**plain, "window_bytes": plan.window_bytes, "shards": _shard_table(plan.shards), "copies": rows},
    )


def _copy_row(copy: Copy, shard: Shard) -> list[Json]:
    """Two numbers where a shard is copied whole, which is nearly always; everything else spelled out."""
    if _is_whole(copy, shard):
        return [copy.tensor, copy.read.shard]
    view = [copy.read.offset, *copy.read.strides]
    return [copy.tensor, copy.read.shard, encode(copy.box), encode(tuple(view))]


def _is_whole(copy: Copy, shard: Shard) -> bool:
    return copy.box == shard.box and copy.read == Read(copy.read.shard, 0, row_major(shard.box.shape))


def load_file_plan(raw: bytes) -> FilePlan:
    """Read a file plan.

    Raises:
        ValidationError: It is not one.
    """
    body = _decompress("file plan", raw)
    try:
        shards = _shards(body["shards"])
        return FilePlan(
            path=body["path"],
            header=decode(bytes, body["header"]),
            size=body["size"],
            tensors=decode(tuple[tuple[str, TensorSpec], ...], body["tensors"]),
            shards=shards,
            copies=tuple(_copy(row, shards) for row in body["copies"]),
            stamps=decode(tuple[FileStamp, ...], body["stamps"]),
            window_bytes=body["window_bytes"],
        )
    except _BAD as error:
        raise ValidationError(f"not a readable file plan: {error}") from error


def _copy(row: list[Any], shards: Sequence[Shard]) -> Copy:
    tensor, shard, *view = row
    if not view:
        box = shards[shard].box
        return Copy(tensor, box, Read(shard, 0, row_major(box.shape)))
    (offset, *strides), box = view[1], decode(Box, view[0])
    return Copy(tensor, box, Read(shard, offset, tuple(strides)))
