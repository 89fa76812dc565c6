"""A real Prefect server, a real checkpoint and a Hub on loopback, for everything that runs the flow."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

from hfdcp_core.errors import HfdcpError
from hfdcp_core.job import STREAM_BOTH
from hfdcp_core.publish import Job
from hfdcp_core.testing.checkpoints import Truth, write_model
from hfdcp_core.testing.faulty import Faults, faulty_store
from hfdcp_core.testing.hub import Hub
from hfdcp_flows.embedded import drain
from hfdcp_flows.publish import parameters_of, publish
from hfdcp_tasks.options import Session, session

REPO = "acme/model"
AT_ONCE = (0.0, 0.0, 0.0)


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[None]:
    """One server for all: its start takes half a minute. A heartbeat would cost each flow run a second."""
    quick: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}
    with prefect_test_harness(server_startup_timeout=180), temporary_settings(quick):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A checkpoint of 147 tensors that torch wrote. Read only: who damages it copies it."""
    return write_model(tmp_path_factory.mktemp("model"), total_bytes=1_000_000, ranks=1)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub whose token is where huggingface_hub looks for one."""
    with Hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@pytest.fixture
def sink() -> Iterator[Faults]:
    """A storage in memory that fails as it is told."""
    with faulty_store("memory://hfdcp-flows") as faults:
        yield faults
        faults.target.store.clear()


@pytest.fixture
def source(model: Truth) -> Iterator[Faults]:
    """The model in a storage that fails as it is told."""
    with faulty_store(f"file://{model.folder}") as faults:
        yield faults


def spread(truth: Truth, files: int) -> Mapping[str, int]:
    return {name: 1 + number % files for number, name in enumerate(truth.tensors)}


MakeJob = Callable[..., Job]


@pytest.fixture
def job(model: Truth, hub: Hub, tmp_path: Path) -> MakeJob:
    """Make the job that publishes the model in so many files; anything may be told otherwise."""

    def make(*, files: int = 3, **options: Any) -> Job:
        usual: dict[str, Any] = {
            "source": str(model.folder),
            "sink": str(tmp_path / "sink"),
            "repo": REPO,
            "endpoint": hub.url,
            "file_index": spread(model, files),
            "stream": STREAM_BOTH,
            "workers": 2,
        }
        return Job(**{**usual, **options})

    return make


@dataclass(frozen=True)
class Outcome:
    """How a run of the flow ended, and what Prefect knows of it."""

    receipt: dict[str, Any] | None
    error: HfdcpError | None
    flow_run: FlowRun
    task_runs: Mapping[str, TaskRun]

    @property
    def attempts(self) -> Mapping[str, int]:
        return {name: run.run_count for name, run in self.task_runs.items()}

    def named(self, state: str) -> set[str]:
        return {name for name, run in self.task_runs.items() if run.state_name == state}


Do = Callable[[Job], Outcome]


@pytest.fixture
def do(prefect_api: None) -> Do:
    """Run the flow, retries without pauses, and see what came of it."""

    def run(job: Job) -> Outcome:
        shared = Session(pauses_s=AT_ONCE)
        receipt, error = None, None
        try:
            with session(shared):
                receipt = publish(**parameters_of(job))
        except HfdcpError as raised:
            error = raised
        with get_client(sync_client=True) as client:
            drain(client, shared.task_runs)
            flow_run_id = client.read_task_run(next(iter(shared.task_runs))).flow_run_id
            assert flow_run_id
            only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
            runs = client.read_task_runs(flow_run_filter=only)
            return Outcome(receipt, error, client.read_flow_run(flow_run_id), {run.name: run for run in runs})

    return run
