"""What the work takes, counted: each byte of the source is read once, and memory keeps within what was announced."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

from hfdcp_core import publish
from hfdcp_core.consolidate import Nowhere, consolidate
from hfdcp_core.errors import UsageError
from hfdcp_core.job import Job, known_bytes
from hfdcp_core.local_store import LocalStore
from hfdcp_core.run import Run
from hfdcp_core.store import open_store

HEAD_BYTES = 8 << 10
"""What is read of an item beside its payload, at most."""
MEASURE = """
import os, sys
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, usage = os.wait4(process, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""
"""Runs a command from a process that is smaller: the kernel counts the memory of who starts one as its own."""


class Counting(LocalStore):
    """A local store that notes what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.spans: list[tuple[str, int, int]] = []

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.spans.append((path, start, start + buffer.nbytes))
        super().read_into(path, start, buffer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bfloat16 checkpoint that torch wrote, of items larger than a window and smaller."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    sizes = {"large": (3000, 1024), "wide": (7, 300_000), "small": (64, 64), "one": ()}
    dcp.save({name: torch.randn(shape).bfloat16() for name, shape in sizes.items()}, checkpoint_id=folder, no_dist=True)
    return folder


def test_of_a_bfloat16_source_each_byte_is_read_once_and_hardly_more_than_its_payload(
    saved: Path, tmp_path: Path
) -> None:
    job = Job(str(saved), str(tmp_path / "out"), max_file_size=5_000_000)
    publish.gather(job)
    planned = publish.reshard(job)
    run, source = Run(open_store(job.sink)), Counting(saved)
    plans = [run.file_plan(index) for index in range(len(planned.files))]
    for plan in plans:
        consolidate(plan, source, Nowhere())
    payload = sum(spec.nbytes for plan in plans for _, spec in plan.tensors)
    items = sum(len(plan.shards) for plan in plans)
    assert payload > 8 << 20
    assert payload <= sum(stop - start for _, start, stop in source.spans) <= payload + items * HEAD_BYTES
    assert max(Counter(source.spans).values()) == 1


def test_of_raw_bytes_each_is_read_once_and_no_other(tmp_path: Path) -> None:
    sparse(tmp_path / "in", rows=700, columns=4096)
    job = Job(str(tmp_path / "in"), str(tmp_path / "out"), world_size=2)
    publish.gather(job)
    publish.reshard(job)
    plan, source = Run(open_store(job.sink)).file_plan(0), Counting(tmp_path / "in")
    consolidate(plan, source, Nowhere())
    assert sum(stop - start for _, start, stop in source.spans) == plan.size - len(plan.header)


def sparse(folder: Path, *, rows: int, columns: int) -> None:
    """Write two ranks' halves of one matrix, cut by columns, as files full of holes."""
    folder.mkdir()
    nbytes = rows * columns * 2 // 2
    for rank in range(2):
        offsets = json.dumps({"weight": {"saved_offsets": [0, rank * columns // 2]}})
        header = json.dumps(
            {
                "__metadata__": {"DCP_SHARDING_INFO": offsets, "DCP_VERSION": "1.0", "format": "pt"},
                "weight": {"dtype": "BF16", "shape": [rows, columns // 2], "data_offsets": [0, nbytes]},
            }
        ).encode()
        with (folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + nbytes)


@pytest.mark.parametrize("memory_mib", [104, 256])
def test_the_whole_command_takes_no_more_memory_than_the_plan_announced(memory_mib: int, tmp_path: Path) -> None:
    sparse(tmp_path / "in", rows=6144, columns=4096)
    job = Job(str(tmp_path / "in"), "", world_size=2, memory_bytes=memory_mib << 20)
    announced = publish.plan_only(job)[1].peak_bytes
    assert announced <= memory_mib << 20
    given = [f"--memory={memory_mib}MiB", "--world-size=2", job.source, str(tmp_path / "out")]
    command = [sys.executable, "-m", "hfdcp_flows.start", "consolidate", "--quiet", *given]
    run = subprocess.run([sys.executable, "-S", "-c", MEASURE, *command], capture_output=True, text=True, check=True)
    status, peak = map(int, run.stdout.split())
    assert status == 0, run.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 48 << 20
    assert peak <= announced


@pytest.mark.parametrize("ranks", [0, 3])
def test_what_is_known_of_many_small_tensors_is_announced_too(ranks: int, tmp_path: Path) -> None:
    names = [f"layers.{number:05}.attention.weight" for number in range(30_000 // max(1, ranks))]
    (tmp_path / "in").mkdir()
    save_file({name: np.zeros(max(1, ranks), np.float32) for name in names}, tmp_path / "in" / "model.safetensors")
    job = Job(str(tmp_path / "in"), "", ranks=ranks)
    announced = publish.plan_only(job)[1].peak_bytes
    assert announced - job.start_bytes >= known_bytes(30_000, 30_000)
    command = [sys.executable, "-m", "hfdcp_flows.start", "consolidate", "--quiet", job.source, str(tmp_path / "out")]
    command += ["--ranks", str(ranks)] if ranks else []
    run = subprocess.run([sys.executable, "-S", "-c", MEASURE, *command], capture_output=True, text=True, check=True)
    status, peak = map(int, run.stdout.split())
    assert status == 0, run.stderr
    assert peak <= announced
    with pytest.raises(UsageError, match="too little: at least"):
        publish.plan_only(replace(job, memory_bytes=job.start_bytes + (40 << 20)))
    smaller = publish.plan_only(replace(job, memory_bytes=job.start_bytes + (110 << 20), workers=1))[1]
    assert smaller.peak_bytes <= job.start_bytes + (110 << 20)
