"""What ``hfdcp demo`` starts from: a small model, saved as a real training run would save it."""

from __future__ import annotations

from pathlib import Path

from hfdcp_core.testing._orders import Order, carry_out
from hfdcp_core.testing._truth import Truth, read_truth

RANKS = 4
"""Processes that take part."""
TIMEOUT_S = 120.0
"""When ranks that have not finished are ended."""
_SIZE = {"hidden": 384, "vocab": 4000, "layers": 4}


def write_demo_checkpoint(folder: Path) -> Truth:
    """Let four real processes save about 60 MB to ``folder/ckpt``: a third weights, the rest optimizer state.

    Half of the layers lie in FSDP2's row shards over tensor-parallel row and column shards, the rest in row shards;
    bf16 weights, an fp32 buffer, a 0-d integer, AdamW's state and a few plain objects. Takes seconds.

    Raises:
        FileExistsError: A checkpoint lies there already.
        RankFailed: A rank raised, died or hung; the message holds its traceback.
    """
    carry_out([Order("demo", RANKS, str(folder.absolute()), "dcp", _SIZE)], timeout_s=TIMEOUT_S)
    return read_truth(folder)
