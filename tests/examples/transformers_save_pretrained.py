"""transformers' ``save_pretrained(distributed_checkpoint=True)`` and ``from_pretrained`` with our writer and reader.

``torchrun --standalone --nproc-per-node 2 transformers_save_pretrained.py MODEL OUT``: transformers takes torch's
classes by name into `transformers.distributed.checkpoint`, so two attributes are all that is changed (and one where
torch keeps its consolidation, for ``push_to_hub=True``). MODEL is a model's folder.
"""

import sys
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint._consolidate_hf_safetensors as torchs_consolidation
import transformers.distributed.checkpoint
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hfdcp_core


def use_hfdcp() -> None:
    transformers.distributed.checkpoint.HuggingFaceStorageReader = hfdcp_core.HuggingFaceStorageReader
    transformers.distributed.checkpoint.HuggingFaceStorageWriter = hfdcp_core.HuggingFaceStorageWriter
    torchs_consolidation.consolidate_safetensors_files = hfdcp_core.consolidate_safetensors_files


def main() -> None:
    source, out = sys.argv[1:]
    warnings.simplefilter("ignore")
    use_hfdcp()
    sharding = DistributedConfig(fsdp_size=int(dist.get_world_size()) if dist.is_initialized() else 2)
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=sharding)
    model.save_pretrained(out, distributed_checkpoint=True)
    again = AutoModelForCausalLM.from_pretrained(out, distributed_config=sharding)
    same = [
        name
        for name, tensor in model.state_dict().items()
        if not tensor.to_local().equal(again.state_dict()[name].to_local())
    ]
    assert same == [], same
    if dist.get_rank() == 0:
        transformers.distributed.checkpoint.consolidate_distributed_checkpoint(out, f"{out}/consolidated")
        model.config.save_pretrained(f"{out}/consolidated")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
