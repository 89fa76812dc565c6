"""Kill one of four ranks while it makes or hands over files for an object storage: writes what it saw as JSON.

``python killing_handing_ranks.py FOLDER OPTIONS``: ``gs://bucket`` leads to the storage with these options (JSON). The
victim kills itself (SIGKILL) as soon as the storage has some of the new files' bytes. The others must end with an
error, and the older checkpoint must still load.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter

WORLD = 4
GROUP_TIMEOUT_S = 30
DEADLINE_S = 60
SHAPE = (2048, 4096)
FILE_BYTES = 40_000_000
"""So that each of two tensors has a file of its own, which ranks 0 and 1 make; 2 and 3 only hand over."""
MIDDLE_BYTES = 1 << 20
URL = "gs://bucket/killed"
SAVED, ENDED_WITH_AN_ERROR = 0, 3


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - torch's complaints about other ranks


def received(options: Mapping[str, Any]) -> int:
    with urllib.request.urlopen(f"{options['endpoint_url']}/journal") as answer:
        return int(json.load(answer).get("received", 0))


def die_in_the_middle(options: Mapping[str, Any]) -> None:
    before = received(options)
    while received(options) < before + MIDDLE_BYTES:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


def save(rank: int, root: Path, options: Mapping[str, Any], step: int, victim: int | None) -> None:
    """Be one rank of a save."""
    quiet()
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/meeting-{step}", rank=rank, world_size=WORLD, timeout=timeout
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    state = {
        name: distribute_tensor(torch.full(SHAPE, float(step)), mesh, [Shard(dim)], src_data_rank=None)
        for dim, name in enumerate(("rows", "columns"))
    }
    writer = HuggingFaceStorageWriter(
        URL, save_distributed=True, enable_consolidation=True, max_file_size=FILE_BYTES, storage_options=options
    )
    dist.barrier()
    if rank == victim:
        threading.Thread(target=die_in_the_middle, args=(options,), daemon=True).start()
    try:
        dcp.save(state, storage_writer=writer)
    except (CheckpointException, RuntimeError):
        os._exit(ENDED_WITH_AN_ERROR)
    os._exit(SAVED)


def stored(report: Path, options: Mapping[str, Any]) -> None:
    """Write down which step the checkpoint is of, whole."""
    quiet()
    state = {name: torch.full(SHAPE, -1.0) for name in ("rows", "columns")}
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(URL, storage_options=options), no_dist=True)
        values = sorted({float(value) for tensor in state.values() for value in tensor.unique()})
    except CheckpointException as error:
        values = [str(error)[-300:]]
    report.write_text(json.dumps(values))


def run(*calls: tuple[Callable[..., None], tuple[Any, ...]]) -> list[int | None]:
    """Run functions in processes, since the library of the storage must not be forked; return their exit statuses."""
    context = multiprocessing.get_context("fork")
    processes: list[ForkProcess] = [context.Process(target=target, args=arguments) for target, arguments in calls]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return statuses


def main() -> None:
    root, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    seen = []
    for step, victim in enumerate((None, 0, 1, 3)):
        began = time.monotonic()
        statuses = run(*((save, (rank, root, options, step, victim)) for rank in range(WORLD)))
        seconds = time.monotonic() - began
        run((stored, (root / "stored.json", options)))
        seen.append([victim, statuses, seconds, json.loads((root / "stored.json").read_text())])
    (root / "killed.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
