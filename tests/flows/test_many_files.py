"""Many output files at once: how many are in flight, and what comes out when some of them fail."""

import threading
from collections.abc import Callable
from typing import Any, Self

import cloudpickle
import pytest
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from hfdcp_core.errors import Cancelled, CorruptFile, HfdcpError, NoSpace, PlanError, StorageDenied, StorageError
from hfdcp_core.publish import Job
from hfdcp_core.testing.faulty import FOREIGN_ERRORS, Fault, Faults
from hfdcp_flows.publish import one_error, parameters_of, publish


class InFlight:
    """Counts the files that were begun and not yet finished."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = 0

    def enter(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def leave(self) -> None:
        with self._lock:
            self.now -= 1


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_files_are_in_flight_than_the_job_says(
    do: Any, job: Callable[..., Job], sink: Faults, workers: int
) -> None:
    files = InFlight()
    sink.add(Fault("create", "out/model-", times=99, then=files.enter))
    sink.add(Fault("commit", "out/model-", times=99, then=files.leave))
    assert do(job(sink=f"{sink.url}/out", files=6, workers=workers)).error is None
    assert files.now == 0
    assert 1 <= files.most <= workers


def test_files_that_fail_together_are_told_of_together(do: Any, job: Callable[..., Job], sink: Faults) -> None:
    both = threading.Barrier(2, timeout=60)
    denied = FOREIGN_ERRORS[StorageDenied]
    for number in (1, 2):
        sink.add(Fault("create", f"out/model-0000{number}-of", then=both.wait, error=denied))
    outcome = do(job(sink=f"{sink.url}/out", workers=2))
    assert type(outcome.error) is StorageDenied
    assert outcome.error.message == "2 of 3 output files failed"
    assert [f"model-0000{number}-of" in problem for number, problem in enumerate(outcome.error.problems, 1)] == [
        True
    ] * 2


def test_no_file_is_begun_after_one_has_failed(do: Any, job: Callable[..., Job], sink: Faults) -> None:
    sink.add(Fault("create", "out/model-00001-of", error=FOREIGN_ERRORS[NoSpace]))
    outcome = do(job(sink=f"{sink.url}/out", files=5, workers=1))
    assert type(outcome.error) is NoSpace
    assert outcome.named("Failed") == {"model-00001-of-00005.safetensors"}
    assert outcome.named("Cancelled") == {f"model-0000{number}-of-00005.safetensors" for number in (2, 3, 4, 5)}
    assert sink.attempts("create", "out/model-") == 1


class Elsewhere(TaskRunner[Any]):
    """Stands for a cluster: takes tasks as one does, and keeps what it would have to send."""

    def __init__(self, sent: list[bytes]) -> None:
        super().__init__()
        self.sent = sent
        self.threads: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=1)

    def duplicate(self) -> "Elsewhere":
        return Elsewhere(self.sent)

    def submit(self, task: Any, parameters: dict[str, Any], *args: Any, **options: Any) -> Any:
        self.sent.append(cloudpickle.dumps(parameters))
        return self.threads.submit(task, parameters, *args, **options)

    def __enter__(self) -> Self:
        self.threads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.threads.__exit__(*error)


def test_a_cluster_is_sent_a_small_task_for_each_file(prefect_api: None, job: Callable[..., Job], sink: Faults) -> None:
    sent: list[bytes] = []
    asked = job(sink=f"{sink.url}/out", file_index=None, max_file_size=300_000)
    publish.with_options(task_runner=Elsewhere(sent))(**parameters_of(asked))
    assert 3 < len(sent) == sink.attempts("create", "out/model-")
    assert max(len(message) for message in sent) < 1_500


RESET, DAMAGED = StorageError("a: reset"), CorruptFile("b: damaged", ["x", "y"])
STOPPED = Cancelled("stopped")


@pytest.mark.parametrize(
    ("errors", "expected", "problems"),
    [
        ([RESET], StorageError, ()),
        ([RESET, DAMAGED], CorruptFile, ("a: reset", "b: damaged: x", "b: damaged: y")),
        ([RESET, NoSpace("full")], NoSpace, ("a: reset", "full")),
        ([DAMAGED, PlanError("no")], CorruptFile, ("b: damaged: x", "b: damaged: y", "no")),
        ([STOPPED, DAMAGED], CorruptFile, ("x", "y")),
        ([STOPPED, STOPPED], Cancelled, ()),
        ([RESET, ValueError("ours")], ValueError, None),
    ],
    ids=["one", "retryable-and-not", "both-of-storage", "first", "stopped-and-damaged", "stopped", "our-mistake"],
)
def test_the_errors_of_several_files_become_one(
    errors: list[Exception], expected: type[Exception], problems: tuple[str, ...] | None
) -> None:
    error = one_error(errors, files=9)
    assert type(error) is expected
    assert getattr(error, "problems", None) == problems


def test_the_error_of_one_file_is_raised_as_it_is() -> None:
    assert one_error([STOPPED, DAMAGED], files=9) is DAMAGED


def test_an_error_of_several_files_has_the_exit_status_of_its_class() -> None:
    error = one_error([RESET, DAMAGED], files=9)
    assert isinstance(error, HfdcpError)
    assert error.exit_status == CorruptFile.exit_status
