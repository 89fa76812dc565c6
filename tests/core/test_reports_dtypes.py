"""Reports of values that a cast, a guess about dtypes or a scale left behind made wrong: bytes are carried as they are.

Each test stands for a kind of report that users of such checkpoints made somewhere; the reference is to one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from hfdcp_core.dtypes import TABLE, Dtype, size_in_bytes
from hfdcp_core.errors import UnknownDtype
from hfdcp_core.safetensors_file import header_length, parse_header
from hfdcp_core.testing.in_memory import Piece, publish_files, rank_files, refusal_of, weights_file


def noise(dtype: str, *shape: int) -> Piece:
    """Return a tensor of random bytes."""
    nbytes = size_in_bytes(dtype, shape)
    return Piece(dtype, shape, np.random.default_rng([len(dtype), *shape]).bytes(nbytes))


def part(whole: Piece, axis: int, start: int, stop: int) -> Piece:
    """Cut a matrix, by the bytes that its elements take."""
    bits = size_in_bytes(whole.dtype, (8,))  # bytes of eight elements are bits of one
    lattice = np.frombuffer(whole.data, np.uint8).reshape(whole.shape[0], -1)
    box = lattice[start:stop] if axis == 0 else lattice[:, start * bits // 8 : stop * bits // 8]
    shape = (stop - start, whole.shape[1]) if axis == 0 else (whole.shape[0], stop - start)
    return Piece(whole.dtype, shape, box.tobytes(), (start, 0) if axis == 0 else (0, start))


# ---- every dtype ----


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", TABLE, ids=lambda dtype: dtype.name)
def test_tensors_of_every_dtype_are_joined_by_bytes(dtype: Dtype, axis: int) -> None:
    """Integers, flags and narrow floats, on which consolidation ended or miscounted (pytorch#192485)."""
    whole = noise(dtype.name, 8, 16)
    middle = 3 if axis == 0 else 4  # of packed kinds four elements are whole bytes
    files = rank_files({"w": part(whole, axis, 0, middle)}, {"w": part(whole, axis, middle, whole.shape[axis])})
    assert publish_files(files, world_size=2).tensors == {"w": whole}


SCALARS = [dtype for dtype in TABLE if dtype.bits >= 8]


@pytest.mark.parametrize("dtype", SCALARS, ids=lambda dtype: dtype.name)
def test_scalars_of_every_dtype_keep_their_value(dtype: Dtype) -> None:
    """A scalar that came out as zero (Automodel#301)."""
    held = noise(dtype.name)
    assert any(held.data)
    at_origin = Piece(held.dtype, (), held.data, ())
    assert publish_files(rank_files({"s": at_origin}, {"s": at_origin}), world_size=2).tensors == {"s": held}


def test_a_dtype_that_nobody_knows_is_an_error_by_name_and_never_a_guess() -> None:
    raw = weights_file({"w": noise("F8_E4M3", 4)}).replace(b'"F8_E4M3"', b'"F8_E9M9"')
    fault = refusal_of({"model.safetensors": raw})
    assert isinstance(fault, UnknownDtype)
    assert "F8_E9M9" in str(fault)


# ---- one model, many dtypes ----

MIXED: Mapping[str, Piece] = {
    "layers.0.w": noise("BF16", 8, 4),
    "layers.0.router.bias": noise("F32", 8),
    "tid2eid": noise("I64", 16),
    "mask": noise("BOOL", 5),
    "experts.w_blocks": noise("U8", 2, 3, 4, 16),
    "experts.w_scales": noise("U8", 2, 3, 4),
    "step": noise("I64"),
}
"""What one model has beside each other: few tensors stay in full precision, buffers count, blocks are packed."""


@pytest.mark.parametrize("max_file_size", [10**9, 200, 1])
def test_each_tensor_keeps_its_own_dtype_beside_others(max_file_size: int) -> None:
    """An integer buffer that became bf16 (VeOmni#935); full precision that was asked for some (Automodel#3193)."""
    made = publish_files({"model.safetensors": weights_file(MIXED)}, max_file_size=max_file_size)
    assert made.tensors == MIXED


@pytest.mark.parametrize("max_file_size", [150, 400])
def test_sizes_are_planned_with_the_bytes_that_each_dtype_really_takes(max_file_size: int) -> None:
    """Eight-byte integers counted as two (VeOmni#935), so that files and totals were wrong."""
    made = publish_files({"model.safetensors": weights_file(MIXED)}, max_file_size=max_file_size)
    expected = {name: len(piece.data) for name, piece in MIXED.items()}
    assert made.manifest.total_size == sum(expected.values())
    index = json.loads(made.files["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(expected.values())
    held = [[n for n in MIXED if made.file_of(n) == record.path] for record in made.manifest.records]
    sizes = [sum(expected[name] for name in names) for names in held]
    assert all(size <= max_file_size or len(names) == 1 for size, names in zip(sizes, held, strict=True))


# ---- quantised weights and their scales ----

SCALES: Mapping[str, tuple[str, Sequence[int]]] = {
    "blocks with ragged edges": ("weight_scale_inv", (2, 3)),
    "one for each row": ("weight_scale", (20, 1)),
    "one for all, in a dimension": ("weight_scale", (1,)),
    "one for all, without a dimension (Model-Optimizer#1962)": ("weight_scale_inv", ()),
}


@pytest.mark.parametrize("beside", [True, False], ids=["in one file", "in another file"])
@pytest.mark.parametrize(("name", "shape"), SCALES.values(), ids=SCALES)
def test_quantised_weights_keep_their_bytes_and_their_scale(name: str, shape: Sequence[int], beside: bool) -> None:
    """Weights that were cast, or left without the scale they are meant with (transformers#47145, unsloth#6978)."""
    tensors = {"l.weight": noise("F8_E4M3", 20, 30), f"l.{name}": noise("F32", *shape)}
    files = [tensors] if beside else [{name: piece} for name, piece in tensors.items()]
    made = publish_files({f"{n}.safetensors": weights_file(held) for n, held in enumerate(files)})
    assert made.tensors == tensors


@pytest.mark.parametrize("dim", [0, 1])
def test_a_scale_without_dimensions_is_never_cut(dim: int) -> None:
    """Scales that were to be cut for ranks by their name (FreeToken#496)."""
    tensors = {"l.weight": noise("F8_E4M3", 4, 6), "l.weight_scale": noise("F32"), "l.input_scale": noise("BF16", 1)}
    made = publish_files({"model.safetensors": weights_file(tensors)}, ranks=2, shard_dim=dim)
    again = publish_files({name: raw for name, raw in made.files.items() if name.startswith("shard-")})
    assert again.tensors == tensors


def test_two_packed_values_are_one_byte_in_shapes_sizes_and_files_for_ranks() -> None:
    """Packed weights beside scales of another narrow dtype (gpt-oss, NVFP4)."""
    tensors = {"w": noise("F4", 6, 8), "w_scale": noise("F8_E8M0", 6, 1)}
    made = publish_files({"model.safetensors": weights_file(tensors)}, ranks=3, shard_dim=1)
    again = publish_files({name: raw for name, raw in made.files.items() if name.startswith("shard-")})
    assert again.tensors == tensors
    assert again.manifest.total_size == 6 * 8 // 2 + 6


# ---- alignment ----


@pytest.mark.parametrize("pad", range(8))
def test_data_that_lie_unaligned_are_read_and_written_aligned(pad: int) -> None:
    """A header that is no multiple of eight long: wide elements begin anywhere (Automodel#2690)."""
    header, data = aligned_by(pad)
    made = publish_files({"model.safetensors": header + data})
    assert made.tensors == {"a": Piece("U8", (1,), data[:1]), "w": Piece("BF16", (3, 5), data[1:])}
    written = made.files["model.safetensors"]
    parsed = parse_header(written[: 8 + header_length(written)], path="model.safetensors", file_size=len(written))
    assert parsed.data_start % 64 == 0
    assert [entry.fqn for entry in parsed.entries if entry.start % size_in_bytes(entry.dtype, (1,))] == []


def aligned_by(pad: int) -> tuple[bytes, bytes]:
    """Return the header and the data of a file whose data begin ``pad`` bytes behind a multiple of eight."""
    entries = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [1, 31]},
    }
    raw = json.dumps(entries).encode()
    raw += b" " * ((pad - len(raw)) % 8)
    return len(raw).to_bytes(8, "little") + raw, np.random.default_rng(pad).bytes(31)
