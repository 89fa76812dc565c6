"""A question to a process of its own: for what imports torch or transformers, or runs a user's code.

The command itself stays small, and whatever the child does to its memory or its interpreter ends with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfdcp_core.errors import PlanError

TIMEOUT_S = 900
"""A child that takes longer is stopped."""
_SHOWN = 2000
"""Characters of what a child said last."""


def ask(module: str, request: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """Run a module of ours, and return its answer.

    Args:
        module: Name of the module, which reads a request on stdin and writes an answer to the file that it names.
        request: Plain data.
        what: What is asked, for messages.

    Raises:
        PlanError: It could not answer; the message has what it said.
    """
    with tempfile.TemporaryDirectory(prefix="hfdcp-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", module]
        text = json.dumps({**request, "answer": str(answer)})
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter and module
                command, input=text, text=True, capture_output=True, timeout=TIMEOUT_S, check=False, env=environment
            )
        except subprocess.TimeoutExpired as error:
            raise PlanError(f"{what}: no answer within {TIMEOUT_S} s") from error
        if not answer.exists():
            raise PlanError(
                f"{what}: the process for it ended with status {done.returncode}: {done.stderr[-_SHOWN:].strip()}"
            )
        found: dict[str, Any] = json.loads(answer.read_text())
    if "error" in found:
        raise PlanError(f"{what}: {found['error']}")
    return found
