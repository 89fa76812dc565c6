"""Where weights live: what a folder is, told by the names in it and, for two frameworks, by a small file.

Every framework puts something of its own around the same weights. Each module here knows some of these homes; it is
given a folder as it was listed and says what it takes it for. Nothing here reads a store.
"""

from __future__ import annotations

from hfdcp_core.homes import distributed, huggingface, pickles
from hfdcp_core.homes.distributed import METADATA, of_rank
from hfdcp_core.homes.folder import Folder, Home, Verdict
from hfdcp_core.homes.steps import step_of

__all__ = ["METADATA", "Folder", "Home", "Verdict", "no_home", "of_rank", "questions", "recognise", "step_of"]

_KINDS = (distributed, huggingface)
_OURS = frozenset({".hfdcp", "hfdcp-manifest.json"})
_OPTIMIZER = ("optim", "optimizer")
_SERVICE = frozenset(
    {"blobs", "logs", "tb", "tensorboard", "wandb", "runs.db", "train", "dataloader", "rng", "tokenizer"}
)


def questions(folder: Folder) -> tuple[str, ...]:
    """Return the small files, relative to a folder, that must be read to tell what it is; they may be absent."""
    return tuple(name for kind in _KINDS for name in kind.questions(folder))


def recognise(folder: Folder) -> Home | None:
    """Tell what a folder is: first what can be read, then what lies around that, then what cannot be read.

    >>> recognise(Folder("step-10", {".metadata": 900, "__0_0.distcp": 4096})).kind
    'torch distributed checkpoint'
    """
    found = [home for kind in _KINDS if (home := kind.recognise(folder))]
    foreign = pickles.recognise(folder)
    order = ("checkpoint", "around", "unfinished", "foreign")
    return min([*found, *([foreign] if foreign else [])], key=lambda home: order.index(home.verdict), default=None)


def no_home(folder: Folder) -> str | None:
    """Say why nobody who looks for weights should look into a folder; None where one should.

    It is not asked of a folder that a user names.

    >>> no_home(Folder("optimizer_0", {".metadata": 900}))
    'optimizer state'
    """
    if folder.name.startswith(_OPTIMIZER):
        return "optimizer state"
    if folder.name.startswith(".") or folder.name in _SERVICE:
        return "not weights"
    if _OURS & {*folder.files, *folder.folders}:
        return "an output of hfdcp"
    return None
