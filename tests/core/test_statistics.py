"""What is counted of numbers is what torch finds, bit for bit, in any cut of their bytes; and what follows from it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.dtypes import TABLE, dtype_named
from hfdcp_core.errors import ValidationError
from hfdcp_core.manifest import FileRecord, Statistics
from hfdcp_core.statistics import BASIC, FULL, LEVELS, NONE, TILE, Counter, covers, merged, problems, refuse, told

NARROW = ("BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
WIDE = ("F64", "F32", "C64")
FLOATING = (*NARROW, *WIDE)
NO_ZERO = "F8_E8M0"


def counted(dtype: str, *pieces: bytes, level: str = FULL) -> Statistics:
    """Count over one tensor, a window for each piece."""
    counter = Counter([("a", dtype)], level=level)
    for piece in pieces:
        counter.window([(0, len(piece))], memoryview(piece))
    return counter.found()


def by_torch(dtype: str, raw: bytes) -> Statistics:
    """Count over one tensor by torch, which widens each number to float64."""
    kind = getattr(torch, str(dtype_named(dtype).torch))
    numbers = torch.frombuffer(bytearray(raw), dtype=kind) if raw else torch.empty(0, dtype=kind)
    values = (torch.view_as_real(numbers) if dtype == "C64" else numbers).double().numpy().reshape(-1)
    nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    finite = np.abs(values[np.isfinite(values)])
    return Statistics(
        FULL,
        {"a": nan} if nan else {},
        {"a": inf} if inf else {},
        ("a",) if values.size and finite.size == values.size and not finite.any() else (),
        {"a": float(finite.max())} if finite.size else {},
    )


def every_number(dtype: str) -> np.ndarray:
    bits = dtype_named(dtype).bits
    return np.arange(1 << bits, dtype=f"u{bits // 8}")


@pytest.mark.parametrize("dtype", NARROW)
def test_each_number_alone_is_what_torch_says(dtype: str) -> None:
    numbers = every_number(dtype)
    names = [(str(number), dtype) for number in range(len(numbers))]
    counter = Counter(names, level=FULL)
    counter.window(((number, numbers.itemsize) for number in range(len(numbers))), memoryview(numbers.tobytes()))
    found = counter.found()
    values = torch.from_numpy(numbers).view(getattr(torch, str(dtype_named(dtype).torch))).double().numpy()
    texts = np.arange(len(numbers)).astype(str)
    assert found.nan == dict.fromkeys(texts[np.isnan(values)], 1)
    assert found.inf == dict.fromkeys(texts[np.isinf(values)], 1)
    assert list(found.zero) == texts[values == 0].tolist()
    finite = np.isfinite(values)
    assert found.absmax == dict(zip(texts[finite], np.abs(values[finite]).tolist(), strict=True))


@pytest.mark.parametrize("dtype", NARROW)
def test_all_numbers_together_are_counted_as_torch_counts(dtype: str) -> None:
    raw = every_number(dtype).tobytes()
    assert counted(dtype, raw) == by_torch(dtype, raw)


SPECIAL = {
    "F64": [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, 0xFFF8 << 48, 0x7FF0 << 48 | 1, (0x7FF << 52) - 1, 1],
    "F32": [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F7FFFFF, 0xFF7FFFFF, 1],
}
SPECIAL["C64"] = SPECIAL["F32"]
UNIT = {"F64": "u8", "F32": "u4", "C64": "u4"}


@pytest.mark.parametrize(("dtype", "plain"), [*itertools.product(WIDE, ["zeros", "numbers", "negative numbers"])])
def test_each_special_number_of_a_wide_kind_is_found_among_plain_ones(dtype: str, plain: str) -> None:
    sign = {"zeros": 0.0, "numbers": 1.0, "negative numbers": -1.0}[plain]
    for special in SPECIAL[dtype]:
        numbers = (np.linspace(0.5, 9, 64) * sign).astype(UNIT[dtype].replace("u", "f")).view(UNIT[dtype])
        numbers[37] = special
        assert counted(dtype, numbers.tobytes()) == by_torch(dtype, numbers.tobytes())


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, bytes, list[int]]:
    """Numbers of which many are special, and the elements at which their bytes are cut."""
    dtype = draw(st.sampled_from(FLOATING))
    size = dtype_named(dtype).bits // 8
    rare = st.sampled_from([0x00, 0x80, 0x7F, 0xFF, 0x7C, 0xFC, 0xC0, 0xF8])
    elements = draw(st.lists(st.lists(rare | st.integers(0, 255), min_size=size, max_size=size), max_size=24))
    places = draw(st.lists(st.integers(0, len(elements)), max_size=4))
    return dtype, bytes(itertools.chain.from_iterable(elements)), [place * size for place in sorted(places)]


@given(cuts())
def test_any_cut_into_windows_gives_the_same(case: tuple[str, bytes, list[int]]) -> None:
    dtype, raw, places = case
    ends = [0, *places, len(raw)]
    assert counted(dtype, *(raw[start:stop] for start, stop in itertools.pairwise(ends))) == by_torch(dtype, raw)


@given(cuts())
def test_any_cut_over_files_gives_the_same(case: tuple[str, bytes, list[int]]) -> None:
    dtype, raw, places = case
    ends = [0, *places, len(raw)]
    parts = [raw[start:stop] for start, stop in itertools.pairwise(ends) if stop > start]  # no file has an empty part
    records = [record(str(number), counted(dtype, part), "a") for number, part in enumerate(parts)]
    assert merged([*records, record("rest", Statistics(FULL), "b")]) == by_torch(dtype, raw)


def test_a_special_number_in_any_tile_is_counted() -> None:
    numbers = np.ones(3 * TILE, np.float32)
    numbers[[0, TILE, 3 * TILE - 1]] = [np.nan, -np.inf, np.nan]
    assert counted("F32", numbers.tobytes()) == Statistics(FULL, {"a": 2}, {"a": 1}, (), {"a": 1.0})


def test_many_tensors_of_several_dtypes_in_a_window_are_kept_apart() -> None:
    arrays = {
        "nan": np.array([1, np.nan], np.float32),
        "plain": np.array([-3, 2], np.float32),
        "integers": np.zeros(4, np.int32),
        "zero": np.array([0.0, -0.0], np.float32),
        "empty": np.zeros(0, np.float32),
        "half": np.array([np.inf, 4], np.float16),
    }
    dtypes = {"f": "F32", "i": "I32", "e": "F16"}
    counter = Counter([(name, dtypes[array.dtype.char]) for name, array in arrays.items()], level=FULL)
    data = memoryview(b"".join(array.tobytes() for array in arrays.values()))
    counter.window(((number, array.nbytes) for number, array in enumerate(arrays.values())), data)
    absmax = {"nan": 1.0, "plain": 3.0, "zero": 0.0, "half": 4.0}
    assert counter.found() == Statistics(FULL, {"nan": 1}, {"half": 1}, ("zero",), absmax)


def test_a_file_without_tensors_has_nothing_to_count() -> None:
    assert Counter([], level=FULL).found() == Statistics(FULL)


def test_every_floating_dtype_is_counted_and_no_other() -> None:
    spoken_of = {dtype.name for dtype in TABLE if counted(dtype.name, bytes(24)).zero}
    assert spoken_of == {dtype.name for dtype in TABLE if dtype.floating} - {NO_ZERO} | {"C64"}


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_packed_kinds_are_zero_or_not_and_never_nan(dtype: str) -> None:
    assert counted(dtype, b"\xff" * 6).zero == counted(dtype, bytes(5) + b"\x01").zero == ()
    assert counted(dtype, bytes(3), b"\x10" * 3).zero == ()
    assert counted(dtype, b"\xff" * 6, level=BASIC) == Statistics(BASIC)
    assert counted(dtype, bytes(6), level=BASIC) == Statistics(BASIC, zero=("a",))


@pytest.mark.parametrize(("byte", "largest"), [(0x88, 0.0), (0x08, 0.0), (0x01, 0.5), (0x21, 1.0), (0x9F, 6.0)])
def test_magnitudes_of_four_bits_are_found_in_either_half(byte: int, largest: float) -> None:
    found = counted("F4", bytes([byte]))
    assert found.absmax == {"a": largest}
    assert found.zero == (("a",) if largest == 0 else ())


def test_magnitudes_of_six_bits_are_not_given() -> None:
    assert counted("F6_E2M3", b"\x01\x02\x03").absmax == {}


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_gives_what_it_says_and_no_more(level: str) -> None:
    found = counted("F32", np.array([np.nan, 2], np.float32).tobytes(), level=level)
    assert (found.level, bool(found.nan), bool(found.absmax)) == (level, level != NONE, level == FULL)


def test_a_tensor_with_no_finite_number_has_no_magnitude_and_is_not_zero() -> None:
    assert counted("BF16", b"\xff\x7f\x80\x7f") == Statistics(FULL, {"a": 1}, {"a": 1})


# ---- what follows from it -------------------------------------------------------------------------------------------


def record(path: str, found: Statistics, *tensors: str) -> FileRecord:
    return FileRecord(path, 1, "ab", dict.fromkeys(tensors, "crc64nvme:0"), statistics=found)


def test_a_tensor_is_all_zero_only_where_all_its_parts_are() -> None:
    first = record("1", Statistics(BASIC, zero=("a", "b")), "a", "b")
    second = record("2", Statistics(BASIC, {"a": 1}, zero=("b",)), "a", "b", "c")
    assert merged([first, second]) == Statistics(BASIC, {"a": 1}, {}, ("b",))


def test_together_records_say_as_much_as_the_one_that_says_least() -> None:
    levels = [record(level, Statistics(level)) for level in LEVELS]
    assert [merged(levels[start:]).level for start in range(3)] == [NONE, BASIC, FULL]
    assert merged([]).level == NONE


@pytest.mark.parametrize(("made", "asked"), [*itertools.product(LEVELS, LEVELS)])
def test_a_record_covers_its_own_level_and_lower_ones(made: str, asked: str) -> None:
    assert covers(Statistics(made), asked) == (LEVELS.index(asked) <= LEVELS.index(made))


FOUND = Statistics(BASIC, {"a": 2}, {"b": 3}, ("c",))


@pytest.mark.parametrize(
    ("kinds", "lines"),
    [
        (("nan",), ["a: 2 NaN"]),
        (("zero", "inf"), ["b: 3 Inf", "c: all zero"]),
        (("nan", "inf", "zero"), ["a: 2 NaN", "b: 3 Inf", "c: all zero"]),
    ],
    ids=["nan", "two", "all"],
)
def test_what_is_refused_is_named_with_its_count_and_what_to_do(kinds: tuple[str, ...], lines: list[str]) -> None:
    assert problems(FOUND, kinds) == lines
    with pytest.raises(ValidationError, match=f"out: --fail-on {','.join(kinds)} refuses .* do without") as caught:
        refuse("out", FOUND, kinds)
    assert list(caught.value.problems) == lines


def test_what_is_not_asked_for_is_not_refused() -> None:
    refuse("out", FOUND, ())
    refuse("out", Statistics(BASIC, {"a": 2}), ("inf", "zero"))
    refuse("out", Statistics(NONE), ())


def test_without_statistics_nothing_can_be_refused() -> None:
    with pytest.raises(ValidationError, match="made with --stats none; make it again with --stats basic"):
        refuse("out", Statistics(NONE), ("nan",))


def test_a_person_reads_the_worst_tensors_first_and_of_many_only_some() -> None:
    many = {f"t{number}": number for number in range(1, 9)}
    assert told(Statistics(BASIC, many, {"x": 1}, ("c", "d"))) == (
        "WARNING: 8 tensors hold NaN: t8 8, t7 7, t6 6, t5 5, t4 4, …",
        "WARNING: 1 tensor holds Inf: x 1",
        "WARNING: 2 tensors are all zero: c, d",
    )
    assert told(Statistics(FULL, absmax={"a": math.pi})) == ()
