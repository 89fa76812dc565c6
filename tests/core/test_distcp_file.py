import copyreg
import dataclasses
import gc
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from hfdcp_core import distcp_file
from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, Skipped, Span, TensorSpec
from hfdcp_core.distcp_file import DcpMetadata, TorchItem, read_item, read_metadata
from hfdcp_core.dtypes import dtype_of_torch
from hfdcp_core.errors import CorruptFile, SourceError, UnsafePickle

FLOAT4 = torch.arange(30, dtype=torch.uint8).reshape(5, 6).view(torch.float4_e2m1fn_x2)
STATE = {
    "model": {
        "w": torch.arange(12.0).reshape(3, 4),
        "t": torch.arange(80.0).reshape(8, 10).T,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bf16": torch.arange(7).to(torch.bfloat16),
        "fp8": torch.arange(6.0).to(torch.float8_e4m3fn),
        "fp4": FLOAT4,
        "u16": torch.arange(5).to(torch.uint16),
        "conj": (torch.arange(4) + 1j).to(torch.complex64).conj(),
        "size1": torch.arange(3.0).as_strided((1, 3), (999, 1)),
    },
    "layers": [torch.ones(2), torch.zeros(2, dtype=torch.bool)],
    "optimizer": {"step": 3, "note": "text", "raw": b"bytes", "wide": torch.zeros(2, dtype=torch.complex128)},
    "__metadata__": torch.ones(1),
}
UNSUPPORTED = {"optimizer.wide", "__metadata__"}


class Saved(NamedTuple):
    folder: Path
    raw: bytes
    metadata: DcpMetadata

    def item(self, name: str) -> bytes:
        [span] = [shard.span for shard in self.metadata.shards if shard.fqn == name]
        return (self.folder / span.path).read_bytes()[span.start : span.stop]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("checkpoint")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    raw = (folder / ".metadata").read_bytes()
    return Saved(folder, raw, read_metadata(raw, path=".metadata"))


def whole(raw: bytes, where: str = "item") -> TorchItem:
    return read_item(lambda start, stop: raw[start:stop], len(raw), where=where)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_every_tensor_that_torch_lists_is_read_with_its_dtype_and_shape(saved: Saved) -> None:
    listed = dcp.FileSystemReader(saved.folder).read_metadata().state_dict_metadata
    expected = {}
    for name, entry in listed.items():
        if isinstance(entry, TensorStorageMetadata) and name not in UNSUPPORTED:
            row = dtype_of_torch(str(entry.properties.dtype).removeprefix("torch."))
            shape = tuple(entry.size)
            expected[name] = TensorSpec(row.name, (*shape[:-1], shape[-1] * 2) if row.packed == 2 else shape)
    assert list(saved.metadata.tensors.items()) == list(expected.items())
    assert {entry.name for entry in saved.metadata.skipped} == {
        name for name, entry in listed.items() if isinstance(entry, BytesStorageMetadata)
    }


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_the_garbage_collector_is_left_as_it_was(saved: Saved, *, enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        read_metadata(saved.raw, path="x")
        with pytest.raises(CorruptFile, match="x"):
            read_metadata(saved.raw[:-1], path="x")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_packed_dtype_is_counted_in_logical_elements(saved: Saved) -> None:
    [shard] = [shard for shard in saved.metadata.shards if shard.fqn == "model.fp4"]
    assert saved.metadata.tensors["model.fp4"] == TensorSpec("F4", (5, 12))
    assert shard.box == Box.whole((5, 12))


def test_every_item_that_torch_lists_becomes_one_shard_unless_it_holds_no_element(saved: Saved) -> None:
    stored = dcp.FileSystemReader(saved.folder).read_metadata().storage_data
    expected = {
        (index.fqn, Span(info.relative_path, info.offset, info.offset + info.length)) for index, info in stored.items()
    }
    found = {(shard.fqn, shard.span) for shard in saved.metadata.shards}
    without = {entry.name for entry in saved.metadata.skipped} | UNSUPPORTED | {"model.empty"}
    assert found == {(name, span) for name, span in expected if name not in without}
    assert {shard.encoding for shard in saved.metadata.shards} == {TORCH_SAVE}
    assert saved.metadata.extents == {path.name: path.stat().st_size for path in saved.folder.glob("*.distcp")}


def test_what_is_left_out_says_why(saved: Saved) -> None:
    assert saved.metadata.unsupported == {
        "optimizer.wide": "torch.complex128: safetensors cannot hold it",
        "__metadata__": "safetensors cannot hold a tensor of that name",
    }
    assert Skipped("optimizer.step", "not a tensor: a pickled Python object") in saved.metadata.skipped


def test_nesting_and_save_id_are_those_of_the_writer(saved: Saved) -> None:
    told = dcp.FileSystemReader(saved.folder).read_metadata()
    assert saved.metadata.nesting["model.w"] == ("model", "w")
    assert saved.metadata.nesting["layers.1"] == ("layers", "1")
    assert saved.metadata.nesting.keys() == saved.metadata.tensors.keys() | saved.metadata.unsupported.keys()
    assert saved.metadata.save_id == told.storage_meta.save_id is not None


@pytest.mark.parametrize("name", [name for name in STATE["model"] if name != "empty"])
def test_the_payload_of_an_item_is_found_without_unpickling_it(saved: Saved, name: str) -> None:
    tensor = STATE["model"][name]
    raw = saved.item(f"model.{name}")
    item = whole(raw)
    payload = raw[item.start : item.stop]
    units = np.frombuffer(payload, f"V{item.unit_bytes}")[item.storage_offset :]
    strides = [stride * item.unit_bytes for stride in item.strides]
    found = np.lib.stride_tricks.as_strided(units, item.unit_shape, strides).tobytes()
    if item.conjugate:
        found = np.frombuffer(found, np.complex64).conj().tobytes()
    spec = saved.metadata.tensors[f"model.{name}"]
    assert found == bytes_of(tensor)
    assert (item.dtype, item.shape, item.unit_shape) == (spec.dtype, spec.shape, tuple(tensor.shape))
    assert (item.conjugate, item.big_endian) == (name == "conj", False)
    assert item.row_major is (name != "t")
    assert item.crc32 == zlib.crc32(payload)
    assert item.storage_bytes == len(payload) == spec.nbytes


def saved_by_torch(tensor: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def test_an_empty_payload_has_the_checksum_of_nothing() -> None:
    item = whole(saved_by_torch(torch.empty(0, 3)))
    assert (item.crc32, item.shape, item.storage_bytes, item.row_major) == (0, (0, 3), 0, True)


def test_a_view_says_where_its_elements_lie_in_a_larger_storage() -> None:
    item = whole(saved_by_torch(torch.arange(20.0).reshape(4, 5)[1:, 2:4]))
    assert (item.shape, item.strides, item.storage_offset, item.storage_bytes) == ((3, 2), (5, 1), 7, 80)
    assert not item.row_major


def test_a_writer_that_computes_no_checksums_is_told_from_one_that_does() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        raw = saved_by_torch(torch.ones(3))
    finally:
        torch.serialization.set_crc32_options(True)
    assert whole(raw).crc32 is None


def test_a_payload_whose_checksum_is_zero_is_not_taken_for_unchecked() -> None:
    payload = np.frombuffer(b"\xff\xff\xff\xff", np.uint8).copy()
    assert zlib.crc32(payload) == 0xFFFFFFFF
    zero = np.frombuffer(b"\x9d\x0a\xd9\x6d", np.uint8).copy()
    assert zlib.crc32(zero) == 0
    assert whole(saved_by_torch(torch.from_numpy(zero))).crc32 == 0


def test_a_large_item_takes_two_small_reads() -> None:
    raw = saved_by_torch(torch.zeros(100_000))
    reads: list[tuple[int, int]] = []

    def fetch(start: int, stop: int) -> bytes:
        reads.append((start, stop))
        return raw[start:stop]

    item = read_item(fetch, len(raw), where="item")
    assert item.storage_bytes == 400_000
    assert len(reads) == 2
    assert sum(stop - start for start, stop in reads) <= 8 << 10


def test_a_small_item_takes_one_read() -> None:
    raw = saved_by_torch(torch.zeros(10))
    reads: list[tuple[int, int]] = []
    read_item(lambda start, stop: (reads.append((start, stop)), raw[start:stop])[1], len(raw), where="item")
    assert reads == [(0, len(raw))]


def test_any_flipped_bit_of_an_item_is_harmless_refused_or_caught_by_its_checksum(saved: Saved) -> None:
    raw = saved.item("model.w")
    good = whole(raw)
    payload = raw[good.start : good.stop]
    outcomes = set()
    for bit in range(0, 8 * len(raw), 3):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            item = whole(bytes(damaged), "the damaged item")
        except SourceError as refused:
            assert str(refused).startswith("the damaged item: ")  # noqa: PT017 - one of three lawful outcomes
            outcomes.add("refused")
            continue
        found = bytes(damaged[item.start : item.stop])
        if (item, found) == (good, payload):
            outcomes.add("harmless")
        else:
            assert item.crc32 is not None
            assert zlib.crc32(found) != item.crc32
            outcomes.add("caught")
    assert outcomes == {"refused", "harmless", "caught"}


def test_an_item_that_is_cut_off_anywhere_is_refused(saved: Saved) -> None:
    raw = saved.item("model.w")
    for length in range(len(raw)):
        with pytest.raises(SourceError, match="the cut item"):
            whole(raw[:length], "the cut item")
        with pytest.raises(CorruptFile, match="the cut item"):
            read_item(lambda a, b, end=length: raw[:end][a:b], len(raw), where="the cut item")


def test_metadata_that_is_cut_off_anywhere_is_refused(saved: Saved) -> None:
    for length in range(len(saved.raw)):
        with pytest.raises(CorruptFile, match="the cut file"):
            read_metadata(saved.raw[:length], path="the cut file")


def test_any_flipped_bit_of_metadata_gives_values_or_an_error_of_ours(saved: Saved) -> None:
    outcomes = set()
    for bit in range(0, 8 * len(saved.raw), 29):
        damaged = bytearray(saved.raw)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            outcomes.add(type(read_metadata(bytes(damaged), path="the damaged file")))
        except SourceError as refused:
            assert "the damaged file" in str(refused)  # noqa: PT017 - one of two lawful outcomes
            outcomes.add(type(refused))
    assert {DcpMetadata, CorruptFile, UnsafePickle} <= outcomes


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x04"):
        with pytest.raises(SourceError, match="noise"):
            read_metadata(start + noise, path="noise")
        with pytest.raises(SourceError, match="noise"):
            whole(start + noise, "noise")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return b"\x80\x04" + named(module, name) + b"(" + b"".join(arguments) + b"tR."


class Reduced:
    """Pickles itself as a call, as anybody's class may."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


CANARY = "canary"
METADATA = "torch.distributed.checkpoint.metadata"
TOUCH = text(f"touch {CANARY}")
DEEP = b")" + b"\x85" * 50_000
TWINS = b"(" + b")\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(199))
"""On the stack: 200 tuples, each of which holds the one before it twice. Whoever hashes the last never ends."""
RECORD_CLASS = named(METADATA, "MetadataIndex")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "os.system": (call("os", "system", TOUCH), "'os.system'"),
    "posix.system by GLOBAL": (b"\x80\x02cposix\nsystem\n(" + TOUCH + b"tR.", "'posix.system'"),
    "builtins.eval": (call("builtins", "eval", text(f"open('{CANARY}','w')")), "'builtins.eval'"),
    "builtins.exec": (call("builtins", "exec", text(f"open('{CANARY}','w')")), "'builtins.exec'"),
    "__builtin__.eval of Python 2": (b"\x80\x02c__builtin__\neval\n(" + TOUCH + b"tR.", "'__builtin__.eval'"),
    "builtins.open": (call("builtins", "open", text(CANARY), text("w")), "'builtins.open'"),
    "io.open": (call("io", "open", text(CANARY), text("w")), "'io.open'"),
    "subprocess.Popen": (call("subprocess", "Popen", text("touch")), "'subprocess.Popen'"),
    "importlib.import_module": (call("importlib", "import_module", text("os")), "'importlib.import_module'"),
    "runpy.run_path": (call("runpy", "run_path", text(CANARY)), "'runpy.run_path'"),
    "getattr chain": (
        b"\x80\x04" + named("builtins", "getattr") + named("os", "path") + text("os") + b"\x86R.",
        "'builtins.getattr'",
    ),
    "dotted name behind an allowed module": (
        call("torch.serialization", "os.system", TOUCH),
        "torch.serialization.os.system",
    ),
    "dotted name behind an allowed class": (call(METADATA, "Metadata.__init__", TOUCH), "Metadata.__init__"),
    "pathlib's write": (call("pathlib", "Path.write_text", text(CANARY)), "'pathlib.Path.write_text'"),
    "torch.load": (call("torch", "load", text(CANARY)), "'torch.load'"),
    "torch.hub": (call("torch.hub", "load", text(CANARY)), "'torch.hub.load'"),
    "numpy": (call("numpy.core.multiarray", "_reconstruct"), "'numpy.core.multiarray._reconstruct'"),
    "__reduce__ to os.system": (pickle.dumps(Reduced(os.system, (f"touch {CANARY}",)), 4), "system'"),
    "__reduce__ with a state setter": (
        pickle.dumps(Reduced(list, (), None, None, None, setattr), 4),
        "'builtins.list'",
    ),
    "copyreg._reconstructor": (
        pickle.dumps(Reduced(copyreg._reconstructor, (list, object, None)), 2),
        "_reconstructor'",
    ),
    "protocol 0": (b"cposix\nsystem\n(S'touch canary'\ntR.", "'posix.system'"),
    "protocol 0 by copyreg": (
        b"ccopyreg\n_reconstructor\n(cposix\nsystem\nc__builtin__\nobject\nNtR.",
        "'copyreg._reconstructor'",
    ),
    "protocol 0 by INST": (b"(S'touch canary'\niposix\nsystem\n.", "'posix.system'"),
    "protocol 1": (pickle.dumps(Reduced(os.system, (f"touch {CANARY}",)), 1), "'posix.system'"),
    "without PROTO": (named("posix", "system") + TOUCH + b"\x85R.", "'posix.system'"),
    "without PROTO, names from the memo": (
        text("posix") + b"\x94" + text("system") + b"q\x0700h\x00h\x07\x93" + TOUCH + b"\x85R.",
        "'posix.system'",
    ),
    "behind an opcode that is refused": (
        b"\x80\x04N0" + named("posix", "system") + TOUCH + b"\x85R.",
        "'posix.system'",
    ),
    "protocol 0 without a name": (b"(lp0\nI1\na.", "not a pickle of protocol 2 to 5"),
    "protocol 0 that names what is allowed": (b"ctorch\nfloat32\n.", "not a pickle of protocol 2 to 5"),
    "no pickle, but text": (b"<html>", "not a pickle of protocol 2 to 5"),
    "no pickle, but an opcode without names": (b"\x93.", "not a pickle of protocol 2 to 5"),
    "protocol 9": (b"\x80\x09N.", "not a pickle of protocol 2 to 5"),
    "a second PROTO": (b"\x80\x04\x80\x02N.", "opcode PROTO"),
    "INST": (b"\x80\x02(" + TOUCH + b"ios\nsystem\n.", "'os.system'"),
    "INST of an allowed class": (b"\x80\x02(itorch\nSize\n.", "opcode INST"),
    "OBJ of an allowed class": (b"\x80\x02(" + RECORD_CLASS + b"o.", "opcode OBJ"),
    "an extension code": (b"\x80\x02\x82\x01.", "opcode EXT1"),
    "a long extension code": (b"\x80\x02\x84\x01\0\0\0.", "opcode EXT4"),
    "a persistent id as text": (b"\x80\x02Pos.system\n.", "opcode PERSID"),
    "NEWOBJ_EX": (b"\x80\x04" + RECORD_CLASS + b")}\x92.", "opcode NEWOBJ_EX"),
    "bytes of an exabyte": (
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        "a value of 1152921504606846976 bytes",
    ),
    "bytes of 4 GiB": (b"\x80\x04B\xff\xff\xff\xffx.", "a value of 4294967295 bytes"),
    "text of an exabyte": (
        b"\x80\x04\x8d" + struct.pack("<Q", (1 << 64) - 1) + b"x.",
        "a value of 18446744073709551615",
    ),
    "text of 2 GiB": (b"\x80\x04X\xff\xff\xff\x7fx.", "a value of 2147483647 bytes"),
    "a bytearray of an exabyte": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".", "opcode BYTEARRAY8"),
    "an integer of 2 GiB": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "opcode LONG4"),
    "an integer of 200 bytes": (b"\x80\x02\x8a\xc8" + b"\x01" * 200 + b".", "an integer of 200 bytes"),
    "an integer in decimal": (b"\x80\x02L" + b"9" * 100_000 + b"L\n.", "opcode LONG,"),
    "a frame of an exabyte": (
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
        r"b'\\x95' is no opcode, or what follows",
    ),
    "frames in frames": (
        b"\x80\x04" + b"\x95" + struct.pack("<Q", 100) + b"\x95" + struct.pack("<Q", 50) + b"N" * 200 + b".",
        "expected a Metadata",
    ),
    "a memo index of 2 billion": (b"\x80\x02Nr\xff\xff\xff\x7f.", r"b'r' is no opcode, or what follows"),
    "a memo index of 10^12 in decimal": (b"\x80\x02Np1000000000000\n.", "opcode PUT"),
    "a memo index that was never put": (b"\x80\x04j\xff\xff\xff\x7f.", "a damaged pickle"),
    "a deep tuple": (b"\x80\x04" + DEEP + b".", "expected a Metadata, found a tuple"),
    "a deep tuple as a key": (b"\x80\x04}" + DEEP + b"K\x01s.", "expected a Metadata, found a list"),
    "a deep list": (b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".", "expected a Metadata, found a list"),
    "a billion twins as a key": (b"\x80\x04}" + TWINS + b"u.", "expected a Metadata, found a list"),
    "a billion twins in a frozen set": (b"\x80\x04" + TWINS + b"\x91.", "opcode FROZENSET"),
    "a billion twins by DUP": (b"\x80\x04]" + b"2\x86" * 200 + b".", "opcode DUP"),
    "a set": (b"\x80\x04\x8f(K\x01\x90.", "opcode EMPTY_SET"),
    "out-of-band buffers": (b"\x80\x05\x97\x98.", "opcode NEXT_BUFFER"),
    "attributes of an allowed class": (
        b"\x80\x04" + RECORD_CLASS + b"N}" + text("kind") + text("x") + b"s\x86b.",
        "a damaged pickle: TypeError|a damaged pickle: UnpicklingError",
    ),
    "the code of an allowed function": (
        b"\x80\x04" + named("torch", "Size") + b"}" + text("__code__") + b"Nsb.",
        "state is not a dictionary",
    ),
    "the defaults of an allowed function": (
        b"\x80\x04" + named("torch", "Size") + b"N}" + text("__defaults__") + b"K\x01\x85s\x86b.",
        "a damaged pickle",
    ),
    "an allowed class that copies its argument": (
        b"\x80\x04" + text("x" * 1_000_000) + b"\x94" + (RECORD_CLASS + b"h\0\x85R") * 100 + b".",
        "a damaged pickle: TypeError",
    ),
    "an allowed function that copies its argument": (
        b"\x80\x04" + text("x" * 1_000_000) + b"\x94" + (named("torch", "Size") + b"h\0\x85R") * 100 + b".",
        "expected a Metadata",
    ),
    "a call whose arguments would be copied again and again": (
        b"\x80\x04" + named("pathlib", "PosixPath") + b"\x94(" + b"N" * 1000 + b"t\x94" + b"h\0h\1R" * 9 + b".",
        "a damaged pickle: ValueError: a call with 1000 arguments|names 'pathlib.PosixPath'",
    ),
    "a record by a call": (b"\x80\x04" + RECORD_CLASS + b")R.", "a record is made without a call"),
    "a name that is no text": (b"\x80\x04K\x01K\x02\x93.", "a damaged pickle: UnpicklingError"),
    "a name of a megabyte": (call("a" * 1_000_000, "b"), r"… \(1000002 characters\)"),
    "half of a surrogate pair for a name": (b"\x80\x02c\xed\xa0\x80\nb\n.", r"names '"),
    "a stack that runs dry": (b"\x80\x04a.", "a damaged pickle"),
    "no value": (b"\x80\x04.", "a damaged pickle"),
    "bytes behind the end": (b"\x80\x04N.N", "1 bytes behind the end of the pickle"),
    "an opcode that does not exist": (b"\x80\x04\xff.", r"byte 2: b'\\xff' is no opcode"),
}


def with_pickle(pickled: bytes) -> bytes:
    """A torch.save archive whose data.pkl is another pickle, with all checksums right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "data/0": b"\0" * 8}.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def as_metadata(hostile: bytes) -> object:
    return read_metadata(hostile, path="the file")


def as_item(hostile: bytes) -> object:
    return whole(with_pickle(hostile), "the file")


@pytest.fixture
def quiet_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("read", [as_metadata, as_item], ids=["metadata", "item"])
@pytest.mark.parametrize(("hostile", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_is_refused_without_being_executed_or_using_memory(
    hostile: bytes, message: str, read: Callable[[bytes], object], quiet_folder: Path
) -> None:
    if read is as_item:
        message += "|expected one plain tensor|at most 1048576|names 'torch.distributed"
    tracemalloc.start()
    try:
        with pytest.raises((UnsafePickle, CorruptFile), match=message) as caught:
            read(hostile)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("the file")
    assert len(str(caught.value)) < 1000
    assert peak < (64 << 20) + 16 * len(hostile)
    assert list(quiet_folder.iterdir()) == []


def test_hostile_pickles_leave_nothing_behind_that_a_later_reading_could_meet(saved: Saved) -> None:
    for hostile, _ in HOSTILE.values():
        with pytest.raises(SourceError, match="x"):
            read_metadata(hostile, path="x")
    assert read_metadata(saved.raw, path="x") == saved.metadata


def test_a_global_that_would_run_code_is_unsafe_and_not_only_damaged() -> None:
    for name in ("os.system", "builtins.eval", "getattr chain", "INST", "__reduce__ to os.system"):
        with pytest.raises(UnsafePickle, match="neither imported nor called"):
            as_metadata(HOSTILE[name][0])


def test_metadata_of_more_than_half_a_gibibyte_is_not_read() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return distcp_file.MOST_METADATA_BYTES + 1

    with pytest.raises(CorruptFile, match="x: 536870913 bytes; at most 536870912 are read"):
        read_metadata(Huge(b"\x80\x04N."), path="x")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.nn.Parameter(torch.ones(2)), "torch._utils._rebuild_parameter"),
        (torch.ones(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        ({"a": torch.ones(2)}, "expected one plain tensor, found a list"),
        (3, "expected one plain tensor, found 3"),
        (torch.Size([1]), "expected one plain tensor, found"),
    ],
    ids=["parameter", "sparse", "dictionary", "number", "size"],
)
def test_an_item_that_is_no_plain_tensor_is_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        whole(saved_by_torch(value))


# ---- the table that names are cleaned by ----


def _with_planner_data(saved: Saved, change: Callable[[dict[str, tuple[object, ...]]], object]) -> bytes:
    """Return the metadata with another table of paths."""
    told = pickle.loads(saved.raw)
    return pickle.dumps(dataclasses.replace(told, planner_data=change(dict(told.planner_data))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda t: {**t, "model.w": ("optim", "w")}, "spells another name", id="a path in another group"),
        pytest.param(
            lambda t: {**t, "model.w": t["layers.1"], "layers.1": t["model.w"]}, "spells another name", id="swapped"
        ),
        pytest.param(
            lambda t: {name: path for name, path in t.items() if name != "model.w"}, "is not in it", id="one is lost"
        ),
    ],
)
def test_a_table_of_paths_that_does_not_fit_the_names_is_refused(
    saved: Saved, change: Callable[[dict[str, tuple[object, ...]]], object], words: str
) -> None:
    with pytest.raises(CorruptFile, match=rf"planner_data: .*{words}"):
        read_metadata(_with_planner_data(saved, change), path="here")


def test_metadata_without_the_field_of_paths_is_refused(saved: Saved) -> None:
    with pytest.raises(CorruptFile, match="no field planner_data"):
        read_metadata(saved.raw.replace(b"planner_data", b"plqnner_data"), path="here")


def test_a_text_of_an_old_protocol_with_an_odd_escape_is_refused_without_a_warning() -> None:
    """Python warns of the escape; here warnings are errors."""
    with pytest.raises(SourceError):
        read_metadata(b"\x80\x02S'\\q'\n.", path="x")
