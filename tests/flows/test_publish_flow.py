"""The five steps as a Prefect flow on a real server: from a checkpoint that torch wrote to a Hub on loopback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfdcp_core.errors import SinkOccupied
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH
from hfdcp_core.publish import Job, hold
from hfdcp_core.testing.checkpoints import Truth, compare_with_truth
from hfdcp_core.testing.hub import Hub

STEPS = {"gather", "reshard", "validate", "push"}
WEIGHTS = {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}


def test_a_checkpoint_goes_through_five_steps_to_the_hub(
    do: Any, job: Callable[..., Job], model: Truth, hub: Hub, tmp_path: Path
) -> None:
    outcome = do(job())
    assert outcome.error is None
    assert compare_with_truth(model, tmp_path / "sink") == ()
    assert hub.files("acme/model").keys() >= WEIGHTS | {INDEX_PATH, MANIFEST_PATH}
    assert hub.private("acme/model")
    assert outcome.flow_run.name == "publish-acme/model"
    assert outcome.flow_run.state_name == "Completed"
    assert outcome.receipt["commit"] in outcome.receipt["url"]
    assert set(outcome.receipt["files"]) == WEIGHTS | {INDEX_PATH, MANIFEST_PATH}


def test_each_output_file_has_a_task_run_that_is_named_after_it(do: Any, job: Callable[..., Job]) -> None:
    outcome = do(job())
    assert dict(outcome.attempts) == dict.fromkeys(STEPS | WEIGHTS, 1)
    assert outcome.named("Completed") == STEPS | WEIGHTS


def test_another_run_finds_everything_done(do: Any, job: Callable[..., Job], tmp_path: Path) -> None:
    do(job())
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "sink").glob("*.safetensors")}
    outcome = do(job())
    assert outcome.receipt["unchanged"]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "sink").glob("*.safetensors")} == written


def test_the_flow_holds_the_sink(do: Any, job: Callable[..., Job]) -> None:
    with hold(job()), pytest.raises(SinkOccupied, match="hfdcp"):
        do(job())
