"""What torch's own writers make when they are asked for something else than usual, and older or larger meshes.

A function's name is the name of its case; `hfdcp_core.testing.checkpoints.CASES` says what each is for.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import Replicate, Shard

from hfdcp_core.testing._net import Net, filled, sharded
from hfdcp_core.testing._values import whole
from hfdcp_core.testing._world import State, World, builder, cut


def _zstd(path: str) -> filesystem.FileSystemWriter:
    return filesystem.FileSystemWriter(path, _extensions=[ZStandard()])


def _in_safetensors(folder: str) -> filesystem.FileSystemWriter:
    """Return a writer of a kind that torch has since 2.8."""
    return filesystem.FileSystemWriter(folder, serialization_format=filesystem.SerializationFormat.SAFETENSORS)


@builder(writer=_zstd)
def zstd(world: World) -> State:
    mesh, make = world.mesh(), world.recorder.make
    turned = world.recorder.record("turned", whole("turned", (9, 40)).t())
    return {
        **sharded(world),
        "wide": cut(make("wide", (400, 301)), mesh, 1),
        "zeros": world.recorder.record("zeros", torch.zeros(300, 300)),
        "turned": turned,
        "scalar": make("scalar", (), torch.bfloat16),
        "step": 3,
    }


@builder(writer=_in_safetensors)
def safetensors_inside(world: World) -> State:
    return {**sharded(world), "step": 3, "note": "objects lie before the tensors"}


@builder(writer=_in_safetensors)
def safetensors_inside_only(world: World) -> State:
    mesh = world.mesh()
    return {
        name: cut(world.recorder.make(name, (5, 6), dtype), mesh)
        for name, dtype in (("b", torch.bfloat16), ("i", torch.int32), ("f", torch.float8_e4m3fn), ("q", torch.bool))
    }


@builder(writer=lambda path: filesystem.FileSystemWriter(path, single_file_per_rank=True, thread_count=3))
def threads(world: World) -> State:
    return {**sharded(world), "step": 1}


@builder(save="each_rank_alone")
def metadata_by_rank(world: World) -> State:
    mesh, make = world.mesh(), world.recorder.make
    return {
        "w": cut(make("w", (5, 4)), mesh),
        "columns": cut(make("columns", (3, 7), torch.bfloat16), mesh, 1),
        "replica": make("replica", (3,)),
        "step": 1,
    }


@builder(save="in_background")
def saved_in_background(world: World) -> State:
    turned = world.recorder.record("turned", whole("turned", (6, 8)).t())
    return {**sharded(world), "turned": turned, "step": 4}


@builder()
def fsdp1(world: World) -> State:
    net = FullyShardedDataParallel(
        filled(world, Net((7, 13, 5), few=4)), use_orig_params=True, device_id=torch.device("cpu")
    )
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
        return dict(net.state_dict())


@builder()
def pipeline(world: World) -> State:
    """Each rank has layers of its own, and the first and the last one the ends of the model."""
    make = world.recorder.make
    layers = {f"layers.{number}.weight": (4 + number, 3) for number in range(2 * world.ranks)}
    made = {name: make(name, shape) for name, shape in layers.items()}
    ends = {name: make(name, (8, 3)) for name in ("embed.weight", "head.weight")}
    end = "embed.weight" if world.rank == 0 else "head.weight"
    state: State = {end: ends[end]}
    return state | {name: made[name] for number, name in enumerate(made) if number // 2 == world.rank}


@builder()
def mesh_of_three(world: World) -> State:
    mesh = world.mesh(dp=2, cp=world.ranks // 4, tp=2)
    spec = {
        "all.dimensions": ((5, 3, 9), (Shard(0), Shard(1), Shard(2))),
        "replicated.once": ((7, 9), (Shard(0), Replicate(), Shard(1))),
        "rows.twice": ((9, 2), (Shard(0), Replicate(), Shard(0))),
        "replicas": ((3,), (Replicate(), Replicate(), Replicate())),
    }
    return {name: world.shard(name, shape, mesh, placements) for name, (shape, placements) in spec.items()}
