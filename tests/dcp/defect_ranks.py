"""What torch's classes get wrong between ranks: run by torchrun on two, writes what it saw as JSON.

``torchrun --standalone --nproc-per-node 2 defect_ranks.py FOLDER``
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hfdcp_core import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
    StridedLoadPlanner,
    StridedSavePlanner,
)
from hfdcp_core.dcp.ranks import Ranks

WORLD = 2
PATIENCE_S = 3
"""How long a collective of a group waits."""
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
WHOLE = torch.arange(96.0).reshape(12, 8)


def right(value: bool) -> str:
    return "right" if value else "wrong"


def cut(tensor: torch.Tensor, dim: int) -> DTensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (WORLD,)), [Shard(dim)], src_data_rank=None)


def is_cut_of(part: DTensor, whole: torch.Tensor) -> bool:
    """Whether this rank holds its part of a tensor."""
    return torch.equal(part.to_local(), distribute_tensor(whole, part.device_mesh, part.placements).to_local())


def experts_into_parts(path: Path) -> str:
    """Let every rank read its part of MXFP4 experts, cut by experts, by rows and through groups."""
    source = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (4, 6, 4, 16), generator=source, dtype=torch.uint8)
    powers = torch.randint(120, 134, (4, 6, 4), generator=source, dtype=torch.uint8)
    if dist.get_rank() == 0:
        path.mkdir()
        save_file({"e_blocks": blocks, "e_scales": powers}, path / "model.safetensors")
    dist.barrier()
    pairs = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1)
    wanted = (pairs.flatten(-2) * torch.exp2(powers.float() - 127).unsqueeze(-1)).flatten(-2)
    seen = []
    for dim in range(3):
        state = {"e_blocks": cut(torch.full(tuple(wanted.shape), 9.0), dim)}
        dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(path))
        seen.append(is_cut_of(state["e_blocks"], wanted))
    return right(all(seen))


def strided(path: Path, options: dict[str, Any], dim: int, factor: int) -> str:
    """Save every second run of rows or columns, and read it whole, and the same way."""
    mesh = init_device_mesh("cpu", (WORLD,))
    placed = [_StridedShard(dim, split_factor=factor)]
    state = {"w": distribute_tensor(WHOLE, mesh, placed, src_data_rank=None), "plain": WHOLE + 1}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, **options), planner=StridedSavePlanner())
    whole = {"w": torch.zeros(12, 8), "plain": torch.zeros(12, 8)}
    dcp.load(whole, storage_reader=HuggingFaceStorageReader(path))
    same = {"w": distribute_tensor(torch.zeros(12, 8), mesh, placed, src_data_rank=None), "plain": torch.zeros(12, 8)}
    dcp.load(same, storage_reader=HuggingFaceStorageReader(path), planner=StridedLoadPlanner())
    both = torch.equal(whole["w"], WHOLE) and torch.equal(whole["plain"], WHOLE + 1)
    return right(both and torch.equal(same["w"].to_local(), state["w"].to_local()))


def over_two_dimensions(path: Path) -> str:
    """Save what FSDP over tensor parallelism makes of one dimension, and replicas of strided parts."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    both = [_StridedShard(0, split_factor=WORLD), Shard(0)]
    copies = [_StridedShard(1, split_factor=2), Replicate()]
    state = {
        "both": distribute_tensor(WHOLE, mesh, both, src_data_rank=None),
        "copies": distribute_tensor(WHOLE, mesh, copies, src_data_rank=None),
    }
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer, planner=StridedSavePlanner())
    whole = {"both": torch.zeros(12, 8), "copies": torch.zeros(12, 8)}
    dcp.load(whole, storage_reader=HuggingFaceStorageReader(path))
    return right(all(torch.equal(found, WHOLE) for found in whole.values()))


def refused(deed: Callable[[], object]) -> str:
    """Return what a save or a load is refused with."""
    try:
        deed()
    except CheckpointException as error:
        return str(error)
    return "nothing"


def strided_mistakes(path: Path) -> str:
    """Name a strided tensor that the checkpoint lacks or has in another shape, and refuse cuts that can mean two."""
    mesh = init_device_mesh("cpu", (WORLD,))
    one = distribute_tensor(WHOLE, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    dcp.save({"w": one, "other": WHOLE}, storage_writer=HuggingFaceStorageWriter(path), planner=StridedSavePlanner())

    def load(state: dict[str, Any], **options: bool) -> None:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(path), planner=StridedLoadPlanner(**options))

    half = distribute_tensor(WHOLE[:8], mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    lacking, other = refused(lambda: load({"x": one})), refused(lambda: load({"w": half}))
    passed = refused(lambda: load({"x": one, "w": one}, allow_partial_load=True))
    grid = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    odd = distribute_tensor(WHOLE[:7], grid, [_StridedShard(0, split_factor=WORLD), Shard(0)], src_data_rank=None)
    writer = HuggingFaceStorageWriter(path.with_name("odd"))
    uneven = refused(lambda: dcp.save({"odd": odd}, storage_writer=writer, planner=StridedSavePlanner()))
    return right(
        "x: the state dict has [12, 8], the checkpoint no such tensor" in lacking
        and "w: the state dict has [8, 8], the checkpoint [12, 8]" in other
        and passed == "nothing"
        and "7 along dimension 0 cannot be cut evenly" in uneven
    )


def moved() -> int:
    """Return how many bytes this process has read and written, as the kernel counts system calls."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def the_end_moves_nothing(path: Path) -> str:
    """Let the first rank end a save, for which the others wait in a collective, without touching the tensors again."""
    seen = []

    class Measured(HuggingFaceStorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            before = moved()
            super().finish(metadata, results)
            seen.append(moved() - before)

    state = {"w": cut(torch.zeros(2048, 1024), 0), "v": cut(torch.ones(2048, 1024), 1)}
    writer = Measured(path, save_distributed=True, enable_consolidation=True, hash="later")
    dcp.save(state, storage_writer=writer)
    return right(seen == [] if dist.get_rank() else seen[0] < (1 << 20))


def slow(path: Path) -> str:
    """Let one rank be slower than the group's patience, reading metadata and consolidating."""
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))

    class Slow(HuggingFaceStorageReader):
        def _catalog(self) -> Any:
            time.sleep(PATIENCE_S + 1)
            return super()._catalog()

    state = {"w": cut(WHOLE, 0)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))
    found = {"w": cut(torch.zeros(12, 8), 1)}
    dcp.load(found, storage_reader=Slow(path, process_group=group))
    made = Ranks(group).own(lambda: time.sleep((PATIENCE_S + 1) * dist.get_rank()))
    return right(is_cut_of(found["w"], WHOLE) and made is None)


ONE_PASS = {"save_distributed": True, "enable_consolidation": True}
CASES: dict[str, Callable[[Path], str]] = {
    "experts in four bits into parts": experts_into_parts,
    "strided rows, whole": lambda path: strided(path, ONE_PASS, 0, 3),
    "strided rows, sharded": lambda path: strided(path, {"save_distributed": True}, 0, 2),
    "strided columns, whole": lambda path: strided(path, ONE_PASS, 1, 2),
    "strided over two dimensions of a mesh": over_two_dimensions,
    "mistakes with strided tensors": strided_mistakes,
    "the end of a save moves no tensors": the_end_moves_nothing,
    "a rank that is slower than a group's patience": slow,
}


def main() -> None:
    root = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {name: case(root / name.replace(" ", "-")) for name, case in CASES.items()}
    everywhere: list[Any] = [None] * WORLD
    dist.all_gather_object(everywhere, seen)
    if dist.get_rank() == 0:
        merged = {name: sorted({other[name] for other in everywhere}) for name in seen}
        (root / "seen.json").write_text(json.dumps(merged))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
