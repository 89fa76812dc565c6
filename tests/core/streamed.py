"""Publishes to be killed, as a process of its own: ``python streamed.py SOURCE WORK REPO FILES``."""

import sys
from pathlib import Path

from hfdcp_core import hub_stage, publish
from hfdcp_core.job import STREAM_ONLY, Job
from hfdcp_core.testing.checkpoints import read_truth


def job_of(source: str, work: str, repo: str, files: int) -> Job:
    """The job that streams a model in so many files; ``source`` is where `write_model` wrote it."""
    truth = read_truth(Path(source))
    spread = {name: 1 + number % files for number, name in enumerate(truth.tensors)}
    return Job(str(truth.folder), work, repo, file_index=spread, stream=STREAM_ONLY, workers=2)


if __name__ == "__main__":
    hub_stage.FLUSH_FILES = 3  # so that of few files some are on the stage when it is killed
    publish.publish(job_of(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
