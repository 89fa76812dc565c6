"""Starts real ranks: what the calling process does.

The ranks are forked by a helper process of their own, which imports torch once. So the caller never imports torch,
its own state is never forked, and nothing outlives the call: the helper leads a process group that is ended with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hfdcp_core.testing._truth import CHECKPOINT_NAME

GRACE_S = 60.0
"""How much longer than its ranks the helper may take: to import torch on a busy machine, and to say who hung where."""


class RankFailed(RuntimeError):
    """A rank raised, died or took too long; the message holds its traceback."""


@dataclass(frozen=True, slots=True)
class Order:
    """One checkpoint that the ranks shall write."""

    builder: str
    """Name of the function in the rank processes that makes the state dict."""
    ranks: int
    """How many processes share it."""
    folder: str
    """Where the checkpoint's folder and its truth go."""
    format: str
    """``dcp`` or ``dcp-safetensors``: which of torch's writers saves it."""
    settings: Mapping[str, str | int] = field(default_factory=dict)
    """Keyword arguments of the builder."""


def carry_out(orders: Sequence[Order], *, timeout_s: float) -> None:
    """Write all checkpoints; those of one number of ranks are written by one set of processes.

    Raises:
        FileExistsError: Something lies where a checkpoint shall go: its files could be taken for parts of the new one.
        RankFailed: A rank raised, died, or had not finished after ``timeout_s``.
    """
    for order in orders:
        _refuse_used(Path(order.folder) / CHECKPOINT_NAME)
    request = json.dumps({"timeout_s": timeout_s, "orders": [asdict(order) for order in orders]})
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "hfdcp_core.testing._ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _, log = process.communicate(request, timeout=timeout_s + GRACE_S)
    except subprocess.TimeoutExpired:
        raise RankFailed(f"the ranks had not finished after {timeout_s:g} s and did not say why") from None
    finally:
        _end(process)
    if process.returncode:
        raise RankFailed(f"the ranks failed with status {process.returncode}:\n{log.strip()}")


def _refuse_used(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: not empty; a checkpoint is only written into an empty folder")


def _end(process: subprocess.Popen[str]) -> None:
    """End the helper and every rank that is left: they share a process group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
