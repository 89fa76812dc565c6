"""Saves and loads by real ranks, every way that the two libraries offer: run by torchrun, writes what it saw as JSON.

``torchrun --standalone --nproc-per-node 4 matrix_ranks.py FOLDER``: subsets of the four ranks save, other subsets load.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _consolidate_hf_safetensors as torch_consolidation
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hfdcp_core

SAVERS, LOADERS = (1, 2, 4), (1, 3)
WORLD = 4
MAPPING_FILES = 3


def truth() -> dict[str, torch.Tensor]:
    """Return every tensor, whole."""
    source = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    return {
        "row": normal(10, 6),
        "column": normal(8, 12).bfloat16(),
        "grid": normal(8, 8),
        "replicate": normal(7),
        "uneven": normal(7, 3).double(),
        "scalar": torch.tensor(3.5),
        "int": torch.arange(12).reshape(3, 4),
        "bool": torch.tensor([True, False, True]),
        "fp8": normal(8, 4).to(torch.float8_e4m3fn),
    }


PLACEMENTS = {
    "row": (Shard(0),),
    "column": (Shard(1),),
    "grid": (Shard(0), Shard(1)),
    "replicate": (Replicate(),),
    "uneven": (Shard(0),),
    "fp8": (Shard(0),),
}


@dataclass(frozen=True)
class Group:
    """The first ranks of the world, as a process group and as meshes."""

    size: int
    group: dist.ProcessGroup
    line: DeviceMesh
    grid: DeviceMesh

    def shard(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Distribute what is distributed; the rest is the same tensor on every rank."""
        return {name: self._placed(name, tensor) for name, tensor in tensors.items()}

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        placements = PLACEMENTS.get(name)
        if placements is None:
            return tensor
        mesh = self.grid if len(placements) == 2 else self.line
        return distribute_tensor(tensor, mesh, list(placements), src_data_rank=None)  # every rank has the whole


def make_group(size: int) -> Group:
    """Make a group; every rank of the world takes part in making it."""
    ranks = torch.arange(size)
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    group = dist.new_group(list(range(size)))
    assert group is not None
    return Group(size, group, DeviceMesh("cpu", ranks), DeviceMesh("cpu", ranks.reshape(shape)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def blank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


WRITERS: dict[str, Callable[..., Any]] = {
    "torch": dcp.HuggingFaceStorageWriter,
    "ours": hfdcp_core.HuggingFaceStorageWriter,
}
READERS: dict[str, Callable[[str], Any]] = {
    "torch": dcp.HuggingFaceStorageReader,
    "ours": hfdcp_core.HuggingFaceStorageReader,
}
CONSOLIDATORS: dict[str, Callable[..., None]] = {
    "torch": torch_consolidation.consolidate_safetensors_files,
    "ours": hfdcp_core.consolidate_safetensors_files,
}


def consolidates(consolidation: str, name: str) -> bool:
    """Whether torch's own consolidation can carry a tensor: it writes 0.0 for scalars and refuses integers."""
    return consolidation != "torch" or (truth()[name].is_floating_point() and truth()[name].dim() > 0)


def save(group: Group, writer: str, consolidation: str, folder: Path) -> Path:
    """Save by a group of ranks, and consolidate on the first."""
    tensors = {name: tensor for name, tensor in truth().items() if consolidates(consolidation, name)}
    if consolidation == "one-pass":
        target = WRITERS[writer](str(folder), save_distributed=True, enable_consolidation=True)
    elif consolidation == "not-distributed":
        target = WRITERS[writer](str(folder))
    else:
        target = WRITERS[writer](str(folder), save_distributed=True)
    if dist.get_rank() < group.size:
        dcp.save(group.shard(tensors), storage_writer=target, process_group=group.group)
    dist.barrier()
    if consolidation not in CONSOLIDATORS:
        return folder
    whole = folder.with_name(folder.name + "-whole")
    if dist.get_rank() == 0:
        whole.mkdir()
        CONSOLIDATORS[consolidation](
            str(folder), str(whole), {name: 1 + n % MAPPING_FILES for n, name in enumerate(sorted(tensors))}
        )
    dist.barrier()
    return whole


def load(group: Group, reader: str, folder: Path, names: list[str]) -> dict[str, bool]:
    """Load by a group of ranks, and say of each tensor whether it is right."""
    tensors = {name: tensor for name, tensor in truth().items() if name in names}
    found: dict[str, bool] = {}
    if dist.get_rank() < group.size:
        state = group.shard(blank(tensors))
        dcp.load(state, storage_reader=READERS[reader](str(folder)), process_group=group.group)
        wanted = group.shard(tensors)
        found = {name: torch.equal(bits(local(state[name])), bits(local(wanted[name]))) for name in tensors}
    seen: list[dict[str, bool]] = [{}] * WORLD
    dist.all_gather_object(seen, found)
    return {name: all(some[name] for some in seen[: group.size]) for name in tensors}


def main() -> None:
    root = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    savers, loaders = [make_group(size) for size in SAVERS], [make_group(size) for size in LOADERS]
    rows = []
    ways = [("torch", way) for way in ("none", "torch", "ours")]
    ways += [("ours", way) for way in ("none", "torch", "ours", "one-pass", "not-distributed")]
    for saver, (writer, way) in itertools.product(savers, ways):
        folder = save(saver, writer, way, root / f"{writer}-{way}-{saver.size}")
        names = [name for name in truth() if consolidates(way, name)]
        for loader, reader in itertools.product(loaders, READERS):
            found = load(loader, reader, folder, names)
            rows.append([writer, way, reader, saver.size, loader.size, found])
    if dist.get_rank() == 0:
        (root / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
