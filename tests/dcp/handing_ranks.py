"""What four ranks save to an object storage: run by torchrun, writes what it saw as JSON.

``torchrun --standalone --nproc-per-node 4 handing_ranks.py FOLDER OPTIONS``: the storage is a bucket that
``gs://bucket`` leads to with these storage options (JSON). For each case the bucket has a folder of its own.
"""

from __future__ import annotations

import json
import logging
import sys
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter
from hfdcp_core.store import open_store
from hfdcp_core.testing.dropin import blank, differences

WORLD = 4
ONE_PASS: Mapping[str, Any] = {"save_distributed": True, "enable_consolidation": True}
LINE, GRID = (WORLD,), (2, 2)
CUTS: Mapping[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": (LINE, [Shard(0)]),
    "columns": (LINE, [Shard(1)]),
    "grid": (GRID, [Shard(0), Shard(1)]),
    "half": (GRID, [Replicate(), Shard(1)]),
    "replicated": (LINE, [Replicate()]),
    "uneven": (LINE, [Shard(0)]),
    "few": (LINE, [Shard(0)]),
    "mask": (LINE, [Shard(0)]),
    "fp8": (LINE, [Shard(1)]),
    "large": (LINE, [Shard(1)]),
}


def wholes() -> dict[str, torch.Tensor]:
    """Return the tensors, whole, the same on all ranks."""
    torch.manual_seed(7)
    return {
        "rows": torch.randn(16, 6),
        "columns": torch.randn(5, 12),
        "grid": torch.randn(6, 10).bfloat16(),
        "half": torch.randn(4, 8, 3),
        "replicated": torch.arange(40, dtype=torch.int64),
        "uneven": torch.randn(7, 3),
        "few": torch.randn(2, 5),
        "mask": torch.arange(9) % 2 == 0,
        "fp8": torch.randn(3, 8).to(torch.float8_e4m3fn),
        "large": torch.randn(1500, 2048),  # several windows of the file, and several pieces of each rank
        "scalar": torch.tensor(2.5),
        "turned": torch.randn(6, 4).t(),
        "none": torch.empty(0, 3),
    }


def cut(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return this rank's part of a state dict."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in (LINE, GRID)}
    return {
        name: distribute_tensor(whole, meshes[CUTS[name][0]], CUTS[name][1], src_data_rank=None)
        if name in CUTS
        else whole
        for name, whole in tensors.items()
    }


def plus_one(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"rows": tensors["rows"] + 1, "columns": tensors["columns"] + 1}


class Case:
    """One folder of the bucket."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self.url, self.options = f"gs://bucket/{name}", options

    def writer(self, **options: Any) -> HuggingFaceStorageWriter:
        return HuggingFaceStorageWriter(self.url, storage_options=self.options, **{**ONE_PASS, **options})

    def save(self, state: Mapping[str, Any], planner: Any = None, **options: Any) -> None:
        dcp.save({**state}, storage_writer=self.writer(**options), planner=planner)

    def loaded(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = blank(like)
        dcp.load(state, storage_reader=HuggingFaceStorageReader(self.url, storage_options=self.options))
        return state

    def verdict(self, wanted: Mapping[str, torch.Tensor]) -> str:
        dist.barrier()
        wrong = differences(self.loaded(wanted), wanted)
        return "right" if not wrong else f"wrong: {wrong}"


class Failing(DefaultSavePlanner):
    """Fails on one rank when the data of a tensor are asked for."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == self._rank and write_item.index.fqn == "columns":
            raise OSError(f"the device of rank {self._rank} is gone")
        return super().resolve_data(write_item)


def every_kind(case: Case, **options: Any) -> str:
    tensors = wholes()
    case.save(cut(tensors), **options)
    return case.verdict(tensors)


def bytes_written(case: Case) -> str:
    """Hold what went to the storage during a save against what is stored then."""

    def received() -> int:
        with urllib.request.urlopen(f"{case.options['endpoint_url']}/journal") as answer:
            return int(json.load(answer).get("received", 0))

    dist.barrier()
    before = received()
    dist.barrier()
    said = every_kind(case, max_file_size=4_000_000)
    dist.barrier()
    sent = received() - before
    stored = sum(stamp.size for stamp in open_store(case.url, storage_options=case.options).list().files)
    dist.barrier()
    return said if stored <= sent < 1.01 * stored else f"{sent} bytes were sent, {stored} are stored"


def again_and_again(case: Case) -> str:
    """Save several times with one writer, then in the background; each must replace the last."""
    tensors, writer = wholes(), case.writer()
    for step in range(3):
        state = {name: tensors[name] + step for name in ("rows", "columns")}
        dcp.save(cut(state), storage_writer=writer)
        if (said := case.verdict(state)) != "right":
            return f"step {step}: {said}"
    future = dcp.async_save(cut(plus_one(tensors)), storage_writer=case.writer())
    future.result()  # type: ignore[union-attr]
    return case.verdict(plus_one(tensors))


def a_rank_fails(case: Case, rank: int) -> str:
    """Save once well, then let a rank fail: the older one stands, and every rank is told why; then save again."""
    tensors = {name: whole for name, whole in wholes().items() if name in ("rows", "columns")}
    case.save(cut(tensors), fqn_to_index_mapping={"rows": 1, "columns": 2})
    told: str | None = None
    try:
        case.save(cut(plus_one(tensors)), planner=Failing(rank), fqn_to_index_mapping={"rows": 1, "columns": 2})
    except CheckpointException as error:
        told = "right"
        for who, (fault, _) in error.failures.items():
            wanted = f"the device of rank {rank} is gone"
            if wanted not in str(fault) or (who != rank and f"rank {rank}" not in str(fault)):
                told = f"rank {who} was told {fault}"
        if len(error.failures) != WORLD:
            told = f"only ranks {sorted(error.failures)} failed"
    if told != "right":
        return told or "no error"
    if (said := case.verdict(tensors)) != "right":
        return said
    case.save(cut(plus_one(tensors)))
    return case.verdict(plus_one(tensors))


def storage_fails(case: Case) -> str:
    """Let the storage refuse one rank's file (the test plants that): nothing of another rank's may appear."""
    tensors = {name: whole for name, whole in wholes().items() if name in ("rows", "columns")}
    try:
        case.save(cut(tensors), fqn_to_index_mapping={"rows": 1, "columns": 2})
    except CheckpointException as error:
        return "right" if len(error.failures) == WORLD else f"only {sorted(error.failures)} failed"
    return "no error"


class BehindAWall(HuggingFaceStorageWriter):
    """Says that the last rank listens where nobody does."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        if dist.get_rank() < WORLD - 1:
            return plan
        peer = plan.storage_data
        return replace(plan, storage_data=replace(peer, near=replace(peer.near, port=1), far=None))


def by_shards(case: Case) -> str:
    """Save where ranks do not reach one another."""
    tensors = wholes()
    writer = BehindAWall(case.url, storage_options=case.options, **ONE_PASS)
    dcp.save(cut(tensors), storage_writer=writer)
    return case.verdict(tensors)


def without_collectives(case: Case) -> str:
    tensors = {"rows": wholes()["rows"]}
    dcp.save(cut(tensors), storage_writer=case.writer(), use_collectives=False)
    return case.verdict(tensors)


def main() -> None:
    root, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {
        "every kind": every_kind(Case("kinds", options)),
        "every kind, in many files": every_kind(Case("files", options), max_file_size=300),
        "every byte is written once": bytes_written(Case("once", options)),
        "not distributed": every_kind(Case("plain", options), save_distributed=False, enable_consolidation=False),
        "again and again": again_and_again(Case("again", options)),
        "the first rank fails": a_rank_fails(Case("fails-0", options), 0),
        "the last rank fails": a_rank_fails(Case("fails-3", options), WORLD - 1),
        "the storage fails": storage_fails(Case("refused", options)),
        "a rank behind a wall": by_shards(Case("wall", options)),
        "without collectives": without_collectives(Case("alone", options)),
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
