"""What several ranks save in odd ways: run by torchrun, writes what it saw as JSON.

``torchrun --standalone --nproc-per-node 2 saving_ranks.py FOLDER``
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hfdcp_core
from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter

WORLD = 2
WHOLE = torch.arange(48.0).reshape(8, 6)


def distributed(tensor: torch.Tensor, dim: int = 0) -> DTensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (WORLD,)), [Shard(dim)], src_data_rank=None)


def read_back(path: Path, shape: tuple[int, ...] = (8, 6), reader: Any = HuggingFaceStorageReader) -> torch.Tensor:
    """Load the tensor ``w`` on every rank for itself."""
    state = {"w": torch.full(shape, -1.0)}
    dcp.load(state, storage_reader=reader(str(path)))
    return state["w"]


def striped(whole: torch.Tensor) -> ShardedTensor:
    """Give each rank two boxes of one tensor: every second pair of rows."""
    rank = dist.get_rank()
    shards = [
        LocalShard.from_tensor_and_offsets(whole[start : start + 2].clone(), [start, 0], rank)
        for start in range(2 * rank, 8, 2 * WORLD)
    ]
    return init_from_local_shards(shards, 8, 6)


class FailsOnTheLastRank(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == WORLD - 1:
            raise OSError("the disk of the last rank is gone")
        return super().resolve_data(write_item)


def files_of(path: Path) -> dict[str, str]:
    """Return what a loader may see of a folder."""
    return {found.name: found.read_bytes().hex() for found in sorted(path.iterdir()) if found.name[0] != "."}


def failure(path: Path, options: dict[str, Any]) -> str:
    """Save once well, then let the last rank fail; say what every rank was told and whether the old one stands."""
    dcp.save({"w": distributed(WHOLE)}, storage_writer=HuggingFaceStorageWriter(path, **options))
    before = files_of(path) if dist.get_rank() == 0 else {}
    dist.barrier()
    writer = HuggingFaceStorageWriter(path, **options)
    try:
        dcp.save({"w": distributed(WHOLE + 1)}, storage_writer=writer, planner=FailsOnTheLastRank())
    except CheckpointException as error:
        told = "the disk of the last rank is gone" in str(error) or str(error)
    else:
        told = False
    writer.reset()
    dist.barrier()
    same = dist.get_rank() != 0 or before == files_of(path)
    stands = torch.equal(read_back(path), WHOLE)
    dcp.save({"w": distributed(WHOLE + 2)}, storage_writer=HuggingFaceStorageWriter(path, **options))
    dist.barrier()
    clean = [found.name for found in path.iterdir() if found.name[0] == "."] == []
    after = torch.equal(read_back(path), WHOLE + 2)
    return "right" if told and same and stands and clean and after else f"{told=} {same=} {stands=} {clean=} {after=}"


def stale(path: Path) -> str:
    """Save by two ranks, then by one: nothing of the wider save may count."""
    options = {"save_distributed": True}
    dcp.save({"w": distributed(WHOLE)}, storage_writer=HuggingFaceStorageWriter(path, **options))
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        state = {"w": WHOLE[:4] + 1}
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, **options), process_group=alone)
    dist.barrier()
    return "right" if torch.equal(read_back(path, (4, 6)), WHOLE[:4] + 1) else "wrong"


def boxes(path: Path, options: dict[str, Any], reader: Any) -> str:
    dcp.save({"w": striped(WHOLE)}, storage_writer=HuggingFaceStorageWriter(path, **options))
    return "right" if torch.equal(read_back(path, reader=reader), WHOLE) else "wrong"


def without_collectives(path: Path, options: dict[str, Any]) -> str:
    state = {"w": distributed(WHOLE, 1)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, **options), use_collectives=False)
    dist.barrier()
    return "right" if torch.equal(read_back(path), WHOLE) else "wrong"


def plain_on_every_rank(path: Path) -> str:
    """Each rank has some tensors of its own, and all have one: torch's ranks write over one another."""
    state = {f"own.{dist.get_rank()}": WHOLE + dist.get_rank(), "w": WHOLE}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path))
    back = {"own.0": torch.zeros(8, 6), "own.1": torch.zeros(8, 6), "w": torch.zeros(8, 6)}
    dcp.load(back, storage_reader=HuggingFaceStorageReader(path))
    wanted = {"own.0": WHOLE, "own.1": WHOLE + 1, "w": WHOLE}
    return "right" if all(torch.equal(back[name], wanted[name]) for name in wanted) else "wrong"


def every_rank(path: Path) -> str:
    """Consolidate what torch's writer left, a part of the files on each rank."""
    shards = path.with_name("every-shards")
    state = {"w": distributed(WHOLE), "v": distributed(WHOLE + 1, 1), "s": torch.tensor(2.5)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(shards), save_distributed=True))
    dist.barrier()
    hfdcp_core.consolidate_safetensors_files_on_every_rank(shards, path, {"w": 1, "v": 2, "s": 3})
    back = {"w": torch.zeros(8, 6), "v": torch.zeros(8, 6), "s": torch.tensor(0.0)}
    dcp.load(back, storage_reader=HuggingFaceStorageReader(path))
    right = torch.equal(back["w"], WHOLE) and torch.equal(back["v"], WHOLE + 1) and back["s"].item() == 2.5
    return "right" if right else "wrong"


def one_reads_for_all(path: Path) -> str:
    """Share one rank's metadata, with an error too."""
    dcp.save({"w": distributed(WHOLE)}, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))
    group = dist.group.WORLD

    def reader(folder: str) -> HuggingFaceStorageReader:
        return HuggingFaceStorageReader(folder, process_group=group)

    right = torch.equal(read_back(path, reader=reader), WHOLE)
    try:
        read_back(path.with_name("not-there"), reader=reader)
    except CheckpointException as error:
        return "right" if right and len(error.failures) == WORLD else f"right={right} {error.failures}"
    return "no error"


def plans_kept(path: Path, options: dict[str, Any]) -> str:
    """Save with a planner that sends only what changed: twice alike, then with one rank's own tensor more."""
    seen = []
    for turn in range(4):
        state = {"w": distributed(WHOLE + turn), "v": WHOLE - turn}
        if turn > 1 and dist.get_rank() == 1:
            state["own"] = WHOLE * turn
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, **options), planner=planner)
        back = {name: torch.full((8, 6), -1.0) for name in ("w", "v", "own")[: 2 + (turn > 1)]}
        dcp.load(back, storage_reader=HuggingFaceStorageReader(str(path)))
        wanted = {"w": WHOLE + turn, "v": WHOLE - turn, "own": WHOLE * turn}
        seen += [f"{name} in turn {turn}" for name, found in back.items() if not torch.equal(found, wanted[name])]
    for kept in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, kept).clear()
    return "; ".join(seen) or "right"


ONE_PASS = {"save_distributed": True, "enable_consolidation": True}


def main() -> None:
    root = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torchs = dcp.HuggingFaceStorageReader
    seen = {
        "a rank fails, whole": failure(root / "fails-whole", ONE_PASS),
        "a rank fails, sharded": failure(root / "fails-sharded", {"save_distributed": True}),
        "a narrower save after a wider one": stale(root / "stale"),
        "two boxes of one rank, whole": boxes(root / "boxes-whole", ONE_PASS, torchs),
        "two boxes of one rank, sharded": boxes(root / "boxes", {"save_distributed": True}, HuggingFaceStorageReader),
        "two boxes of one rank, read by torch": boxes(root / "boxes-torch", {"save_distributed": True}, torchs),
        "without collectives, whole": without_collectives(root / "alone-whole", ONE_PASS),
        "without collectives, sharded": without_collectives(root / "alone", {"save_distributed": True}),
        "tensors of every rank's own": plain_on_every_rank(root / "own"),
        "consolidated on every rank": every_rank(root / "every"),
        "plans that a planner keeps, whole": plans_kept(root / "kept-whole", ONE_PASS),
        "plans that a planner keeps, sharded": plans_kept(root / "kept", {"save_distributed": True}),
        "one rank reads the metadata for all": one_reads_for_all(root / "shared"),
    }
    everywhere: list[Any] = [None] * WORLD
    dist.all_gather_object(everywhere, seen)
    if dist.get_rank() == 0:
        merged = {name: sorted({other[name] for other in everywhere}) for name in seen}
        (root / "seen.json").write_text(json.dumps(merged))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
