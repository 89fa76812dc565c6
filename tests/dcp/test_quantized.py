"""The drop-in quantised reader: scaled numbers come in as plain ones, where torch's is right and where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader as TorchsReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from hfdcp_core import QuantizedHuggingFaceStorageReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of four bits."""


def folder(path: Path, tensors: dict[str, torch.Tensor], *, block: list[int] | None = None) -> Path:
    """Write a plain folder with an index, as torch's reader wants one, and a config where a block is named."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if block:
        (path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": block}}))
    return path


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(4)) + 0.5


def in_blocks(weight: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Multiply each number with the scale of its block, as the definition has it."""
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


def load(reader: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_blocks_come_in_as_torchs_own_reader_brings_them(tmp_path: Path) -> None:
    weight, scale, norm = numbers(200, 300), scales(2, 3), torch.randn(5)
    path = folder(tmp_path / "q", {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": norm})
    shapes = {"a.weight": (200, 300), "norm.weight": (5,)}
    ours = load(QuantizedHuggingFaceStorageReader(path), {n: torch.zeros(s) for n, s in shapes.items()})
    torchs = load(TorchsReader(str(path)), {n: torch.zeros(s) for n, s in shapes.items()})
    assert torch.equal(ours["a.weight"], torchs["a.weight"])
    assert torch.equal(ours["a.weight"], in_blocks(weight, scale, 128, 128))
    assert torch.equal(ours["norm.weight"], norm)


@pytest.mark.parametrize("block", [[64, 64], [32, 128]])
def test_the_size_of_blocks_is_the_configs(tmp_path: Path, block: list[int]) -> None:
    weight = numbers(130, 200)
    scale = scales(-(-130 // block[0]), -(-200 // block[1]))
    path = folder(tmp_path / "q", {"a.weight": weight, "a.weight_scale_inv": scale}, block=block)
    state = load(QuantizedHuggingFaceStorageReader(path), {"a.weight": torch.zeros(130, 200)})
    assert torch.equal(state["a.weight"], in_blocks(weight, scale, *block))


def test_scales_of_rows_are_applied(tmp_path: Path) -> None:
    weight, scale = numbers(6, 40), scales(6, 1)
    path = folder(tmp_path / "q", {"a.weight": weight, "a.weight_scale": scale})
    state = load(QuantizedHuggingFaceStorageReader(path), {"a.weight": torch.zeros(6, 40)})
    assert torch.equal(state["a.weight"], weight.float() * scale)


def test_a_state_dict_that_is_filled_gets_the_target_dtype(tmp_path: Path) -> None:
    weight, scale = numbers(200, 300), scales(2, 3)
    path = folder(tmp_path / "q", {"a.weight": weight, "a.weight_scale_inv": scale})
    state: dict[str, Any] = {}
    reader = QuantizedHuggingFaceStorageReader(path, target_dtype=torch.bfloat16)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert torch.equal(state["a.weight"], in_blocks(weight, scale, 128, 128).bfloat16())


@pytest.mark.parametrize("lead", [(6,), (3, 6)], ids=["matrix", "experts"])
def test_every_number_of_mxfp4_is_filled(tmp_path: Path, lead: tuple[int, ...]) -> None:
    """torch's own fills the first G of G * 32 columns and leaves the rest as it was."""
    source = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (*lead, 4, 16), generator=source, dtype=torch.uint8)
    powers = torch.randint(120, 134, (*lead, 4), generator=source, dtype=torch.uint8)
    path = folder(tmp_path / "q", {"e_blocks": blocks, "e_scales": powers})
    pairs = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1)
    wanted = (pairs.flatten(-2) * torch.exp2(powers.float() - 127).unsqueeze(-1)).flatten(-2)
    state = load(QuantizedHuggingFaceStorageReader(path), {"e_blocks": torch.full((*lead, 128), 9.0)})
    assert torch.equal(state["e_blocks"], wanted)


def test_numbers_without_their_scale_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": numbers(128, 128), "a.weight_scale_inv": scales(1, 1), "b.weight": numbers(4, 4)}
    path = folder(tmp_path / "q", tensors)
    with pytest.raises(CheckpointException, match=r"b\.weight is F8_E4M3, and no scale of it is known"):
        load(QuantizedHuggingFaceStorageReader(path), {"a.weight": torch.zeros(128, 128)})


def test_a_checkpoint_that_is_not_quantised_is_read_as_it_is(tmp_path: Path) -> None:
    path = folder(tmp_path / "q", {"w": torch.arange(6.0)})
    assert torch.equal(load(QuantizedHuggingFaceStorageReader(path), {"w": torch.zeros(6)})["w"], torch.arange(6.0))
