"""The whole chain, numbers changed on the way: cast, dequantised and quantised as torch does it, from any shards."""

from __future__ import annotations

import glob
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from hfdcp_core import publish
from hfdcp_core.dtypes import dtype_named, dtype_of_torch
from hfdcp_core.errors import CorruptFile, PlanError, ValidationError
from hfdcp_core.job import MEMORY_AT_START, SMALLEST_WINDOW, Job
from hfdcp_core.manifest import CONFIG_PATH
from hfdcp_core.operation import OPERAND_WINDOWS, WORKSPACE_BYTES
from hfdcp_core.plan import BUFFERS, SCRATCH
from hfdcp_core.testing.checkpoints import Truth
from hfdcp_core.testing.in_memory import Piece, publish_files, rank_files, refusal_of, weights_file

LEAST_MEMORY = MEMORY_AT_START + WORKSPACE_BYTES + SMALLEST_WINDOW * (BUFFERS + SCRATCH + OPERAND_WINDOWS)
"""Enough for the smallest windows, of which a matrix below takes several."""
UP, NORM = "model.up.weight", "model.norm.weight"
BLOCK = 128


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def piece(tensor: torch.Tensor, at: tuple[int, ...] | None = None) -> Piece:
    dtype = dtype_of_torch(str(tensor.dtype).removeprefix("torch.")).name
    return Piece(dtype, tuple(tensor.shape), tensor.reshape(-1).clone().view(torch.uint8).numpy().tobytes(), at)


def tensor_of(found: Piece) -> torch.Tensor:
    raw = torch.from_numpy(np.frombuffer(found.data, np.uint8).copy())
    return raw.view(getattr(torch, str(dtype_named(found.dtype).torch))).reshape(found.shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, but for what stands in a NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.double(), other.double()
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(one[~nan].view(torch.int64), other[~nan].view(torch.int64))


def expanded(scales: torch.Tensor, rows: int, columns: int, block: int = BLOCK) -> torch.Tensor:
    return scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]


ROWS, COLUMNS = 700, 330
FP8 = numbers(ROWS, COLUMNS).to(torch.float8_e4m3fn)
FP8_SCALES = numbers(6, 3, seed=1, scale=1e-2)
PLAIN = (FP8.float() * expanded(FP8_SCALES, ROWS, COLUMNS)).to(torch.bfloat16)
CONFIG = b'{"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'


# ---- casts ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    "case",
    ["fsdp2_uneven", "fsdp2_columns", "fsdp_tp_uneven", "experts", "scalars_and_empties", "bit_patterns", "views"],
)
def test_real_checkpoints_are_cast_as_torch_casts_them(
    case: str, dtype: str, checkpoints: Mapping[str, Truth], tmp_path: Path
) -> None:
    source, plain, cast = str(checkpoints[case].folder), str(tmp_path / "plain"), str(tmp_path / "cast")
    publish.make(Job(source, plain, include=("*",), recipe="none"))
    eight_bits = [name for name, t in load_file(f"{plain}/model.safetensors").items() if t.element_size() == 1]
    options = {"include": ("*",), "recipe": "none", "memory_bytes": LEAST_MEMORY, "workers": 1}
    manifest = publish.make(Job(source, cast, dtype=dtype, keep_dtype=tuple(map(glob.escape, eight_bits)), **options))
    before, after = load_file(f"{plain}/model.safetensors"), load_file(f"{cast}/model.safetensors")
    assert before.keys() == after.keys()
    target = getattr(torch, dtype)
    lost = {}
    for name, tensor in before.items():
        expected = tensor.to(target) if tensor.is_floating_point() and name not in eight_bits else tensor
        assert same(after[name], expected), name
        if count := int((tensor.isfinite() & ~expected.isfinite()).sum()) if expected is not tensor else 0:
            lost[name] = count
    assert {name: n for record in manifest.records for name, n in record.overflowed.items()} == lost
    assert manifest.records[0].source.unchecked == 0
    assert publish.validate_again(Job(source, cast)) == manifest


def test_the_budget_holds_and_the_plan_says_it() -> None:
    job = Job("somewhere", "elsewhere", dtype="bfloat16", memory_bytes=LEAST_MEMORY, workers=1)
    assert job.window_bytes == SMALLEST_WINDOW
    with pytest.raises(Exception, match="too little"):
        Job("a", "b", dtype="bfloat16", memory_bytes=LEAST_MEMORY - 1, workers=1).window_bytes  # noqa: B018


# ---- dequantising ----


def cut_anyhow(name: str, whole: torch.Tensor, cuts: list[list[int]]) -> list[dict[str, Piece]]:
    """Return pieces between cuts of rows and columns, one for each rank."""
    rows, columns = ([0, *sorted(set(cut)), extent] for cut, extent in zip(cuts, whole.shape, strict=True))
    return [
        {name: piece(whole[a:b, c:d].contiguous(), at=(a, c))}
        for a, b in itertools.pairwise(rows)
        for c, d in itertools.pairwise(columns)
    ]


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.integers(1, ROWS - 1), max_size=3),
    columns=st.lists(st.integers(1, COLUMNS - 1), max_size=2),
    scale_rows=st.lists(st.integers(1, 5), max_size=2),
)
def test_shards_may_cut_through_blocks(rows: list[int], columns: list[int], scale_rows: list[int]) -> None:
    ranks = cut_anyhow(UP, FP8, [rows, columns]) + cut_anyhow(f"{UP}_scale_inv", FP8_SCALES, [scale_rows, []])
    files = {**rank_files(*ranks), CONFIG_PATH: CONFIG}
    options = {"dequantize": True, "world_size": len(ranks), "memory_bytes": LEAST_MEMORY}
    output = publish_files(files, **options)
    assert output.tensors.keys() == {UP}
    assert same(tensor_of(output.tensors[UP]), PLAIN)


@pytest.mark.parametrize(
    ("name", "scales", "config", "options"),
    [
        ("weight_scale_inv", FP8_SCALES, CONFIG, {}),
        ("weight_scale_inv", FP8_SCALES, None, {"block_size": (128, 128)}),
        ("weight_scale_inv", FP8_SCALES.to(torch.bfloat16), CONFIG, {}),
        ("weight_scale", numbers(ROWS, 1, seed=2), None, {}),
        ("weight_scale", numbers(ROWS, seed=2), CONFIG, {}),
        ("weight_scale", torch.tensor(0.37), None, {}),
        ("weight_scale_inv", torch.tensor([0.37]), CONFIG, {}),
    ],
    ids=["blocks", "given-block", "bf16-scales", "rows", "rows-flat", "tensor", "one"],
)
def test_scales_in_another_file_become_part_of_the_numbers(
    name: str, scales: torch.Tensor, config: bytes | None, options: dict[str, object]
) -> None:
    files = {
        "model-00001-of-00002.safetensors": weights_file({UP: piece(FP8), NORM: piece(torch.ones(3))}),
        "model-00002-of-00002.safetensors": weights_file({f"model.up.{name}": piece(scales)}),
        "model.safetensors.index.json": json.dumps(
            {
                "metadata": {},
                "weight_map": {
                    UP: "model-00001-of-00002.safetensors",
                    NORM: "model-00001-of-00002.safetensors",
                    f"model.up.{name}": "model-00002-of-00002.safetensors",
                },
            }
        ).encode(),
        **({CONFIG_PATH: config} if config else {}),
    }
    output = publish_files(files, dequantize=True, dtype="float32", memory_bytes=LEAST_MEMORY, **options)
    wide = scales.float()
    if wide.numel() == 1:
        factors = wide.reshape(())
    else:
        factors = expanded(wide, ROWS, COLUMNS) if wide.shape == (6, 3) else wide.reshape(-1, 1)
    assert output.tensors.keys() == {UP, NORM}
    assert same(tensor_of(output.tensors[UP]), FP8.float() * factors)
    configs = [record.path for record in output.manifest.extra_files]
    assert configs == ([CONFIG_PATH] if config else [])


def test_blocks_whose_size_nobody_states_are_refused() -> None:
    files = {"model.safetensors": weights_file({UP: piece(FP8), f"{UP}_scale_inv": piece(FP8_SCALES)})}
    error = refusal_of(files, dequantize=True)
    assert isinstance(error, PlanError)
    assert "--block-size" in error.problems[0]


def test_numbers_without_their_scale_are_refused() -> None:
    files = {"model.safetensors": weights_file({UP: piece(FP8), f"{UP}_scale_inv": piece(FP8_SCALES)})}
    error = refusal_of(files, dtype="bfloat16")
    assert isinstance(error, PlanError)
    assert "--dequantize" in error.problems[0]
    kept = publish_files(files, dtype="bfloat16", keep_dtype=("*.up.weight",))
    assert kept.tensors == {UP: piece(FP8), f"{UP}_scale_inv": piece(FP8_SCALES)}


def test_stacked_experts_in_mxfp4_become_what_transformers_has() -> None:
    source = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 70, 40, 16), dtype=torch.uint8, generator=source)
    scales = torch.randint(100, 140, (3, 70, 40), dtype=torch.uint8, generator=source)
    ranks = [
        {
            "mlp.gate_up_proj_blocks": piece(blocks[:, a:b].contiguous(), at=(0, a, 0, 0)),
            "mlp.gate_up_proj_scales": piece(scales[:, a:b].contiguous(), at=(0, a, 0)),
        }
        for a, b in ((0, 33), (33, 70))
    ]
    output = publish_files(rank_files(*ranks), dequantize=True, world_size=2, memory_bytes=LEAST_MEMORY)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    plain = torch.ldexp(table[nibbles], scales.to(torch.int32)[..., None] - 127).to(torch.bfloat16).flatten(-2)
    assert output.tensors.keys() == {"mlp.gate_up_proj"}
    assert same(tensor_of(output.tensors["mlp.gate_up_proj"]), plain.transpose(1, 2).contiguous())


# ---- quantising, and what torch's own reader makes of it ----


def write_plain(folder: Path, tensors: dict[str, torch.Tensor], config: str = '{"dtype": "bfloat16"}') -> str:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / CONFIG_PATH).write_text(config)
    return str(folder)


def test_torchs_reader_of_quantised_models_reads_what_is_quantised_here(tmp_path: Path) -> None:
    weight = numbers(300, 200, scale=0.02).to(torch.bfloat16)
    source = write_plain(tmp_path / "in", {UP: weight, NORM: torch.ones(200), "lm_head.weight": weight.clone()})
    out = tmp_path / "out"
    publish.make(Job(source, str(out), quantize="fp8-block", max_file_size=1000))  # several files, so with an index
    assert json.loads((out / CONFIG_PATH).read_text())["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    state = {UP: torch.zeros(300, 200, dtype=torch.float32)}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(out)), no_dist=True)
    again = publish.make(Job(str(out), str(tmp_path / "again"), dequantize=True, dtype="float32"))
    ours = load_file(tmp_path / "again" / "model.safetensors")
    assert same(ours[UP], state[UP])
    assert (ours[UP] - weight.float()).abs().max() <= weight.float().abs().max() / 16
    assert torch.equal(ours["lm_head.weight"], weight.float())
    assert again.numerics.block_size == (128, 128)
    assert "quantization_config" not in json.loads((tmp_path / "again" / CONFIG_PATH).read_text())


@pytest.mark.parametrize("memory", [LEAST_MEMORY, 0], ids=["small-windows", "usual"])
def test_blocks_are_quantised_alike_in_windows_of_any_size_and_in_files_for_ranks(memory: int, tmp_path: Path) -> None:
    weight = numbers(1000, 300)
    source = write_plain(tmp_path / "in", {UP: weight})
    scales = torch.stack([part.abs().amax() for row in weight.split(BLOCK) for part in row.split(BLOCK, dim=1)])
    scales = (scales / 448).reshape(8, 3)
    expected = (weight / expanded(scales, 1000, 300)).clamp(-448, 448).to(torch.float8_e4m3fn)
    options = {"quantize": "fp8-block", "memory_bytes": memory, "workers": 1}
    publish.make(Job(source, str(tmp_path / "out"), **options))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert same(found[UP], expected)
    assert same(found[f"{UP}_scale_inv"], scales)
    publish.make(Job(source, str(tmp_path / "ranks"), ranks=3, **options))
    parts = [load_file(path) for path in sorted((tmp_path / "ranks").glob("*.safetensors"))]
    assert torch.equal(torch.cat([part[UP].float() for part in parts]), expected.float())
    assert torch.equal(torch.cat([part[f"{UP}_scale_inv"] for part in parts if f"{UP}_scale_inv" in part]), scales)


def test_a_quantised_model_needs_a_config_that_says_so(tmp_path: Path) -> None:
    save_file({UP: numbers(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=re.escape("name it (--config)")):
        publish.make(Job(str(tmp_path), str(tmp_path / "out"), quantize="fp8-block"))


# ---- what must hold for made tensors as for copied ones ----


@pytest.mark.parametrize("damaged", [UP, f"{UP}_scale_inv"], ids=["numbers", "scales"])
@pytest.mark.parametrize("memory", [LEAST_MEMORY, 0], ids=["small-windows", "usual"])
def test_damage_of_what_a_tensor_is_made_from_is_found(damaged: str, memory: int, tmp_path: Path) -> None:
    state = {UP: FP8.view(torch.uint8).clone().view(torch.float8_e4m3fn), f"{UP}_scale_inv": FP8_SCALES.clone()}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    [file] = (tmp_path / "ckpt").glob("*.distcp")
    raw = bytearray(file.read_bytes())
    place = raw.index(state[damaged].view(torch.uint8).numpy().tobytes())
    raw[place + 5] ^= 1
    file.write_bytes(raw)
    job = Job(
        str(tmp_path / "ckpt"),
        str(tmp_path / "out"),
        dequantize=True,
        block_size=(128, 128),
        memory_bytes=memory,
        workers=1,
    )
    with pytest.raises(CorruptFile, match=re.escape(damaged)):
        publish.make(job)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("options", [{"quantize": "fp8-block"}, {"dtype": "float16"}], ids=["quantise", "cast"])
def test_damage_of_a_plain_operand_is_found(options: dict[str, object], tmp_path: Path) -> None:
    weight = numbers(500, 300)
    dcp.save({UP: weight}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "ckpt" / CONFIG_PATH).write_text("{}")
    [file] = (tmp_path / "ckpt").glob("*.distcp")
    raw = bytearray(file.read_bytes())
    raw[raw.index(weight.numpy().tobytes()) + 400_003] ^= 64
    file.write_bytes(raw)
    with pytest.raises(CorruptFile, match="CRC-32"):
        publish.make(
            Job(str(tmp_path / "ckpt"), str(tmp_path / "out"), memory_bytes=LEAST_MEMORY, workers=1, **options)
        )


def test_a_source_that_gives_other_numbers_today_is_told(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "in", {UP: numbers(8, 8)})
    job = Job(source, str(tmp_path / "out"), dtype="bfloat16")
    manifest = publish.make(job)
    assert publish.validate_again(job) == manifest
    save_file({UP: numbers(8, 8) + 1}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(ValidationError, match="not what its manifest says") as caught:
        publish.validate_again(job)
    assert any(UP in problem for problem in caught.value.problems)


def test_tied_tensors_are_compared_as_they_will_be_written(tmp_path: Path) -> None:
    embed = numbers(8, 4)
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": embed * (1 + 2**-20)}
    source = write_plain(tmp_path / "in", tensors, '{"tie_word_embeddings": true, "dtype": "float32"}')
    with pytest.raises(PlanError, match="tie_word_embeddings") as caught:
        publish.make(Job(source, str(tmp_path / "out")))
    assert "hold different values" in caught.value.problems[0]
    job = Job(source, str(tmp_path / "out"), dtype="bfloat16")
    manifest = publish.make(job)
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert publish.validate_again(job) == manifest
    assert json.loads((tmp_path / "out" / CONFIG_PATH).read_text())["dtype"] == "bfloat16"


def test_a_config_says_of_ties_and_of_numbers_what_was_done(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": numbers(8, 4), "lm_head.weight": numbers(8, 4, seed=1)}
    source = write_plain(tmp_path / "in", tensors, '{"tie_word_embeddings": true, "dtype": "float32"}')
    publish.make(Job(source, str(tmp_path / "out"), dtype="float16", untie=True))
    assert (tmp_path / "out" / CONFIG_PATH).read_text() == '{"tie_word_embeddings": false, "dtype": "float16"}'


def test_the_plan_says_what_changes_and_another_wish_is_another_plan(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "in", {UP: numbers(8, 8), NORM: torch.ones(8, dtype=torch.bfloat16)})
    _, plain = publish.plan_only(Job(source, ""))
    _, cast = publish.plan_only(Job(source, "", dtype="bfloat16"))
    _, kept = publish.plan_only(Job(source, "", dtype="bfloat16", keep_dtype=(UP,)))
    assert plain.changes == kept.changes == ()
    [change] = cast.changes
    assert (change.tensors, change.before, change.after) == (1, 256, 128)
    assert cast.digest != plain.digest == kept.digest
    assert cast.peak_bytes - plain.peak_bytes == WORKSPACE_BYTES + OPERAND_WINDOWS * Job(source, "").window_bytes


def test_an_interrupted_cast_goes_on_with_the_files_that_are_whole(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "in", {UP: numbers(8, 8), NORM: torch.ones(8)})
    job = Job(source, str(tmp_path / "out"), dtype="bfloat16", max_file_size=100)
    first = publish.make(job)
    assert all(file.done for file in publish.reshard(job).files)
    assert publish.make(job) == first


def test_what_is_quantised_and_cut_for_ranks_with_nothing_left_for_some(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "in", {UP: numbers(2, 8), "empty": torch.ones(0, 8), "one": torch.tensor(1.5)})
    publish.make(Job(source, str(tmp_path / "out"), dtype="float16", ranks=4))
    parts = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert [sorted(part) for part in parts] == [["empty", UP, "one"], [UP], [], []]
    assert parts[0]["empty"].dtype == torch.float16
    assert torch.equal(torch.cat([part[UP] for part in parts[:2]]), numbers(2, 8).to(torch.float16))
