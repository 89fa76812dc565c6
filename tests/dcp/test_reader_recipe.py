"""Training starts from a repository: the reader gives a model's own names and shapes, by the inverse of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from hfdcp_core import HuggingFaceStorageReader
from hfdcp_core.arrangement import Arrangement
from hfdcp_core.testing.arrangements import evaluated
from hfdcp_core.testing.native_models import FILES, Model, compiled, recipe_called

MODEL = Model(2, 2, 2, 4, 12, 3, 20, tied=False)
NAMES = ("torchtitan-llama3", "torchtitan-qwen3", "megatron-gpt", "olmo-core", "torchtune-qwen2")


def repository(folder: Path, name: str, model: Model = MODEL) -> dict[str, torch.Tensor]:
    """Write what Hugging Face's files hold; return what the recipe's own framework would have in memory."""
    first, tensors = 1.0, {}
    for fqn, shape in FILES[name](model).items():
        count = int(torch.Size(shape).numel())
        tensors[fqn] = torch.arange(first, first + count).reshape(shape)
        first += count
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config))
    arrays = {fqn: tensor.numpy() for fqn, tensor in tensors.items()}
    targets = compiled(recipe_called(name).inverse(), FILES[name](model), model)
    return {target.fqn: torch.from_numpy(_numbers(target.arrangement, arrays)) for target in targets}


def _numbers(arrangement: Arrangement, arrays: Any) -> Any:
    return evaluated(arrangement, arrays).astype("float32")


def loaded(folder: Path, name: str, state: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    reader = HuggingFaceStorageReader(str(folder), recipe=f"inverse:{name}", **options)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize("name", NAMES)
def test_a_framework_s_own_model_is_loaded_from_a_repository(name: str, tmp_path: Path) -> None:
    expected = repository(tmp_path, name)
    state = loaded(tmp_path, name, {fqn: torch.full_like(tensor, -1) for fqn, tensor in expected.items()})
    assert all(torch.equal(state[fqn], tensor) for fqn, tensor in expected.items())


def test_into_tensors_of_another_order_and_dtype(tmp_path: Path) -> None:
    expected = repository(tmp_path, "torchtitan-llama3")
    matrices = {fqn: tensor for fqn, tensor in expected.items() if tensor.ndim == 2}
    state = {fqn: torch.zeros_like(tensor) for fqn, tensor in expected.items()}
    state |= {fqn: torch.zeros(tensor.shape[::-1], dtype=torch.float64).T for fqn, tensor in matrices.items()}
    loaded(tmp_path, "torchtitan-llama3", state)
    assert all(torch.equal(state[fqn].to(tensor.dtype), tensor) for fqn, tensor in expected.items())


def test_a_tied_head_is_there_twice_in_training(tmp_path: Path) -> None:
    tied = Model(1, 2, 2, 4, 12, 3, 20, tied=True)
    expected = repository(tmp_path, "torchtitan-qwen3", tied)
    state = loaded(tmp_path, "torchtitan-qwen3", {fqn: torch.zeros_like(tensor) for fqn, tensor in expected.items()})
    assert torch.equal(state["lm_head.weight"], state["tok_embeddings.weight"])


def test_what_does_not_fit_the_recipe_is_an_error(tmp_path: Path) -> None:
    repository(tmp_path, "torchtitan-llama3")
    with pytest.raises(CheckpointException, match="does not fit the checkpoint"):
        loaded(tmp_path, "torchtitan-qwen3", {"x": torch.zeros(1)})


def test_sizes_come_from_the_config_that_is_named(tmp_path: Path) -> None:
    expected = repository(tmp_path, "torchtitan-llama3")
    (tmp_path / "meta").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "meta" / "config.json")
    state = {fqn: torch.zeros_like(tensor) for fqn, tensor in expected.items()}
    with pytest.raises(CheckpointException, match="nothing says what heads is"):
        loaded(tmp_path, "torchtitan-llama3", state)
    loaded(tmp_path, "torchtitan-llama3", state, config=str(tmp_path / "meta"))
    assert all(torch.equal(state[fqn], tensor) for fqn, tensor in expected.items())
