"""torchtitan's last save in Hugging Face form (``last_save_in_hf``), to a bucket.

``torchrun --standalone --nproc-per-node 2 torchtitan_last_save.py URL STORAGE_OPTIONS``: what follows the import is
what torchtitan's checkpoint manager does, in both of its ways. There, change the import and nothing else; the options
of the bucket come from the environment, or by `hfdcp_core.store.configure` as here.
"""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hfdcp_core import HuggingFaceStorageWriter, consolidate_safetensors_files_on_every_rank
from hfdcp_core.store import configure


def last_save(state: dict[str, torch.Tensor], checkpoint_id: str, fqn_to_index_mapping: dict[str, int] | None) -> None:
    if fqn_to_index_mapping:  # the model's own files: shards first, and then all ranks make the files
        writer = HuggingFaceStorageWriter(
            path=os.path.join(checkpoint_id, "sharded"),  # noqa: PTH118 - a URL
            save_distributed=True,
            fqn_to_index_mapping=fqn_to_index_mapping,
            enable_consolidation=False,
        )
        dcp.save(state, storage_writer=writer)
        consolidate_safetensors_files_on_every_rank(
            input_dir=os.path.join(checkpoint_id, "sharded"),  # noqa: PTH118
            output_dir=checkpoint_id,
            fqn_to_index_mapping=fqn_to_index_mapping,
            num_threads=5,
        )
    else:
        writer = HuggingFaceStorageWriter(
            path=checkpoint_id, save_distributed=True, enable_consolidation=True, thread_count_consolidation=5
        )
        dcp.save(state, storage_writer=writer, checkpoint_id=checkpoint_id)


def main() -> None:
    url, options = sys.argv[1], json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    configure(url.partition("://")[0], options)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {
        "model.embed.weight": torch.arange(96.0).reshape(12, 8),
        "model.norm.weight": torch.ones(8, dtype=torch.bfloat16),
    }
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in whole.items()}
    last_save(dict(state), f"{url}/one-pass", None)
    last_save(dict(state), f"{url}/mapped", {"model.embed.weight": 1, "model.norm.weight": 2})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
