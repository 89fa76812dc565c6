"""Reshard: which bytes go into which file? A proof that every element comes from exactly one place."""

from __future__ import annotations

from hfdcp_core import publish
from hfdcp_core.publish import Job, Planned
from hfdcp_tasks.options import begin, log, step


@step("reshard")
def reshard(job: Job) -> Planned:
    """Plan every output file."""
    planned = publish.reshard(job, progress=begin().progress)
    log().info("planned %d files of %d bytes, plan %s", len(planned.files), planned.nbytes, planned.digest)
    return planned
