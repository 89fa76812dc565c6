"""hfdcp: distributed PyTorch checkpoints become verified Hugging Face repositories.

The classes and functions that stand in for those of `torch.distributed.checkpoint` can be imported from here; torch
is imported when one of them is asked for, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfdcp_core.dcp import (
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
        QuantizedHuggingFaceStorageReader,
        StridedLoadPlanner,
        StridedSavePlanner,
        consolidate_safetensors_files,
        consolidate_safetensors_files_on_every_rank,
    )

__version__ = "0.1.0"

__all__ = [
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "QuantizedHuggingFaceStorageReader",
    "StridedLoadPlanner",
    "StridedSavePlanner",
    "__version__",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hfdcp_core import dcp

    return getattr(dcp, name)


def __dir__() -> list[str]:
    return __all__
