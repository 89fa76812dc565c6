"""The state dicts that real frameworks hand to ``dcp.save``, one function for each layout.

A function's name is the name of its case; `hfdcp_core.testing.checkpoints.CASES` says what each is for.
"""

from __future__ import annotations

import pickle
from functools import partial

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hfdcp_core.testing._net import Net, filled, sharded, tensor_parallel, trained, two_dimensional
from hfdcp_core.testing._values import DTYPES, whole
from hfdcp_core.testing._world import State, World, builder, cut, renamed, sharded_safetensors, under

# ---------------------------------------------------------------- FSDP2, HSDP, DDP


@builder()
def fsdp2_pair(world: World) -> State:
    return sharded(world)


@builder()
def fsdp2_even(world: World) -> State:
    return sharded(world, (8, 16, 8), few=4)


@builder()
def fsdp2_uneven(world: World) -> State:
    return sharded(world, few=3)


@builder()
def fsdp2_mostly_empty(world: World) -> State:
    return sharded(world, (2, 3, 2))


@builder()
def fsdp2_columns(world: World) -> State:
    net = filled(world, Net((8, 12, 8)).bfloat16())
    fully_shard(
        net,
        mesh=world.mesh(),
        shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world.ranks == 0 else Shard(0),
    )
    return net.state_dict()


@builder(writer=partial(FileSystemWriter, single_file_per_rank=False, thread_count=2))
def file_per_shard(world: World) -> State:
    return sharded(world)


@builder()
def hsdp(world: World) -> State:
    net = filled(world, Net())
    fully_shard(net, mesh=world.mesh(replica=2, dp=2))
    return net.state_dict()


@builder(published=lambda name: name.removeprefix("module."))
def ddp(world: World) -> State:
    net = filled(world, Net((9, 17, 8)), "module.")
    return nn.parallel.DistributedDataParallel(net).state_dict()


@builder()
def tied_fsdp2(world: World) -> State:
    weight = world.recorder.make("embed_tokens.weight", (11, 6))
    world.recorder.record("lm_head.weight", weight)
    part = cut(weight, world.mesh())
    return {"embed_tokens.weight": part, "lm_head.weight": part}


# ---------------------------------------------------------------- tensor parallel and several dimensions


@builder()
def tp_column(world: World) -> State:
    net = filled(world, Net())
    tensor_parallel(net, world.mesh(tp=world.ranks), up=ColwiseParallel(), down=ColwiseParallel())
    return net.state_dict()


@builder()
def tp_row(world: World) -> State:
    net = filled(world, Net())
    tensor_parallel(net, world.mesh(tp=world.ranks), up=RowwiseParallel(), down=RowwiseParallel())
    return net.state_dict()


@builder()
def fsdp_tp(world: World) -> State:
    return two_dimensional(world, filled(world, Net((16, 24, 16), blocks=2)))


@builder()
def fsdp_tp_uneven(world: World) -> State:
    return two_dimensional(world, filled(world, Net((7, 13, 6))))


@builder()
def mesh_orders(world: World) -> State:
    mesh = world.mesh(outer=2, inner=2)
    spec = {
        "rows.then.columns": ((5, 7), (Shard(0), Shard(1))),
        "columns.then.rows": ((5, 7), (Shard(1), Shard(0))),
        "rows.twice": ((9, 2), (Shard(0), Shard(0))),
        "columns.twice": ((3, 9), (Shard(1), Shard(1))),
        "rows.of.replicas": ((5, 3), (Replicate(), Shard(0))),
        "replicas.of.columns": ((3, 5), (Shard(1), Replicate())),
        "replicas": ((3, 3), (Replicate(), Replicate())),
        "scalar": ((), (Replicate(), Replicate())),
        "three.dimensions": ((3, 5, 9), (Shard(2), Shard(1))),
    }
    return {name: world.shard(name, shape, mesh, placements) for name, (shape, placements) in spec.items()}


@builder()
def middle_dimension(world: World) -> State:
    mesh = world.mesh()
    shapes = {"even": ((3, 8, 5), 1), "uneven": ((2, 7, 3), 1), "last": ((2, 3, 9), 2), "five": ((2, 3, 2, 5, 2), 3)}
    return {name: cut(world.recorder.make(name, shape), mesh, dim) for name, (shape, dim) in shapes.items()}


@builder()
def tall_columns(world: World) -> State:
    mesh, make = world.mesh(), world.recorder.make
    return {
        "bf16": cut(make("bf16", (5000, 10), torch.bfloat16), mesh, 1),
        "i8": cut(make("i8", (3001, 7), torch.int8), mesh, 1),
        "f64": cut(make("f64", (2000, 4), torch.float64), mesh, 1),
    }


@builder()
def experts(world: World) -> State:
    mesh = world.mesh(dp=2, ep=2)
    state: State = {
        name: world.shard(name, shape, mesh, (Shard(1), Shard(0)))
        for name, shape in {"grouped.w1": (6, 10, 4), "grouped.w2": (6, 4, 9)}.items()
    }
    own = {f"experts.{number}.w1": (6, 4 + number) for number in range(world.ranks)}
    made = {name: world.recorder.make(name, shape) for name, shape in own.items()}
    name = f"experts.{world.rank}.w1"
    return state | {name: made[name], "router.gate": world.recorder.make("router.gate", (8, 4))}


@builder()
def transposed_shards(world: World) -> State:
    mesh, full = world.mesh(), whole("full", (6, 8))
    world.recorder.record("columns", full)
    world.recorder.record("transposed", full.t())
    width = 8 // world.ranks
    mine = slice(width * world.rank, width * (world.rank + 1))
    return {
        "columns": DTensor.from_local(full[:, mine], mesh, (Shard(1),), run_check=False),
        "transposed": DTensor.from_local(full.t()[mine], mesh, (Shard(0),), run_check=False),
    }


@builder()
def blocks(world: World) -> State:
    full = world.recorder.make("table", (9, 8))
    boxes = ((0, 0, 4, 4), (0, 4, 4, 4), (4, 0, 5, 3), (4, 3, 5, 5))
    local = [
        LocalShard.from_tensor_and_offsets(full[r : r + h, c : c + w].contiguous(), [r, c], world.rank)
        for number, (r, c, h, w) in enumerate(boxes)
        if number % world.ranks == world.rank
    ]
    return {"table": init_from_local_shards(local, 9, 8)}


@builder()
def sharded_dtypes(world: World) -> State:
    mesh = world.mesh()
    return {name: cut(world.recorder.make(name, (5, 3), dtype), mesh) for name, dtype in DTYPES.items()}


# ---------------------------------------------------------------- whole training states, and names


def _fsdp_net(world: World) -> nn.Module:
    net = Net()
    fully_shard(net, mesh=world.mesh())
    return net


@builder(published=under("model"))
def train_state(world: World) -> State:
    model, optim = trained(world, _fsdp_net(world), model_prefix="model.", optim_prefix="optim.")
    return {
        "model": model,
        "optim": optim,
        "lr_scheduler": {"last_epoch": 3, "base_lrs": [1e-3], "_last_lr": [5e-4]},
        "dataloader": {"world_size": world.ranks, f"dp_rank_{world.rank}": pickle.dumps({"position": world.rank})},
        "train_state": {"step": world.recorder.make("train_state.step", (), torch.int32), "losses": [1.5, 1.25]},
        "rng": world.recorder.make("rng", (64,), torch.uint8),
        "note": "any object at all",
    }


@builder(published=under("app", "model"))
def app_state(world: World) -> State:
    model, optim = trained(world, _fsdp_net(world), model_prefix="app.model.", optim_prefix="app.optim.")
    return {"app": {"model": model, "optim": optim}, "step": 3}


WRAPPED = {
    "module._orig_mod.layers.0._checkpoint_wrapped_module.up.weight": "layers.0.up.weight",
    "module.layers.0._checkpoint_wrapped_module._orig_mod.down.weight": "layers.0.down.weight",
    "module._fsdp_wrapped_module.layers.1._fsdp_wrapped_module.up.weight": "layers.1.up.weight",
    "_orig_mod.module.norm.weight": "norm.weight",
    "module.lm_head._orig_mod.weight": "lm_head.weight",
    "module.layers.1.module.weight": "layers.1.module.weight",
}
"""What wrappers make of names, and what the names were."""


@builder(published=renamed(WRAPPED))
def wrapped_names(world: World) -> State:
    mesh = world.mesh()
    return {name: cut(world.recorder.make(name, (5, 4)), mesh) for name in WRAPPED}


# ---------------------------------------------------------------- torch's Hugging Face writer


@builder()
def hf_pair(world: World) -> State:
    return sharded(world)


@builder()
def hf_uneven(world: World) -> State:
    return sharded(world, few=3)


@builder()
def hf_two_dimensional(world: World) -> State:
    return two_dimensional(world, filled(world, Net((16, 24, 16), blocks=2)))


@builder()
def hf_columns(world: World) -> State:
    mesh = world.mesh()
    return {name: cut(world.recorder.make(name, (501, 10), DTYPES[name]), mesh, 1) for name in ("BF16", "F32", "I64")}


UNREADABLE = ("F8_E8M0", "F4")
"""Dtypes that torch's Hugging Face writer writes and its reader does not know."""


@builder()
def hf_unreadable(world: World) -> State:
    mesh = world.mesh()
    return {name: cut(world.recorder.make(name, (5, 3), DTYPES[name]), mesh) for name in UNREADABLE}


@builder()
def hf_dtypes(world: World) -> State:
    mesh, make = world.mesh(), world.recorder.make
    names = [name for name in DTYPES if name not in UNREADABLE]
    scalars: State = {f"scalar.{name}": make(f"scalar.{name}", (), DTYPES[name]) for name in ("F32", "I64", "BOOL")}
    return scalars | {name: cut(make(name, (5, 3), DTYPES[name]), mesh) for name in names}


MAPPED = {f"t{number}": 1 + number % 2 for number in range(6)}
"""Which file of its rank each tensor of `hf_mapped` goes to."""


@builder(writer=partial(sharded_safetensors, mapping=MAPPED))
def hf_mapped(world: World) -> State:
    mesh = world.mesh()
    return {name: cut(world.recorder.make(name, (5, 3)), mesh) for name in MAPPED}
