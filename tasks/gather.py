"""Gather: what tensors are there, and in which files do they lie?"""

from __future__ import annotations

from hfdcp_core import publish
from hfdcp_core.publish import Job
from hfdcp_tasks.options import begin, log, step


@step("gather")
def gather(job: Job) -> str:
    """List the tensors of the checkpoint and their shards, and return the digest of its files."""
    found = publish.gather(job, progress=begin().progress)
    for line in found.said:
        log().info("%s", line)
    left_out = len(found.skipped)
    log().info("gathered %s: %d tensors in %d files, %d left out", found.format, found.tensors, found.files, left_out)
    return found.source_digest
