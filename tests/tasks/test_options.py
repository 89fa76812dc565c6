"""How the five steps run as tasks; nothing here needs a Prefect server."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Failed

from hfdcp_core import errors
from hfdcp_core.errors import Cancelled, HfdcpError, StorageError
from hfdcp_core.state import SILENT, Cancellation
from hfdcp_tasks.consolidate import consolidate
from hfdcp_tasks.gather import gather
from hfdcp_tasks.options import JITTER, PAUSES_S, Session, again, begin, session
from hfdcp_tasks.push import push
from hfdcp_tasks.reshard import reshard
from hfdcp_tasks.validate import validate

STEPS: dict[str, Task[..., Any]] = {
    "gather": gather,
    "reshard": reshard,
    "consolidate": consolidate,
    "validate": validate,
    "push": push,
}
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HfdcpError)]


def attempt(number: int) -> TaskRun:
    return TaskRun(task_key="step", dynamic_key="0", run_count=number)


def failed(error: Exception) -> State[Any]:
    return Failed(data=error)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_step_asks_its_error_whether_to_go_on(step: Task[..., Any]) -> None:
    assert step.retry_condition_fn is again
    assert step.retries == len(PAUSES_S)
    assert not step.retry_delay_seconds


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_no_step_keeps_its_result_or_takes_it_from_a_cache(step: Task[..., Any]) -> None:
    assert step.cache_policy == NO_CACHE
    assert step.persist_result is False


@pytest.mark.parametrize(("name", "step"), STEPS.items(), ids=STEPS)
def test_a_task_bears_the_name_of_its_step(name: str, step: Task[..., Any]) -> None:
    assert step.name == name
    assert step.task_run_name == ("{path}" if name == "consolidate" else name)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_is_tried_again_if_its_class_says_so(kind: type[HfdcpError]) -> None:
    with session(Session(pauses_s=(0.0,))):
        assert again(gather, attempt(1), failed(kind("as told"))) is kind.retryable


@pytest.mark.parametrize(
    "error", [ValueError("ours"), OSError("not translated")], ids=lambda error: type(error).__name__
)
def test_an_error_that_is_none_of_ours_is_a_mistake_and_is_not_tried_again(error: Exception) -> None:
    with session(Session(pauses_s=(0.0,))):
        assert not again(gather, attempt(1), failed(error))


@given(pauses=st.integers(0, 5), number=st.integers(1, 8))
def test_there_is_one_more_attempt_than_there_are_pauses(pauses: int, number: int) -> None:
    with session(Session(pauses_s=(0.0,) * pauses)):
        assert again(gather, attempt(number), failed(StorageError("reset"))) is (number <= pauses)


def test_a_pause_ends_with_a_wish_to_stop() -> None:
    shared = Session(pauses_s=(3600.0,))
    threading.Timer(0.1, shared.cancellation.cancel).start()
    with session(shared):
        assert not again(gather, attempt(1), failed(StorageError("reset")))


def test_pauses_grow_and_are_not_all_alike() -> None:
    assert list(PAUSES_S) == sorted(PAUSES_S)
    assert 0 < JITTER < 1


def test_without_a_session_a_task_is_silent_and_nobody_stops_it() -> None:
    alone = begin()
    assert alone.progress is SILENT
    alone.cancellation.check()


def test_a_session_reaches_what_is_called_within_it_and_ends_with_it() -> None:
    outer = Session()
    with session(outer):
        assert begin() is outer
        with session() as inner:
            assert inner is outer
        with session(Session()) as other:
            assert begin() is other
        assert begin() is outer
    assert begin() is not outer


def test_no_step_begins_after_a_wish_to_stop() -> None:
    wish = Cancellation()
    wish.cancel()
    with session(Session(cancellation=wish)), pytest.raises(Cancelled, match="stopped on request"):
        begin()
