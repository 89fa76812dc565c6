"""Consolidate: one output file is written, hashed and recorded."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from hfdcp_core import publish
from hfdcp_core.publish import Job
from hfdcp_tasks.options import begin, log, step


@step("consolidate", run_name="{path}")
def consolidate(job: Job, index: int, path: str) -> str | State[Any]:
    """Write the output file ``path``, which is number ``index`` of the plan, and return its sha256."""
    session = begin()
    if session.closed.is_set():
        return Cancelled(message="not begun, because another file failed")
    record = publish.consolidate(job, index, progress=session.progress, cancellation=session.cancellation)
    log().info("consolidated %s: %d bytes, sha256 %s", path, record.size, record.sha256)
    return record.sha256
