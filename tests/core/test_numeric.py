"""Numbers in another dtype are bit for bit what torch makes of them; NaNs stay, and what is too large is counted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.dtypes import dtype_named
from hfdcp_core.numeric import CHUNK, Workspace, cast, quantized, scales_of
from hfdcp_core.operation import CASTABLE, DECODABLE

TORCH = {name: getattr(torch, str(dtype_named(name).torch)) for name in DECODABLE}
PAIRS = [pair for pair in itertools.product(sorted(DECODABLE), sorted(CASTABLE)) if pair[0] != pair[1]]
NARROW = [pair for pair in PAIRS if dtype_named(pair[0]).bits <= 16]
WIDE = [pair for pair in PAIRS if dtype_named(pair[0]).bits > 16]
WORKSPACE = Workspace()


def bits_type(dtype: str) -> np.dtype:
    return np.dtype(f"u{dtype_named(dtype).bits // 8}")


def as_torch(raw: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(raw.copy()).view(TORCH[dtype]) if raw.size else torch.empty(0, dtype=TORCH[dtype])


def bits_of(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), bits_type(dtype))


def hold_against_torch(raw: np.ndarray, source: str, target: str) -> None:
    out = np.empty(raw.size, bits_type(target))
    lost = cast(source, target, raw, out, WORKSPACE)
    numbers = as_torch(raw, source)
    expected = numbers.to(TORCH[target])
    nan = np.isnan(expected.double().numpy())
    assert np.array_equal(np.isnan(as_torch(out, target).double().numpy()), nan)
    assert np.array_equal(out[~nan], bits_of(expected, target)[~nan])
    assert lost == too_large(numbers.double().numpy(), expected.double().numpy(), target)


def too_large(before: np.ndarray, after: np.ndarray, target: str) -> int:
    if target == "F8_E4M3":  # torch gives its largest number; 464 is the last that rounds to it
        with np.errstate(all="ignore"):
            return int(np.count_nonzero(np.abs(before.astype(np.float32)) > 464))
    return int(np.count_nonzero(np.isfinite(before) & ~np.isfinite(after)))


@pytest.mark.parametrize(("source", "target"), NARROW, ids="-".join)
def test_every_number_of_a_narrow_kind_is_cast_as_torch_does(source: str, target: str) -> None:
    count = 1 << dtype_named(source).bits
    hold_against_torch(np.arange(count).astype(bits_type(source)), source, target)
    hold_against_torch(np.arange(count - 1).astype(bits_type(source)), source, target)  # an odd number of them


def around(narrow: str, wide: np.dtype) -> np.ndarray:
    """Return every number of a narrow kind, all that lie half way between two, and their neighbours."""
    numbers = as_torch(np.arange(1 << dtype_named(narrow).bits).astype(bits_type(narrow)), narrow).double().numpy()
    numbers = np.unique(numbers[np.isfinite(numbers)])
    between = numbers[1:] / 2 + numbers[:-1] / 2
    bits = np.concatenate([numbers, between]).astype(wide).view(f"u{wide.itemsize}")
    return np.concatenate([bits, bits + 1, bits - 1])


@pytest.mark.parametrize(("source", "target"), WIDE, ids="-".join)
def test_ties_and_their_neighbours_are_rounded_as_torch_does(source: str, target: str) -> None:
    wide = np.dtype(np.float32 if source == "F32" else np.float64)
    for narrow in ("F16", "BF16", "F8_E4M3", "F8_E5M2"):
        hold_against_torch(around(narrow, wide), source, target)


@settings(max_examples=40, deadline=None)
@given(
    pair=st.sampled_from(WIDE),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([0, 1, 7, 1000, CHUNK + 3]),
    exponents=st.integers(0, 2047),
)
def test_numbers_of_any_bits_are_cast_as_torch_does(
    pair: tuple[str, str], seed: int, size: int, exponents: int
) -> None:
    source, target = pair
    random = np.random.default_rng(seed)
    bits = dtype_named(source).bits
    raw = random.integers(0, 1 << bits, size, dtype=bits_type(source))
    mantissa = 52 if bits == 64 else 23
    near = raw & bits_type(source).type((1 << mantissa) - 1)  # all of about one magnitude, where roundings are many
    exponent = bits_type(source).type(exponents % (1 << (bits - 1 - mantissa))) << bits_type(source).type(mantissa)
    hold_against_torch(raw, source, target)
    hold_against_torch(near | exponent, source, target)


@pytest.mark.parametrize("target", ["BF16", "F16", "F64"])
def test_a_nan_keeps_its_sign_and_the_head_of_its_payload(target: str) -> None:
    raw = np.array([0x7FC12345, 0xFFE00000, 0x7F800001], np.uint32)
    out = np.empty(3, bits_type(target))
    cast("F32", target, raw, out, WORKSPACE)
    numbers = as_torch(out, target).double()
    assert numbers.isnan().all()
    assert numbers.signbit().tolist() == [False, True, False]
    if target == "BF16":
        assert out.tolist() == [0x7FC1, 0xFFE0, 0x7FC0]


def test_infinities_are_not_counted_where_they_can_be_said() -> None:
    raw = np.array([np.inf, -np.inf, 1e300, np.nan]).view(np.uint64)
    for target in ("F32", "F16", "BF16", "F8_E5M2"):
        assert cast("F64", target, raw, np.empty(4, bits_type(target)), WORKSPACE) == 1
    assert cast("F64", "F8_E4M3", raw, np.empty(4, np.uint8), WORKSPACE) == 3


def test_the_largest_number_of_a_block_becomes_the_largest_of_fp8() -> None:
    values = np.array([[1.5, -3.0, 0.0, 0.0], [np.nan, np.inf, -0.0, 0.0]], np.float32)
    scales = scales_of(values, 2)
    assert scales.tolist() == [np.float32(3) / np.float32(448), 1.0]
    out = np.empty(values.shape, np.uint8)
    quantized(values, np.repeat(scales, 2), out, WORKSPACE)
    assert as_torch(out.reshape(-1), "F8_E4M3").float().nan_to_num(-1).tolist() == [224, -448, 0, 0, -1, 448, 0, 0]
