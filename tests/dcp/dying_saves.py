"""Let a process die at each change of a file's name while it saves or consolidates: writes what it saw as JSON.

``python dying_saves.py FOLDER``: each attempt is a forked process that saves over an older checkpoint. It kills itself
(SIGKILL) when it is about to rename, link or remove a file for the n-th time, n growing until it lives to the end.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter, consolidate_safetensors_files

MAPPING = {"a": 1, "b": 2, "c": 2}
CHANGES = ("os.rename", "os.link", "os.remove")
EVER = 1 << 20


def save(folder: Path, step: int, **options: bool) -> None:
    state = {name: torch.full((3, 4), float(step)) for name in MAPPING}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, MAPPING, **options), no_dist=True)


def consolidated(folder: Path, step: int) -> None:
    shards = folder.with_name(f"{folder.name}-shards-{step}")
    if not shards.exists():
        save(shards, step, save_distributed=True)
    consolidate_safetensors_files(shards, folder, MAPPING)


WAYS: dict[str, Callable[[Path, int], None]] = {
    "consolidating": consolidated,
    "whole": save,
    "one pass": lambda folder, step: save(folder, step, save_distributed=True, enable_consolidation=True),
    "sharded": lambda folder, step: save(folder, step, save_distributed=True),
}


def attempt(way: str, folder: Path, step: int, survives: int) -> None:
    """Save, and die at the change of a name after so many."""
    left = [survives]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES and str(arguments[0]).startswith(f"{folder}/"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    WAYS[way](folder, step)


def lived(way: str, folder: Path, step: int, survives: int = EVER) -> bool:
    """Make an attempt in a process of its own, and say whether it lived to the end."""
    process = multiprocessing.get_context("fork").Process(target=attempt, args=(way, folder, step, survives))
    process.start()
    process.join(60)
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{way}, step {step}, {survives}: {process.exitcode}")
    return process.exitcode == 0


def stored(folder: Path) -> float | str:
    """Return the step that all tensors are of, or what the reader says."""
    state = {name: torch.full((3, 4), -1.0) for name in MAPPING}
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    except CheckpointException:
        return "refused"
    values = sorted({float(value) for tensor in state.values() for value in tensor.unique()})
    return values[0] if len(values) == 1 else f"mixed: {values}"


def main() -> None:
    root, seen = Path(sys.argv[1]), []
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for way in WAYS:
        folder, survives, alive = root / way.replace(" ", "-"), 0, False
        while not alive and survives < 60:
            assert lived(way, folder, 1)  # and what the last death left does no harm
            before, step = stored(folder), survives + 2
            alive = lived(way, folder, step, survives)
            seen.append([way, survives, alive, before, step, stored(folder)])
            survives += 1
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
