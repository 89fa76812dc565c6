"""Homes of safetensors files: Hugging Face repositories, their cache on disk, and torch's own safetensors writer.

::

    a repository          model.safetensors, or model-0000i-of-0000N.safetensors with model.safetensors.index.json
    the Hub's cache       models--org--name/{blobs/,refs/main,snapshots/<commit>/…}: links to the blobs
    torch's writer        shard-0000R-model-0000F-of-0000N.safetensors; with consolidation the same files in sharded/,
                          and beside it the consolidated ones, which are taken
"""

from __future__ import annotations

import re

from hfdcp_core.homes.folder import Folder, Home

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
_HEAD = "refs/main"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def questions(folder: Folder) -> tuple[str, ...]:
    """Return the small files whose contents matter here."""
    return (_HEAD,) if _is_cache(folder) else ()


def recognise(folder: Folder) -> Home | None:
    """Tell a folder that holds safetensors files, or one that lies around it."""
    if any(_SHARD.fullmatch(name) for name in folder.files):
        return Home("torch's sharded safetensors", "checkpoint")
    if any(name.endswith(".safetensors") for name in folder.files):
        return Home("Hugging Face safetensors", "checkpoint")
    if _is_cache(folder):
        return Home("cache of the Hub", "around", inside=_snapshots(folder))
    if "sharded" in folder.folders:
        return Home("output of torch's safetensors writer", "around", inside=("sharded",))
    if folder.has(_INDEX):
        return Home("Hugging Face safetensors", "unfinished", f"{_INDEX} is there, but no file that it names")
    return None


def _is_cache(folder: Folder) -> bool:
    return {"snapshots", "refs"} <= set(folder.folders)


def _snapshots(folder: Folder) -> tuple[str, ...]:
    head = folder.texts.get(_HEAD, b"").decode("ascii", "replace").strip()
    return (f"snapshots/{head}",) if _COMMIT.fullmatch(head) else ("snapshots",)
