"""Validate: is what was written what was meant? The manifest comes last."""

from __future__ import annotations

from hfdcp_core import publish
from hfdcp_core.publish import Job
from hfdcp_core.statistics import merged, told
from hfdcp_tasks.options import begin, log, step


@step("validate")
def validate(job: Job) -> str:
    """Hold what was written against the plan, write the manifest, and return the plan's digest, which it bears."""
    session = begin()
    manifest = publish.validate(job, progress=session.progress, cancellation=session.cancellation)
    for line in told(merged(manifest.records)):
        log().warning("%s", line)
    log().info("validated %d files of %d bytes", len(manifest.files), manifest.total_size)
    return manifest.plan_digest
