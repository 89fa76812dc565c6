"""Numbers in one dtype become numbers in another, bit for bit as torch makes them: kernels over arrays, without I/O.

Elements come and go as unsigned integers, as they lie in files. On the way they are float32, as they are in torch:
``float64`` is rounded to ``float32`` before it is rounded to something narrower. Every step rounds to the nearest, ties
to even. A NaN stays a NaN, with its sign and the head of its payload where the narrower kind has room (torch's own bits
of a NaN differ between its builds). What is too large becomes an infinity, in ``F8_E4M3``, which has none, the largest
number (as in torch 2.13), and is counted.

Work goes in chunks that stay in the processor's cache, on memory of a `Workspace` that is used again and again.
Measured in GB/s of source, one core of a busy Zen 3 machine: F32 to BF16 2.5, BF16 to F32 3.5, F64 to F32 9, F32 to F16
0.7 and back 1.0 (numpy's own), F32 to F8 1.7. Tables give F8 two numbers at a time, and what sixteen bits become as
sixteen or eight at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger]
"""Elements as they lie in a file."""
Floats = npt.NDArray[np.float32]

CHUNK = 1 << 16
"""Elements that are worked on at a time: with their temporaries they stay in a core's cache."""
LARGEST_E4M3 = 448.0
"""The largest number of ``F8_E4M3``."""

_INFINITY = 0x7F800000
_TOO_LARGE: Mapping[str, int] = {
    "BF16": 0x7F7F8000,  # half way from the largest number to the next power of two, which a tie goes to
    "F16": 0x477FF000,  # 65520
    "F8_E5M2": 0x47700000,  # 61440
    "F8_E4M3": 0x43E80001,  # above 464: a tie goes down to 448
}
"""Bits of the smallest float32 that a dtype cannot hold."""


class Workspace:
    """Memory that chunks are worked on in; for one thread."""

    def __init__(self, elements: int = CHUNK) -> None:
        """Allocate it, for chunks of so many elements."""
        self.values = np.empty(elements, np.float32)
        self.quotients = np.empty(elements, np.float32)
        self.bits = np.empty(elements, np.uint32)
        self.halves = np.empty(elements, np.uint16)


def _quiet() -> np.errstate:
    """Infinities, NaNs and numbers next to nothing are values like others: no warning is wanted."""
    return np.errstate(all="ignore")


# ---- tables: made when they are first needed ------------------------------------------------------------------------


@functools.cache
def values_of(dtype: str) -> Floats:
    """Return the number that each byte of an eight-bit dtype stands for.

    >>> values_of("F8_E4M3")[[0, 1, 0x38, 0x7E, 0xFE]].tolist(), values_of("F8_E8M0")[[0x7F, 0x80]].tolist()
    ([0.0, 0.001953125, 1.0, 448.0, -448.0], [1.0, 2.0])
    """
    if dtype == "F8_E5M2":  # the first byte of a half
        with _quiet():
            return np.asarray((np.arange(256, dtype=np.uint16) << 8).view(np.float16), np.float32)
    if dtype == "F8_E8M0":
        with _quiet():
            values = powers() * np.float32(2)
        values[255] = np.nan
        return values
    byte = np.arange(256)  # F8_E4M3: no infinity, and one NaN for each sign
    exponent, mantissa = byte >> 3 & 15, byte & 7
    numbers = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    numbers[byte & 0x7F == 0x7F] = np.nan
    return np.asarray(np.copysign(numbers, np.where(byte & 0x80, -1.0, 1.0)), np.float32)


@functools.cache
def powers() -> Floats:
    """Return half of the power of two that a byte stands for as an exponent: as float32 has it, of the last one too."""
    return np.asarray(np.ldexp(np.float32(1), np.arange(256) - 128), np.float32)


@functools.cache
def _pairs_of(dtype: str) -> npt.NDArray[np.uint64]:
    """Return, for each two bytes, their two numbers: one look-up gives both."""
    bits = values_of(dtype).view(np.uint32).astype(np.uint64)
    return (bits[np.newaxis, :] | bits[:, np.newaxis] << np.uint64(32)).reshape(-1)


@functools.cache
def _twice_e2m1_pairs() -> npt.NDArray[np.uint64]:
    """Return, for each byte, twice its two four-bit numbers as float32, the low half first."""
    positive = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
    table = np.concatenate([positive, -positive])
    byte = np.arange(256)
    return np.stack([table[byte & 15], table[byte >> 4]], axis=1).view(np.uint64).reshape(-1)


@functools.cache
def _eight_bits(dtype: str) -> npt.NDArray[np.uint8]:
    """Return the byte of every float32 that was cut to its first 16 bits and made odd if anything was lost.

    Rounding to odd loses nothing that rounding to nearest needs, as long as two more bits are kept than wanted.
    """
    top = np.arange(1 << 15, dtype=np.uint32)
    values = (top << 16).view(np.float32)
    positive = values_of(dtype)[:128]
    finite = positive[np.isfinite(positive)].astype(np.float64)
    nan = np.isnan(values)
    table = _nearest(
        finite, np.minimum(np.where(nan, np.float32(0), values), np.float32(finite[-1])).astype(np.float64)
    )
    table[top << 16 >= _TOO_LARGE[dtype]] = len(finite) - (dtype == "F8_E4M3")
    table[nan] = 0x7F
    return np.concatenate([table, table | 0x80])


def _nearest(values: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Return where the nearest of ``values``, which ascend, lies for each of ``wanted``; of two the even place."""
    upper = np.searchsorted(values, wanted).clip(1, len(values) - 1)
    below, above = wanted - values[upper - 1], values[upper] - wanted
    is_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(is_upper, upper, upper - 1).astype(np.uint8)


@functools.cache
def _sixteen_bits(source: str, target: str) -> tuple[Bits, range]:
    """Return the element that each one of sixteen bits becomes, and the magnitudes that the target cannot hold."""
    workspace, raw = Workspace(), np.arange(1 << 16, dtype=np.uint16)
    table: Bits = np.empty(raw.size, "u1" if target.startswith("F8") else "u2")
    decode(source, raw, workspace.values)
    magnitudes = workspace.values[: 1 << 15].view(np.uint32)
    first, infinity = (int(np.searchsorted(magnitudes, bits)) for bits in (_TOO_LARGE[target], _INFINITY))
    encode(target, workspace.values, table, workspace)
    return table, range(first, infinity + (target == "F8_E4M3"))


# ---- one chunk ------------------------------------------------------------------------------------------------------


def decode(dtype: str, raw: Bits, out: Floats) -> int:
    """Write the numbers of contiguous elements as float32.

    Returns:
        How many finite numbers became infinite, which only those of ``F64`` can.
    """
    if dtype == "F32":
        np.copyto(out.view(np.uint32), raw)
    elif dtype == "F16":
        with _quiet():
            np.copyto(out, raw.view(np.float16))
    elif dtype == "BF16":
        np.left_shift(raw, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    elif dtype == "F64":
        return _narrow(raw.view(np.float64), out)
    elif raw.size % 2 == 0:
        np.take(_pairs_of(dtype), raw.view(np.uint16), out=out.view(np.uint64), mode="clip")
    else:
        np.take(values_of(dtype), raw, out=out, mode="clip")
    return 0


def _narrow(wide: npt.NDArray[np.float64], out: Floats) -> int:
    with _quiet():
        np.copyto(out, wide, casting="unsafe")
    infinite = int(np.count_nonzero(np.isinf(out)))
    return infinite - int(np.count_nonzero(np.isinf(wide))) if infinite else 0


def encode(dtype: str, values: Floats, out: Bits, workspace: Workspace) -> int:
    """Write contiguous float32 numbers as elements of a dtype.

    Returns:
        How many of them the dtype cannot hold: finite ones that are too large, in ``F8_E4M3`` infinities too.
    """
    if dtype == "F64":
        with _quiet():
            np.copyto(out.view(np.float64), values)
        return 0
    if dtype == "F32":
        np.copyto(out, values.view(np.uint32))
        return 0
    bits, scratch = values.view(np.uint32), workspace.bits[: values.size]
    largest = int(np.bitwise_and(bits, np.uint32(0x7FFFFFFF), out=scratch).max(initial=0))
    stop = _INFINITY + (dtype == "F8_E4M3")
    lost = 0
    if largest >= _TOO_LARGE[dtype]:
        lost = int(np.count_nonzero((scratch >= _TOO_LARGE[dtype]) & (scratch < stop)))
    if dtype == "F16":
        with _quiet():
            np.copyto(out.view(np.float16), values, casting="unsafe")
    elif dtype == "BF16":
        _to_bfloat16(bits, out, scratch, has_nan=largest > _INFINITY)
    else:
        _to_eight_bits(dtype, bits, out, workspace)
    return lost


def _to_bfloat16(bits: Bits, out: Bits, scratch: Bits, *, has_nan: bool) -> None:
    """Add just under half of the last place that is kept, or exactly half where that place is odd, and cut."""
    np.right_shift(bits, 16, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, np.uint32(0x7FFF), out=scratch)
    np.add(scratch, bits, out=scratch)
    np.right_shift(scratch, 16, out=scratch)
    if has_nan:
        nan = np.isnan(bits.view(np.float32))
        scratch[nan] = bits[nan] >> 16 | 0x40
    np.copyto(out, scratch, casting="unsafe")


def _to_eight_bits(dtype: str, bits: Bits, out: Bits, workspace: Workspace) -> None:
    scratch, halves = workspace.bits[: bits.size], workspace.halves[: bits.size]
    np.bitwise_and(bits, np.uint32(0xFFFF), out=scratch)
    np.add(scratch, np.uint32(0xFFFF), out=scratch)
    np.right_shift(scratch, 16, out=scratch)  # 1 where anything lies behind the first 16 bits
    np.copyto(halves, scratch, casting="unsafe")
    np.right_shift(bits, 16, out=scratch)
    np.bitwise_or(halves, scratch, out=halves, casting="unsafe")
    np.take(_eight_bits(dtype), halves, out=out, mode="clip")


# ---- whole arrays ---------------------------------------------------------------------------------------------------


def cast(source: str, target: str, raw: Bits, out: Bits, workspace: Workspace) -> int:
    """Write contiguous elements of one dtype as those of another.

    Returns:
        How many finite numbers the target cannot hold (and, in ``F8_E4M3``, infinities).
    """
    if raw.itemsize == 2 and out.itemsize <= 2:
        return _by_table(source, target, raw, out, workspace)
    lost = 0
    for start in range(0, raw.size, CHUNK):
        part, into = raw[start : start + CHUNK], out[start : start + CHUNK]
        if target == "F32":
            lost += decode(source, part, into.view(np.float32))
            continue
        values = part.view(np.float32) if source == "F32" else workspace.values[: part.size]
        narrowed = 0 if source == "F32" else decode(source, part, values)
        counted = encode(target, values, into, workspace)
        lost += counted if target == "F8_E4M3" else counted + narrowed
    return lost


def _by_table(source: str, target: str, raw: Bits, out: Bits, workspace: Workspace) -> int:
    """Cast what has so few elements that each one's outcome is known."""
    table, too_large = _sixteen_bits(source, target)
    lost = 0
    for start in range(0, raw.size, CHUNK):
        part = raw[start : start + CHUNK]
        np.take(table, part, out=out[start : start + CHUNK], mode="clip")
        magnitudes = np.bitwise_and(part, np.uint16(0x7FFF), out=workspace.halves[: part.size])
        if int(magnitudes.max()) >= too_large.start:
            lost += int(np.count_nonzero((magnitudes >= too_large.start) & (magnitudes < too_large.stop)))
    return lost


def flat(array: Bits) -> Bits:
    """Return all elements of an array that lie one behind the other, as a view: what is written there stays."""
    assert array.flags.c_contiguous  # of what does not lie so, `reshape` would make a copy in silence
    return array.reshape(-1)


def scaled(dtypes: tuple[str, str], raw: Bits, scales: Floats, out: Bits, workspace: Workspace) -> int:
    """Write ``raw * scales`` for a few rows.

    Args:
        dtypes: Source and target.
        raw: Rows of contiguous elements, `CHUNK` in all at most.
        scales: What broadcasts to the rows.
        out: The rows in the target dtype, contiguous.
        workspace: What is worked on.

    Returns:
        How many finite numbers the target cannot hold.
    """
    source, target = dtypes
    values = workspace.values[: raw.size]
    decode(source, flat(raw), values)
    shaped = values.reshape(raw.shape)
    with _quiet():
        np.multiply(shaped, scales, out=shaped)
    return encode(target, values, flat(out), workspace)


def unpack_mxfp4(blocks: Bits, exponents: Bits, workspace: Workspace) -> Floats:
    """Return four-bit numbers times the power of two of their block, in the workspace.

    Args:
        blocks: Bytes of blocks one behind the other, two numbers in each, the low half first.
        exponents: One byte for each block, 127 standing for 1; `CHUNK` numbers at most.
        workspace: What is worked on.

    >>> unpack_mxfp4(np.full(16, 0x92, np.uint8), np.array([128], np.uint8), Workspace())[:4].tolist()
    [2.0, -1.0, 2.0, -1.0]
    """
    values = workspace.values[: 2 * blocks.size]
    np.take(_twice_e2m1_pairs(), blocks, out=values.view(np.uint64), mode="clip")
    shaped = values.reshape(exponents.size, -1)
    with _quiet():
        np.multiply(shaped, np.take(powers(), exponents)[:, np.newaxis], out=shaped)
    return values


def scales_of(values: Floats, columns: int) -> Floats:
    """Return the scale of every block of a few rows: its largest finite magnitude becomes the largest ``F8_E4M3``.

    Args:
        values: Rows that are one block high, starting at the first column of a block.
        columns: Columns of a block; the last one may have fewer.

    >>> scales_of(np.array([[448.0, -896.0, 0.0]], np.float32), 2).tolist()
    [2.0, 1.0]
    """
    largest = np.abs(values)
    largest[~np.isfinite(largest)] = 0
    in_columns = largest.max(axis=0)
    blocks = np.maximum.reduceat(in_columns, np.arange(0, values.shape[1], columns))
    scales: Floats = (blocks / np.float32(LARGEST_E4M3)).astype(np.float32, copy=False)
    scales[scales == 0] = 1  # nothing but zeros: any scale will do, but 0 would make NaN of them
    return scales


def quantized(values: Floats, scales: Floats, out: Bits, workspace: Workspace) -> None:
    """Write rows divided by the scales of their columns as ``F8_E4M3``; infinities become its largest number."""
    shaped = workspace.quotients[: values.size].reshape(values.shape)
    with _quiet():
        np.divide(values, scales, out=shaped)
    np.clip(shaped, -LARGEST_E4M3, LARGEST_E4M3, out=shaped)
    encode("F8_E4M3", shaped.reshape(-1), flat(out), workspace)
