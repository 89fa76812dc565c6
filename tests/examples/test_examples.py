"""The examples do what they say, each by two real ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load, load_file, save

from hfdcp_core.job import Job
from hfdcp_core.publish import validate_again
from hfdcp_core.store import Sink, open_store
from hfdcp_core.testing.dropin import differences, run_ranks
from hfdcp_core.testing.gcs_server import BUCKET, GcsServer
from hfdcp_core.testing.hub import Hub

HERE = Path(__file__).parent


def tensors_in(store: Sink) -> Mapping[str, torch.Tensor]:
    names = [stamp.path for stamp in store.list().files if stamp.path.endswith(".safetensors")]
    return {key: value for name in names for key, value in load(store.read_whole(name)).items()}


def test_a_plain_loop_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    run_ranks(HERE / "fsdp2_loop.py", 2, str(tmp_path / "twice"))
    run_ranks(HERE / "fsdp2_loop.py", 2, str(tmp_path / "twice"))
    assert sorted(path.name for path in (tmp_path / "twice").iterdir()) == ["step-4", "step-8"]
    first, second = (dict(tensors_in(open_store(tmp_path / "twice" / f"step-{step}"))) for step in (4, 8))
    assert {name: tuple(tensor.shape) for name, tensor in second.items()} == {
        "0.weight": (17, 8), "0.bias": (17,), "2.weight": (8, 17), "2.bias": (8,)
    }  # fmt: skip
    assert differences(first, second) == sorted(second), "it trained"
    validate_again(Job("", str(tmp_path / "twice" / "step-8")))


def test_the_last_save_of_torchtitan_goes_to_a_bucket() -> None:
    with GcsServer() as gcs:
        url = f"gs://{BUCKET}/run"
        run_ranks(HERE / "torchtitan_last_save.py", 2, url, json.dumps(dict(gcs.options)))
        wanted = {
            "model.embed.weight": torch.arange(96.0).reshape(12, 8),
            "model.norm.weight": torch.ones(8, dtype=torch.bfloat16),
        }
        files = {"one-pass": 1, "mapped": 2}
        for way, count in files.items():
            store = open_store(f"{url}/{way}", storage_options=gcs.options)
            assert differences(tensors_in(store), wanted) == []
            names = [stamp.path for stamp in store.list().files]
            assert len([name for name in names if name.endswith(".safetensors")]) == count
            assert "model.safetensors.index.json" in names


def test_transformers_saves_and_loads_by_our_classes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    run_ranks(HERE / "transformers_save_pretrained.py", 2, str(tmp_path / "model"), str(tmp_path / "out"))
    shards = sorted(path.name for path in (tmp_path / "out").glob("shard-*.safetensors"))
    assert shards == [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    whole = {}
    for path in (tmp_path / "out" / "consolidated").glob("*.safetensors"):
        whole |= load_file(path)
    assert differences(whole, load_file(tmp_path / "model" / "model.safetensors")) == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "consolidated")
    assert differences(model.state_dict(), whole) == []


# huggingface_hub 2.4 still sends LFS parts by an argument that httpx2 deprecates; it is theirs to change.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_fine_tuning_begins_and_ends_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"a.weight": torch.arange(60.0).reshape(10, 6), "b.weight": torch.ones(5, 2).bfloat16()}
    with Hub(tmp_path / "hub") as hub:
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
        api = HfApi(endpoint=hub.url, token=hub.token)
        api.create_repo("acme/base", private=True)
        api.upload_file(repo_id="acme/base", path_in_repo="model.safetensors", path_or_fileobj=save(base))
        said = run_ranks(HERE / "finetune_from_hub.py", 2, "acme/base", "acme/tuned", str(tmp_path / "tuned"))
        assert "bytes in 2 ranges" in said
        name = "model-00001-of-00001.safetensors"
        pushed = load_file(hub.download("acme/tuned", name, tmp_path / "back"))
    assert differences(pushed, {name: tensor + 1 for name, tensor in base.items()}) == []
