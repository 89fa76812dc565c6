"""Runs real ranks: what the helper process and the ranks do (``python -m hfdcp_core.testing._ranks``, orders on stdin).

The helper imports torch, then forks one process for each rank and each number of ranks in turn. The ranks meet in a
file on disk, talk by gloo on loopback, and save through torch's own writers.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from hfdcp_core.testing import (  # noqa: F401  (they enter their builders in BUILDERS)
    _layouts,
    _models,
    _odd_layouts,
    _whole_layouts,
)
from hfdcp_core.testing._orders import Order
from hfdcp_core.testing._truth import CHECKPOINT_NAME, Truth, TruthTensor, write_truth
from hfdcp_core.testing._world import BUILDERS, State, World, sharded_safetensors

WRITERS: dict[str, Callable[[str], FileSystemWriter]] = {
    "dcp": FileSystemWriter,
    "dcp-safetensors": sharded_safetensors,
}
"""torch's writer for each format."""
LOG_TAIL = 8000
"""How many characters of a failed rank's log are repeated."""


def main() -> int:
    """Carry out the orders on stdin; return the exit status, with what went wrong on stderr."""
    request = json.load(sys.stdin)
    deadline = time.monotonic() + request["timeout_s"]
    orders = sorted((Order(**order) for order in request["orders"]), key=lambda order: order.ranks)
    for ranks, group in itertools.groupby(orders, key=lambda order: order.ranks):
        with tempfile.TemporaryDirectory(prefix="hfdcp-ranks-") as scratch:
            problem = run_group(ranks, tuple(group), Path(scratch), deadline)
        if problem:
            sys.stderr.write(problem)
            return 1
    return 0


def run_group(ranks: int, orders: Sequence[Order], scratch: Path, deadline: float) -> str | None:
    """Fork the ranks and wait for them; return what the first rank to fail has to say, or None."""
    if ranks > 1:
        importlib.import_module("torch._dynamo")  # fully_shard's first call does: here it costs its seconds only once
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(rank, orders, scratch, deadline)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        failed = first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failed is None:
        return None
    log = log_of(scratch, failed).read_text(errors="replace")[-LOG_TAIL:]
    return f"rank {failed} of {ranks} ended with status {processes[failed].exitcode}:\n{log}"


def first_failure(processes: Sequence[ForkProcess]) -> int | None:
    """Wait until all have ended well, or one has not; each ends by itself at the deadline at the latest."""
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        for sentinel in wait(list(running)):
            rank = running.pop(cast("int", sentinel))
            processes[rank].join()
            if processes[rank].exitcode:
                return rank
    return None


def log_of(scratch: Path, rank: int) -> Path:
    """Return where a rank writes its output and, in the end, its traceback."""
    return scratch / f"rank-{rank}.log"


def rank_main(rank: int, orders: Sequence[Order], scratch: Path, deadline: float) -> None:
    """Be one rank: join the others, carry out every order, leave."""
    log = os.open(log_of(scratch, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    seconds = max(deadline - time.monotonic(), 1.0)
    faulthandler.dump_traceback_later(seconds, exit=True)  # a hang ends with the place where it hung
    torch.set_num_threads(1)
    ranks = orders[0].ranks
    join_others(rank, ranks, scratch / "rendezvous", seconds)
    for order in orders:
        write_one(order, rank)
    if ranks > 1:
        dist.destroy_process_group()


def join_others(rank: int, ranks: int, meeting_place: Path, seconds: float) -> None:
    """Enter the process group; one rank alone needs none."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting_place}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
        )


def write_one(order: Order, rank: int) -> None:
    """Build one state dict, save it through torch's own writer, and keep the truth beside it."""
    world = World(rank, order.ranks, Path(order.folder) / CHECKPOINT_NAME)
    world.checkpoint.mkdir(parents=True, exist_ok=True)
    builder = BUILDERS[order.builder]
    state = builder.build(world, **order.settings)
    writer = (builder.writer or WRITERS[order.format])(str(world.checkpoint))
    if builder.save == "in_background":
        saved: Any = async_save(state, storage_writer=writer)
        getattr(saved, "upload_completion", saved).result()
    else:
        alone = {"use_collectives": False} if builder.save == "each_rank_alone" else {}  # torch knows it since 2.9
        save(state, storage_writer=writer, no_dist=world.ranks == 1, **alone)
    tensors, objects = gather_truth(world, state)
    if rank == 0:
        names = {name: clean for name in tensors if (clean := builder.published(name)) is not None}
        weights = None if all(name == clean for name, clean in names.items()) and len(names) == len(tensors) else names
        write_truth(Path(order.folder), Truth(world.checkpoint, tensors, objects, weights))


def gather_truth(world: World, state: State) -> tuple[dict[str, TruthTensor], tuple[str, ...]]:
    """Join what every rank recorded: tensors, and names of entries that are none."""
    flat, _ = flatten_state_dict(state)
    objects = [name for name, value in flat.items() if not isinstance(value, torch.Tensor)]
    mine = (world.recorder.tensors, objects)
    everyone: list[tuple[dict[str, TruthTensor], list[str]]] = [mine] * world.ranks
    if world.ranks > 1:
        dist.all_gather_object(everyone, mine)
    tensors = {name: tensor for recorded, _ in everyone for name, tensor in recorded.items()}
    return tensors, tuple(sorted({name for _, names in everyone for name in names}))


if __name__ == "__main__":
    sys.exit(main())
