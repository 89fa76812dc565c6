"""Boxes of tensors made by operations, in any cut, are what the references make of the whole."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core import numeric, operate
from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import dtype_of_torch
from hfdcp_core.operation import (
    CAST,
    DEQUANTIZE,
    DEQUANTIZE_MXFP4,
    QUANTIZE,
    SCALES,
    Operand,
    Operation,
    blocks_of,
    mxfp4_shape,
    pull,
    tiles,
)

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TARGETS = (torch.bfloat16, torch.float16, torch.float32)
WORKSPACE = numeric.Workspace()


def name_of(dtype: torch.dtype) -> str:
    return dtype_of_torch(str(dtype).removeprefix("torch.")).name


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    raw = tensor.reshape(-1).clone().view(torch.uint8).numpy()
    return raw.view(f"u{tensor.element_size()}").reshape(tensor.shape)


def operation(kind: str, operands: list[torch.Tensor], target: TensorSpec, block: tuple[int, ...] = ()) -> Operation:
    specs = [TensorSpec(name_of(tensor.dtype), tuple(tensor.shape)) for tensor in operands]
    return Operation(kind, tuple(Operand(f"t{n}", spec) for n, spec in enumerate(specs)), target, block)


def cuts(extent: int, chance: random.Random) -> list[tuple[int, int]]:
    inside = (chance.randint(0, extent) for _ in range(chance.randint(0, 2)))
    return list(itertools.pairwise(sorted({0, extent, *inside})))


def boxes_of(shape: tuple[int, ...], chance: random.Random) -> Iterator[Box]:
    for spans in itertools.product(*(cuts(extent, chance) for extent in shape)):
        yield Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))


def made(how: Operation, operands: list[torch.Tensor], seed: int) -> tuple[np.ndarray, int]:
    """Make the outcome in boxes cut by chance, each in tiles that fit rooms chosen by chance."""
    chance, raw, lost = random.Random(seed), [bits_of(tensor) for tensor in operands], 0
    out = np.empty(how.target.shape, f"u{TensorSpec(how.target.dtype, (1,)).nbytes}")
    for box in boxes_of(how.target.shape, chance):
        for tile in tiles(how, box, [chance.choice([64, 1000, 10**9])] * len(raw)):
            held = [
                whole[(*map(slice, part.offset, part.stop), ...)]
                for whole, part in zip(raw, pull(how, tile), strict=True)
            ]
            part = np.empty(tile.shape, out.dtype)
            lost += operate.operate(
                how, tile, [np.ascontiguousarray(h).reshape(h.shape) for h in held], part, WORKSPACE
            )
            out[(*map(slice, tile.offset, tile.stop), ...)] = part
    return out, lost


def hold(how: Operation, operands: list[torch.Tensor], expected: torch.Tensor, seed: int) -> None:
    assert how.target == TensorSpec(name_of(expected.dtype), tuple(expected.shape))
    out, lost = made(how, operands, seed)
    nan = expected.float().isnan().numpy()
    found = torch.from_numpy(out.reshape(-1).copy()).view(expected.dtype).reshape(expected.shape)
    assert np.array_equal(found.float().isnan().numpy(), nan)
    assert np.array_equal(out[~nan], bits_of(expected)[~nan])
    if expected.dtype in TARGETS and how.kind != CAST:
        assert lost <= np.count_nonzero(expected.float().isinf().numpy())


def tensor_of(shape: tuple[int, ...], seed: int, scale: float) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


SEEDS = st.integers(0, 2**31 - 1)
SHAPES = st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(shape=st.just(()) | SHAPES, seed=SEEDS, target=st.sampled_from(TARGETS), scale=st.sampled_from([1.0, 1e-6, 1e5]))
def test_a_cast_in_boxes_is_the_cast_of_the_whole(
    shape: tuple[int, ...], seed: int, target: torch.dtype, scale: float
) -> None:
    numbers = tensor_of(shape, seed, scale).double()
    hold(operation(CAST, [numbers], TensorSpec(name_of(target), shape)), [numbers], numbers.to(target), seed)


def expanded(scales: torch.Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    for axis, size in enumerate(block):
        scales = scales.repeat_interleave(size, dim=axis).narrow(axis, 0, shape[axis])
    return scales


@settings(max_examples=120, deadline=None)
@given(
    shape=SHAPES,
    seed=SEEDS,
    target=st.sampled_from(TARGETS),
    kind=st.sampled_from(["blocks", "rows", "tensor"]),
    source=st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_numbers_times_scales_are_as_torchs_reader_makes_them(
    shape: tuple[int, ...],
    seed: int,
    target: torch.dtype,
    kind: str,
    source: torch.dtype,
    scale_dtype: torch.dtype,
) -> None:
    chance = random.Random(seed)
    ones = (1,) * len(shape)
    block = {
        "blocks": (*ones[2:], *(chance.choice([3, 4, 8]) for _ in ones[:2])),
        "rows": (*ones[1:], shape[-1]),
        "tensor": shape,
    }[kind]
    numbers = tensor_of(shape, seed, chance.choice([0.01, 1, 100])).to(source)
    scales = (tensor_of(blocks_of(shape, block), seed + 1, chance.choice([1e-3, 1, 1e30]))).to(scale_dtype)
    expected = (numbers.float() * expanded(scales.float(), block, shape)).to(target)
    own = scales
    if kind == "tensor":
        own = scales.reshape(1)
    elif kind == "rows" and len(shape) > 1:
        own = scales.squeeze(-1)
    how = operation(DEQUANTIZE, [numbers, own], TensorSpec(name_of(target), shape), block)
    hold(how, [numbers, own], expected, seed)


def unpacked(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The formula of gpt-oss, which torch's reader and transformers have too."""
    table = torch.tensor([*FP4, *(-number for number in FP4)], dtype=dtype)
    flat = blocks.reshape(-1, blocks.shape[-1])
    out = torch.empty(flat.shape[0], 2 * flat.shape[1], dtype=dtype)
    out[:, 0::2], out[:, 1::2] = table[(flat & 15).long()], table[(flat >> 4).long()]
    torch.ldexp(out, scales.to(torch.int32).reshape(-1, 1) - 127, out=out)
    return out.reshape(*blocks.shape[:-2], -1)


@settings(max_examples=80, deadline=None)
@given(
    lead=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    groups=st.integers(1, 5),
    seed=SEEDS,
    target=st.sampled_from(TARGETS),
)
def test_mxfp4_is_unpacked_as_the_references_do_and_experts_are_turned(
    lead: tuple[int, ...], groups: int, seed: int, target: torch.dtype
) -> None:
    source = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*lead, groups, 16), dtype=torch.uint8, generator=source)
    scales = torch.randint(0, 256, (*lead, groups), dtype=torch.uint8, generator=source)
    expected = unpacked(blocks, scales, target)
    if len(lead) == 2:
        expected = expected.transpose(1, 2).contiguous()  # as transformers' experts have it
    how = operation(DEQUANTIZE_MXFP4, [blocks, scales], TensorSpec(name_of(target), mxfp4_shape(tuple(blocks.shape))))
    hold(how, [blocks, scales], expected, seed)


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.tuples(st.sampled_from([4, 16]), st.sampled_from([4, 16])),
    seed=SEEDS,
    source=st.sampled_from([torch.float64, *TARGETS]),
    scale=st.sampled_from([1.0, 1e-3, 1e-40, 1e4]),
)
def test_blocks_are_quantised_as_the_reference_does(
    shape: tuple[int, int], block: tuple[int, int], seed: int, source: torch.dtype, scale: float
) -> None:
    numbers = tensor_of(shape, seed, scale).to(source)
    numbers[: shape[0] // 2, : shape[1] // 2] = 0
    numbers[-1, -1] = torch.nan
    values, counts = numbers.float(), blocks_of(shape, block)
    scales, expected = torch.empty(counts), torch.empty(shape, dtype=torch.float8_e4m3fn)
    for row, column in np.ndindex(*counts):
        where = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
        largest = values[where].abs().nan_to_num(0, posinf=0).max() / 448
        scales[row, column] = largest or 1
        expected[where] = (values[where] / scales[row, column]).clamp(-448, 448).to(torch.float8_e4m3fn)
    hold(operation(QUANTIZE, [numbers], TensorSpec("F8_E4M3", shape), block), [numbers], expected, seed)
    hold(operation(SCALES, [numbers], TensorSpec("F32", counts), block), [numbers], scales, seed)


def test_what_is_dequantised_again_is_within_half_a_step_of_what_was_quantised() -> None:
    numbers = tensor_of((300, 200), 0, 0.02).to(torch.bfloat16)
    block, counts = (128, 128), blocks_of((300, 200), (128, 128))
    raw, _ = made(operation(QUANTIZE, [numbers], TensorSpec("F8_E4M3", (300, 200)), block), [numbers], 0)
    raw_scales, _ = made(operation(SCALES, [numbers], TensorSpec("F32", counts), block), [numbers], 0)
    values = torch.from_numpy(raw).view(torch.float8_e4m3fn).float()
    scales = expanded(torch.from_numpy(raw_scales).view(torch.float32), block, (300, 200))
    error = (values * scales - numbers.float()).abs()
    assert bool((error <= numbers.float().abs() / 16 + scales * 2**-10).all())


def test_infinite_numbers_are_counted_once_however_the_tensor_is_cut() -> None:
    numbers = torch.zeros(40, 40)
    numbers[7, 9] = numbers[30, 30] = torch.inf
    how = operation(QUANTIZE, [numbers], TensorSpec("F8_E4M3", (40, 40)), (16, 16))
    assert {made(how, [numbers], seed)[1] for seed in range(5)} == {2}


@pytest.mark.parametrize("columns", [numeric.CHUNK + 2, 3], ids=["wider-than-a-chunk", "many-rows"])
def test_rows_wider_than_a_chunk_and_chunks_of_many_rows_are_made_alike(columns: int) -> None:
    rows = 2 * numeric.CHUNK // columns + 2
    numbers = tensor_of((rows, columns), 1, 1.0).to(torch.float8_e4m3fn)
    block = (max(1, rows // 2), max(1, columns // 2))
    scales = tensor_of(blocks_of((rows, columns), block), 2, 1.0)
    how = operation(DEQUANTIZE, [numbers, scales], TensorSpec("BF16", (rows, columns)), block)
    out = np.empty((rows, columns), np.uint16)
    operate.operate(how, Box.whole((rows, columns)), [bits_of(numbers), bits_of(scales)], out, WORKSPACE)
    expected = (numbers.float() * expanded(scales, block, (rows, columns))).to(torch.bfloat16)
    assert np.array_equal(out, bits_of(expected))


@pytest.mark.parametrize("experts", [1, 3])
def test_many_groups_of_mxfp4_are_unpacked_in_parts(experts: int) -> None:
    shape = (experts, 1100, 3, 16)
    blocks = torch.arange(math.prod(shape)).remainder(251).to(torch.uint8).reshape(shape)
    scales = torch.arange(math.prod(shape[:-1])).remainder(20).add(120).to(torch.uint8).reshape(shape[:-1])
    how = operation(DEQUANTIZE_MXFP4, [blocks, scales], TensorSpec("BF16", mxfp4_shape(shape)))
    out = np.empty(how.target.shape, np.uint16)
    operate.operate(how, Box.whole(how.target.shape), [bits_of(blocks), bits_of(scales)], out, WORKSPACE)
    assert np.array_equal(out, bits_of(unpacked(blocks, scales, torch.bfloat16).transpose(1, 2).contiguous()))
