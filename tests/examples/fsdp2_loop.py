"""A plain FSDP2 loop: it starts from what lies in RUNS, trains, and saves whole tensors by all ranks.

``torchrun --standalone --nproc-per-node 2 fsdp2_loop.py RUNS``: each save is a folder ``step-N`` that transformers or
``hfdcp push`` takes as it is. Run it again and it goes on from the last one. It runs on any machine: with gloo on CPUs.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter

STEPS = 4


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 8))


def steps_in(runs: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in runs.glob("step-*"))


def main() -> None:
    runs = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = small_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    first = steps_in(runs)[-1] if steps_in(runs) else 0
    dist.barrier()  # no rank saves before all have looked
    if first:
        weights = model.state_dict()  # DTensors: each rank reads the bytes of its own rows
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(runs / f"step-{first}"))
        model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first + 1, first + STEPS + 1):
        torch.manual_seed(step * 100 + dist.get_rank())
        batch = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = runs / f"step-{first + STEPS}"
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(model.state_dict(), storage_writer=writer)
    if dist.get_rank() == 0:
        print(f"saved {folder}, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
