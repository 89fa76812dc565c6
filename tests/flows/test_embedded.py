"""The flow for a person at a terminal: which server it runs on, how it stops, and that nothing of it is lost."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from hfdcp_core.errors import Cancelled, StorageError, UsageError
from hfdcp_core.publish import Job
from hfdcp_core.state import Cancellation
from hfdcp_core.testing.checkpoints import Truth
from hfdcp_core.testing.faulty import Fault, Faults
from hfdcp_core.testing.hub import Hub
from hfdcp_flows.embedded import drain
from hfdcp_flows.publish import run

PROGRAM = """
import sys
from hfdcp_core.publish import Job
from hfdcp_flows.publish import run
print(run(Job.from_json(sys.argv[1])).commit)
"""


@pytest.fixture
def own_home(tmp_path: Path, hub: Hub) -> dict[str, str]:
    """The environment of somebody who has never used Prefect."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**kept, **hub.environment, "PREFECT_HOME": str(tmp_path / "prefect")}


def task_run_states(home: Path) -> list[tuple[str, int]]:
    with sqlite3.connect(home / "prefect.db") as database:
        return database.execute("select state_name, count(*) from task_run group by state_name").fetchall()


def test_the_embedded_server_needs_no_setup_and_loses_no_task_run(
    job: Callable[..., Job], own_home: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, job(files=40).to_json()],
        env=own_home,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.strip()) == 40
    assert task_run_states(tmp_path / "prefect") == [("Completed", 44)]


def stopped_by(act: Callable[[], object], wish: Cancellation) -> Callable[[], None]:
    """Ask for a stop, and go on only when it has reached the core: until then the thread is in the middle of a file."""

    def then() -> None:
        act()
        heard = threading.Event()
        for _ in range(3000):
            try:
                wish.check()
            except Cancelled:
                return
            heard.wait(0.01)

    return then


@pytest.mark.parametrize(
    "act",
    [lambda: os.kill(os.getpid(), signal.SIGINT), lambda: os.kill(os.getpid(), signal.SIGTERM), None],
    ids=["ctrl-c", "sigterm", "a-handler-of-the-command-line"],
)
def test_a_stop_reaches_the_threads_and_the_run_has_an_end(
    prefect_api: None, job: Callable[..., Job], sink: Faults, act: Callable[[], object] | None
) -> None:
    wish = Cancellation()
    sink.add(Fault("commit", "out/model-", then=stopped_by(act or wish.cancel, wish)))
    asked = job(sink=f"{sink.url}/out", repo=f"acme/stopped-{os.urandom(4).hex()}", workers=1)
    with pytest.raises(Cancelled, match="run the same command again"):
        run(asked, cancellation=wish)
    assert sink.attempts("create", "out/model-") == 1
    with get_client(sync_client=True) as client:
        (flow_run,) = [found for found in client.read_flow_runs() if found.name == f"publish-{asked.repo}"]
    assert flow_run.state
    assert flow_run.state.is_final()
    assert not flow_run.state.is_completed()


def test_a_configured_api_that_is_down_is_one_clear_message(job: Callable[..., Job]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}),
        pytest.raises(
            StorageError,
            match=rf"no answer from the Prefect API at http://127.0.0.1:{port}/api: ConnectError.*--direct",
        ),
    ):
        run(job())


def test_parameters_that_prefect_does_not_take_are_refused_before_anything_starts(job: Callable[..., Job]) -> None:
    with pytest.raises(UsageError, match="use --direct"):
        run(job(file_index={f"model.layers.{number}.mlp.experts.weight": 1 for number in range(20_000)}))


def test_what_never_arrives_is_waited_for_within_bounds_and_told(
    prefect_api: None, caplog: pytest.LogCaptureFixture
) -> None:
    with get_client(sync_client=True) as client:
        drain(client, {uuid4(), uuid4()}, silence_s=0.3)
    assert "does not show how 2 task runs ended" in caplog.text


class Watcher:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        self.done: dict[str, int] = {}

    def begin(self, step: str, total_bytes: int) -> None:
        self.steps.append((step, total_bytes))

    def advance(self, nbytes: int) -> None:
        step = self.steps[-1][0]
        self.done[step] = self.done.get(step, 0) + nbytes

    def say(self, line: str) -> None: ...


def test_whoever_watches_hears_of_every_step_from_the_task_threads(
    prefect_api: None, job: Callable[..., Job], model: Truth
) -> None:
    watcher = Watcher()
    receipt = run(job(), progress=watcher)
    assert [step for step, _ in watcher.steps] == ["gather", "reshard", "consolidate", "validate", "push"]
    bytes_of = dict(watcher.steps)
    assert 1_000_000 < watcher.done["consolidate"] <= bytes_of["consolidate"]
    assert receipt.uploaded_bytes > 1_000_000
    assert watcher.done.get("push", 0) == bytes_of["push"] == 0  # every large file was streamed before
