"""Who consolidates: hfdcp, torch in two ways, accelerate, and the floor; each is a command that writes to a sink."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from cases import Case
from measuring import Rival

CORES = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
FLOOR = "floor: read, SHA-256, write"
FLOOR_CHECKED = "floor with both checksums"
FLOOR_COPY = "floor: read, write"
HFDCP, HFDCP_SHARDED, HFDCP_UNHASHED = "hfdcp", "hfdcp, sharded safetensors", "hfdcp, no hashing"
HFDCP_COUNTING = "hfdcp with statistics"
TORCH, TORCH_LOAD, ACCELERATE = "torch consolidation", "torch load-all + save_file", "accelerate merge-weights"

CONSOLIDATION = """
import json, sys
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
source, sink, mapping, threads = sys.argv[1:]
consolidate_safetensors_files(source, sink, json.load(open(mapping)), num_threads=int(threads))
"""
LOAD_ALL = """
import sys, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from safetensors.torch import save_file
source, sink, dtype = sys.argv[1:]
dcp_to_torch_save(source, f"{sink}/all.pt")
state = torch.load(f"{sink}/all.pt", weights_only=True)
if dtype:
    state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
save_file(state, f"{sink}/model.safetensors", metadata={"format": "pt"})
"""
MERGE = """
import sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(*sys.argv[1:])
"""
UNHASHED = """
import json, sys
from hfdcp_core import publish
from hfdcp_core.job import Job
source, sink, mapping = sys.argv[1:]
publish.make(Job(source, sink, file_index=json.load(open(mapping)), hashing=False, statistics="none"))
"""


def rivals_of(case: Case, sink: Path) -> list[Rival]:
    """Return everybody who can do a case."""

    def empty() -> None:
        shutil.rmtree(sink, ignore_errors=True)
        sink.mkdir()
        os.sync()

    return [Rival(name, command, prepare=empty) for name, command in _commands(case, str(sink), str(case.mapping))]


def _commands(case: Case, sink: str, mapping: str) -> Iterator[tuple[str, list[str]]]:
    python, source = sys.executable, str(case.distributed or case.sharded)
    for name, kind in ((FLOOR, "hash"), (FLOOR_CHECKED, "checked"), (FLOOR_COPY, "copy")):
        yield name, [python, str(Path(__file__).with_name("floor.py")), source, sink, CORES, kind]
    hfdcp = [str(Path(python).with_name("hfdcp")), "consolidate", "--quiet", "--file-index", mapping]
    hfdcp += ["--dtype", case.dtype] if case.dtype else []
    plain = [*hfdcp, "--stats", "none"]
    if case.distributed:
        yield HFDCP, [*plain, source, sink]
        yield HFDCP_COUNTING, [*hfdcp, source, sink]
        yield TORCH_LOAD, [python, "-c", LOAD_ALL, source, sink, case.dtype]
    if case.dtype:
        return  # the others change no numbers
    if case.distributed:
        yield HFDCP_UNHASHED, [python, "-c", UNHASHED, source, sink, mapping]
        if importlib.util.find_spec("accelerate"):
            yield ACCELERATE, [python, "-c", MERGE, source, sink]
    yield HFDCP_SHARDED if case.distributed else HFDCP, [
        *plain, "--world-size", str(case.ranks), str(case.sharded), sink,
    ]  # fmt: skip
    yield TORCH, [python, "-c", CONSOLIDATION, str(case.sharded), sink, mapping, CORES]
