"""Fine-tuning that starts from the Hub and ends there.

``torchrun --standalone --nproc-per-node 2 finetune_from_hub.py org/base org/tuned FOLDER``: each rank reads the bytes
of its own rows from the Hub, at one revision; all ranks write whole tensors to a folder; the first one pushes it. The
Hub is that of ``HF_ENDPOINT`` and ``HF_TOKEN``.
"""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import HfApi
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter
from hfdcp_core.job import Job
from hfdcp_core.publish import push


def main() -> None:
    base, tuned, folder = sys.argv[1:]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    revision: list[Any] = [HfApi().model_info(base).sha if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(revision)  # all ranks read one state, whatever is pushed meanwhile
    reader = HuggingFaceStorageReader(f"hf://{base}@{revision[0]}")
    weights: dict[str, DTensor] = {
        name: distribute_tensor(torch.zeros(stored.size, dtype=stored.properties.dtype), mesh, [Shard(0)])
        for name, stored in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(weights, storage_reader=reader)
    with torch.no_grad():  # a training would be here
        for tensor in weights.values():
            tensor.add_(1)
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(weights, storage_writer=writer)
    if dist.get_rank() == 0:
        print(reader.report)
        print(push(Job(source="", sink=folder, repo=tuned, message=f"Tuned from {base}@{revision[0]}")))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
