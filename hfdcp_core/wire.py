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
import itertools
import json
import math
import types
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, FileStamp, ObjectItem, Shard, Skipped, Span, TensorSpec
from hfdcp_core.collector import without_collector
from hfdcp_core.errors import HfdcpError, ValidationError
from hfdcp_core.json_text import indented
from hfdcp_core.manifest import Manifest
from hfdcp_core.plan import Copy, FilePlan, Making, Read, Zeros, row_major

VERSION = 1
"""Version of all our documents; another one is refused by name."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Value = TypeVar("Value")
_BAD = (KeyError, TypeError, ValueError, IndexError, AttributeError, HfdcpError)
"""What reading a document of another shape runs into; all of it means that the document is not ours any more."""
_SURROGATES = "backslashreplace"
"""Half of a surrogate pair, which a path or a pickled name may hold, has no UTF-8, but ``\\udc80`` is right JSON."""


def dumps(kind: str, value: object) -> bytes:
    """Write a value as a document of a kind, for a person to read.

    >>> loads("span", Span, dumps("span", Span("a", 0, 4)))
    Span(path='a', start=0, stop=4)
    """
    return (indented(_wrap(kind, encode(value)), 1, ascii_only=False) + "\n").encode(errors=_SURROGATES)


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


def dump_extra(values: Mapping[str, object]) -> bytes:
    """Write what JSON already has the types for: the entries of a checkpoint that are no tensors, by name."""
    document = {"hfdcp": "extra", "version": VERSION, "value": dict(values)}
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(errors=_SURROGATES)


def _wrap(kind: str, body: Json) -> dict[str, Json]:
    return {"hfdcp": kind, "version": VERSION, "value": body}


def _unwrap(kind: str, raw: bytes) -> Json:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"not a {kind}: {error}") from error
    if not isinstance(document, dict) or document.get("hfdcp") != kind:
        raise ValidationError(f"not a {kind} of hfdcp")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise ValidationError(f"{kind} of version {version!r}; this hfdcp reads version {VERSION}")
    body: Json = document.get("value")
    return body


def encode(value: object) -> Json:
    """Turn a value into JSON's types."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
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
    if kind in _OTHERWISE:
        return _OTHERWISE[kind](data)
    origin, args = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if data is None else decode(next(arg for arg in args if arg is not type(None)), data)
    if origin is tuple:
        return _decode_tuple(args, _expect(list, data))
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(args[1], _expect(dict, data))
    return _expect(kind, data)


def _bytes(data: Any) -> bytes:
    return base64.b64decode(_expect(str, data), validate=True)


def _finite(data: Any) -> float:
    number: float = _expect(float, data)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no number in JSON")
    return number


_PLAIN = (str, int)
_OTHERWISE: Mapping[Any, Callable[[Any], object]] = {bytes: _bytes, float: _finite}
"""What JSON has a narrower, or a wider, idea of."""


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


def _decode_mapping(kind: Any, items: dict[str, Any]) -> dict[str, object]:
    if kind in _PLAIN and set(map(type, items.values())) <= {kind}:
        return items  # of which there may be one for each tensor
    return {key: decode(kind, item) for key, item in items.items()}


def _decode_tuple(args: tuple[Any, ...], items: list[Any]) -> tuple[object, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(decode(args[0], item) for item in items)
    return tuple(decode(arg, item) for arg, item in zip(args, items, strict=True))


def _expect(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(data).__name__}")
    return data


# ---- tables: catalogs and file plans --------------------------------------------------------------------------------


_INDEXED = ("fqn", "dtype", "path", "encoding")
"""Columns of the table of shards that hold numbers of strings."""
_COLUMNS = (*_INDEXED, "box", "start", "stop")
_VIEWS = ("row", "box", "offset", "steps")
"""Columns of the table of copies that are views of a shard."""
_Key = TypeVar("_Key", bound=Hashable)
_Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a box."""


def _numbered(values: Iterable[_Key]) -> dict[_Key, int]:
    """Give values numbers, in the order in which they are first met."""
    return {value: number for number, value in enumerate(dict.fromkeys(values))}


def _numbers(column: Iterable[_Key], numbers: Mapping[_Key, int]) -> list[Json]:
    return list(map(numbers.__getitem__, column))


def _shard_table(shards: Sequence[Shard]) -> dict[str, Json]:
    """One list for each field: what takes few bytes, and is made and read without a step of Python for each shard."""
    spans = [shard.span for shard in shards]
    texts = {
        "fqn": [shard.fqn for shard in shards],
        "dtype": [shard.dtype for shard in shards],
        "path": [span.path for span in spans],
        "encoding": [shard.encoding for shard in shards],
    }
    cuts = _cuts(shard.box for shard in shards)
    strings, boxes = _numbered(itertools.chain.from_iterable(texts.values())), _numbered(cuts)
    return {
        "strings": list(strings),
        "boxes": _shown(boxes),
        **{name: _numbers(column, strings) for name, column in texts.items()},
        "box": _numbers(cuts, boxes),
        "start": [span.start for span in spans],
        "stop": [span.stop for span in spans],
    }


def _cuts(boxes: Iterable[Box]) -> list[_Cut]:
    return [(box.offset, box.shape) for box in boxes]


def _shown(cuts: Iterable[_Cut]) -> list[Json]:
    return [[*offset, *shape] for offset, shape in cuts]


def _shards(table: Mapping[str, Any]) -> tuple[Shard, ...]:
    columns = {name: _naturals(table[name]) for name in _COLUMNS}
    if len(set(map(len, columns.values()))) != 1:
        raise ValueError("the columns of the table of shards are not of one length")
    strings = _texts(table["strings"])
    boxes = [_box(numbers) for numbers in table["boxes"]]
    fqns, dtypes, paths, encodings = (map(strings.__getitem__, columns[name]) for name in _INDEXED)
    spans = map(Span, paths, columns["start"], columns["stop"])
    return tuple(map(Shard, fqns, dtypes, map(boxes.__getitem__, columns["box"]), spans, encodings))


def _spec_table(tensors: Iterable[tuple[str, TensorSpec]]) -> dict[str, Json]:
    """Names, and numbers of kinds: most tensors of a model have one of a few."""
    rows = list(tensors)
    column = [(spec.dtype, spec.shape) for _, spec in rows]
    kinds = _numbered(column)
    shown: list[Json] = [[dtype, list(shape)] for dtype, shape in kinds]
    return {"names": [name for name, _ in rows], "kinds": shown, "kind": _numbers(column, kinds)}


def _specs(table: Mapping[str, Any]) -> list[tuple[str, TensorSpec]]:
    kinds = [TensorSpec(_expect(str, dtype), tuple(_naturals(shape))) for dtype, shape in _expect(list, table["kinds"])]
    names = _texts(table["names"])
    return list(zip(names, map(kinds.__getitem__, _naturals(table["kind"])), strict=True))


def _box(numbers: Any) -> Box:
    axes = len(_naturals(numbers)) // 2
    return Box(tuple(numbers[:axes]), tuple(numbers[axes:]))


def _texts(data: Any) -> list[str]:
    texts: list[str] = _expect(list, data)
    if not set(map(type, texts)) <= {str}:
        raise TypeError("expected texts")
    return texts


def _naturals(data: Any) -> list[int]:
    numbers = _integers(data)
    if min(numbers, default=0) < 0:
        raise ValueError("expected numbers from 0")
    return numbers


def _integers(data: Any) -> list[int]:
    numbers: list[int] = _expect(list, data)
    if not set(map(type, numbers)) <= {int}:
        raise TypeError("expected integers")
    return numbers


def _compress(kind: str, body: Json) -> bytes:
    raw = json.dumps(_wrap(kind, body), separators=(",", ":"), ensure_ascii=False).encode(errors=_SURROGATES)
    return gzip.compress(raw, compresslevel=3, mtime=0)


def _decompress(kind: str, raw: bytes) -> dict[str, Any]:
    try:
        body: dict[str, Any] = _expect(dict, _unwrap(kind, gzip.decompress(raw)))
    except (OSError, EOFError, zlib.error, TypeError) as error:
        raise ValidationError(f"not a readable {kind}: {error}") from error
    return body


@without_collector()
def dump_catalog(catalog: Catalog) -> bytes:
    """Write a catalog, compressed."""
    plain = {name: encode(getattr(catalog, name)) for name in ("format", "files", "skipped")}
    rest = {name: encode(getattr(catalog, name)) for name in ("nesting", "unproved", "unsupported", "objects")}
    tables = {"tensors": _spec_table(catalog.tensors.items()), "shards": _shard_table(catalog.shards)}
    return _compress("catalog", {**plain, **rest, **tables})


@without_collector()
def load_catalog(raw: bytes) -> Catalog:
    """Read a catalog.

    Raises:
        ValidationError: It is not one.
    """
    body = _decompress("catalog", raw)
    try:
        return Catalog(
            format=decode(str, body["format"]),
            tensors=dict(_specs(body["tensors"])),
            shards=_shards(body["shards"]),
            files=decode(tuple[FileStamp, ...], body["files"]),
            skipped=decode(tuple[Skipped, ...], body["skipped"]),
            nesting=decode(Mapping[str, tuple[str, ...]], body["nesting"]),
            unproved=decode(str | None, body["unproved"]),
            unsupported=decode(Mapping[str, str], body["unsupported"]),
            objects=decode(tuple[ObjectItem, ...], body["objects"]),
        )
    except _BAD as error:
        raise ValidationError(f"not a readable catalog: {error}") from error


@without_collector()
def dump_file_plan(plan: FilePlan) -> bytes:
    """Write a file plan, compressed: a few bytes for each shard."""
    plain = {name: encode(getattr(plan, name)) for name in ("path", "header", "size", "stamps", "makings", "zeros")}
    tables: dict[str, Json] = {
        "tensors": _spec_table(plan.tensors),
        "operands": _spec_table(plan.operands),
        "shards": _shard_table(plan.shards),
        "copies": _copy_table(plan),
    }
    return _compress("file plan", {**plain, "window_bytes": plan.window_bytes, **tables})


def _copy_table(plan: FilePlan) -> dict[str, Json]:
    """Two numbers where a shard is copied whole, which is nearly always; every other view in a table of its own."""
    reads = [copy.read for copy in plan.copies]
    shards = [read.shard for read in reads]
    boxes = [plan.shards[shard].box for shard in shards]
    rows = [row for row, (copy, box) in enumerate(zip(plan.copies, boxes, strict=True)) if not _is_whole(copy, box)]
    cuts, steps = _cuts(plan.copies[row].box for row in rows), [reads[row].strides for row in rows]
    cut_numbers, step_numbers = _numbered(cuts), _numbered(steps)
    columns = (rows, _numbers(cuts, cut_numbers), [reads[row].offset for row in rows], _numbers(steps, step_numbers))
    return {
        "tensor": [copy.tensor for copy in plan.copies],
        "shard": list(shards),
        "views": {name: list(column) for name, column in zip(_VIEWS, columns, strict=True)},
        "boxes": _shown(cut_numbers),
        "strides": [list(strides) for strides in step_numbers],
    }


def _is_whole(copy: Copy, box: Box) -> bool:
    same = copy.box is box or copy.box == box
    return same and copy.read.offset == 0 and copy.read.strides == row_major(box.shape)


@without_collector()
def load_file_plan(raw: bytes) -> FilePlan:
    """Read a file plan.

    Raises:
        ValidationError: It is not one.
    """
    body = _decompress("file plan", raw)
    try:
        shards = _shards(body["shards"])
        tensors, operands = tuple(_specs(body["tensors"])), tuple(_specs(body["operands"]))
        return FilePlan(
            path=decode(str, body["path"]),
            header=decode(bytes, body["header"]),
            size=decode(int, body["size"]),
            tensors=tensors,
            shards=shards,
            copies=_copies(body["copies"], [spec for _, spec in (*tensors, *operands)], shards),
            stamps=decode(tuple[FileStamp, ...], body["stamps"]),
            window_bytes=decode(int, body["window_bytes"]),
            operands=operands,
            makings=decode(tuple[Making, ...], body["makings"]),
            zeros=decode(tuple[Zeros, ...], body["zeros"]),
        )
    except _BAD as error:
        raise ValidationError(f"not a readable file plan: {error}") from error


def load_file_header(raw: bytes) -> bytes:
    """Read of a file plan only the first bytes of the file.

    Raises:
        ValidationError: It is no file plan.
    """
    body = _decompress("file plan", raw)
    try:
        return _bytes(body["header"])
    except _BAD as error:
        raise ValidationError(f"not a readable file plan: {error}") from error


def _copies(table: Mapping[str, Any], specs: Sequence[TensorSpec], shards: Sequence[Shard]) -> tuple[Copy, ...]:
    copies = [
        Copy(tensor, shards[shard].box, Read(shard, 0, row_major(shards[shard].box.shape)))
        for tensor, shard in zip(_naturals(table["tensor"]), _naturals(table["shard"]), strict=True)
    ]
    boxes = [_box(numbers) for numbers in table["boxes"]]
    strides = [tuple(_integers(steps)) for steps in table["strides"]]
    views = table["views"]
    rows, taken, offsets = _naturals(views["row"]), _naturals(views["box"]), _integers(views["offset"])
    for number, box, offset, steps in zip(rows, taken, offsets, _naturals(views["steps"]), strict=True):
        whole = copies[number]
        copies[number] = Copy(whole.tensor, boxes[box], Read(whole.read.shard, offset, strides[steps]))
    _check_copies(copies, specs)
    return tuple(copies)


def _check_copies(copies: Sequence[Copy], specs: Sequence[TensorSpec]) -> None:
    """Refuse copies that fill what is no part of their tensor."""
    cuts = {(specs[copy.tensor].shape, copy.box.offset, copy.box.shape) for copy in copies}
    for whole, offset, shape in cuts:
        if not Box(offset, shape).within(Box.whole(whole)):
            raise ValueError(f"a copy fills {Box(offset, shape)} of a tensor of shape {list(whole)}")
    if any(len(copy.read.strides) != len(copy.box.shape) for copy in copies):
        raise ValueError("a view has not as many strides as its box has dimensions")
