"""Adapters are traced on tensors without data, in a process of their own: into what, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hfdcp_core import publish
from hfdcp_core.arrangement import Arrangement
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.equations import Compiled
from hfdcp_core.errors import PlanError
from hfdcp_core.recipe_sources import unused
from hfdcp_core.testing.arrangements import evaluated
from hfdcp_core.testing.in_memory import Files, Piece, publish_files, refusal_of, stored, weights_file
from hfdcp_core.tracing import load_adapter, trace
from hfdcp_core.wire import decode_as

PACKAGES = str(Path(__file__).parent / "package_adapters.py")
HEADS, KV_HEADS, HIDDEN, HEAD_DIM, EXPERTS, INNER, VOCAB, LAYERS = 4, 2, 32, 8, 4, 24, 40, 2


def checkpoint(**shapes: tuple[int, ...]) -> Files:
    """Tensors of different numbers; `__` in a name is a dot, and `0` in a layer's name every layer."""
    generator = np.random.default_rng(0)
    named = {
        name.replace("__", ".").replace("#", str(layer)): shape
        for name, shape in shapes.items()
        for layer in range(LAYERS)
    }
    return {
        "model.safetensors": weights_file(
            {n: Piece.of(generator.standard_normal(s, np.float32)) for n, s in named.items()}
        )
    }


def adapter(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"import torch\n\ndef to_hf(state):\n    {body}\n")
    return f"{folder / 'mine.py'}:to_hf"


# ---- real ones ------------------------------------------------------------------------------------------------------

_DENSE = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
_ROWS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
TITAN = {
    "tok_embeddings.weight": (VOCAB, HIDDEN),
    "norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
    "layers.#.attention_norm.weight": (HIDDEN,),
    "layers.#.ffn_norm.weight": (HIDDEN,),
    "layers.#.attention.wo.weight": (HIDDEN, HEADS * HEAD_DIM),
    **{f"layers.#.attention.qkv_linear.w{kind}.weight": (rows, HIDDEN) for kind, rows in _ROWS.items()},
}
TUNE = {
    "tok_embeddings.weight": (VOCAB, HIDDEN),
    "norm.scale": (HIDDEN,),
    "output.weight": (VOCAB, HIDDEN),
    "layers.#.sa_norm.scale": (HIDDEN,),
    "layers.#.mlp_norm.scale": (HIDDEN,),
    "layers.#.attn.output_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    **{f"layers.#.attn.{kind}_proj.weight": (rows, HIDDEN) for kind, rows in _ROWS.items()},
    **{f"layers.#.mlp.{name}.weight": shape for name, shape in _DENSE.items()},
}
REAL = {
    "llama3": ("torchtitan-llama3", TITAN | {f"layers.#.feed_forward.{n}.weight": s for n, s in _DENSE.items()}),
    "qwen3_moe": (
        "torchtitan-qwen3",
        TITAN
        | {f"layers.#.attention.{kind}_norm.weight": (HEAD_DIM,) for kind in "qk"}
        | {"layers.#.moe.router.gate.weight": (EXPERTS, HIDDEN)}
        | {
            f"layers.#.moe.routed_experts.inner_experts.{name}": (EXPERTS, *_DENSE[name[:2]])
            for name in ("w1_EFD", "w3_EFD", "w2_EDF")
        },
    ),
    "tune_llama3": ("torchtune-llama3", TUNE),
    "tune_qwen2": ("torchtune-qwen2", TUNE | {f"layers.#.attn.{k}_proj.bias": (rows,) for k, rows in _ROWS.items()}),
}
CONFIG = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_size": HIDDEN,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "vocab_size": VOCAB,
}


@pytest.mark.parametrize("name", REAL)
def test_adapters_of_torchtitan_and_torchtune_give_the_bytes_of_the_shipped_recipe(name: str, tmp_path: Path) -> None:
    recipe, shapes = REAL[name]
    files = checkpoint(**shapes)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    traced = publish_files(files, recipe=f"{PACKAGES}:{name}")
    shipped = publish_files(files, recipe=recipe, config=str(config))
    assert traced.manifest.recipe == f"package_adapters.py:{name}"
    assert traced.tensors == shipped.tensors
    assert len(traced.tensors) > len(shapes)


# ---- what can be traced ---------------------------------------------------------------------------------------------


def traced(folder: Path, body: str) -> tuple[Compiled, ...]:
    """What an adapter makes of W, traced in this process."""
    tensors = {"w": ("w", TensorSpec("F32", W.shape))}
    function = load_adapter(adapter(folder, body))
    assert callable(function)
    made = trace(function, tensors)["targets"]
    targets = tuple(
        Compiled(name, decode_as(Arrangement, target["arrangement"]), target["dtype"], "")
        for name, target in made.items()
    )
    PlanError.raise_for("left out", unused(targets, tensors))
    return targets


W = np.arange(48).reshape(4, 12)
MOVES = {
    "chunk and cat": (
        'return {"x": torch.cat(list(reversed(state["w"].chunk(2))), dim=0)}',
        np.concatenate([W[2:], W[:2]]),
    ),
    "movedim": ('return {"x": state["w"].view(4, 3, 4).movedim(0, -1)}', np.moveaxis(W.reshape(4, 3, 4), 0, -1)),
    "t": ('return {"x": state["w"].t().contiguous()}', W.T),
    "every second row": (
        'w = state["w"]\n    return {"x": torch.stack([w[::2], w[1::2]])}',
        np.stack([W[::2], W[1::2]]),
    ),
    "every fifth column": (
        'w = state["w"]\n    return {"x": torch.cat([w[:, n::5] for n in range(5)], 1)}',
        np.concatenate([W[:, n::5] for n in range(5)], 1),
    ),
    "unflatten, permute, flatten": (
        'return {"x": state["w"].unflatten(1, (3, 4)).permute(2, 0, 1).flatten(1)}',
        W.reshape(4, 3, 4).transpose(2, 0, 1).reshape(4, 12),
    ),
    "split by sizes": (
        'a, b = state["w"].split([1, 3])\n    return {"x": torch.cat([b, a])}',
        np.concatenate([W[1:], W[:1]]),
    ),
    "unbind and stack": ('return {"x": torch.stack(state["w"].unbind(1))}', W.T),
    "squeeze": ('return {"x": state["w"].unsqueeze(0).squeeze().unsqueeze(-1).squeeze(-1)[None]}', W[None]),
    "expand": ('return {"x": state["w"].unsqueeze(0).expand(1, -1, -1)}', W[None]),
    "pad": ('return {"x": torch.nn.functional.pad(state["w"], (0, 0, 0, 2))}', np.pad(W, ((0, 2), (0, 0)))),
    "cast": ('return {"x": state["w"].to(torch.float16).to(torch.float16).clone().detach()}', W),
    "a tensor of one dimension": ('return {"x": state["w"].flatten().t()}', W.reshape(-1)),
}


@pytest.mark.parametrize("way", MOVES)
def test_what_only_moves_elements_is_traced(way: str, tmp_path: Path) -> None:
    body, expected = MOVES[way]
    [target] = traced(tmp_path, body)
    assert (target.fqn, target.dtype) == ("x", "F16" if way == "cast" else "F32")
    assert target.arrangement.shape == expected.shape
    assert (evaluated(target.arrangement, {"w": W}) == expected).all()


REFUSED = {
    "numbers are changed": ('return {"x": state["w"] + 1}', r"aten.add.Tensor changes or looks at numbers"),
    "numbers decide": (
        'return {"x": state["w"]} if state["w"].max() > 0 else {}',
        r"aten.max.default changes or looks at",
    ),
    "written in place": (
        'x = torch.empty(4, 12)\n    x[:2] = state["w"][:2]\n    return {"x": x}',
        r"aten.copy_.default changes or looks at numbers",
    ),
    "repeated": ('return {"x": state["w"].unsqueeze(0).expand(2, -1, -1)}', "aten.expand repeats elements"),
    "a tensor of its own": (
        'return {"w": state["w"], "x": torch.zeros(3)}',
        "x comes out as a Tensor that is not made of",
    ),
    "joined with one": (
        'return {"w": torch.cat([state["w"], torch.zeros(1, 12, device="meta")])}',
        "that is not of the checkpoint",
    ),
    "cast twice": ('return {"w": state["w"].half().float()}', "casts a second time"),
    "of two dtypes": ('return {"w": torch.cat([state["w"], state["w"].half()])}', "of different dtypes"),
    "padded in front": (
        'return {"w": torch.nn.functional.pad(state["w"], (1, 0))}',
        "other than with zeros at the end",
    ),
    "left out": ("return {}", "w: it is in nothing that comes out; --exclude 'w'"),
    "left out in part": ('return {"x": state["w"][1:]}', "only 36 of its 48 elements come out"),
    "taken twice": ('return {"x": state["w"], "y": state["w"]}', "its elements come out more than once"),
    "not a state dict": ('return state["w"]', "returns a TracedTensor, not a state dict"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_traced_is_refused_by_the_name_of_the_operation(way: str, tmp_path: Path) -> None:
    body, words = REFUSED[way]
    with pytest.raises(PlanError, match=words):
        traced(tmp_path, body)


def test_whatever_happens_to_the_process_of_an_adapter_is_told(tmp_path: Path) -> None:
    files = {"model.safetensors": weights_file({"w": Piece.of(W)})}
    with pytest.raises(PlanError, match=r"KeyError: 'nothing' \(mine.py, line 4: return"):
        raise refusal_of(files, recipe=adapter(tmp_path, 'return state["nothing"]'))
    body = 'import os, sys\n    sys.stderr.write("a word of its own")\n    sys.stderr.flush()\n    os._exit(3)'
    with pytest.raises(PlanError, match="ended with status 3: a word of its own"):
        raise refusal_of(files, recipe=adapter(tmp_path, body))
    with pytest.raises(PlanError, match=r"aten.add.Tensor changes or looks at numbers; .* \(mine.py, line 4"):
        raise refusal_of(files, recipe=adapter(tmp_path, 'return {"x": state["w"] + 1}'))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("no_such_module:to_hf", "No module named 'no_such_module'"),
        ("json:to_hf", "json has no to_hf"),
        ("json:decoder.NaN", "is a float: expected a function"),
    ],
)
def test_an_adapter_that_is_none_is_refused(recipe: str, words: str) -> None:
    with pytest.raises((PlanError, ModuleNotFoundError), match=words):
        load_adapter(recipe)


def test_dtypes_that_torch_has_no_name_for_are_refused() -> None:
    with pytest.raises(PlanError, match="F6_E2M3, which this torch has no name for"):
        trace(lambda state: state, {"w": ("w", TensorSpec("F6_E2M3", (4, 4)))})


def test_a_recipe_of_a_module_is_taken_as_such(tmp_path: Path) -> None:
    """Rules may be written in Python too."""
    (tmp_path / "rules.py").write_text(
        "from hfdcp_core.recipe_text import read_recipe\n"
        "mine = read_recipe({'name': 'mine', 'rules': [{'rename': {'w': 'x'}}]}, where='rules.py')\n"
    )
    output = publish_files(
        {"model.safetensors": weights_file({"w": Piece.of(W)})}, recipe=f"{tmp_path / 'rules.py'}:mine"
    )
    assert set(output.tensors) == {"x"}
    assert output.manifest.recipe == "mine"


# ---- transformers' registry -----------------------------------------------------------------------------------------


def test_fused_experts_get_the_names_of_the_hub(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1}
    config |= {"hidden_size": 8, "num_experts": 2, "moe_intermediate_size": 3, "vocab_size": 5, "head_dim": 4}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fused = np.arange(2 * 6 * 8, dtype=np.float32).reshape(2, 6, 8)
    files = {"model.safetensors": weights_file({"model.layers.0.mlp.experts.gate_up_proj": Piece.of(fused)})}
    output = publish_files(files, recipe="transformers", config=str(tmp_path / "config.json"), load_check="off")
    expected = {
        f"model.layers.0.mlp.experts.{n}.{kind}_proj.weight": Piece.of(fused[n, 3 * at : 3 * at + 3])
        for n in range(2)
        for at, kind in enumerate(("gate", "up"))
    }
    assert output.tensors == expected


def test_the_registry_needs_a_config_that_it_knows(tmp_path: Path) -> None:
    files = {"model.safetensors": weights_file({"w": Piece.of(W)})}
    with pytest.raises(PlanError, match="needs the model's config"):
        raise refusal_of(files, recipe="transformers")
    (tmp_path / "config.json").write_text('{"model_type": "no-such"}')
    with pytest.raises(PlanError, match="knows no model_type 'no-such'"):
        raise refusal_of(files, recipe="transformers", config=str(tmp_path))


def test_an_output_of_an_adapter_can_be_compared_without_it(tmp_path: Path) -> None:
    source, sink = stored({"model.safetensors": weights_file({"w": Piece.of(W)})}), stored({})
    manifest = publish.make(publish.Job(source.url, sink.url, recipe=adapter(tmp_path, 'return {"x": state["w"].t()}')))
    (tmp_path / "mine.py").unlink()
    assert publish.validate_again(publish.Job(source.url, sink.url)) == manifest
