"""Runs a flow for a person at a terminal: on the Prefect API that is configured, else on Prefect's embedded server.

Nothing has to be set up. Prefect's embedded server is a child process that ends with this one, and what its queue still
holds then is lost (hundreds of task runs became dozens). So its start is given time, and before the end every task run
that began is waited for until the server has stored its end.

The person sees hfdcp's own lines; Prefect's go to its API, where the user interface shows them.
"""

from __future__ import annotations

import json
import logging
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from types import FrameType
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterId
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    PREFECT_SERVER_LOGGING_LEVEL,
    temporary_settings,
)

from hfdcp_core.errors import Cancelled, StorageError, UsageError
from hfdcp_tasks.options import Session, session

R = TypeVar("R")

STARTUP_S = 180
"""How long the embedded server may take to start; its first start also makes the database."""
SILENCE_S = 60.0
"""How long the drain waits with nothing arriving."""
POLL_S = 0.2
"""Pause between two looks at the embedded server."""
PAGE = 200
"""How many runs the API returns at once."""
PARAMETER_BYTES = 500_000
"""A little less than what Prefect's API takes as parameters (512 KiB)."""

_UNREACHABLE = (httpx.HTTPError, OSError, RuntimeError, ValueError)
"""What Prefect raises when there is no API, the embedded server's start fails, or none is allowed."""

_log = logging.getLogger(__name__)


def run(flow: Flow[..., R], parameters: Mapping[str, Any], *, shared: Session, debug: bool = False) -> R:
    """Run ``flow`` to its end and return what it returns; ``debug`` lets Prefect's own log lines through.

    Raises:
        StorageError: The configured API does not answer, or the embedded server does not start.
        UsageError: The parameters are too large for Prefect.
        Cancelled: Somebody pressed Ctrl-C or ended the process.
    """
    _refuse_large(flow.serialize_parameters(dict(parameters)))
    if not debug:
        _quiet()
    with (
        _interrupts(shared),
        _settings(debug=debug),
        _connected(shared) as client,
        _drained(client, shared),
        session(shared),
        _api_errors(),
    ):
        result: R = flow(**parameters)
        return result


def _refuse_large(parameters: Mapping[str, Any]) -> None:
    """Refuse here what the API would refuse with a page of its own."""
    size = len(json.dumps(parameters))
    if size > PARAMETER_BYTES:
        raise UsageError(
            f"the parameters of the run take {size} bytes, and Prefect stores up to {PARAMETER_BYTES}: "
            "use --direct, which runs the same steps without Prefect"
        )


def _is_embedded() -> bool:
    return not PREFECT_API_URL.value()


@contextmanager
def _settings(*, debug: bool) -> Iterator[None]:
    """Set what the embedded server needs wherever the user, in environment or profile, has not set it."""
    defaults: dict[Any, Any] = {
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True,
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: STARTUP_S,
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
    }
    # the embedded server writes to our stderr, and says more there than a person can use
    with temporary_settings(set_defaults=defaults if debug else {**defaults, PREFECT_SERVER_LOGGING_LEVEL: "CRITICAL"}):
        yield


def _quiet() -> None:
    """Keep Prefect's lines from the terminal, whose handler is the root logger's; its API has handlers of its own.

    It stays so to the end of the process, when the embedded server says goodbye.
    """
    for handler in logging.getLogger().handlers:
        handler.addFilter(_not_of_prefect)


def _not_of_prefect(record: logging.LogRecord) -> bool:
    """Let pass what is not Prefect's, and Prefect's warnings; a run's errors reach the person as our own."""
    of_run = record.name.startswith(("prefect.flow_runs", "prefect.task_runs"))
    return not record.name.startswith("prefect") or (record.levelno >= logging.WARNING and not of_run)


@contextmanager
def _interrupts(shared: Session) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM stop the threads and come out as `Cancelled`, after Prefect has stored the run's end."""
    in_main = threading.current_thread() is threading.main_thread()
    # Prefect answers SIGTERM during a run, and then hands it to the handler that it found
    former = signal.signal(signal.SIGTERM, _interrupt) if in_main else None
    try:
        yield
    except (KeyboardInterrupt, TerminationSignal) as stop:
        shared.cancellation.cancel()
        raise Cancelled("stopped on request; run the same command again to go on from here") from stop
    finally:
        if former is not None:
            signal.signal(signal.SIGTERM, former)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _connected(shared: Session) -> Iterator[SyncPrefectClient]:
    """Give a client of the API, which has answered."""
    if _is_embedded():
        _start_server(shared)
    with ExitStack() as stack:
        try:
            client = stack.enter_context(get_client(sync_client=True))
            client.raise_for_api_version_mismatch()
        except _UNREACHABLE as error:
            cause = error.__cause__ or error
            raise StorageError(
                f"no answer from the Prefect API at {PREFECT_API_URL.value() or 'its embedded server'}: "
                f"{type(cause).__name__}: {cause}; start it, or unset PREFECT_API_URL (or leave that Prefect profile) "
                "for the embedded server, or use --direct, which runs without Prefect"
            ) from error
        yield client


def _start_server(shared: Session) -> None:
    """Start the embedded server, in a thread that blocks SIGINT, which the server inherits.

    Ctrl-C reaches every process of the terminal, and the server must live on to store how the run ended.
    """
    ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    threading.Thread(target=copy_context().run, args=(_start, ends), daemon=True).start()
    while True:
        shared.cancellation.check()
        with suppress(queue.Empty):
            error = ends.get(timeout=POLL_S)
            break
    if error:
        raise StorageError(f"Prefect's embedded server does not start: {error}; --direct runs without it") from error


def _start(ends: queue.SimpleQueue[Exception | None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        get_client(sync_client=True)
    except _UNREACHABLE as error:
        ends.put(error)
    else:
        ends.put(None)


@contextmanager
def _api_errors() -> Iterator[None]:
    """Translate what breaks between the flow and its API."""
    try:
        yield
    except (httpx.HTTPError, PrefectException) as error:
        raise StorageError(
            f"Prefect's API failed during the run: {type(error).__name__}: {error}; "
            "what is written is kept: run the same command again"
        ) from error


@contextmanager
def _drained(client: SyncPrefectClient, shared: Session) -> Iterator[None]:
    """However the run ends, let the embedded server store it."""
    try:
        yield
    finally:
        if _is_embedded():
            drain(client, shared.task_runs)


def drain(client: SyncPrefectClient, task_runs: set[UUID], *, silence_s: float = SILENCE_S) -> None:
    """Wait until the server has stored the end of every task run; give up, and say so, when nothing more arrives."""
    waiting = set(task_runs)
    patience = time.monotonic() + silence_s
    with suppress(httpx.HTTPError):  # a server that is gone stores nothing more
        while waiting and time.monotonic() < patience:
            if ended := _ended(client, sorted(waiting)):
                waiting -= ended
                patience = time.monotonic() + silence_s
            else:
                time.sleep(POLL_S)
    if waiting:
        _log.warning("Prefect's server does not show how %d task runs ended; the output is not concerned", len(waiting))


def _ended(client: SyncPrefectClient, task_runs: list[UUID]) -> set[UUID]:
    """Return those task runs whose end is stored."""
    ended: set[UUID] = set()
    for start in range(0, len(task_runs), PAGE):
        page = TaskRunFilter(id=TaskRunFilterId(any_=task_runs[start : start + PAGE]))
        found = client.read_task_runs(task_run_filter=page, limit=PAGE)
        ended.update(run.id for run in found if run.state and run.state.is_final())
    return ended
