import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import TABLE
from hfdcp_core.errors import CorruptFile, PlanError, UnknownDtype
from hfdcp_core.safetensors_file import (
    MOST_HEADER_BYTES,
    Entry,
    Header,
    Index,
    file_names,
    header_length,
    parse_header,
    parse_index,
    sharding_info,
    write_header,
    write_index,
)

GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
}


def header_of(members: object) -> bytes:
    text = members if isinstance(members, bytes) else json.dumps(members).encode()
    return len(text).to_bytes(8, "little") + text


def with_a(**fields: object) -> bytes:
    return header_of({**GOOD, "a": {**GOOD["a"], **fields}})


def shapes_of(dtype: str) -> st.SearchStrategy[tuple[int, ...]]:
    whole = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    # Four elements of six bits, or two of four, end at a byte.
    return whole.map(lambda shape: (*shape, 4)) if dtype in {"F4", "F6_E2M3", "F6_E3M2"} else whole


SPECS = st.sampled_from([row.name for row in TABLE]).flatmap(
    lambda dtype: shapes_of(dtype).map(lambda shape: TensorSpec(dtype, shape))
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
TENSORS = st.dictionaries(NAMES, SPECS, max_size=6)
METADATA = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), NAMES, max_size=3)


@given(tensors=TENSORS, metadata=METADATA)
def test_what_is_written_is_what_safetensors_reads_and_what_we_read(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> None:
    raw, entries = write_header(tensors, metadata=metadata)
    data = bytes(range(256)) * (sum(spec.nbytes for spec in tensors.values()) // 256 + 1)
    file = raw + data[: sum(spec.nbytes for spec in tensors.values())]
    read = dict(deserialize(file))
    assert {name: (found["dtype"], tuple(found["shape"])) for name, found in read.items()} == {
        name: (spec.dtype, spec.shape) for name, spec in tensors.items()
    }
    assert all(
        bytes(read[entry.fqn]["data"]) == file[len(raw) + entry.start : len(raw) + entry.stop] for entry in entries
    )
    header = parse_header(raw, path="x", file_size=len(file))
    assert set(header.entries) == set(entries)
    assert header.metadata == {"format": "pt", **metadata}
    assert len(raw) == header.data_start == header_length(raw) + 8
    assert len(raw) % 64 == 0


@given(st.permutations(["a", "b", "c", "d"]))
def test_tensors_lie_in_the_given_order(names: list[str]) -> None:
    raw, entries = write_header(dict.fromkeys(names, TensorSpec("F32", (2,))), metadata={})
    assert [(entry.fqn, entry.start, entry.stop) for entry in entries] == [
        (name, 8 * place, 8 * place + 8) for place, name in enumerate(names)
    ]
    assert parse_header(raw, path="x").entries == entries


# At least one tensor: of none, safetensors 0.8 writes a header with notes that is not JSON.
@given(
    st.dictionaries(
        NAMES,
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
        min_size=1,
        max_size=5,
    ),
    METADATA,
)
def test_what_safetensors_writes_is_read(dtypes: Mapping[str, torch.dtype], metadata: dict[str, str]) -> None:
    file = save({name: torch.ones(2, 3).to(dtype) for name, dtype in dtypes.items()}, metadata)
    header = parse_header(file[: 8 + header_length(file)], path="x", file_size=len(file))
    assert {entry.fqn: entry.shape for entry in header.entries} == dict.fromkeys(dtypes, (2, 3))
    assert header.metadata == metadata


MUTATIONS = st.one_of(
    st.tuples(st.just("replace"), st.integers(0), st.integers(0, 255)),
    st.tuples(st.just("insert"), st.integers(0), st.sampled_from(list(b' "{}[]:,-.0159eENI\\u\x00\xff'))),
    st.tuples(st.just("delete"), st.integers(0), st.just(0)),
)


def mutated(raw: bytes, mutations: list[tuple[str, int, int]]) -> bytes:
    text = bytearray(raw[8:])
    for kind, place, byte in mutations:
        at = place % (len(text) + 1)
        text[at : at + (kind != "insert")] = b"" if kind == "delete" else bytes([byte])
    return len(text).to_bytes(8, "little") + bytes(text)


@settings(max_examples=400)
@given(tensors=TENSORS, mutations=st.lists(MUTATIONS, min_size=1, max_size=3))
def test_no_damaged_header_is_accepted_that_safetensors_refuses(
    tensors: Mapping[str, TensorSpec], mutations: list[tuple[str, int, int]]
) -> None:
    raw = mutated(write_header(tensors, metadata={"key": "value"})[0].rstrip(), mutations)
    data = b"\0" * sum(spec.nbytes for spec in tensors.values())
    try:
        header = parse_header(raw, path="x", file_size=len(raw) + len(data))
    except (CorruptFile, UnknownDtype):
        pass
    else:
        found = dict(deserialize(raw + data))
        assert {entry.fqn: (entry.dtype, list(entry.shape)) for entry in header.entries} == {
            name: (value["dtype"], value["shape"]) for name, value in found.items()
        }


TOO_LONG = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,%s]}}' % (b"9" * 5000)
HUGE = 2**40
BAD = {
    "does not begin with a brace": (header_of(b' {"a":1}'), "begins with"),
    "is empty": (header_of(b""), "begins with"),
    "is no JSON": (header_of(b"{"), "not JSON"),
    "is no UTF-8": (header_of(b'{"\xff":1}'), "not JSON"),
    "has half of a surrogate pair in a name": (header_of(rb'{"\ud800":1}'), "not JSON"),
    "has half of a surrogate pair in a note": (header_of(rb'{"__metadata__":{"a":"\ud800"}}'), "__metadata__: 'a'"),
    "is nested very deeply": (header_of(b'{"a":' + b"[" * 100_000), "not JSON"),
    "has more behind its end": (header_of(b"{} x"), "not JSON"),
    "names a tensor twice": (header_of(b'{"a":{},"a":{}}'), "'a' stands there 2 times"),
    "names a field twice": (header_of(b'{"a":{"shape":[],"shape":[]}}'), "'shape' stands there 2 times"),
    "has notes that are no object": (header_of({"__metadata__": []}), "__metadata__: expected an object, found a list"),
    "has null for notes": (header_of({"__metadata__": None}), "__metadata__: expected an object, found null"),
    "has a note that is no text": (header_of({"__metadata__": {"a": {}}}), "'a': expected text, found an object"),
    "has a tensor that is no object": (header_of({"a": 1}), "'a': expected an object with 'dtype', found 1"),
    "has no dtype": (header_of({"a": {"shape": [], "data_offsets": [0, 0]}}), "object with 'dtype'"),
    "has no shape": (header_of({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), "object with 'shape'"),
    "has no offsets": (header_of({"a": {"dtype": "F32", "shape": []}}), "object with 'data_offsets'"),
    "has an unknown field": (with_a(codec="zstd"), "unknown fields 'codec'"),
    "has a dtype that is no text": (with_a(dtype=4), "dtype: expected text, found 4"),
    "has a shape that is no list": (with_a(shape=2), "shape: expected a list of counts, found 2"),
    "has a float in a shape": (with_a(shape=[2.0]), "shape: expected a count, found 2.0"),
    "has true in a shape": (with_a(shape=[2, True]), "shape: expected a count, found true"),
    "has a long text in a shape": (with_a(shape=["x" * 500]), r'expected a count, found "x{79}…'),
    "has a negative extent": (with_a(shape=[-2]), "expected a count, found -2"),
    "has a negative zero": (
        header_of(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
        "a count, found -0$",
    ),
    "has NaN": (header_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}'), "NaN is not JSON"),
    "has an integer of 5000 digits": (header_of(TOO_LONG), r"data_offsets: expected a count, found \d{80}…"),
    "has an extent of 71 bits": (
        with_a(shape=[2**70, 0]),
        r"shape: expected a count, found 1180591620717411303424, and a count is below 2\^63",
    ),
    "has an integer of 64 bits": (with_a(data_offsets=[0, 2**63]), "expected a count"),
    "has a shape that overflows": (with_a(shape=[HUGE, HUGE]), "larger than any file"),
    "has a shape that overflows before a zero": (with_a(shape=[HUGE, HUGE, 0], data_offsets=[0, 0]), "larger than any"),
    "has three offsets": (with_a(data_offsets=[0, 8, 8]), "are not where data begin and end"),
    "has offsets that run backwards": (with_a(data_offsets=[8, 0]), "are not where data begin and end"),
    "has more bytes than its shape": (with_a(shape=[1]), r"data_offsets \[0, 8\] for F32 of shape \[1\]"),
    "has a tensor that ends inside a byte": (with_a(dtype="F4", shape=[3]), "ends inside a byte"),
    "has an overlap": (with_a(data_offsets=[4, 12]), "a hole before 'a'"),
    "has two tensors at one place": (header_of({**GOOD, "c": GOOD["a"]}), "an overlap before 'c'"),
    "has a hole": (header_of({"b": GOOD["b"]}), "a hole before 'b', which begins at 8 and not at 0"),
}


@pytest.mark.parametrize(("raw", "message"), BAD.values(), ids=BAD)
def test_a_header_is_refused_that(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptFile, match=message) as caught:
        parse_header(raw, path="dir/x.safetensors")
    assert str(caught.value).startswith("dir/x.safetensors: ")


STRICTER = {
    "names a tensor twice",
    "has null for notes",
    "has an unknown field",
}
"""Where safetensors says nothing, or takes the last of two."""


@pytest.mark.parametrize(
    "raw",
    [raw for name, (raw, _) in BAD.items() if name not in STRICTER],
    ids=[name for name in BAD if name not in STRICTER],
)
def test_safetensors_refuses_a_header_too_that(raw: bytes) -> None:
    for data_bytes in (0, 8, 11, 12, 19):
        with pytest.raises(SafetensorError, match=r"."):
            deserialize(raw + bytes(data_bytes))


def test_an_unknown_dtype_is_named_with_its_tensor_and_file() -> None:
    with pytest.raises(UnknownDtype, match=r"x: 'a': unknown dtype 'F7'"):
        parse_header(with_a(dtype="F7"), path="x")


def test_spaces_behind_the_header_are_padding() -> None:
    header = parse_header(header_of(json.dumps(GOOD).encode() + b"   "), path="x")
    assert [entry.fqn for entry in header.entries] == ["a", "b"]


def test_entries_come_in_the_order_of_their_data_whatever_the_order_of_the_header() -> None:
    header = parse_header(header_of(dict(reversed(GOOD.items()))), path="x")
    assert header.entries == (Entry("a", "F32", (2,), 0, 8), Entry("b", "U8", (3,), 8, 11))


@pytest.mark.parametrize(("size", "accepted"), [(-1, False), (0, True), (1, False)], ids=["cut off", "exact", "longer"])
def test_the_data_must_end_where_the_file_does(size: int, *, accepted: bool) -> None:
    raw = header_of(GOOD)
    if accepted:
        assert parse_header(raw, path="x", file_size=len(raw) + 11 + size).file_size == len(raw) + 11
    else:
        with pytest.raises(CorruptFile, match=f"x: {len(raw) + 11 + size} bytes, where its header describes"):
            parse_header(raw, path="x", file_size=len(raw) + 11 + size)


def test_a_file_without_tensors_is_as_long_as_its_header() -> None:
    raw, entries = write_header({}, metadata={})
    assert (entries, parse_header(raw, path="x", file_size=len(raw)).file_size) == ((), len(raw))


def test_a_header_that_is_cut_off_says_how_much_is_there() -> None:
    with pytest.raises(CorruptFile, match=r"x: 20 bytes of a header of \d+: the file is cut off"):
        parse_header(header_of(GOOD)[:28], path="x")


@pytest.mark.parametrize(
    ("first8", "message"),
    [
        (b"1234567", "x: 7 bytes are too few"),
        ((MOST_HEADER_BYTES + 1).to_bytes(8, "little"), "a header of 100000001 bytes"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes"),
    ],
    ids=["too short", "one too many", "all ones"],
)
def test_a_length_is_refused_before_anything_is_allocated(first8: bytes, message: str) -> None:
    with pytest.raises(CorruptFile, match=message):
        header_length(first8, path="x")


def test_the_longest_header_that_safetensors_reads_is_not_refused() -> None:
    assert header_length(MOST_HEADER_BYTES.to_bytes(8, "little")) == MOST_HEADER_BYTES


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"__metadata__": TensorSpec("U8", (1,))}, {}, "cannot hold a tensor named __metadata__"),
        ({"a\ud800": TensorSpec("U8", (1,))}, {}, r"cannot be written as UTF-8: '\\ud800'"),
        ({}, {"note": "x" * MOST_HEADER_BYTES}, "a header of 1000000.. bytes"),
    ],
    ids=["reserved name", "lone surrogate", "too long"],
)
def test_a_header_that_no_reader_takes_is_not_written(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        write_header(tensors, metadata=metadata)


def test_safe_open_reads_what_is_written_and_every_name_that_a_checkpoint_may_have(tmp_path: Path) -> None:
    names = ["", "..", "a/b", "nul\0", "line\nbreak", "日本", "x" * 300, '"']
    raw, entries = write_header(dict.fromkeys(names, TensorSpec("I32", ())), metadata={"k": "v"})
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw + b"".join(place.to_bytes(4, "little") for place in range(len(entries))))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "k": "v"}
        assert [file.get_tensor(name).item() for name in names] == list(range(len(names)))


def sharded(info: object, *, shape: tuple[int, ...] = (2, 3)) -> Header:
    text = info if isinstance(info, str) else json.dumps(info)
    raw, _ = write_header({"w": TensorSpec("U8", shape)}, metadata={"DCP_SHARDING_INFO": text})
    return parse_header(raw, path="x")


def test_saved_offsets_are_read_for_each_tensor() -> None:
    assert sharding_info(sharded({"w": {"saved_offsets": [4, 0]}}), path="x") == {"w": (4, 0)}


def test_a_scalar_has_offsets_without_a_number() -> None:
    assert sharding_info(sharded({"w": {"saved_offsets": []}}, shape=()), path="x") == {"w": ()}


def test_a_file_without_sharding_information_says_so() -> None:
    assert sharding_info(parse_header(header_of(GOOD), path="x"), path="x") is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # meant so: one process saves alone
def test_the_sharding_information_that_torch_writes_is_read(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save(
        {"w": torch.ones(2, 3), "s": torch.tensor(1.0)},
        storage_writer=torch.distributed.checkpoint.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True),
        no_dist=True,
    )
    [path] = tmp_path.glob("*.safetensors")
    raw = path.read_bytes()
    header = parse_header(raw[: 8 + header_length(raw)], path=path.name, file_size=len(raw))
    assert sharding_info(header, path=path.name) == {"w": (0, 0), "s": ()}


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("{", "x: DCP_SHARDING_INFO: not JSON"),
        ("[]", "DCP_SHARDING_INFO: expected a JSON object, found a list"),
        ('{"w":{},"w":{}}', "'w' stands there 2 times"),
        ({}, "differ, first in 'w'"),
        ({"w": {"saved_offsets": [0, 0]}, "v": {"saved_offsets": []}}, "differ, first in 'v'"),
        ({"w": [0, 0]}, "'w': expected an object with 'saved_offsets', found a list"),
        ({"w": {}}, "expected an object with 'saved_offsets'"),
        ({"w": {"saved_offsets": [0, -1]}}, "expected a count, found -1"),
        ({"w": {"saved_offsets": [0]}}, r"'w' of shape \[2, 3\] has saved offsets \[0\]"),
    ],
    ids=str,
)
def test_sharding_information_that_does_not_fit_its_file_is_refused(info: object, message: str) -> None:
    with pytest.raises(CorruptFile, match=message):
        sharding_info(sharded(info), path="x")


@given(st.dictionaries(NAMES, st.sampled_from(file_names(3)), max_size=5), st.integers(0, 2**60))
def test_an_index_is_read_as_it_was_written(weight_map: Mapping[str, str], size: int) -> None:
    assert parse_index(write_index(weight_map, total_size=size, total_parameters=3), path="i") == Index(
        weight_map, size
    )


def test_an_index_looks_as_hugging_face_writes_it() -> None:
    weight_map = {"b": "model-00002-of-00002.safetensors", "a": "model-00001-of-00002.safetensors"}
    expected = {"metadata": {"total_parameters": 5, "total_size": 20}, "weight_map": weight_map}
    assert write_index(weight_map, total_size=20, total_parameters=5).decode() == (
        json.dumps(expected, indent=2, sort_keys=True) + "\n"
    )


@pytest.mark.parametrize(
    "members",
    [{"weight_map": {"a": "f"}}, {"weight_map": {"a": "f"}, "metadata": {"other": 1.5}}],
    ids=["none", "other"],
)
def test_an_index_may_state_no_total_size(members: object) -> None:
    assert parse_index(json.dumps(members).encode(), path="i") == Index({"a": "f"}, None)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "i: not JSON"),
        (b"[]", "i: expected a JSON object, found a list"),
        (b"{}", "weight_map: expected an object, found null"),
        (b'{"weight_map":[]}', "weight_map: expected an object, found a list"),
        (b'{"weight_map":{"a":1}}', "weight_map: 'a': expected text, found 1"),
        (b'{"weight_map":{"a":"f","a":"g"}}', "'a' stands there 2 times"),
        (b'{"weight_map":{"a":""}}', "'a' is said to lie in ''"),
        (b'{"weight_map":{"a":"."}}', "'a' is said to lie in '.'"),
        (b'{"weight_map":{"a":".."}}', "'a' is said to lie in '..'"),
        (b'{"weight_map":{"a":"../f"}}', "no name of a file beside the index"),
        (b'{"weight_map":{"a":"/etc/passwd"}}', "no name of a file beside the index"),
        (b'{"weight_map":{"a":"d\\\\f"}}', "no name of a file beside the index"),
        (b'{"weight_map":{"a":"f\\u0000"}}', "no name of a file beside the index"),
        (b'{"weight_map":{},"metadata":[]}', "metadata: expected an object, found a list"),
        (b'{"weight_map":{},"metadata":{"total_size":1.5}}', "total_size: expected a count, found 1.5"),
        (b'{"weight_map":{},"metadata":{"total_size":1e999}}', "total_size: expected a count, found Infinity"),
        (b'{"weight_map":{},"metadata":{"total_size":-2.0}}', "total_size: expected a count, found -2"),
        (b'{"weight_map":{},"metadata":{"total_size":-1}}', "total_size: expected a count, found -1"),
        (b'{"weight_map":{},"metadata":{"total_size":null}}', "total_size: expected a count, found null"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else "",
)
def test_an_index_is_refused_that_is(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptFile, match=message):
        parse_index(raw, path="i")


@pytest.mark.parametrize("total", ["12", "12.0", "1.2e1"])
def test_a_total_size_may_be_written_as_a_whole_float(total: str) -> None:
    raw = f'{{"weight_map":{{}},"metadata":{{"total_size":{total}}}}}'.encode()
    assert parse_index(raw, path="i").total_size == 12


def test_one_file_bears_no_number_and_many_are_numbered_from_one() -> None:
    assert file_names(1) == ("model.safetensors",)
    names = file_names(12)
    assert (names[0], names[-1], len(set(names))) == (
        "model-00001-of-00012.safetensors",
        "model-00012-of-00012.safetensors",
        12,
    )
