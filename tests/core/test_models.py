"""What is published loads in transformers, and the right words come out: its logits are the model's own, to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hfdcp_core import publish
from hfdcp_core.job import Job

RANKS = Path(__file__).parent / "model_ranks.py"
KINDS = ("llama", "qwen3", "qwen3_moe", "gemma", "mixtral", "deepseek_v3", "gpt_oss", "phi3")
PROMPT = [3, 5, 7, 11, 13]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that four ranks saved by FSDP2, the dense ones by tensor parallelism too."""
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", RANKS, folder]
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks had: sums in another order are other sums
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits
    torch.set_num_threads(before)
    return logits


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_from_names_in_memory_and_from_names_of_the_hub(kind: str, saved: Path, tmp_path: Path) -> None:
    source, whole = saved / kind / "ckpt", saved / kind / "whole"
    expected = torch.load(saved / kind / "logits.pt")
    for recipe in ("transformers", "auto"):
        # transformers itself loads what comes out below: asking it before would only take twice as long
        job = Job(str(source), str(tmp_path / recipe), recipe=recipe, base=str(whole), load_check="off")
        publish.make(job)
        assert torch.equal(logits_of(tmp_path / recipe), expected)
    theirs, ours = tensors_of(whole), tensors_of(tmp_path / "transformers")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
