"""Checksums compose: however bytes are cut, the whole has one value."""

import importlib
import itertools
import sys
import zlib
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core import ops
from hfdcp_core.ops import EMPTY_DIGEST, combine_parts, crc32, digest_text, extend_digest

DATA = st.binary(max_size=200)
CUTS = st.lists(st.integers(0, 200), max_size=6)


def pieces(data: bytes, cuts: list[int]) -> Iterator[tuple[int, int]]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    yield from itertools.pairwise(edges)


def crc64nvme(data: bytes) -> int:
    """The definition, bit by bit: reflected polynomial 0x9a6c9329ac4bc9b5, all ones before and after."""
    crc = 2**64 - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (2**64 - 1)


@given(DATA, CUTS)
def test_a_digest_of_pieces_is_the_digest_of_the_whole_by_its_definition(data: bytes, cuts: list[int]) -> None:
    digest = EMPTY_DIGEST
    for start, stop in pieces(data, cuts):
        digest = extend_digest(digest, memoryview(data)[start:stop])
    assert digest == crc64nvme(data)


def test_a_digest_names_its_algorithm_and_has_all_its_digits() -> None:
    assert digest_text(0x1F) == "crc64nvme:000000000000001f"


@given(DATA)
def test_crc32_is_the_one_that_zip_archives_state(data: bytes) -> None:
    assert crc32(data) == zlib.crc32(data)


@given(DATA, CUTS, st.randoms())
def test_parts_in_any_order_and_read_twice_make_the_whole(data: bytes, cuts: list[int], random: Random) -> None:
    parts = [(a, b, crc32(data[a:b])) for a, b in pieces(data, cuts) if a < b]
    parts += parts[: len(parts) // 2]
    random.shuffle(parts)
    assert combine_parts(parts) == ([(0, len(data), zlib.crc32(data))] if data else [])


def test_parts_that_do_not_touch_stay_apart() -> None:
    parts = [(6, 9, crc32(b"789")), (0, 2, crc32(b"12")), (2, 4, crc32(b"34"))]
    assert combine_parts(parts) == [(0, 4, crc32(b"1234")), (6, 9, crc32(b"789"))]


def test_parts_that_overlap_are_never_joined_into_a_whole() -> None:
    data = b"123456"
    parts = [(0, 4, crc32(data[0:4])), (2, 6, crc32(data[2:6]))]
    assert combine_parts(parts) == parts


def test_parts_of_one_range_with_other_values_are_never_joined_into_one() -> None:
    assert len(combine_parts([(0, 4, 1), (0, 4, 2)])) == 2


def test_where_the_fast_crc32_is_not_installed_the_one_of_python_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        try:
            assert importlib.reload(ops).crc32 is zlib.crc32
        finally:
            patch.undo()
            importlib.reload(ops)
    assert ops.crc32(b"123456789") == 0xCBF43926
