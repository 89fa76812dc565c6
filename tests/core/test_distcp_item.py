import io
import struct
import zipfile
import zlib
from collections.abc import Mapping

import pytest
import torch

from hfdcp_core.distcp_file import TorchItem, read_item
from hfdcp_core.errors import CorruptFile, SourceError, UnknownDtype, UnsafePickle


def whole(raw: bytes) -> TorchItem:
    return read_item(lambda start, stop: raw[start:stop], len(raw), where="the item")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def named(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def storage(kind: str = "torch.FloatStorage", name: bytes = text("0"), count: bytes = number(6)) -> bytes:
    return b"(" + text("storage") + named(kind) + name + text("cpu") + count + b"tQ"


HOOKS = named("collections.OrderedDict") + b")R"
PARTS = {
    "storage": storage(),
    "offset": number(0),
    "size": numbers(2, 3),
    "strides": numbers(3, 1),
    "grad": b"\x89",
    "hooks": HOOKS,
}


def tensor(rebuild: str = "torch._utils._rebuild_tensor_v2", **parts: bytes) -> bytes:
    return b"\x80\x02" + named(rebuild) + b"(" + b"".join((PARTS | parts).values()) + b"tR."


def archive(
    pickled: bytes = tensor(),
    payload: bytes = bytes(24),
    *,
    order: bytes = b"little",
    others: Mapping[str, bytes] | None = None,
) -> bytes:
    """An archive as torch writes it, but by the standard library: no zip64 end, checksums in the local headers."""
    buffer = io.BytesIO()
    records = {"r/data.pkl": pickled, "r/byteorder": order, "r/data/0": payload} | dict(others or {})
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in records.items():
            file.writestr(name, content)
    return buffer.getvalue()


def v3(dtype: str, count: int, **parts: bytes) -> bytes:
    untyped = storage("torch.storage.UntypedStorage", count=number(count))
    return tensor("torch._utils._rebuild_tensor_v3", storage=untyped, dtype=named(f"torch.{dtype}"), **parts)


def test_an_archive_without_zip64_end_is_read() -> None:
    item = whole(archive(payload=bytes(range(24))))
    assert (item.dtype, item.shape, item.strides, item.storage_offset) == ("F32", (2, 3), (3, 1), 0)
    assert (item.unit_bytes, item.unit_shape, item.row_major, item.conjugate, item.big_endian) == (
        4,
        (2, 3),
        True,
        False,
        False,
    )
    assert item.crc32 == zlib.crc32(bytes(range(24)))


def test_the_other_byte_order_is_told() -> None:
    assert whole(archive(order=b"big")).big_endian


def test_an_untyped_storage_counts_bytes() -> None:
    item = whole(archive(v3("uint16", 12), bytes(12)))
    assert (item.dtype, item.shape, item.storage_bytes) == ("U16", (2, 3), 12)


def test_strides_of_a_packed_dtype_count_the_bytes_that_hold_two_elements() -> None:
    item = whole(archive(v3("float4_e2m1fn_x2", 6, strides=numbers(1, 2)), bytes(6)))
    assert (item.shape, item.unit_shape, item.strides, item.unit_bytes) == ((2, 6), (2, 3), (1, 2), 1)
    assert not item.row_major


def test_a_root_of_any_name_and_a_comment_behind_the_archive_are_read() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in {"data.pkl": tensor(), "byteorder": b"little", "data/0": bytes(24)}.items():
            file.writestr(f"some/root/{name}", content)
        file.comment = b"PK\5\6" + b"c" * 60_000
    assert whole(buffer.getvalue() + b"").shape == (2, 3)
    padded = buffer.getvalue()
    reads: list[int] = []

    def fetch(start: int, stop: int) -> bytes:
        reads.append(stop - start)
        return (b"\0" * 100_000 + padded)[start:stop]

    with pytest.raises(CorruptFile, match="where it should end at byte"):
        read_item(fetch, len(padded) + 100_000, where="the item")
    assert sum(reads) < 140_000


def test_a_pickle_that_lies_far_from_both_ends_is_read() -> None:
    raw = archive(others={"r/data/1": bytes(50_000)})
    first = archive(tensor(), others={"r/filler": bytes(200_000)})
    assert whole(raw).shape == whole(first).shape == (2, 3)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in {
            "f": bytes(90_000),
            "data.pkl": tensor(),
            "byteorder": b"little",
            "data/0": bytes(24),
            "g": bytes(90_000),
        }.items():
            file.writestr(f"r/{name}", content)
    assert whole(buffer.getvalue()).shape == (2, 3)


CONJ = b"}" + text("conj") + b"\x88s"
WRONG: dict[str, tuple[bytes, str]] = {
    "no tensor": (archive(b"\x80\x02K\x01."), "data.pkl: expected one plain tensor, found 1"),
    "a storage that is none": (archive(tensor(storage=number(1))), "data.pkl: expected a storage, found 1"),
    "hooks": (archive(tensor(hooks=b"](K\x01e")), "its tensor has hooks"),
    "a storage of another size": (archive(payload=bytes(20)), "a storage of 6 elements, where its record has 20 bytes"),
    "a storage that is too small": (
        archive(tensor(offset=number(1))),
        "from element 1 on reaches behind its storage of 24",
    ),
    "strides that reach too far": (
        archive(tensor(strides=numbers(6, 1))),
        r"strides \[6, 1\] from element 0 on reaches behind",
    ),
    "strides of another rank": (archive(tensor(strides=numbers(3))), r"size \[2, 3\] with strides \[3\]"),
    "a negative stride": (archive(tensor(strides=numbers(-3, 1))), "strides: expected counts"),
    "a negative offset": (archive(tensor(offset=number(-1))), "storage offset: expected a count, found -1"),
    "a size that is no tuple": (archive(tensor(size=number(1))), "size: expected at most 64 counts, found 1"),
    "too few arguments": (archive(tensor(size=b"", strides=b"", hooks=b"")), "a damaged pickle: TypeError"),
    "too many arguments": (archive(tensor(a=b"N", b=b"N", c=b"N")), "a damaged pickle: TypeError"),
    "a dtype of a typed storage": (
        archive(tensor("torch._utils._rebuild_tensor_v3", dtype=named("torch.float32"))),
        "a storage of float32 with dtype 'float32'|a storage of float32 with dtype a TorchDtype",
    ),
    "an untyped storage without dtype": (
        archive(tensor(storage=storage("torch.UntypedStorage", count=number(24)))),
        "a storage of bytes with dtype nothing",
    ),
    "a dtype that is text": (
        archive(
            tensor("torch._utils._rebuild_tensor_v3", storage=storage("torch.UntypedStorage"), dtype=text("uint8"))
        ),
        "a storage of bytes with dtype 'uint8'",
    ),
    "a negated view": (
        archive(tensor(marks=b"}" + text("neg") + b"\x88s")),
        "its tensor is marked neg, which this hfdcp",
    ),
    "a conjugate view of floats": (archive(tensor(marks=CONJ)), "a conjugate view of F32"),
    "marks that are no dictionary": (
        archive(tensor(marks=number(1))),
        "metadata: expected a list or dictionary, found 1",
    ),
    "a persistent id that is no storage": (
        archive(tensor(storage=number(1) + b"Q")),
        "a persistent id that names no storage",
    ),
    "a storage without a kind": (archive(tensor(storage=b"(" + text("storage") + b"NNNNtQ")), "names no storage"),
    "a storage of true elements": (archive(tensor(storage=storage(count=b"\x88"))), "names no storage"),
    "a storage of negative length": (archive(tensor(storage=storage(count=number(-1)))), "names no storage"),
    "a storage that is not there": (
        archive(tensor(storage=storage(name=text("7")))),
        "it has no record 'r/data/7', only 'r/byteorder'",
    ),
    "a byte order that is none": (archive(order=b"middle"), "byteorder is b'middle', neither little nor big"),
    "a long byte order": (archive(order=b"l" * 17), "'r/byteorder' has 17 bytes, where at most 16 are expected"),
    "two pickles": (archive(others={"q/data.pkl": tensor()}), "expected one record data.pkl in it, found 2"),
    "a pickle of two megabytes": (archive(b"\x80\x02" + b"N" * 2_000_000), "where at most 1048576 are expected"),
    "a large item that is no archive": (bytes(100_000), "no zip directory at its end"),
    "a small item that is no archive": (b"x", "no zip directory at its end"),
    "nothing": (b"", "no zip directory at its end"),
}


@pytest.mark.parametrize(("raw", "message"), WRONG.values(), ids=WRONG)
def test_an_item_is_refused_that_holds(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptFile, match=message) as caught:
        whole(raw)
    assert str(caught.value).startswith("the item: ")


@pytest.mark.parametrize(
    "name", ["torch._utils._rebuild_qtensor", "torch._tensor._rebuild_from_type_v2", "torchao.quantization.Int8Tensor"]
)
def test_an_item_that_needs_more_than_a_plain_tensor_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsafePickle, match=f"the item: data.pkl: names '{name}'"):
        whole(archive(tensor(name)))


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (tensor(storage=storage("torch.ComplexDoubleStorage")), "torch.complex128: safetensors cannot hold it"),
        (v3("float4_e2m1fn_x2", 24, size=b")", strides=b")"), "without a dimension: its elements are halves of bytes"),
    ],
    ids=["complex128", "half a byte"],
)
def test_an_item_of_a_dtype_that_safetensors_cannot_hold_is_refused(pickled: bytes, message: str) -> None:
    with pytest.raises(UnknownDtype, match=message):
        whole(archive(pickled))


def test_a_conjugate_view_is_told() -> None:
    complex_storage = storage("torch.ComplexFloatStorage")
    assert whole(archive(tensor(storage=complex_storage, marks=CONJ), bytes(48))).conjugate
    assert not whole(
        archive(tensor(storage=complex_storage, marks=CONJ.replace(b"\x88", b"\x89")), bytes(48))
    ).conjugate


def patched(raw: bytes, mark: bytes, offset: int, new: bytes, *, last: bool = True) -> bytes:
    """The archive with ``new`` written ``offset`` bytes behind the last (or first) header with a signature."""
    at = (raw.rfind(mark) if last else raw.find(mark)) + offset
    return raw[:at] + new + raw[at + len(new) :]


def compressed() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("r/data.pkl", tensor())
    return buffer.getvalue()


def twice() -> bytes:
    return archive(others={"r/data/1": bytes(24)}).replace(b"r/data/1", b"r/data/0")


def by_torch() -> bytes:
    buffer = io.BytesIO()
    torch.save(torch.zeros(2, 3), buffer)
    return buffer.getvalue()


ENTRY, LOCAL, END, END64, LOCATOR = b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"
FULL = b"\xff" * 4
DAMAGED: dict[str, tuple[bytes, str]] = {
    "compressed records": (compressed(), "'r/data.pkl' is compressed or encrypted"),
    "an encrypted record": (patched(archive(), ENTRY, 8, b"\1\0"), "'r/data/0' is compressed or encrypted"),
    "a record of two sizes": (patched(archive(), ENTRY, 20, b"\1"), "'r/data/0' is compressed or encrypted"),
    "a record on another disk": (patched(archive(), ENTRY, 34, b"\1"), "'r/data/0' is compressed or encrypted"),
    "two records of one name": (twice(), "two zip records of the name 'r/data/0'"),
    "several volumes": (patched(archive(), END, 4, b"\1"), "several volumes"),
    "records on other volumes": (patched(archive(), END, 8, b"\1"), "several volumes"),
    "a directory elsewhere": (patched(archive(), END, 16, b"\1"), "where it should end at byte"),
    "more records than fit": (patched(archive(), END, 8, b"\xfe\0\xfe\0"), "a zip directory of 254 records in"),
    "fewer records than there are": (patched(archive(), END, 8, b"\2\0\2\0"), "whose 2 records end at byte"),
    "one record too many": (
        patched(archive(others={"r/" + "x" * 300: b""}), END, 8, b"\5\0\5\0"),
        "a zip directory that is cut off",
    ),
    "a damaged entry": (patched(archive(), ENTRY, 0, b"XX"), "a damaged zip directory"),
    "a name that runs out": (patched(archive(), ENTRY, 28, b"\xff\xff"), "a damaged zip directory"),
    "a directory of a gigabyte": (
        patched(by_torch(), END64, 40, (1 << 30).to_bytes(8, "little")),
        "contradict each other",
    ),
    "numbers that are missing": (patched(archive(), ENTRY, 20, FULL * 2), "whose zip64 sizes are missing"),
    "a zip64 end elsewhere": (
        patched(by_torch(), LOCATOR, 8, b"\1"),
        "the zip64 end record is not where its locator says",
    ),
    "a zip64 end that is none": (patched(by_torch(), END64, 0, b"XX"), "the zip64 end record is not where"),
    "two ends that differ": (patched(by_torch(), END, 12, b"\1"), "two ends that contradict each other"),
    "records that overlap": (
        patched(archive(), LOCAL, 28, b"\1"),
        "'r/data/0' of 24 bytes at byte .* runs into what follows",
    ),
    "records at one place": (patched(archive(), ENTRY, 42, bytes(4)), "runs into what follows|no zip header"),
    "a record behind the directory": (
        patched(archive(), ENTRY, 42, b"\xff\xff\0\0"),
        "bytes 65535 to 65565 of an item of",
    ),
    "a local header that is none": (patched(archive(), LOCAL, 0, b"XX"), "no zip header of 'r/data/0', where"),
    "a local header of another name": (patched(archive(), LOCAL, 30, b"q"), "no zip header of 'r/data/0', where"),
    "a local header with another checksum": (
        patched(archive(payload=b"x" * 24), LOCAL, 14, b"\1\2\3"),
        "its zip header contradicts",
    ),
    "a local header with another size": (patched(archive(), LOCAL, 18, b"\1"), "its zip header contradicts"),
    "a local header that is compressed": (patched(archive(), LOCAL, 8, b"\x08"), "its zip header contradicts"),
    "a payload that is pushed away": (patched(archive(), LOCAL, 28, b"\xff\xff"), "runs into what follows"),
    "a damaged pickle": (archive().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"), "'r/data.pkl': CRC-32"),
    "a damaged byte order": (archive().replace(b"little", b"litter"), "'r/byteorder': CRC-32"),
}


@pytest.mark.parametrize(("raw", "message"), DAMAGED.values(), ids=DAMAGED)
def test_an_archive_is_refused_that_has(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptFile, match=message) as caught:
        whole(raw)
    assert str(caught.value).startswith("the item: ")


def with_zip64_entry(extra: bytes) -> bytes:
    """The payload's entry says by all ones that its sizes stand in an extra field."""
    raw = patched(archive(), ENTRY, 20, FULL * 2)
    raw = patched(raw, ENTRY, 30, struct.pack("<H", len(extra)))
    name = raw.rfind(ENTRY) + 46 + len("r/data/0")
    raw = raw[:name] + extra + raw[name:]
    size = struct.unpack_from("<I", raw, raw.rfind(END) + 12)[0] + len(extra)
    return patched(raw, END, 12, struct.pack("<I", size))


def test_sizes_of_a_large_payload_are_taken_from_the_zip64_extra_field() -> None:
    sizes = struct.pack("<2H2Q", 1, 16, 24, 24)
    assert whole(with_zip64_entry(struct.pack("<2H", 9, 2) + b"xx" + sizes)).storage_bytes == 24


@pytest.mark.parametrize(
    "extra",
    [b"", b"\1\0", struct.pack("<2HQ", 1, 8, 24), struct.pack("<2H2Q", 2, 16, 24, 24)],
    ids=["none", "cut off", "one of two", "another kind"],
)
def test_a_zip64_extra_field_that_lacks_the_sizes_is_refused(extra: bytes) -> None:
    with pytest.raises(CorruptFile, match="whose zip64 sizes are missing"):
        whole(with_zip64_entry(extra))


def test_a_directory_of_more_than_a_megabyte_is_not_read() -> None:
    raw = archive(others={f"r/{number}{'x' * 60_000}": b"" for number in range(20)})
    with pytest.raises(CorruptFile, match="a zip directory of 23 records in 1"):
        whole(raw)


def test_a_storage_that_answers_with_too_few_bytes_is_not_believed() -> None:
    raw = by_torch()
    with pytest.raises(SourceError, match=r"the item: got 10 bytes where \[0, \d+\) were asked for"):
        read_item(lambda *_: raw[:10], len(raw), where="the item")


def test_an_archive_without_records_holds_no_tensor() -> None:
    with pytest.raises(CorruptFile, match=r"expected one record data.pkl in it, found 0"):
        whole(b"PK\5\6" + bytes(18))
