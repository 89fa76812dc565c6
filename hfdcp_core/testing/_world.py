"""What a builder of state dicts is given, and the table that it enters itself in. Runs in the rank processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from hfdcp_core.testing._values import Recorder


def sharded_safetensors(folder: str, mapping: dict[str, int] | None = None) -> FileSystemWriter:
    """Return torch's own writer of sharded safetensors, which torch has since 2.8."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter(folder, mapping, save_distributed=True)


State = dict[str, object]
"""A state dict, perhaps nested, as ``dcp.save`` takes it."""
Save = Literal["together", "each_rank_alone", "in_background"]
"""``dcp.save``, ``dcp.save(use_collectives=False)``, ``dcp.async_save``."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view while it builds one checkpoint."""

    rank: int
    """Number of this process."""
    ranks: int
    """How many there are."""
    checkpoint: Path
    """Where the checkpoint is going to lie."""
    recorder: Recorder = field(default_factory=Recorder)
    """Makes the whole tensors and notes the truth."""

    def mesh(self, **dims: int) -> DeviceMesh:
        """Return a mesh of CPU ranks with the named dimensions; one over all ranks if none is named."""
        named = dims or {"dp": self.ranks}
        return init_device_mesh("cpu", tuple(named.values()), mesh_dim_names=tuple(named))

    def shard(self, name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
        """Return this rank's part of the float tensor that ``name`` stands for."""
        return distribute_tensor(self.recorder.make(name, shape), mesh, placements, src_data_rank=None)


def cut(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """Return this rank's part of a whole tensor of any dtype, cut along ``dim`` as FSDP2 cuts: later ranks get less.

    The part owns its memory, so the whole tensor can go.
    """
    extent = tensor.shape[dim]
    step = -(-extent // mesh.size())
    start, stop = (min(step * (dist.get_rank() + more), extent) for more in (0, 1))
    local = tensor.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, mesh, (Shard(dim),), run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


class Build(Protocol):
    """A function that makes one rank's state dict."""

    def __call__(self, world: World, /, **settings: str | int) -> State:
        """Record the whole tensors and return this rank's part of them."""
        ...


@dataclass(frozen=True, slots=True)
class Builder:
    """How one kind of checkpoint is made."""

    build: Build
    """Makes the state dict."""
    published: Callable[[str], str | None]
    """Clean name of a tensor by the name it is saved under; None for a tensor that is no weight."""
    writer: Callable[[str], FileSystemWriter] | None
    """torch's writer with other options than the usual, given the folder."""
    save: Save = "together"
    """How the ranks save: together, each with metadata of its own, or while they go on."""


BUILDERS: dict[str, Builder] = {}
"""Every builder, by the name of its function."""


def as_saved(name: str) -> str | None:
    """Return the name itself: a weight that keeps its name."""
    return name


def under(*keys: str) -> Callable[[str], str | None]:
    """Return a rule by which only what lies under the outer ``keys`` is a weight, and loses them.

    >>> under("app", "model")("app.model.norm.weight"), under("model")("optim.state.step")
    ('norm.weight', None)
    """
    prefix = "".join(f"{key}." for key in keys)
    return lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None


def renamed(names: Mapping[str, str]) -> Callable[[str], str | None]:
    """Return a rule by which each weight is called as ``names`` says, and others keep their name."""
    return lambda name: names.get(name, name)


def builder(
    *,
    published: Callable[[str], str | None] = as_saved,
    writer: Callable[[str], FileSystemWriter] | None = None,
    save: Save = "together",
) -> Callable[[Callable[..., State]], Callable[..., State]]:
    """Enter the decorated function in `BUILDERS`."""

    def enter(function: Callable[..., State]) -> Callable[..., State]:
        BUILDERS[function.__name__] = Builder(function, published, writer, save)
        return function

    return enter
