"""What Hugging Face's files of small models hold, for each shipped recipe: names and shapes, no numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.equations import Compiled, Equations, compile_rules
from hfdcp_core.recipe_sources import resolve
from hfdcp_core.sizes import Sizes

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Model:
    """Extents of a small model."""

    layers: int
    """Layers."""
    kv_heads: int
    """Heads of keys and values."""
    per_group: int
    """Heads of queries for each of them."""
    half_head: int
    """Half of the rows of a head."""
    inner: int
    """Width of the feed-forward block."""
    experts: int
    """Experts."""
    vocab: int
    """Words."""
    tied: bool
    """Whether the head is the embedding."""

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.kv_heads * self.per_group * self.half_head * 2

    @property
    def config(self) -> dict[str, object]:
        """What a config says of it."""
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


# ---- what Hugging Face's files of each kind of model hold -----------------------------------------------------------


def common(model: Model, norms: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """What all of them have."""
    hidden = model.hidden
    shapes = {"model.embed_tokens.weight": (model.vocab, hidden), "model.norm.weight": (hidden,)}
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, hidden)
    for layer in range(model.layers):
        shapes |= {f"model.layers.{layer}.{norm}.weight": (hidden,) for norm in norms}
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
    return shapes


def attention(model: Model, *, biases: bool = False, norms: bool = False) -> dict[str, tuple[int, ...]]:
    """The projections of attention."""
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
    """A feed-forward block."""
    wide = (model.inner, model.hidden)
    shapes: dict[str, tuple[int, ...]] = {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}
    layers = range(model.layers)
    return {f"model.layers.{n}.{place}.{name}.weight": shape for n in layers for name, shape in shapes.items()}


def experts(model: Model) -> dict[str, tuple[int, ...]]:
    """A mixture of experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {f"model.layers.{n}.mlp.gate.weight": (model.experts, model.hidden) for n in range(model.layers)}
    for expert in range(model.experts):
        shapes |= dense(model, f"mlp.experts.{expert}")
    return shapes


BEFORE = ("input_layernorm", "post_attention_layernorm")
GEMMA2 = (*BEFORE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
OLMO = ("post_attention_layernorm", "post_feedforward_layernorm")


def deepseek(model: Model) -> dict[str, tuple[int, ...]]:
    """What DeepSeek V3 has."""
    hidden, shapes = model.hidden, common(model, BEFORE) | experts(model) | dense(model, "mlp.shared_experts")
    names = {"q_a_proj": (3, hidden), "q_a_layernorm": (3,), "q_b_proj": (6, 3), "kv_a_proj_with_mqa": (5, hidden)}
    names |= {"kv_a_layernorm": (3,), "kv_b_proj": (8, 3)}
    for layer in range(model.layers):
        shapes |= {f"model.layers.{layer}.self_attn.{name}.weight": shape for name, shape in names.items()}
        shapes[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = (model.experts,)
    return shapes


FILES: Mapping[str, Callable[[Model], dict[str, tuple[int, ...]]]] = {
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


def recipe_called(name: str) -> Equations:
    """Return a recipe of rules by name."""
    found = resolve(name)
    assert isinstance(found, Equations)
    return found


def compiled(recipe: Equations, shapes: Shapes, model: Model) -> tuple[Compiled, ...]:
    """Hold a recipe against tensors of given shapes."""
    tensors = {name: (name, TensorSpec("F32", shape)) for name, shape in shapes.items()}
    return compile_rules(recipe, tensors, Sizes(model.config, recipe.sizes))
