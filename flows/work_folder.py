"""Where a publish without a sink keeps its output: a folder of the user's cache, removed after success.

The folder is named after the source, the repository and the plan. So the same command finds what an interrupted run
left and goes on from there, and a source that changed since starts anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hfdcp_core.job import Job
from hfdcp_core.state import Progress

NAME_LENGTH = 16
"""Hexadecimal digits of a digest in a folder's name."""


@contextmanager
def work_folder(job: Job, plan_digest: str, progress: Progress) -> Iterator[str]:
    """Lend a folder for the output of one plan; it stays for the next try where the work fails."""
    folder = folder_of(job)
    work = folder / plan_digest[:NAME_LENGTH]
    work.mkdir(parents=True, exist_ok=True)
    try:
        yield str(work)
    except BaseException:
        progress.say(f"what is done is kept in {work}; the same command goes on from there")
        raise
    # What earlier states of the same source left is superseded by what was published now. A cache that cannot be
    # emptied, or that another run of the same just did empty, is no fault.
    shutil.rmtree(folder, ignore_errors=True)


def folder_of(job: Job) -> Path:
    """Return the folder of everything that is published from one source to one repository."""
    source = job.source if "://" in job.source else str(Path(job.source).absolute())
    name = hashlib.sha256("\n".join([source, job.endpoint, job.repo, job.revision]).encode()).hexdigest()
    return cache_home() / "hfdcp" / "publish" / name[:NAME_LENGTH]


def cache_home() -> Path:
    """Return the user's folder for what can be made again, as the XDG base directory specification has it."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return Path(chosen) if chosen.startswith("/") else Path.home() / ".cache"
