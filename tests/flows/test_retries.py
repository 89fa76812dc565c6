"""Whether a step is tried again is asked of the error: attempts are counted by Prefect and by the storage itself."""

from collections.abc import Callable
from typing import Any

import pytest
from prefect import flow
from prefect.client.schemas.objects import State

from hfdcp_core import errors
from hfdcp_core import publish as core
from hfdcp_core.errors import (
    CorruptFile,
    HfdcpError,
    HubDenied,
    SourceChanged,
    StorageError,
    ValidationError,
)
from hfdcp_core.manifest import MANIFEST_PATH
from hfdcp_core.publish import Job
from hfdcp_core.testing.faulty import FOREIGN_ERRORS, Fault, Faults
from hfdcp_core.testing.hub import Hub
from hfdcp_tasks.consolidate import consolidate
from hfdcp_tasks.options import Session, session

FILE = "model-00002-of-00003.safetensors"
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HfdcpError)]


def test_the_classes_that_are_tried_again_are_these() -> None:
    assert {kind.__name__ for kind in CLASSES if kind.retryable} == {"StorageError", "RateLimited", "HubUnavailable"}


def test_each_class_of_error_has_its_number_of_attempts(
    prefect_api: None, job: Callable[..., Job], sink: Faults
) -> None:
    """One file for each class; the storage fails once with it, or with an error that is translated into it."""
    asked = job(sink=f"{sink.url}/out", files=len(CLASSES))
    core.gather(asked)
    paths = dict(zip(CLASSES, [file.path for file in core.reshard(asked).files], strict=True))
    for kind, path in paths.items():
        sink.add(Fault("commit", f"out/{path}", error=FOREIGN_ERRORS.get(kind) or kind("as told")))
    ended: dict[type[HfdcpError], State[Any]] = {}

    @flow
    def every_file() -> None:
        for index, (kind, path) in enumerate(paths.items()):
            with session(Session(pauses_s=(0.0, 0.0, 0.0))):
                ended[kind] = consolidate(asked, index, path, return_state=True)

    every_file()
    attempts = {kind: sink.attempts("commit", f"out/{path}") for kind, path in paths.items()}
    assert attempts == {kind: 2 if kind.retryable else 1 for kind in CLASSES}
    raised = {kind: type(state.result(raise_on_failure=False)) for kind, state in ended.items()}
    assert raised == {kind: str if kind.retryable else kind for kind in CLASSES}


def test_a_file_whose_storage_failed_is_made_by_the_second_attempt(
    do: Any, job: Callable[..., Job], sink: Faults
) -> None:
    sink.fail_once(StorageError, "commit", f"out/{FILE}")
    outcome = do(job(sink=f"{sink.url}/out"))
    assert outcome.error is None
    assert outcome.attempts[FILE] == sink.attempts("commit", f"out/{FILE}") == 2
    assert sum(outcome.attempts.values()) == len(outcome.attempts) + 1


@pytest.mark.parametrize("kind", [SourceChanged, ValidationError], ids=lambda kind: kind.__name__)
def test_any_other_error_of_a_file_ends_the_flow_as_it_was_raised(
    do: Any, job: Callable[..., Job], sink: Faults, kind: type[HfdcpError]
) -> None:
    raised = kind("as told", ["model.norm.weight: wrong"])
    sink.add(Fault("commit", f"out/{FILE}", error=raised))
    outcome = do(job(sink=f"{sink.url}/out"))
    assert outcome.error is raised
    assert outcome.attempts[FILE] == sink.attempts("commit", f"out/{FILE}") == 1
    assert outcome.flow_run.state_name == "Failed"
    assert not {"validate", "push"} & outcome.task_runs.keys()


def test_a_damaged_source_is_not_read_again(do: Any, job: Callable[..., Job], source: Faults) -> None:
    source.add(Fault("read", r"\.distcp$", flip=5_000, times=99))
    outcome = do(job(source=source.url, files=1))
    assert isinstance(outcome.error, CorruptFile)
    assert outcome.attempts["model.safetensors"] == 1


@pytest.mark.parametrize(
    ("step", "where", "operation", "path"),
    [
        ("gather", "source", "read", r"\.metadata"),
        ("reshard", "sink", "commit", r"plan\.json"),
        ("validate", "sink", "commit", MANIFEST_PATH),
        ("push", "sink", "read", MANIFEST_PATH),
    ],
)
def test_every_step_is_tried_again(
    do: Any, job: Callable[..., Job], source: Faults, sink: Faults, step: str, where: str, operation: Any, path: str
) -> None:
    {"source": source, "sink": sink}[where].fail_once(StorageError, operation, path)
    outcome = do(job(source=source.url, sink=f"{sink.url}/out", files=1))
    assert outcome.error is None
    assert {name for name, attempts in outcome.attempts.items() if attempts > 1} == {step}
    assert outcome.attempts[step] == 2


def test_attempts_have_an_end(do: Any, job: Callable[..., Job], sink: Faults) -> None:
    sink.add(Fault("commit", f"out/{FILE}", times=99, error=FOREIGN_ERRORS[StorageError]))
    outcome = do(job(sink=f"{sink.url}/out"))
    assert type(outcome.error) is StorageError
    assert outcome.attempts[FILE] == 4


@pytest.mark.parametrize(("status", "times", "attempts"), [(429, 2, 1), (503, 1, 1), (503, 4, 2)])
def test_a_hub_that_is_busy_is_asked_again(
    do: Any, job: Callable[..., Job], hub: Hub, status: int, times: int, attempts: int
) -> None:
    """By the core as often as it has patience, then by the step."""
    hub.fault("/commit/main", status=status, headers={"Retry-After": "0"}, times=times)
    outcome = do(job(files=1))
    assert outcome.error is None
    assert outcome.attempts["push"] == attempts


def test_a_hub_that_refuses_the_token_is_not(do: Any, job: Callable[..., Job], hub: Hub) -> None:
    hub.fault("/commit/main", status=401, times=99)
    outcome = do(job(files=1))
    assert type(outcome.error) is HubDenied
    assert outcome.attempts["push"] == 1
