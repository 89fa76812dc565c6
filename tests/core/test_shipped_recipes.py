"""The recipes that come with hfdcp: each leads to the names of Hugging Face and back, element by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.equations import Compiled, Equations, compile_rules
from hfdcp_core.errors import PlanError
from hfdcp_core.recipe_sources import resolve, shipped
from hfdcp_core.sizes import Sizes
from hfdcp_core.testing.arrangements import evaluated

Array = npt.NDArray[np.int64]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """Extents of a small model."""

    layers: int
    kv_heads: int
    per_group: int
    half_head: int
    inner: int
    experts: int
    vocab: int
    tied: bool

    @property
    def hidden(self) -> int:
        return self.kv_heads * self.per_group * self.half_head * 2

    @property
    def config(self) -> dict[str, object]:
        return {
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.kv_heads * self.per_group,
            "num_key_value_heads": self.kv_heads,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_experts": self.experts,
            "n_routed_experts": self.experts,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
        }


models = st.builds(
    Model,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    per_group=st.integers(1, 2),
    half_head=st.integers(1, 3),
    inner=st.integers(1, 4),
    experts=st.integers(1, 3),
    vocab=st.integers(1, 7),
    tied=st.booleans(),
)


# ---- what Hugging Face's files of each kind of model hold -----------------------------------------------------------


def common(model: Model, norms: Iterable[str]) -> dict[str, tuple[int, ...]]:
    hidden = model.hidden
    shapes = {"model.embed_tokens.weight": (model.vocab, hidden), "model.norm.weight": (hidden,)}
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, hidden)
    for layer in range(model.layers):
        shapes |= {f"model.layers.{layer}.{norm}.weight": (hidden,) for norm in norms}
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
    return shapes


def attention(model: Model, *, biases: bool = False, norms: bool = False) -> dict[str, tuple[int, ...]]:
    keys = model.kv_heads * model.half_head * 2
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(model.layers):
        for name, rows in (("q", model.hidden), ("k", keys), ("v", keys)):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (rows, model.hidden)
            if biases:
                shapes[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = (rows,)
            if norms and name != "v":
                shapes[f"model.layers.{layer}.self_attn.{name}_norm.weight"] = (model.half_head * 2,)
    return shapes


def dense(model: Model, place: str = "mlp") -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (model.inner, model.hidden), "up_proj": (model.inner, model.hidden)}
    shapes["down_proj"] = (model.hidden, model.inner)
    layers = range(model.layers)
    return {f"model.layers.{n}.{place}.{name}.weight": shape for n in layers for name, shape in shapes.items()}


def experts(model: Model) -> dict[str, tuple[int, ...]]:
    shapes = {f"model.layers.{n}.mlp.gate.weight": (model.experts, model.hidden) for n in range(model.layers)}
    for expert in range(model.experts):
        shapes |= dense(model, f"mlp.experts.{expert}")
    return shapes


BEFORE = ("input_layernorm", "post_attention_layernorm")
GEMMA2 = (*BEFORE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
OLMO = ("post_attention_layernorm", "post_feedforward_layernorm")


def deepseek(model: Model) -> dict[str, tuple[int, ...]]:
    hidden, shapes = model.hidden, common(model, BEFORE) | experts(model) | dense(model, "mlp.shared_experts")
    names = {"q_a_proj": (3, hidden), "q_a_layernorm": (3,), "q_b_proj": (6, 3), "kv_a_proj_with_mqa": (5, hidden)}
    names |= {"kv_a_layernorm": (3,), "kv_b_proj": (8, 3)}
    for layer in range(model.layers):
        shapes |= {f"model.layers.{layer}.self_attn.{name}.weight": shape for name, shape in names.items()}
        shapes[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = (model.experts,)
    return shapes


FILES = {
    "accelerate": lambda m: common(m, BEFORE) | attention(m) | dense(m),
    "megatron-gpt": lambda m: common(m, BEFORE) | attention(m, biases=True, norms=True) | dense(m),
    "megatron-gpt-moe": lambda m: common(m, BEFORE) | attention(m, norms=True) | experts(m),
    "olmo-core": lambda m: (
        common(m, OLMO) | attention(m, norms=True) | experts(m) | {"lm_head.weight": (m.vocab, m.hidden)}
    ),
    "olmo-core-llama": lambda m: common(m, BEFORE) | attention(m) | dense(m) | {"lm_head.weight": (m.vocab, m.hidden)},
    "torchtitan-deepseek_v3": deepseek,
    "torchtitan-llama3": lambda m: common(m, BEFORE) | attention(m) | dense(m),
    "torchtitan-qwen3": lambda m: common(m, BEFORE) | attention(m, norms=True) | experts(m),
    "torchtune-gemma": lambda m: common(m, BEFORE) | attention(m) | dense(m),
    "torchtune-gemma2": lambda m: common(m, GEMMA2) | attention(m) | dense(m),
    "torchtune-llama3": lambda m: common(m, BEFORE) | attention(m) | dense(m),
    "torchtune-qwen2": lambda m: common(m, BEFORE) | attention(m, biases=True) | dense(m),
}
"""For each recipe: names and shapes of a model that it leads to."""


def test_every_shipped_recipe_is_here() -> None:
    assert set(FILES) == set(shipped())


# ---- there and back -------------------------------------------------------------------------------------------------


def recipe_called(name: str) -> Equations:
    found = resolve(name)
    assert isinstance(found, Equations)
    return found


def compiled(recipe: Equations, shapes: Shapes, model: Model) -> tuple[Compiled, ...]:
    tensors = {name: (name, TensorSpec("F32", shape)) for name, shape in shapes.items()}
    return compile_rules(recipe, tensors, Sizes(model.config, recipe.sizes))


def applied(targets: Iterable[Compiled], arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {target.fqn: evaluated(target.arrangement, arrays) for target in targets}


def counted(shapes: Shapes) -> dict[str, Array]:
    arrays, first = {}, 1
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        arrays[name] = np.arange(first, first + count).reshape(shape)
        first += count
    return arrays


@pytest.mark.parametrize("name", shipped())
@given(model=models)
@settings(deadline=None, max_examples=15)
def test_a_recipe_and_its_inverse_are_one_another_s_way_back(name: str, model: Model) -> None:
    recipe = recipe_called(name)
    files = FILES[name](model)
    native = {target.fqn: target.arrangement.shape for target in compiled(recipe.inverse(), files, model)}
    arrays = counted(native)
    made = applied(compiled(recipe, native, model), arrays)
    tied = {name for name in made if name == "lm_head.weight" and model.tied and name not in files}
    assert {name: array.shape for name, array in made.items() if name not in tied} == files
    back = applied(compiled(recipe.inverse(), {n: a.shape for n, a in made.items()}, model), made)
    for fqn, array in arrays.items():
        kept = back[fqn]
        assert kept.shape == array.shape
        assert ((kept == array) | (kept == 0)).all()
        assert (kept == array).all() or name.startswith("megatron")
        if name.startswith("megatron") and (kept == 0).any():
            assert (kept[: model.vocab] == array[: model.vocab]).all()  # what was padding is zero again


@pytest.mark.parametrize("name", [name for name in shipped() if name != "accelerate"])
def test_a_rule_that_is_gone_or_a_name_that_is_mistyped_is_told(name: str) -> None:
    model = Model(2, 2, 2, 2, 3, 2, 5, tied=False)
    recipe = recipe_called(name)
    native = {target.fqn: target.arrangement.shape for target in compiled(recipe.inverse(), FILES[name](model), model)}
    for fqn in native:
        odd = {other + ("s" if other == fqn else ""): shape for other, shape in native.items()}
        with pytest.raises(PlanError) as caught:
            compiled(recipe, odd, model)
        assert any(f"{fqn}s" in problem for problem in caught.value.problems)


def test_heads_that_the_config_does_not_say_are_told() -> None:
    model = Model(1, 2, 2, 2, 3, 2, 5, tied=False)
    recipe = recipe_called("torchtitan-llama3")
    native = {t.fqn: t.arrangement.shape for t in compiled(recipe.inverse(), FILES["torchtitan-llama3"](model), model)}
    tensors = {name: (name, TensorSpec("F32", shape)) for name, shape in native.items()}
    with pytest.raises(PlanError) as caught:
        compile_rules(recipe, tensors, Sizes(model.config | {"num_attention_heads": 3}, recipe.sizes))
    assert any("wq.weight" in problem for problem in caught.value.problems)
    with pytest.raises(PlanError) as nothing:
        compile_rules(recipe, tensors, Sizes({}, recipe.sizes))
    assert any("nothing says what heads is" in problem for problem in nothing.value.problems)
