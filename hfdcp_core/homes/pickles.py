"""Homes of weights that lie in pickles: refused by name, each with its way out.

A pickle runs code when it is read, and what these hold is often no tensor but a flat piece that only the training code
can place. So they are not read; the framework that wrote them can bring them into a form that is.

::

    DeepSpeed ZeRO         global_step100/{*_optim_states.pt,*mp_rank_00_model_states.pt,…}, latest, zero_to_fp32.py
    verl                   global_step_5/actor/{model_world_size_8_rank_0.pt,…}
    FSDP, local            rank_0.pt, model.rank_0.pth, pytorch_model_fsdp_rank0.bin, ep0-ba10-rank0.pt, …
    Megatron-LM, legacy    iter_0000100/mp_rank_00/model_optim_rng.pt
    Llama, as released     consolidated.00.pth, params.json
    plain                  pytorch_model.bin, pytorch_model-00001-of-00002.bin, model.pt, last.ckpt
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hfdcp_core.homes.folder import Folder, Home


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of pickles."""

    name: str
    """What to call it."""
    advice: str
    """The way out."""
    fits: Callable[[Folder], bool]
    """Whether a folder holds it."""


def _any_file(pattern: str) -> Callable[[Folder], bool]:
    form = re.compile(pattern)
    return lambda folder: any(form.fullmatch(name) for name in folder.files)


def _any_folder(pattern: str) -> Callable[[Folder], bool]:
    form = re.compile(pattern)
    return lambda folder: any(form.fullmatch(name) for name in folder.folders)


_NO_WEIGHTS = re.compile(
    r"(optim|sched|rng|random|training_args|train_state|trainer|scaler|grad_scaler|extra_state|dataloader|data\.|meta\.|"
    r"common\.|args\.|custom_checkpoint).*"
)
_PLAIN = re.compile(r".*\.(pt|pth|ckpt)|.*model.*\.bin")


def _plain_weights(folder: Folder) -> bool:
    return any(_PLAIN.fullmatch(name) and not _NO_WEIGHTS.fullmatch(name) for name in folder.files)


_KINDS = (
    _Kind(
        "DeepSpeed ZeRO checkpoint (pickles)",
        "in the folder that holds zero_to_fp32.py, which DeepSpeed leaves beside `latest`, run `python zero_to_fp32.py "
        ". FOLDER --safe_serialization`, or make a universal checkpoint and save its model as safetensors; then "
        "publish FOLDER",
        _any_file(r".*_optim_states\.pt|(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|layer_\d+-.*model_states\.pt"),
    ),
    _Kind(
        "verl checkpoint (one pickle for each rank)",
        "merge it with verl: `python -m verl.model_merger merge --backend fsdp --local_dir THIS --target_dir FOLDER`, "
        "and publish FOLDER",
        _any_file(r"model_world_size_\d+_rank_\d+\.pt"),
    ),
    _Kind(
        "local pickles of FSDP (one for each rank)",
        "their flat pieces can be placed by the training code only: load them there with as many ranks, and save with "
        "torch.distributed.checkpoint (StateDictType.SHARDED_STATE_DICT)",
        _any_file(r"(?!rng_|random_|optim|extra_state|scheduler)(.*[-_.])?rank[-_]?\d+\.(pt|pth|bin)"),
    ),
    _Kind(
        "Megatron-LM checkpoint of the legacy kind (one pickle for each rank)",
        "start Megatron's training script on it once with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER, "
        "and publish FOLDER",
        _any_folder(r"mp_rank_\d+(_\d+)*"),
    ),
    _Kind(
        "Llama weights as Meta releases them (pickles)",
        "convert them with transformers' convert_llama_weights_to_hf.py, and publish what it writes",
        _any_file(r"consolidated\.\d+\.pth"),
    ),
    _Kind(
        "weights in plain pickles",
        "load them where you trust them (torch.load(…, weights_only=True), or from_pretrained), and save them as "
        "safetensors: model.save_pretrained(FOLDER) or safetensors.torch.save_model",
        _plain_weights,
    ),
)


def recognise(folder: Folder) -> Home | None:
    """Tell a folder that holds weights in pickles."""
    kind = next((kind for kind in _KINDS if kind.fits(folder)), None)
    return Home(kind.name, "foreign", kind.advice) if kind else None
