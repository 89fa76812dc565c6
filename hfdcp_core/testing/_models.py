"""Models for benchmarks and for the demo: llama-like names, realistic shapes, any size."""

from __future__ import annotations

import math
import pickle

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hfdcp_core.testing._net import trained
from hfdcp_core.testing._values import whole
from hfdcp_core.testing._world import State, World, builder, cut, under

LAYERS = 16
"""Layers of a model for benchmarks, whatever its size."""
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
"""Weights that tensor parallelism cuts by columns of the matrix."""


def llama_shapes(hidden: int, vocab: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model by name."""
    wide = hidden * 11 // 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        within = f"model.layers.{layer}."
        shapes |= {f"{within}self_attn.{kind}_proj.weight": (hidden, hidden) for kind in "qkvo"}
        shapes |= {f"{within}mlp.{kind}_proj.weight": (wide, hidden) for kind in ("gate", "up")}
        shapes[f"{within}mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{within}{kind}_layernorm.weight": (hidden,) for kind in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def shapes_of_size(elements: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model with very nearly that many elements.

    >>> elements = sum(math.prod(shape) for shape in shapes_of_size(1_000_000).values())
    >>> abs(elements - 1_000_000) < 1_000
    True
    """
    hidden = max(8, int(math.sqrt(elements / (12.25 * LAYERS + 16)) / 8) * 8)
    inner = sum(math.prod(shape) for shape in llama_shapes(hidden, 0, LAYERS).values())
    return llama_shapes(hidden, max(1, round((elements - inner) / 2 / hidden)), LAYERS)


@builder()
def model(world: World, *, total_bytes: int, layout: str, dtype: str) -> State:
    """Cut one tensor after the other, so that no rank holds more than its part and one whole tensor."""
    kind: torch.dtype = getattr(torch, dtype)
    mesh = world.mesh() if world.ranks > 1 else None
    state: State = {}
    for number, (name, shape) in enumerate(shapes_of_size(total_bytes // kind.itemsize).items()):
        tensor = whole(name, shape, kind)
        if number % world.ranks == world.rank:
            world.recorder.record(name, tensor)
        state[name] = tensor if mesh is None else cut(tensor, mesh, cut_dimension(name, shape, layout))
    return state


def cut_dimension(name: str, shape: tuple[int, ...], layout: str) -> int:
    """Return the dimension along which a layout cuts a tensor; vectors are always cut along their only one."""
    by_column = layout == "column" or (layout == "mixed" and name.endswith(ROW_PARALLEL))
    return 1 if by_column and len(shape) == 2 else 0


class Part(nn.Module):
    """Named children under a ``forward``, which fully_shard asks for."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it is given: nobody trains here."""
        return x


def llama(hidden: int, vocab: int, layers: int) -> nn.Module:
    """Return a network with the names of `llama_shapes`, an fp32 buffer and a 0-d integer buffer."""

    def linear(out: int, wide: int) -> nn.Module:
        return nn.Linear(wide, out, bias=False)

    wide = hidden * 11 // 4
    body = [
        Part(
            self_attn=Part(**{f"{kind}_proj": linear(hidden, hidden) for kind in "qkvo"}),
            mlp=Part(gate_proj=linear(wide, hidden), up_proj=linear(wide, hidden), down_proj=linear(hidden, wide)),
            input_layernorm=nn.RMSNorm(hidden),
            post_attention_layernorm=nn.RMSNorm(hidden),
        )
        for _ in range(layers)
    ]
    core = Part(embed_tokens=nn.Embedding(vocab, hidden), layers=nn.ModuleList(body), norm=nn.RMSNorm(hidden))
    net = Part(model=core, lm_head=linear(vocab, hidden)).bfloat16()
    core.register_buffer("inv_freq", torch.empty(hidden // 2, dtype=torch.float32))
    core.register_buffer("steps_trained", torch.tensor(0, dtype=torch.int64))
    return net


TENSOR_PARALLEL = {
    **{f"self_attn.{kind}_proj": ColwiseParallel() for kind in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{kind}_proj": ColwiseParallel() for kind in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}
"""How a transformer's layer is usually shared by the ranks of one group."""


@builder(published=under("model"))
def demo(world: World, *, hidden: int, vocab: int, layers: int) -> State:
    """Shard as a training run would: half of the layers by FSDP2 over tensor parallelism, the rest by FSDP2 alone."""
    mesh = world.mesh(dp=2, tp=world.ranks // 2)
    net = llama(hidden, vocab, layers)
    for number, layer in enumerate(net.get_submodule("model.layers").children()):
        if number % 2:
            parallelize_module(layer, mesh["tp"], TENSOR_PARALLEL)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    weights, optim = trained(world, net, model_prefix="model.", optim_prefix="optim.")
    return {
        "model": weights,
        "optim": optim,
        "lr_scheduler": {"last_epoch": 1000},
        "dataloader": {f"dp_rank_{world.rank}": pickle.dumps({"position": 17 + world.rank})},
        "step": 1000,
    }
