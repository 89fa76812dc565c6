"""Objects in a checkpoint: plain values come back, everything else is named, and nothing is ever executed."""

from __future__ import annotations

import base64
import collections
import datetime as dt
import io
import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core import distcp_machine, distcp_object
from hfdcp_core.distcp_file import TENSORS, ObjectContent, read_object
from hfdcp_core.distcp_object import MOST_DEPTH, MOST_PICKLE_BYTES, hides_tensors, plain_value, sound_records
from hfdcp_core.errors import CorruptFile


def saved(value: object, **options: object) -> bytes:
    """Return what a DCP item of the value is."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def looked_at(raw: bytes) -> ObjectContent:
    return read_object(lambda start, stop: raw[start:stop], len(raw), where="item")


# ---- whole or damaged ----


def records_of(raw: bytes) -> object:
    return sound_records(lambda start, stop: raw[start:stop], len(raw), where="item")


def test_the_records_of_an_archive_are_told_by_their_checksums() -> None:
    raw = saved({"step": 3})
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert records_of(raw) == {entry.filename: entry.CRC for entry in archive.infolist()}
    at = raw.index(b"step")
    with pytest.raises(CorruptFile, match=r"item: '.*data\.pkl': CRC-32"):
        records_of(raw[:at] + b"stop" + raw[at + 4 :])


def test_records_without_checksums_tell_nothing() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        assert records_of(saved({"step": 3})) is None
    finally:
        torch.serialization.set_crc32_options(True)


# ---- plain values ----


def as_json(value: object) -> object:
    """What is written for a value, said a second time."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        items = [(key, as_json(item)) for key, item in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if plain else {"$items": [[as_json(key), item] for key, item in items]}
    return value


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**300), 2**300)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["$x", "\udc80", "x" * 300])
    | st.binary(max_size=300)
)
KEYS = st.text(max_size=3) | st.integers(0, 9) | st.booleans() | st.tuples(st.integers(0, 3), st.text(max_size=1))
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(2, 5))
def test_every_plain_value_comes_back_in_every_protocol(value: object, protocol: int) -> None:
    found = plain_value(pickle.dumps(value, protocol), where="x")
    assert found == ObjectContent(as_json(value))
    assert json.loads(json.dumps(found.value, allow_nan=False)) == found.value


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_torch_saved_comes_back(protocol: int) -> None:
    value = {"step": 3, "betas": (0.9, 0.95), "raw": b"\x00\xff", 7: [None, True], "big": 2**80, "none": b""}
    assert looked_at(saved(value, pickle_protocol=protocol)) == ObjectContent(as_json(value))


def test_what_is_shared_is_written_twice() -> None:
    part = [1, 2]
    assert plain_value(pickle.dumps({"a": part, "b": part}), where="x").value == {"a": [1, 2], "b": [1, 2]}


def test_long_values_with_long_prefixes_are_read() -> None:
    text, data = b"\x8d" + struct.pack("<Q", 2) + b"ab", b"\x8e" + struct.pack("<Q", 1) + b"c"
    assert plain_value(b"\x80\x04(" + text + data + b"B\x01\0\0\0d" + b"t.", where="x").value == [
        "ab",
        {"$bytes": "Yw=="},
        {"$bytes": "ZA=="},
    ]


@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_a_number_that_json_does_not_have_is_written_by_name(value: float, name: str) -> None:
    assert plain_value(pickle.dumps({"loss": value}), where="x").value == {"loss": {"$float": name}}


# ---- what is no plain value ----


class Mine:
    """A class of the user's."""


def with_attributes() -> object:
    ordered = collections.OrderedDict(a=1)
    ordered.note = 1  # type: ignore[attr-defined]
    return ordered


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Mine(), f"holds Mine of {__name__}"),
        (Mine, f"holds Mine of {__name__}"),
        ({"deep": [Mine()]}, f"holds Mine of {__name__}"),
        (np.float32(1.5), f"holds scalar of {np.float32(1).__reduce__()[0].__module__}"),
        (np.ones(2), f"holds _reconstruct of {np.ones(1).__reduce__()[0].__module__}"),
        (dt.date(2020, 1, 1), "holds date of datetime"),
        ({1, 2}, "holds set of builtins"),
        (1j, "holds complex of builtins"),
        (torch.float32, "holds float32 of torch"),
        (torch.Size((2, 3)), "holds Size of torch"),
        (Path("x"), "holds PosixPath of pathlib"),
        (io.BytesIO(b"abc"), "holds BytesIO of _io"),
        (collections.OrderedDict, "holds OrderedDict of collections"),
        (collections.defaultdict(list), "holds defaultdict of collections"),
        (2**2100, "holds an integer of 263 bytes"),
        (with_attributes(), "holds a container with attributes of its own"),
        (torch.ones(2), TENSORS),
        ((torch.ones(2), torch.zeros(3)), TENSORS),
        ({"a": Mine(), "model": {"w": torch.ones(2)}}, TENSORS),
        (torch.nn.Linear(2, 2).state_dict(), TENSORS),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_plain_value_is_named(value: object, problem: str) -> None:
    assert looked_at(saved(value)) == ObjectContent(None, problem)


def test_a_set_of_a_newer_protocol_is_named_by_its_opcode() -> None:
    assert plain_value(pickle.dumps({1, 2}, 4), where="x").problem == (
        "is pickled with the opcode EMPTY_SET, which no plain value needs"
    )


def test_a_tensor_is_told_from_a_pickle_alone_and_goes_before_what_else_there_is() -> None:
    for reference in (b"X\x01\0\0\0aQ", b"Pstorage\n"):
        raw = b"\x80\x02(cfoo\nbar\n" + reference + b"t."
        assert plain_value(raw, where="x") == ObjectContent(None, TENSORS)


def test_depth_is_bounded() -> None:
    value: object = 1
    for _ in range(MOST_DEPTH):
        value = [value]
    assert plain_value(pickle.dumps(value), where="x").problem == ""
    assert "more than 64 deep" in plain_value(pickle.dumps([value]), where="x").problem


def test_a_list_that_holds_itself_ends() -> None:
    value: list[object] = []
    value.append(value)
    assert "deep" in plain_value(pickle.dumps(value), where="x").problem


def test_parts_that_are_shared_without_end_are_not_written_out() -> None:
    value: list[object] = ["lol"] * 10
    for _ in range(12):
        value = [value] * 10
    assert "shared so often" in plain_value(pickle.dumps(value), where="x").problem


def test_a_large_pickle_is_not_looked_into() -> None:
    size = MOST_PICKLE_BYTES + 1
    found = looked_at(saved("x" * size)).problem
    assert found.startswith("holds a pickle of ")
    assert found.endswith(f"at most {MOST_PICKLE_BYTES} are looked into")


# ---- nobody is called ----


class Calls:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


TRAP = "hfdcp-trap"


def hostile() -> dict[str, bytes]:
    """Pickles that would make a file named `TRAP`, or do worse, if anything in them were called."""
    code = f"open({TRAP!r}, 'w')"
    text = f"X{chr(len(code))}\0\0\0".encode("latin1") + code.encode()
    return {
        "os.system": pickle.dumps(Calls(os.system, f"touch {TRAP}")),
        "eval": pickle.dumps(Calls(eval, code)),
        "exec": pickle.dumps([1, Calls(exec, code)], 2),
        "getattr chain": pickle.dumps(Calls(getattr, Calls(__import__, "os"), "system")),
        "dotted name": b"\x80\x04\x8c\x02os\x8c\x0bsystem.open\x93" + text + b"\x85R.",
        "INST": b"(" + text + b"i__builtin__\neval\n.",
        "OBJ": b"(c__builtin__\neval\n" + text + b"o.",
        "NEWOBJ": b"\x80\x02c__builtin__\neval\n" + text + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04cbuiltins\neval\n" + text + b"\x85}\x92.",
        "EXT1": b"\x80\x02\x82\x01" + text + b"\x85R.",
        "codecs as a call": b"\x80\x02c_codecs\nencode\n" + text + b"X\x06\0\0\0rot_13\x86R.",
        "bytes as a call": b"\x80\x02cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
        "OrderedDict as a call": b"\x80\x02ccollections\nOrderedDict\n(cos\nsystem\nt\x85R.",
        "BUILD of a class": b"\x80\x02ccollections\nOrderedDict\n}X\x08\0\0\0__init__cos\nsystem\nsb.",
        "APPENDS to a name": b"\x80\x02cos\nsystem\n(" + text + b"e.",
        "SETITEMS of a name": b"\x80\x02cos\nenviron\n(" + text + text + b"u.",
        "persistent id": b"\x80\x02" + text + b"Q.",
    }


@pytest.mark.parametrize("name", hostile())
def test_a_hostile_object_is_named_and_does_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = plain_value(hostile()[name], where="x")
    assert found.value is None
    assert found.problem
    assert list(tmp_path.iterdir()) == []


def test_the_reader_knows_no_pickle() -> None:
    assert not hasattr(distcp_object, "pickle")
    assert not hasattr(distcp_machine, "pickle")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02cos\nsystem",
        b"\x80\x02cos\nsys",
        b"",
        b".",
        b"(.",
        b"\x80\x02K\x01",
        b"\x80\x02K\x01.K",
        b"\x80\x02K\x01K\x02.",
        b"\x80\x02\xff.",
        b"\x80\x02X\xff\xff\xff\xffab.",
        b"\x80\x02h\x05.",
        b"\x80\x02q\x05.",
        b"\x80\x02X\x01\0\0\0\xff.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02K\x01K\x02K\x03s.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02t.",
        b"\x80\x02]e.",
        b"\x80\x02(a.",
        b"\x80\x02K\x01)R.",
        b"\x80\x04K\x01K\x02\x93.",
        b"\x80\x02c_codecs\nencode\nX\x02\0\0\0\xd0\x90X\x06\0\0\0latin1\x86R.",
        b"G\x00",
    ],
    ids=repr,
)
def test_a_damaged_pickle_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptFile, match=r"^here: a damaged pickle: .*\(byte \d+\)$"):
        plain_value(raw, where="here")


@given(st.binary(max_size=60), VALUES)
def test_whatever_the_bytes_the_answer_is_a_value_a_name_or_damage(noise: bytes, value: object) -> None:
    whole = pickle.dumps(value, 2)
    for raw in (noise, whole[: len(noise)] + noise, noise + whole):
        try:
            found = plain_value(raw, where="x")
        except CorruptFile:
            continue
        json.dumps(found.value, allow_nan=False)


# ---- the archive ----


def archive(**records: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in records.items():
            file.writestr(name, data)
    return buffer.getvalue()


def test_an_archive_without_a_pickle_is_refused() -> None:
    with pytest.raises(CorruptFile, match="one record data\\.pkl in it, found 0"):
        looked_at(archive(other=b"x"))


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_cut_archive_is_refused(cut: int) -> None:
    raw = saved({"step": 3})
    with pytest.raises(CorruptFile, match="item"):
        looked_at(raw[:-cut])


def test_a_flipped_bit_is_found() -> None:
    raw = saved({"note": "a text that is easily found"})
    at = raw.index(b"easily")
    with pytest.raises(CorruptFile, match="CRC-32"):
        looked_at(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def test_a_whole_model_in_one_object_is_told_without_reading_it() -> None:
    raw = saved({f"layer.{number}": torch.ones(1) for number in range(300)})
    reads: list[int] = []

    def fetch(start: int, stop: int) -> bytes:
        reads.append(stop - start)
        return raw[start:stop]

    found: Callable[[], ObjectContent] = lambda: read_object(fetch, len(raw), where="x")  # noqa: E731
    assert found().problem == TENSORS
    assert sum(reads) < len(raw)


@pytest.mark.parametrize(
    ("value", "hides"), [((torch.ones(2), 1), True), ({"lr": 0.1}, False)], ids=["tensor", "plain"]
)
def test_the_directory_alone_tells_whether_tensors_hide_in_an_object(value: object, *, hides: bool) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    raw = stream.getvalue()
    assert hides_tensors(lambda start, stop: raw[start:stop], len(raw), where="here") is hides
