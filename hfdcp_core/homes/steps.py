"""Which training step a folder is of, by its name, as torchtitan, Trainer, Lightning, Megatron and others have it."""

from __future__ import annotations

import re

_WORDS = "global_?step|step|checkpoint|ckpt|iter|iteration|ba"
_STEP = re.compile(rf"(?:^|[-_=.])(?:{_WORDS})[-_=]?(\d{{1,18}})(?!\d)", re.IGNORECASE)
_EPOCH = re.compile(r"(?:^|[-_.])(?:epoch|ep)[-_=]?(\d{1,18})(?!\d)", re.IGNORECASE)
_BARE = re.compile(r"\d{1,18}")
_BEING_WRITTEN = re.compile(r"(^|[-_.])te?mp($|[-_.])", re.IGNORECASE)


def step_of(name: str) -> int | None:
    """Return the number of the step, or None where the name is not that of one.

    >>> [step_of(name) for name in ("step-10", "checkpoint-9", "iter_0000100", "epoch=1-step=200.ckpt", "model")]
    [10, 9, 100, 200, None]
    """
    if _BEING_WRITTEN.search(name):
        return None
    if _BARE.fullmatch(name):
        return int(name)
    found = _STEP.findall(name) or _EPOCH.findall(name)
    return int(found[-1]) if found else None
