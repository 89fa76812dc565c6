"""Ranks of a training: random models of transformers, cut by FSDP2 (and tensor parallelism), are saved by torch.

Started by torchrun with a folder. Beside each checkpoint lies the model as transformers saves it, and its answer to a
prompt: what a publication is held against.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PROMPT = [3, 5, 7, 11, 13]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 4, "moe_intermediate_size": 36, "n_group": 1, "topk_group": 1}
MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 36, "num_experts_per_tok": 2},
    "gemma": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
}
"""Kinds of models, and what differs from `SIZES`."""
BY_TENSOR = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}
"""How dense models are cut for tensor parallelism."""


def model_of(kind: str) -> torch.nn.Module:
    """Make a model of random numbers, its norms too."""
    torch.manual_seed(0)
    sizes = SIZES | MODELS[kind]
    if kind == "deepseek_v3":
        del sizes["head_dim"]
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made: torch.nn.Module = model
    return made


def save(kind: str, folder: Path) -> None:
    """Save a model: whole and with its logits by the first rank, then cut by all of them."""
    model = model_of(kind)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "whole")  # type: ignore[operator]
        with torch.no_grad():
            torch.save(model(input_ids=torch.tensor([PROMPT])).logits, folder / "logits.pt")
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    if kind in {"llama", "qwen3"}:
        parallelize_module(model, mesh["tensor"], BY_TENSOR)
        across = mesh["data"]
    else:
        across = init_device_mesh("cpu", (4,))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=across)  # type: ignore[arg-type]
    fully_shard(model, mesh=across)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=str(folder / "ckpt"))


def main() -> None:
    """Save every kind."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in MODELS:
        folder = Path(sys.argv[1]) / kind
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        save(kind, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
