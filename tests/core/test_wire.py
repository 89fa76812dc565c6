"""Documents: every value comes back from its own, and a damaged one is never anything but a `ValidationError`."""

import contextlib
import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hfdcp_core import wire
from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, TORCH_SAVE, Catalog, FileStamp, ObjectItem, Shard, Skipped, Span, TensorSpec
from hfdcp_core.dtypes import TABLE
from hfdcp_core.errors import ValidationError
from hfdcp_core.manifest import CrcPart, FileRecord, Manifest, SourceCheck, Statistics
from hfdcp_core.operation import DEQUANTIZE, Operand, Operation
from hfdcp_core.plan import Copy, FilePlan, Making, Read, row_major

# ---- values of every kind -------------------------------------------------------------------------------------------

TEXT = st.text(max_size=8) | st.sampled_from(["model.layers.0.w", "", "ключ", "\udc80.w", '"\\', "\x00"])
COUNT = st.integers(0, 2**40)
NUMBERS = st.lists(COUNT, max_size=3).map(tuple)
SPECS = st.builds(TensorSpec, st.sampled_from([dtype.name for dtype in TABLE]), NUMBERS)
STAMPS = st.builds(FileStamp, TEXT, COUNT, TEXT)
SKIPPED = st.builds(Skipped, TEXT, TEXT)
CHECKS = st.builds(SourceCheck, COUNT, COUNT, st.lists(st.builds(CrcPart, TEXT, *[COUNT] * 5), max_size=2).map(tuple))
RECORDS = st.builds(FileRecord, TEXT, COUNT, TEXT, st.dictionaries(TEXT, TEXT, max_size=3), CHECKS)


def many(strategy: st.SearchStrategy[Any], most: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=most).map(tuple)


MANIFESTS = st.builds(
    Manifest,
    plan_digest=TEXT,
    source_digest=TEXT,
    source_format=TEXT,
    records=many(RECORDS),
    extra_files=many(RECORDS, 2),
    total_size=COUNT,
    recipe=TEXT,
    include=many(TEXT),
    exclude=many(TEXT),
    unproved=st.none() | TEXT,
    skipped=many(TEXT),
    tools=st.dictionaries(TEXT, TEXT, max_size=3),
    checks=many(TEXT),
    tied=st.dictionaries(TEXT, TEXT, max_size=2),
)


@st.composite
def shards(draw: st.DrawFn, fqn: str, spec: TensorSpec) -> Shard:
    offset = tuple(draw(st.integers(0, extent)) for extent in spec.shape)
    shape = tuple(draw(st.integers(0, n - first)) for n, first in zip(spec.shape, offset, strict=True))
    start = draw(COUNT)
    span = Span(draw(TEXT), start, start + draw(COUNT))
    return Shard(fqn, spec.dtype, Box(offset, shape), span, draw(st.sampled_from([RAW, TORCH_SAVE])))


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    tensors = draw(st.dictionaries(TEXT, SPECS, max_size=4))
    owners = draw(st.lists(st.sampled_from(sorted(tensors)), max_size=6)) if tensors else []
    return Catalog(
        format=draw(TEXT),
        tensors=tensors,
        shards=tuple(draw(shards(fqn, tensors[fqn])) for fqn in owners),
        files=draw(many(STAMPS)),
        skipped=draw(many(SKIPPED)),
        unsupported=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
        nesting=draw(st.dictionaries(TEXT, many(TEXT), max_size=2)),
        unproved=draw(st.none() | TEXT),
        objects=draw(many(st.builds(ObjectItem, TEXT, st.builds(Span, TEXT, st.just(3), COUNT.map(lambda n: n + 3))))),
    )


@st.composite
def file_plans(draw: st.DrawFn) -> FilePlan:
    tensors = draw(st.lists(st.tuples(TEXT, SPECS), min_size=1, max_size=4).map(tuple))
    owners = draw(st.lists(st.integers(0, len(tensors) - 1), max_size=6))
    held = tuple(draw(shards(*tensors[owner])) for owner in owners)
    copies = []
    for number, shard in enumerate(held):
        whole = Copy(owners[number], shard.box, Read(number, 0, row_major(shard.box.shape)))
        box = draw(shards(shard.fqn, tensors[owners[number]][1])).box
        strides = draw(st.tuples(*[st.integers(-9, 9)] * len(box.shape)))
        view = Copy(owners[number], box, Read(number, draw(COUNT), strides))
        copies.append(draw(st.sampled_from([whole, view])))
    return FilePlan(
        draw(TEXT),
        draw(st.binary(max_size=9)),
        draw(COUNT),
        tensors,
        held,
        tuple(copies),
        draw(many(STAMPS)),
        draw(COUNT),
        *draw(st.sampled_from([((), ()), made(len(tensors))])),
    )


def made(tensors: int) -> tuple[tuple[tuple[str, TensorSpec], ...], tuple[Making, ...]]:
    """Return the operands of a file plan and what is made from them."""
    numbers, scales = TensorSpec("F8_E4M3", (4, 6)), TensorSpec("F32", (2, 3))
    operands = (Operand("w", numbers), Operand("w_scale", scales))
    operation = Operation(DEQUANTIZE, operands, TensorSpec("BF16", (4, 6)), (2, 2))
    making = Making(0, operation, Box((2, 0), (2, 6)), (tensors, tensors + 1))
    return (("w", numbers), ("w_scale", scales)), (making,)


@dataclass(frozen=True, slots=True)
class Everything:
    """One field of every type that our values have."""

    flag: bool
    number: int
    text: str
    maybe: str | None
    raw: bytes
    names: tuple[str, ...]
    pairs: tuple[tuple[str, TensorSpec], ...]
    counts: dict[str, int]


EVERYTHING = st.builds(
    Everything,
    st.booleans(),
    st.integers(),
    TEXT,
    st.none() | TEXT,
    st.binary(max_size=9),
    many(TEXT),
    many(st.tuples(TEXT, SPECS)),
    st.dictionaries(TEXT, st.integers(), max_size=3),
)

# ---- round trips ----------------------------------------------------------------------------------------------------


@given(EVERYTHING)
def test_a_value_comes_back_from_its_document(value: Everything) -> None:
    assert wire.loads("thing", Everything, wire.dumps("thing", value)) == value


@given(MANIFESTS)
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    assert wire.load_manifest(wire.dump_manifest(manifest)) == manifest


@given(catalogs())
def test_a_catalog_comes_back_with_its_order(catalog: Catalog) -> None:
    again = wire.load_catalog(wire.dump_catalog(catalog))
    assert again == catalog
    assert list(again.tensors) == list(catalog.tensors)


@given(file_plans())
def test_a_file_plan_comes_back(plan: FilePlan) -> None:
    assert wire.load_file_plan(wire.dump_file_plan(plan)) == plan


@settings(suppress_health_check=[HealthCheck.too_slow])  # the values are many, and a machine may be busy
@given(catalogs(), file_plans(), MANIFESTS)
def test_documents_are_the_same_bytes_each_time_and_after_a_round_trip(
    catalog: Catalog, plan: FilePlan, manifest: Manifest
) -> None:
    cases: list[tuple[Any, Callable[[Any], bytes], Callable[[bytes], object]]] = [
        (catalog, wire.dump_catalog, wire.load_catalog),
        (plan, wire.dump_file_plan, wire.load_file_plan),
        (manifest, wire.dump_manifest, wire.load_manifest),
    ]
    for value, dump, load in cases:
        raw = dump(value)
        assert dump(value) == dump(load(raw)) == raw


def test_plain_documents_can_be_read_by_a_person() -> None:
    text = wire.dumps("skipped", Skipped("ключ", "why")).decode()
    assert json.loads(text) == {"hfdcp": "skipped", "version": 1, "value": {"name": "ключ", "reason": "why"}}
    assert '"name": "ключ",\n' in text
    assert text.endswith("}\n")


def test_half_a_surrogate_pair_in_a_path_is_written_as_json_that_anyone_reads() -> None:
    raw = wire.dumps("skipped", Skipped("\udc80", "why"))
    assert b'"\\udc80"' in raw
    assert wire.loads("skipped", Skipped, raw).name == "\udc80"


@pytest.mark.parametrize(("value", "kind"), [(0.5j, "complex"), (float("inf"), "float"), (float("nan"), "float")])
def test_what_has_no_place_in_a_document_is_refused_when_written(value: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"{kind} has no place in a document"):
        wire.dumps("number", value)


@pytest.mark.parametrize("number", [0.0, 1.0, 1e22, 3.4028234663852886e38, 5e-324])
def test_a_magnitude_is_read_back_as_it_was_written(number: float) -> None:
    found = Statistics("full", absmax={"a": number})
    assert wire.loads("statistics", Statistics, wire.dumps("statistics", found)) == found


@pytest.mark.parametrize("text", ["1", "NaN", "Infinity", '"1.0"'])
def test_what_is_no_magnitude_is_refused_when_read(text: str) -> None:
    raw = wire.dumps("statistics", Statistics("full", absmax={"a": 1.5})).replace(b"1.5", text.encode())
    with pytest.raises(ValidationError, match="not a Statistics"):
        wire.loads("statistics", Statistics, raw)


def grid_plan(ranks: int, tensors: int) -> FilePlan:
    spec = TensorSpec("BF16", (8 * ranks, 64))
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(tensors)]
    cells = [(t, r) for t in range(tensors) for r in range(ranks)]
    held = tuple(
        Shard(
            names[t], "BF16", Box((8 * r, 0), (8, 64)), Span(f"__{r}_0.distcp", t * 2345, t * 2345 + 2300), TORCH_SAVE
        )
        for t, r in cells
    )
    copies = tuple(Copy(t, held[n].box, Read(n, 0, (64, 1))) for n, (t, _) in enumerate(cells))
    return FilePlan("f", b"", 1, tuple((name, spec) for name in names), held, copies, (), 1)


def test_a_shard_takes_a_few_bytes_in_a_file_plan_and_in_a_catalog() -> None:
    plan = grid_plan(ranks=64, tensors=100)
    assert len(wire.dump_file_plan(plan)) < 5 * len(plan.shards)
    catalog = Catalog("dcp", dict(plan.tensors), plan.shards)
    assert len(wire.dump_catalog(catalog)) < 5 * len(plan.shards)


# ---- damage ---------------------------------------------------------------------------------------------------------

SHARD = Shard("a", "F32", Box((0, 1), (2, 2)), Span("f", 0, 16), TORCH_SAVE)
CATALOG = Catalog(
    "dcp",
    {"a": TensorSpec("F32", (2, 3))},
    (SHARD,),
    (FileStamp("f", 16, "1"),),
    (Skipped("step", "no tensor"),),
    {"q": "quantised"},
    {"a": ("a",)},
    "nothing proves it",
    (ObjectItem("step", Span("f", 16, 20)),),
)
PLAN = FilePlan(
    path="model.safetensors",
    header=b"header",
    size=30,
    tensors=(("a", TensorSpec("F32", (2, 3))),),
    shards=(SHARD, SHARD),
    copies=(Copy(0, SHARD.box, Read(0, 0, (2, 1))), Copy(0, Box((0, 0), (2, 1)), Read(1, 1, (2, 1)))),
    stamps=(FileStamp("f", 16, "1"),),
    window_bytes=64,
)
PART = CrcPart("f[0:9]", 0, 4, 7, 9, 8)
RECORD = FileRecord("model.safetensors", 30, "ab", {"a": "crc64nvme:0"}, SourceCheck(1, 2, (PART,)))
MANIFEST = Manifest(
    *("p", "s", "dcp", (RECORD,), (RECORD,), 24, "auto", ("a*",), ("b*",)),
    unproved="nothing",
    skipped=("step",),
    tools={"hfdcp": "0"},
    checks=("crc",),
)


def plainly(raw: bytes) -> bytes:
    return raw


KINDS: dict[str, tuple[bytes, Callable[[bytes], object], Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "catalog": (wire.dump_catalog(CATALOG), wire.load_catalog, gzip.decompress, gzip.compress),
    "file plan": (wire.dump_file_plan(PLAN), wire.load_file_plan, gzip.decompress, gzip.compress),
    "manifest": (wire.dump_manifest(MANIFEST), wire.load_manifest, plainly, plainly),
}
Place = tuple[str | int, ...]


def places(document: Any, here: Place = ()) -> Iterator[Place]:
    """Every place in a JSON document but its root."""
    for key, item in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*here, key)
        if isinstance(item, dict | list):
            yield from places(item, (*here, key))


def all_places(kind: str) -> list[Place]:
    raw, _, unpack, _ = KINDS[kind]
    return list(places(json.loads(unpack(raw))))


def changed(kind: str, place: Place, change: Callable[[Any, Any], None]) -> bytes:
    """The document of a kind after a change to what holds the place."""
    raw, _, unpack, pack = KINDS[kind]
    document = json.loads(unpack(raw))
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    change(holder, place[-1])
    return pack(json.dumps(document).encode())


def load(kind: str, raw: bytes) -> object:
    return KINDS[kind][1](raw)


def test_the_whole_documents_are_read() -> None:
    assert load("catalog", KINDS["catalog"][0]) == CATALOG
    assert load("file plan", KINDS["file plan"][0]) == PLAN
    assert load("manifest", KINDS["manifest"][0]) == MANIFEST


FREE = {"tensors", "tools", "nesting", "unsupported"}
"""Mappings from names: without one of them a document is another right one."""
LISTS = {
    *("files", "skipped", "objects", "stamps", "records", "extra_files", "parts", "include", "exclude"),
    *("checks", "views", "a"),
}
"""Lists that may be shorter: without an item a document is another right one."""


def accepts(kind: str, raw: bytes) -> bool:
    try:
        load(kind, raw)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_without_one_of_its_parts_is_refused(kind: str) -> None:
    accepted = {
        place for place in all_places(kind) if accepts(kind, changed(kind, place, lambda holder, key: holder.pop(key)))
    }
    free = {place for place in accepted if place[-2] in (LISTS if isinstance(place[-1], int) else FREE)}
    assert accepted - free == set()


OTHERS: dict[str, Any] = {
    "a float": 0.5,
    "a whole float": 1.0,
    "a list": [[[]]],
    "an object": {"?": {}},
    "a text": "?",
    "a truth": True,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_with_a_part_of_another_type_is_refused(kind: str, other: Any) -> None:
    same: list[bool] = []

    def put(holder: Any, key: Any) -> None:
        same.append(type(other) is type(holder[key]) and isinstance(other, str | bool))
        holder[key] = other

    accepted = [place for place in all_places(kind) if accepts(kind, changed(kind, place, put)) and not same[-1]]
    assert accepted == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_that_is_cut_off_is_refused(kind: str) -> None:
    raw = KINDS[kind][0]
    for stop in range(len(raw) - 1):  # a manifest's last byte is the end of its last line
        with pytest.raises(ValidationError, match=f"not a (readable )?{kind}"):
            load(kind, raw[:stop])


@pytest.mark.parametrize("kind", ["catalog", "file plan"])
def test_a_byte_of_a_compressed_document_that_flipped_never_goes_unseen(kind: str) -> None:
    raw = KINDS[kind][0]
    right = load(kind, raw)
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 0x10
        with contextlib.suppress(ValidationError):
            assert load(kind, bytes(damaged)) == right  # the time and system in gzip's own head mean nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_by_name(kind: str, version: object) -> None:
    raw = changed(kind, ("version",), lambda holder, _: holder.update(version=version))
    with pytest.raises(ValidationError, match=f"{kind} of version {version!r}; this hfdcp reads version 1"):
        load(kind, raw)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_of_another_kind_is_refused(kind: str) -> None:
    raw = changed(kind, ("hfdcp",), lambda holder, _: holder.update(hfdcp="record"))
    with pytest.raises(ValidationError, match=f"not a {kind} of hfdcp"):
        load(kind, raw)


BROKEN = {
    "nothing": b"",
    "no object": b"[]",
    "nested too deep": b"[" * 100_000,
    "deep below a right head": b'{"hfdcp":"KIND","version":1,"value":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a number too long": b'{"hfdcp":"KIND","version":1,"value":' + b"9" * 5000 + b"}",
    "no UTF-8": b'{"hfdcp":"\xff"}',
    "no value": b'{"hfdcp":"KIND","version":1}',
    "no number": b'{"hfdcp":"KIND","version":NaN}',
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_document_is_refused(kind: str, text: bytes) -> None:
    _, _, _, pack = KINDS[kind]
    with pytest.raises(ValidationError, match=f"not a|{kind} of version nan"):
        load(kind, pack(text.replace(b"KIND", kind.encode())))


@pytest.mark.parametrize("kind", ["catalog", "file plan"])
def test_tables_whose_columns_differ_in_length_are_refused(kind: str) -> None:
    raw = changed(kind, ("value", "shards", "stop"), lambda holder, key: holder[key].append(1))
    with pytest.raises(ValidationError, match="not of one length"):
        load(kind, raw)


REFERENCES: dict[str, tuple[Place, int]] = {
    "a string": (("value", "shards", "fqn", 0), 99),
    "a box": (("value", "shards", "box", 0), 99),
    "a shard": (("value", "copies", "shard", 0), 99),
    "a tensor": (("value", "copies", "tensor", 0), 1),
    "a copy": (("value", "copies", "views", "row", 0), 99),
    "a box of a view": (("value", "copies", "views", "box", 0), 99),
    "strides of a view": (("value", "copies", "views", "steps", 0), 99),
    "a kind of tensor": (("value", "tensors", "kind", 0), 99),
}


@pytest.mark.parametrize(("place", "number"), REFERENCES.values(), ids=REFERENCES)
@pytest.mark.parametrize("sign", [1, -1], ids=["behind the last", "before the first"])
def test_a_number_of_something_that_is_not_there_is_refused(place: Place, number: int, sign: int) -> None:
    raw = changed("file plan", place, lambda holder, key: holder.__setitem__(key, sign * number))
    with pytest.raises(ValidationError, match="not a readable file plan"):
        load("file plan", raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=9,
)


@given(st.data(), JSON)
def test_whatever_is_put_anywhere_is_a_right_value_or_a_validation_error(data: st.DataObject, other: Any) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    place = data.draw(st.sampled_from(all_places(kind)))
    raw = changed(kind, place, lambda holder, key: holder.__setitem__(key, other))
    try:
        value = load(kind, raw)
    except ValidationError:
        return
    assert typed(value)


def typed(value: object) -> bool:
    """Whether a value holds nothing but the types that our values hold, all the way down."""
    if is_dataclass(value):
        return all(typed(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return all(map(typed, value))
    if isinstance(value, dict):
        return all(type(key) is str for key in value) and all(map(typed, value.values()))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in {bool, int, str, bytes}


@pytest.mark.parametrize("body", [{}, {"header": 5}, {"header": "no base64!"}], ids=["absent", "a number", "damaged"])
def test_a_file_plan_without_a_header_is_refused(body: dict[str, object]) -> None:
    document = json.dumps({"hfdcp": "file plan", "version": wire.VERSION, "value": body}).encode()
    with pytest.raises(ValidationError, match="not a readable file plan"):
        wire.load_file_header(gzip.compress(document))
    assert wire.load_file_header(wire.dump_file_plan(PLAN)) == PLAN.header
