"""Recipes at the command line: one is proposed, a tensor explained, a checkpoint compared with what was made of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from hfdcp_core.testing.native_models import FILES, Model, compiled, recipe_called
from hfdcp_flows import cli

RECIPE = "torchtitan-llama3"
MODEL = Model(2, 2, 2, 4, 24, 4, 40, tied=False)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
QUICK = ("--load-check", "off")
"""transformers is asked in tests of its own."""


@pytest.fixture
def titan(tmp_path: Path) -> Path:
    """A model by torchtitan's names, and Hugging Face's config beside it in a folder of its own."""
    recipe, files = recipe_called(RECIPE), FILES[RECIPE](MODEL)
    native = {t.fqn: t.arrangement.shape for t in compiled(recipe.inverse(), files, MODEL)}
    random = np.random.default_rng(7)
    (tmp_path / "titan").mkdir()
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in native.items()}
    save_file(tensors, tmp_path / "titan" / "model.safetensors", {"format": "pt"})
    (tmp_path / "meta").mkdir()
    config = {**MODEL.config, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (tmp_path / "meta" / "config.json").write_text(json.dumps(config))
    return tmp_path / "titan"


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    status = cli.main([*map(str, args), "--quiet"])
    said = capsys.readouterr()
    return status, said.out, said.err


def made(capsys: pytest.CaptureFixture[str], titan: Path) -> Path:
    out = titan.parent / "out"
    status, _, err = run(capsys, "consolidate", titan, out, "--recipe", RECIPE, "--base", titan.parent / "meta", *QUICK)
    assert status == 0, err
    return out


def test_a_proposed_recipe_is_a_file_of_rules_that_a_person_completes(
    titan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta, expected = titan.parent / "meta", load_file(made(capsys, titan) / "model.safetensors")
    status, proposed, _ = run(capsys, "plan", titan, "--config", meta, "--infer-recipe")
    assert status == 0
    unsure = [line for line in proposed.splitlines() if "- " in line and "UNSURE" in line]
    assert [("wk" in line, "wq" in line) for line in unsure] == [(True, False), (False, True)]

    document = yaml.safe_load(proposed)
    for rule in document["rules"]:
        [(source, target)] = rule["rename"].items()
        if heads := {"wq": 4, "wk": 2}.get(source.split(".")[-2]):
            rule.clear()
            rule.update({"from": source, "to": target, "ops": [{"rope": {"heads": heads, "to": "half"}}]})
    (mine := titan.parent / "mine.yaml").write_text(yaml.safe_dump(document))
    again = titan.parent / "again"
    status, _, err = run(capsys, "consolidate", titan, again, "--recipe", mine, "--base", meta, *QUICK)
    assert status == 0, err
    written = load_file(again / "model.safetensors")
    assert {name: written[name].tobytes() for name in written} == {n: expected[n].tobytes() for n in expected}


def test_a_tensor_is_explained_down_to_the_bytes(titan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", titan, "--config", titan.parent / "meta", "--recipe", RECIPE, *QUICK, "--explain", Q_PROJ)
    status, said, _ = run(capsys, *asked)
    assert status == 0
    assert f"{Q_PROJ}  F32[32, 32]  in model.safetensors[" in said
    assert "rope(heads: heads, head_dim: head_dim, to: half)" in said
    assert "<- layers.1.attention.qkv_linear.wq.weight[0:32, 0:32] in model.safetensors[" in said
    _, document, _ = run(capsys, *asked, "--json")
    [told] = json.loads(document)["explained"]
    assert (told["fqn"], told["sources"]) == (Q_PROJ, ["layers.1.attention.qkv_linear.wq.weight"])
    status, _, err = run(capsys, *asked[:-1], "model.layers.1.self_attn.q_prj.weight")
    assert status == 2
    assert Q_PROJ in err


def test_a_native_checkpoint_is_compared_with_what_was_made_of_it(
    titan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(capsys, titan)
    sides = ("diff", titan, out, "--recipe", RECIPE, "--recipe-b", "auto", "--config", out)
    status, said, _ = run(capsys, *sides)
    assert (status, said.splitlines()[-1]) == (0, "21 tensors equal, 0 tensors different; 107.8 KB read")

    tensors = load_file(out / "model.safetensors")
    tensors[Q_PROJ][3, 4] *= np.float32(1.0001)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    status, said, _ = run(capsys, *sides)
    assert status == 1
    assert said.startswith(f"{Q_PROJ}  F32[32, 32]: unequal in 1 element, first at [3, 4]")
    assert run(capsys, *sides, "--tolerance", "1e-3")[0] == 0
    _, document, _ = run(capsys, *sides, "--json")
    [odd] = [one for one in json.loads(document)["diff"]["tensors"] if one["what"] != "equal"]
    assert (odd["fqn"], odd["differing"], odd["first"]) == (Q_PROJ, 1, [3, 4])


def test_one_recipe_for_two_kinds_of_names_is_refused(titan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = made(capsys, titan)
    status, _, err = run(capsys, "diff", titan, out, "--recipe", RECIPE, "--config", out)
    assert status == 4
    assert "model.embed_tokens.weight: no rule says what becomes of it" in err


@pytest.mark.parametrize(
    ("given", "status", "match"),
    [
        (("--recipe", "torchtitan-lama3"), 2, "torchtitan-llama3"),
        (("--recipe", RECIPE, "--config", "nowhere"), 3, "nowhere: there is no config.json"),
        (("--recipe", RECIPE), 4, "nothing says what heads is"),
        (("--infer-recipe",), 4, "needs the model's config"),
    ],
)
def test_wrong_input_is_told(
    titan: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], status: int, match: str
) -> None:
    ended, _, err = run(capsys, "plan", titan, *QUICK, *given)
    assert ended == status
    assert match in err
