"""transformers is asked whether it would load: of headers alone, and for real."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers

from hfdcp_core import load_check, load_child, publish
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import PlanError, UsageError, ValidationError
from hfdcp_core.job import Job
from hfdcp_core.load_check import LoadReport, can_ask, check, told
from hfdcp_core.safetensors_file import write_header
from hfdcp_core.store import open_store
from hfdcp_core.validate import read_raw_header

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
PLAIN_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def model_in(folder: Path, kind: str, **sizes: object) -> Mapping[str, object]:
    """Save a small model of random numbers, as transformers does; return its config."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**(SIZES | sizes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found


def headers(folder: Path) -> dict[str, bytes]:
    store = open_store(str(folder))
    return {path.name: read_raw_header(store, path.name) for path in folder.glob("*.safetensors")}


def renamed(folder: Path, old: str, new: str) -> dict[str, bytes]:
    """The headers of a model with another name in them; a name that is as long leaves all else in its place."""
    return {path: raw.replace(old.encode(), new.encode()) for path, raw in headers(folder).items()}


@pytest.fixture
def directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers in this process, which has it already; tests of whole runs ask as runs do."""

    def ask(_module: str, request: Mapping[str, object], *, what: str) -> dict[str, object]:
        del what
        return load_child.check(request)

    monkeypatch.setattr(load_check, "ask", ask)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    model_in(folder, "llama")
    return folder


def config_of(folder: Path, **changes: object) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text()) | changes


@pytest.mark.usefixtures("directly")
def test_names_that_the_hub_has_and_names_in_memory_load(tmp_path: Path) -> None:
    config = model_in(tmp_path, "qwen3_moe", num_experts=4, moe_intermediate_size=24)
    assert check(config, headers(tmp_path)).problems == ()
    gone = renamed(tmp_path, "experts.2.gate_proj", "experts.2.gate_prof")
    report = check(config, gone)
    assert any("gate_up_proj" in name for name in report.missing)


@pytest.mark.usefixtures("directly")
def test_a_tied_head_need_not_be_there(tmp_path: Path) -> None:
    config = model_in(tmp_path, "gemma", tie_word_embeddings=True)
    assert "lm_head" not in str(headers(tmp_path))
    report = check(config, headers(tmp_path))
    assert report.problems == ()
    [line] = told(report)
    assert line.startswith(f"transformers {transformers.__version__} loads it: nothing missing, nothing unexpected")
    untied = check({**config, "tie_word_embeddings": False}, headers(tmp_path))
    assert untied.missing == ("lm_head.weight",)


@pytest.mark.usefixtures("directly")
def test_a_mistyped_name_is_told_with_what_it_may_be(llama: Path) -> None:
    report = check(config_of(llama), renamed(llama, "self_attn.q_proj", "self_attn.q_prof"))
    assert [line.split(":")[0] for line in report.problems] == [
        "model.layers.0.self_attn.q_proj.weight and 1 more like it",
        "model.layers.0.self_attn.q_prof.weight and 1 more like it",
    ]
    assert "perhaps model.layers.0.self_attn.q_prof.weight" in report.problems[0]
    assert "perhaps model.layers.0.self_attn.q_proj.weight" in report.problems[1]


@pytest.mark.usefixtures("directly")
def test_a_config_that_disagrees_with_shapes_is_told(llama: Path) -> None:
    report = check(config_of(llama, vocab_size=65), headers(llama))
    assert sorted(line.split(" ")[0] for line in report.mismatched) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert "is [64, 32], and the model expects [65, 32]" in report.mismatched[0]


@pytest.mark.usefixtures("directly")
def test_numbers_with_scales_are_judged_as_plain_ones(llama: Path) -> None:
    specs = {"model.embed_tokens.weight": TensorSpec("BF16", (64, 32)), "model.norm.weight": TensorSpec("BF16", (32,))}
    specs["lm_head.weight"] = TensorSpec("BF16", (64, 32))
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
        }.items():
            specs[f"model.layers.{layer}.{name}.weight"] = TensorSpec("F8_E4M3", shape)
            specs[f"model.layers.{layer}.{name}.weight_scale_inv"] = TensorSpec("F32", (1, 1))
        for name, shape in {
            "self_attn.o_proj": (32, 32),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
        }.items():
            specs[f"model.layers.{layer}.{name}.weight"] = TensorSpec("BF16", shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            specs[f"model.layers.{layer}.{name}.weight"] = TensorSpec("BF16", (32,))
    header, _ = write_header(specs, metadata={"format": "pt"})
    config = config_of(llama, quantization_config={"quant_method": "fp8"})
    assert check(config, {"model.safetensors": header}).problems == ()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "names no model_type"),
        ({"model_type": 3}, "names no model_type"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "'gptq' are not known here"),
        ({"model_type": "llama", "quantization_config": 1}, "None are not known here"),
    ],
)
def test_what_cannot_be_judged_is_not_taken_for_right(config: Mapping[str, object], words: str) -> None:
    assert words in can_ask(config)
    assert words in check(config, {}).why


@pytest.mark.usefixtures("directly")
@pytest.mark.parametrize("config", [{"model_type": "none-such"}, PLAIN_LLAMA | {"architectures": ["MyOwnModel"]}])
def test_code_that_is_not_of_transformers_is_not_run(llama: Path, config: Mapping[str, object]) -> None:
    report = check(config, headers(llama))
    assert "has no class of its own for" in report.why
    assert told(report)[0].startswith("not checked whether transformers loads it")


# ---- as a step ------------------------------------------------------------------------------------------------------


def test_a_run_that_would_not_load_writes_nothing(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    raw = (llama / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(raw.replace(b"layers.1.mlp.up_proj", b"layers.1.mlp.up_prof"))
    job = Job(str(source), str(tmp_path / "out"), config=str(llama))
    with pytest.raises(PlanError, match="would not load this as its config says") as caught:
        publish.make(job)
    assert any("model.layers.1.mlp.up_proj.weight: the model needs it" in problem for problem in caught.value.problems)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    manifest = publish.make(Job(job.source, job.sink, config=job.config, load_check="off"))
    assert not any("loads it" in line for line in manifest.checks)
    part = Job(job.source, str(tmp_path / "part"), config=job.config, include=("model.layers.0.*",))
    publish.make(part)


def test_what_loads_is_said_in_the_manifest_and_can_be_asked_again(llama: Path, tmp_path: Path) -> None:
    job = Job(str(llama), str(tmp_path / "out"), base=str(llama), check_logits="3, 5, 7", reference=str(llama))
    manifest = publish.make(job)
    assert manifest.checks[-1].startswith("transformers ")
    again = Job("", job.sink, load_check="require", check_logits="3,5,7", reference=str(llama))
    assert publish.validate_again(again) == manifest
    (tmp_path / "other").mkdir()
    model_in(tmp_path / "other", "llama", rms_norm_eps=0.1)
    with pytest.raises(ValidationError, match="logits differ by"):
        publish.validate_again(
            Job("", job.sink, load_check="off", check_logits="3,5", reference=str(tmp_path / "other"))
        )


def test_a_check_that_is_required_is_no_luxury(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none-such"}')
    job = Job(str(llama), str(tmp_path / "out"), config=str(tmp_path), load_check="require")
    with pytest.raises(PlanError, match="cannot be checked"):
        publish.make(job)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"load_check": "maybe"}, "one of auto, off, require"),
        ({"reference": "x"}, "say what --check-logits compares with"),
        ({"base": "x", "ranks": 2}, "no model repository"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Job("a", "b", **options)  # type: ignore[arg-type]


def test_a_report_without_a_version_says_nothing_that_nobody_asked() -> None:
    assert told(LoadReport(why="--load-check off")) == ()
    assert told(LoadReport("5", missing=("w",)))[0].startswith("of what was chosen")
