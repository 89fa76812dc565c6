"""Push: what the manifest names becomes one commit on the Hub."""

from __future__ import annotations

from hfdcp_core import publish
from hfdcp_core.hub import Receipt
from hfdcp_core.publish import Job
from hfdcp_tasks.options import begin, log, step


@step("push")
def push(job: Job) -> Receipt:
    """Commit the output, and compare what the Hub has then with what was written."""
    session = begin()
    receipt = publish.push(job, progress=session.progress, cancellation=session.cancellation)
    log().info("pushed %d files as %s", len(receipt.files), receipt.url)
    return receipt
