"""A small network whose sizes are chosen to divide badly, and helpers to fill and shard real training state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from hfdcp_core.testing._world import State, World

BAD_SIZES = (7, 13, 5)
"""Extents that neither 2 nor 4 divides."""


class Block(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self, wide: int, wider: int, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(wide, wider)
        self.down = nn.Linear(wider, out, bias=False)
        self.norm = nn.LayerNorm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Do what its layers say (fully_shard asks for a forward)."""
        return self.norm(self.down(self.up(x).relu()))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks, a parameter of very few rows, a float buffer and a 0-d integer buffer."""

    def __init__(self, sizes: tuple[int, int, int] = BAD_SIZES, *, blocks: int = 1, few: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(*sizes) for _ in range(blocks))
        self.few_rows = nn.Parameter(torch.empty(few, 9))
        self.register_buffer("freqs", torch.empty(6))
        self.register_buffer("steps", torch.tensor(0, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it is given: nobody trains here."""
        return x


def filled(world: World, net: nn.Module, prefix: str = "") -> nn.Module:
    """Return the network with the values of its names."""
    world.recorder.fill(net, prefix)
    return net


def sharded(world: World, sizes: tuple[int, int, int] = BAD_SIZES, *, few: int = 1) -> State:
    """Return the state dict of a network under FSDP2, all ranks in one row."""
    net = filled(world, Net(sizes, few=few))
    fully_shard(net, mesh=world.mesh())
    return net.state_dict()


def tensor_parallel(net: nn.Module, mesh: DeviceMesh, *, up: ParallelStyle, down: ParallelStyle) -> None:
    """Shard the linear layers of each block as ``up`` and ``down`` say."""
    layers = net.get_submodule("layers")
    for block in layers.children():
        parallelize_module(block, mesh, {"up": up, "down": down})


def two_dimensional(world: World, net: nn.Module) -> State:
    """Return the state dict under FSDP2 over tensor parallelism on a mesh of 2 x 2."""
    mesh = world.mesh(dp=2, tp=2)
    tensor_parallel(net, mesh["tp"], up=ColwiseParallel(), down=RowwiseParallel())
    fully_shard(net, mesh=mesh["dp"])
    return net.state_dict()


def trained(world: World, net: nn.Module, *, model_prefix: str, optim_prefix: str) -> tuple[State, State]:
    """Take one AdamW step on a sharded network and return model and optimizer state with the values of their names."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), foreach=False)
    for parameter in net.parameters():
        parameter.grad = parameter.detach() * 0
    optimizer.step()
    model, optim = get_state_dict(net, optimizer)
    refill(world, model, model_prefix)
    refill(world, optim, optim_prefix)
    return dict(model), dict(optim)


def refill(world: World, state: Mapping[str, object], prefix: str) -> None:
    """Give every tensor of a state dict, sharded or not, the values of its name."""
    flat, _ = flatten_state_dict(dict(state))
    for name, tensor in flat.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        whole = world.recorder.make(prefix + name, tuple(tensor.shape), tensor.dtype)
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(whole)
