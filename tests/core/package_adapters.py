"""Adapters of torchtitan and torchtune, as they come in those packages, for tests that trace them.

Only the modules with the adapters are run. What they import of their packages for names in annotations and for training
(kernels, data loaders, quantisation) is replaced by empty modules, so that neither package's own needs are installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def folder_of(package: str) -> Path:
    """Where a package is installed; it is not run."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def as_folder(name: str, root: Path) -> None:
    """Let a package be a folder with modules: what it does when it is imported is left out."""
    module = ModuleType(name)
    module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = module


def stand_in(name: str, **members: object) -> None:
    """Put a module in the place of one that adapters import names from."""
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


class Named:
    """What is imported for annotations only."""

    Config = object


TITAN, TUNE = folder_of("torchtitan"), folder_of("torchtune")
for package in ("", ".models", ".models.llama3", ".models.qwen3", ".models.common", ".protocols", ".tools"):
    as_folder(f"torchtitan{package}", TITAN)
for package in ("", ".models", ".models.qwen2"):
    as_folder(f"torchtune{package}", TUNE)
stand_in("torchtitan.models.common.rope", ComplexRoPE=Named, CosSinRoPE=Named)
stand_in("torchtitan.models.common.decoder", Decoder=Named)
stand_in("torchtitan.models.llama3.model", Llama3Model=Named)
stand_in("torchtitan.models.qwen3.model", Qwen3Model=Named)
stand_in("torchtitan.protocols.model", BaseModel=Named)
stand_in("torchtitan.tools.logging", logger=logging.getLogger("torchtitan"))

HEADS, KV_HEADS, HIDDEN, HEAD_DIM, EXPERTS = 4, 2, 32, 8, 4


def titan_config(**layer: object) -> Any:
    attention = SimpleNamespace(n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    return SimpleNamespace(
        layers=[SimpleNamespace(attention=attention, **layer)], dim=HIDDEN, enable_weight_tying=False
    )


llama3 = importlib.import_module("torchtitan.models.llama3.state_dict_adapter").Llama3StateDictAdapter(
    titan_config(), None
)
qwen3_moe = importlib.import_module("torchtitan.models.qwen3.state_dict_adapter").Qwen3StateDictAdapter(
    titan_config(moe=SimpleNamespace(num_experts=EXPERTS)), None
)
_SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "dim": HIDDEN, "head_dim": HEAD_DIM}
tune_llama3 = functools.partial(importlib.import_module("torchtune.models.convert_weights").tune_to_hf, **_SIZES)
tune_qwen2 = functools.partial(
    importlib.import_module("torchtune.models.qwen2._convert_weights").qwen2_tune_to_hf, **_SIZES
)
