"""A shard's elements come out row-major and little-endian, whatever way they lie, and checked."""

from __future__ import annotations

import io
import math
import uuid
import warnings
import zlib

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.box import Box, boxes_of_run
from hfdcp_core.catalog import TORCH_SAVE, TORCH_SAVE_ZSTD, Shard, Span
from hfdcp_core.errors import CorruptFile
from hfdcp_core.manifest import CrcPart, SourceCheck
from hfdcp_core.read import MOST_OVERHEAD, gather_strided, open_payload, page_aligned
from hfdcp_core.store import Sink, open_store
from hfdcp_core.windows import Strides

SCRATCH = 256


def stored(raw: bytes) -> Sink:
    """Return a store that holds one file, with something before the item."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.put("item", b"#" * 10 + raw)
    return store


def saved(tensor: torch.Tensor) -> bytes:
    """Return what ``torch.save`` writes, as a checkpoint's writer calls it."""
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def shard_of(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Shard:
    """Return the shard that is the whole item."""
    return Shard("w", dtype, Box.whole(shape), Span("item", 10, 10 + len(raw)), TORCH_SAVE)


def read_all(raw: bytes, dtype: str, shape: tuple[int, ...], nbytes: int, step: int) -> tuple[bytes, SourceCheck]:
    """Read an item in steps of some bytes."""
    payload = open_payload(stored(raw), shard_of(raw, dtype, shape), scratch=page_aligned(SCRATCH))
    out = bytearray(nbytes)
    for start in range(0, nbytes, step):
        payload.read_into(start, memoryview(out)[start : start + step])
    return bytes(out), payload.check()


def compressed_shard(raw: bytes, dtype: str, shape: tuple[int, ...]) -> tuple[Sink, Shard]:
    """Return an item that Zstandard compressed, in a store, and its shard."""
    squeezed = zstandard.ZstdCompressor().compress(raw)
    shard = Shard("w", dtype, Box.whole(shape), Span("item", 10, 10 + len(squeezed)), TORCH_SAVE_ZSTD)
    return stored(squeezed), shard


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(60_000.0).reshape(200, 300), id="row-major"),
        pytest.param(torch.arange(60_000.0).reshape(200, 300).t(), id="transposed"),
        pytest.param(torch.arange(9.0)[2:7], id="a part of a larger storage"),
        pytest.param(torch.tensor(2.5), id="0-d"),
    ],
)
def test_a_compressed_item_gives_the_same_elements_in_any_order(tensor: torch.Tensor, in_order: bool) -> None:
    expected = tensor.contiguous().numpy().tobytes()
    store, shard = compressed_shard(saved(tensor), "F32", tuple(tensor.shape))
    payload = open_payload(store, shard, scratch=page_aligned(1 << 16), in_order=in_order)
    out = bytearray(len(expected))
    starts = list(range(0, len(out), 60_000))
    for start in starts if in_order else reversed(starts):
        payload.read_into(start, memoryview(out)[start : start + 60_000])
    assert out == expected
    assert payload.check() == SourceCheck(verified=1)


def test_a_flipped_bit_in_a_compressed_payload_is_found() -> None:
    raw = bytearray(saved(torch.arange(9.0)))
    raw[raw.index(torch.arange(9.0).numpy().tobytes())] ^= 1
    store, shard = compressed_shard(bytes(raw), "F32", (9,))
    payload = open_payload(store, shard, scratch=page_aligned(SCRATCH))
    payload.read_into(0, memoryview(bytearray(36)))
    with pytest.raises(CorruptFile, match=r"w\[0:9\] in item\[10:.*CRC-32"):
        payload.check()


def test_a_compressed_item_that_holds_far_more_than_its_tensor_is_refused() -> None:
    store, shard = compressed_shard(bytes(MOST_OVERHEAD + 1_000_000), "F32", (9,))
    with pytest.raises(CorruptFile, match=r"w\[0:9\] in item.*hold more than"):
        open_payload(store, shard, scratch=page_aligned(SCRATCH))


@pytest.mark.parametrize("step", [8, 40, 10_000])
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(30.0).reshape(5, 6), id="row-major"),
        pytest.param(torch.arange(30.0).reshape(5, 6).t(), id="transposed"),
        pytest.param(
            torch.arange(300.0, dtype=torch.float64).reshape(20, 15).t(), id="transposed and larger than scratch"
        ),
        pytest.param(torch.arange(240.0).reshape(2, 3, 5, 8).to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(torch.arange(120.0).reshape(2, 3, 20).permute(2, 0, 1), id="permuted"),
        pytest.param(torch.arange(64.0)[::2], id="every second element of a larger storage"),
        pytest.param(torch.arange(64.0)[7:21], id="a part of a larger storage"),
        pytest.param(torch.arange(6.0).reshape(6, 1).expand(6, 4), id="expanded"),
        pytest.param(torch.tensor(2.5), id="0-d"),
        pytest.param(torch.complex(torch.arange(9.0), -torch.arange(9.0)).conj(), id="conjugate"),
    ],
)
def test_elements_come_out_in_row_major_order(tensor: torch.Tensor, step: int) -> None:
    dtype = {torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64"}[tensor.dtype]
    expected = tensor.resolve_conj().contiguous().numpy().tobytes()
    got, check = read_all(saved(tensor), dtype, tuple(tensor.shape), len(expected), step)
    assert got == expected
    assert check == SourceCheck(verified=1)


@pytest.mark.parametrize("tensor", [torch.arange(30.0).reshape(5, 6), torch.arange(30.0).reshape(5, 6).t()])
def test_big_endian_items_are_turned_round(tensor: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = bytearray(saved(tensor))
    payload = tensor.untyped_storage().tolist()
    at = raw.index(bytes(payload))
    swapped = np.frombuffer(bytes(payload), "<f4").astype(">f4").tobytes()
    raw[at : at + len(payload)] = swapped
    raw = _replace_crc(raw, zlib.crc32(bytes(payload)), zlib.crc32(swapped))
    order = raw.index(b"little")
    raw[order : order + 6] = b"big\0\0\0"
    raw = _shorten_record(raw, b"little", b"big")
    got, check = read_all(bytes(raw), "F32", tuple(tensor.shape), 120, 24)
    assert got == tensor.contiguous().numpy().tobytes()
    assert check == SourceCheck(verified=1)


def _replace_crc(raw: bytearray, old: int, new: int) -> bytearray:
    return bytearray(bytes(raw).replace(old.to_bytes(4, "little"), new.to_bytes(4, "little")))


def _shorten_record(raw: bytearray, old: bytes, new: bytes) -> bytearray:
    """State the length and CRC-32 of a shorter record in the directory; what is left of it stays as padding."""
    was = zlib.crc32(old).to_bytes(4, "little") + len(old).to_bytes(4, "little") * 2
    now = zlib.crc32(new).to_bytes(4, "little") + len(new).to_bytes(4, "little") * 2
    assert bytes(raw).count(was) >= 1
    return bytearray(bytes(raw).replace(was, now))


@pytest.mark.parametrize("tensor", [torch.arange(30.0).reshape(5, 6), torch.arange(30.0).reshape(5, 6).t()])
@pytest.mark.parametrize("at", [0, 57, 119])
def test_a_flipped_bit_in_the_payload_is_found(tensor: torch.Tensor, at: int) -> None:
    raw = bytearray(saved(tensor))
    raw[raw.index(bytes(tensor.untyped_storage().tolist())) + at] ^= 1
    with pytest.raises(CorruptFile, match=r"w\[0:\d, 0:\d\] in item\[10:\d+\]: CRC-32"):
        read_all(bytes(raw), "F32", tuple(tensor.shape), 120, 40)


def test_what_was_read_of_an_item_is_kept_for_those_who_read_the_rest() -> None:
    tensor = torch.arange(30.0).reshape(5, 6)
    raw = saved(tensor)
    payload = open_payload(stored(raw), shard_of(raw, "F32", (5, 6)), scratch=page_aligned(SCRATCH))
    payload.read_into(24, memoryview(bytearray(48)))
    data = tensor.numpy().tobytes()
    part = CrcPart(f"item[10:{10 + len(raw)}]", 24, 72, zlib.crc32(data[24:72]), 120, zlib.crc32(data))
    assert payload.check() == SourceCheck(parts=(part,))


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F32", (6, 5)), ("F32", (30,)), ("I32", (5, 6))], ids=["transposed", "flat", "other dtype"]
)
def test_an_item_that_holds_another_tensor_than_the_metadata_says_is_refused(
    dtype: str, shape: tuple[int, ...]
) -> None:
    raw = saved(torch.arange(30.0).reshape(5, 6))
    with pytest.raises(CorruptFile, match=r"the item holds F32\[5, 6\], expected"):
        open_payload(stored(raw), shard_of(raw, dtype, shape), scratch=page_aligned(SCRATCH))


def test_raw_bytes_have_nothing_to_be_checked_against() -> None:
    store = stored(bytes(range(24)))
    payload = open_payload(store, Shard("w", "U8", Box.whole((24,)), Span("item", 10, 34)), scratch=page_aligned(1))
    out = bytearray(24)
    payload.read_into(0, memoryview(out))
    assert (bytes(out), payload.check()) == (bytes(range(24)), SourceCheck(unchecked=1))


@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_a_run_of_elements_is_cut_into_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, numbers.size)] * 2)))
    found: list[int] = []
    for offset, part in boxes_of_run(shape, start, stop):
        stops = (a + n for a, n in zip(offset, part, strict=True))
        found += numbers[(*map(slice, offset, stops), ...)].reshape(-1).tolist()
    assert found == list(range(start, stop))


@given(shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), scratch=st.integers(4, 400), data=st.data())
@settings(max_examples=200)
def test_any_strided_box_is_gathered_with_as_little_room_as_one_item(
    shape: tuple[int, ...], scratch: int, data: st.DataObject
) -> None:
    strides = tuple(data.draw(st.integers(0, 40)) for _ in shape)
    view = Strides(data.draw(st.integers(0, 5)), shape, strides)
    run = np.arange(view.offset + (view.reach if 0 not in shape else 1), dtype=np.uint32)
    raw = memoryview(run.tobytes())

    def fetch(start: int, buffer: memoryview) -> None:
        assert len(buffer) <= max(scratch, out.nbytes)
        assert start + len(buffer) <= len(raw)
        buffer[:] = raw[start : start + len(buffer)]

    out = np.zeros(shape, np.uint32)
    gather_strided(fetch, view, out, scratch=page_aligned(scratch))
    expected = np.lib.stride_tricks.as_strided(run[view.offset :], shape, tuple(4 * s for s in strides))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("gap_bytes", "requests"), [(0, 64), (4 * 99, 1), (4 * 99 - 1, 64)], ids=["none", "as wide as it is", "narrower"]
)
def test_narrow_columns_are_read_with_what_lies_between_where_a_request_costs_more(
    gap_bytes: int, requests: int
) -> None:
    """One item of a hundred in each row: by itself a request for each of 64 rows."""
    run = np.arange(6400, dtype=np.uint32)
    raw, asked = memoryview(run.tobytes()), []

    def fetch(start: int, buffer: memoryview) -> None:
        asked.append(len(buffer))
        buffer[:] = raw[start : start + len(buffer)]

    out = np.zeros((64, 1), np.uint32)
    view = Strides(7, (64, 1), (100, 1))
    gather_strided(fetch, view, out, scratch=page_aligned(1 << 20), gap_bytes=gap_bytes)
    assert np.array_equal(out[:, 0], run[7::100])
    assert len(asked) == requests
