"""For tests of the drop-in: state dicts to compare bit for bit, and real ranks by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

TORCHRUN_TIMEOUT_S = 300


def run_ranks(script: Path, ranks: int, *arguments: str) -> str:
    """Run a script by torchrun and return its output; it must succeed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=TORCHRUN_TIMEOUT_S,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:6000]
    return done.stdout


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def blank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same kinds whose every byte is another one."""
    return {name: (~bits(tensor)).view(tensor.dtype).reshape(tensor.shape) for name, tensor in tensors.items()}


def differences(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Name the tensors that two state dicts do not have alike, bit for bit."""
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not torch.equal(bits(one[n]), bits(other[n]))]
