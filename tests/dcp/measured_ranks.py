"""What four ranks read of a checkpoint on some storage: run by torchrun, writes their reports as JSON.

``torchrun --standalone --nproc-per-node 4 measured_ranks.py URL STORAGE_OPTIONS REPORT``: below the URL lie two
checkpoints, ``sharded`` (cut as four ranks hold it) and ``whole``.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hfdcp_core import HuggingFaceStorageReader

WORLD = 4
SHAPE = (1024, 512)
NAMES = {"rows": 0, "columns": 1}
"""The tensors, and the dimension along which they are cut."""


def values(name: str) -> torch.Tensor:
    return torch.arange(1024 * 512, dtype=torch.float32).reshape(SHAPE) + NAMES[name]


def loaded(url: str, options: dict[str, Any], names: list[str], dims: dict[str, int]) -> dict[str, Any]:
    """Load tensors, cut along given dimensions, and return the report and whether they are right."""
    mesh = init_device_mesh("cpu", (WORLD,))
    state, wanted = (
        {name: distribute_tensor(tensor(name), mesh, [Shard(dims[name])], src_data_rank=None) for name in names}
        for tensor in (lambda _: torch.full(SHAPE, -1.0), values)
    )
    reader = HuggingFaceStorageReader(url, storage_options=options)
    dcp.load(state, storage_reader=reader)
    assert reader.report is not None
    right = all(torch.equal(state[name].to_local(), wanted[name].to_local()) for name in names)
    return {**asdict(reader.report), "right": right}


def main() -> None:
    url, options, report = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cuts = {
        "rows as stored": (f"{url}/sharded", ["rows"], NAMES),
        "columns as stored": (f"{url}/sharded", ["columns"], NAMES),
        "rows of a whole file": (f"{url}/whole", ["rows"], NAMES),
        "columns of a whole file": (f"{url}/whole", ["columns"], NAMES),
    }
    seen = {case: loaded(folder, options, names, dims) for case, (folder, names, dims) in cuts.items()}
    everywhere: list[Any] = [None] * WORLD
    dist.all_gather_object(everywhere, seen)
    if dist.get_rank() == 0:
        report.write_text(json.dumps({case: [other[case] for other in everywhere] for case in seen}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
