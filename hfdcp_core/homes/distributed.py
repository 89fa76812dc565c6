"""Homes of torch's distributed checkpoints (DCP): what frameworks put around a ``.metadata`` and its ``.distcp`` files.

::

    torch, torchtitan      step-N/{.metadata,__R_0.distcp}
    Lightning              epoch=E-step=N.ckpt/{.metadata,__R_0.distcp,meta.pt}: a folder, in spite of its name
    accelerate, Trainer    checkpoint-N/{pytorch_model_fsdp_0/{.metadata,…},optimizer_0/{.metadata,…},…}
    Megatron-core          iter_0000100/{.metadata,__R_0.distcp,common.pt,metadata.json}
    NeMo                   …-step=N/{weights/{.metadata,common.pt,metadata.json,…},context/}
"""

from __future__ import annotations

import json
import re

from hfdcp_core.homes.folder import Folder, Home

METADATA = ".metadata"
"""The file that makes a folder a distributed checkpoint."""
_OF_ONE_RANK = re.compile(r"__\d+\.metadata")
_ACCELERATE = re.compile(r"pytorch_model_fsdp(_\d+)?")
_RANK = re.compile(r"__(\d+)_\d+\.distcp")
_MEGATRON = "metadata.json"
_READ = frozenset({"torch_dist", "torch_dcp", "fsdp_dtensor"})
"""Megatron-core's backends whose files are torch's."""


def of_rank(path: str) -> str:
    """Say which rank wrote a file, where its name says so.

    >>> of_rank("__3_0.distcp"), of_rank("all.distcp")
    ('rank 3: __3_0.distcp', 'all.distcp')
    """
    found = _RANK.fullmatch(path.rpartition("/")[2])
    return f"rank {int(found[1])}: {path}" if found else path


def questions(folder: Folder) -> tuple[str, ...]:
    """Return the small files whose contents matter here."""
    return (_MEGATRON,) if folder.has(_MEGATRON) else ()


def recognise(folder: Folder) -> Home | None:
    """Tell a folder that holds a distributed checkpoint, or one that lies around it."""
    backend = _megatron_backend(folder)
    if backend and backend not in _READ:
        return Home(
            f"Megatron-core checkpoint of its backend {backend!r}",
            "foreign",
            "only torch_dist is read: start Megatron's training script on it once with --ckpt-convert-format torch_dist"
            " --ckpt-convert-save FOLDER, and publish FOLDER",
        )
    kind = _kind(folder, backend)
    if folder.has(METADATA) or any(_OF_ONE_RANK.fullmatch(name) for name in folder.files):
        return Home(kind, "checkpoint")
    if backend or any(name.endswith(".distcp") for name in folder.files):
        return Home(kind, "unfinished", f"no {METADATA}, which is written last")
    return _around(folder)


def _megatron_backend(folder: Folder) -> str:
    """Return the backend that Megatron-core's description names; nothing where there is no such description."""
    try:
        stated = json.loads(folder.texts.get(_MEGATRON, b"null"))
    except (ValueError, RecursionError):
        return ""
    backend = stated.get("sharded_backend") if isinstance(stated, dict) else None
    return backend if isinstance(backend, str) else ""


def _kind(folder: Folder, backend: str) -> str:
    if backend:
        return f"Megatron-core {backend} checkpoint"
    if folder.has("meta.pt"):
        return "Lightning sharded checkpoint"
    if _ACCELERATE.fullmatch(folder.name):
        return "accelerate's FSDP weights"
    return "torch distributed checkpoint"


def _around(folder: Folder) -> Home | None:
    models = tuple(name for name in folder.folders if _ACCELERATE.fullmatch(name))
    if models:
        return Home("accelerate or Trainer checkpoint", "around", inside=models)
    if {"weights", "context"} <= set(folder.folders):
        return Home("NeMo checkpoint", "around", inside=("weights",))
    return None
