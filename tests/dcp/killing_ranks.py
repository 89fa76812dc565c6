"""Kill one rank in the middle of a save, again and again: run by itself, writes what it saw as JSON.

``python killing_ranks.py FOLDER TIMES SEED``: two ranks save over an older checkpoint; one of them is killed (SIGKILL)
at a random point. The other must end with an error, and the older checkpoint must still load.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter

GROUP_TIMEOUT_S = 8
DEADLINE_S = 60
SHAPE = (2048, 4096)
WAYS = ({"save_distributed": True, "enable_consolidation": True}, {"save_distributed": True})
ENDED_WITH_AN_ERROR, SAVED = 3, 0


def save(rank: int, folder: Path, step: int, way: int, dies_after_s: float | None) -> None:
    """Be one rank of a save; kill yourself after a while where that is asked."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - torch's complaints about the other rank
    meeting = folder.with_name(f"{folder.name}-meeting-{step}")
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timeout)
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(torch.full(SHAPE, float(step)), mesh, [Shard(dim)], src_data_rank=None)
        for dim, name in enumerate(("rows", "columns"))
    }
    dist.barrier()
    if dies_after_s is not None:
        threading.Timer(dies_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, **WAYS[way]))
    except (CheckpointException, RuntimeError):
        os._exit(ENDED_WITH_AN_ERROR)
    if rank == 0:
        took_of(folder).write_text(str(time.monotonic() - began))
    os._exit(SAVED)


def took_of(folder: Path) -> Path:
    """Return the file that says how many seconds the last whole save took."""
    return folder.with_name(f"{folder.name}-took")


def ranks(folder: Path, step: int, way: int, victim: int | None, dies_after_s: float) -> list[int | None]:
    """Let two ranks save, and return their exit statuses; None for one that had to be stopped."""
    context = multiprocessing.get_context("fork")
    processes: list[ForkProcess] = [
        context.Process(target=save, args=(rank, folder, step, way, dies_after_s if rank == victim else None))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return statuses


def stored(folder: Path) -> float | str:
    """Return which step a checkpoint is of, whole."""
    state = {name: torch.full(SHAPE, -1.0) for name in ("rows", "columns")}
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    except CheckpointException as error:
        return str(error)[-300:]
    values = {float(value) for tensor in state.values() for value in tensor.unique()}
    return values.pop() if len(values) == 1 else f"mixed: {sorted(values)}"


def main() -> None:
    root, times, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    chance = random.Random(seed)
    seen = []
    for number in range(times):
        way = number % len(WAYS)
        folder = root / f"out-{way}"
        if not folder.exists():
            assert ranks(folder, 0, way, None, 0.0) == [SAVED, SAVED]
        before = stored(folder)
        victim, dies_after_s = chance.randrange(2), chance.uniform(0.0, float(took_of(folder).read_text()))
        statuses = ranks(folder, number + 1, way, victim, dies_after_s)
        seen.append([way, victim, dies_after_s, statuses, before, number + 1, stored(folder)])
    (root / "killed.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
