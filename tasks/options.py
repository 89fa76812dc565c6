"""How the five steps run as tasks, said once: retries, names, caching, and what they share with their process.

A task run is handed a `Job`, and for one output file its number and name. All else that it wants to know, who watches
the progress and who may stop it, is the `Session` of the process. A context variable leads to it: that reaches
Prefect's task threads, and it is no parameter, so nothing of it is hashed, sent or stored. A task that runs in another
process finds a session that is silent and that nobody stops.

Whether a failed step is tried again is asked of the error itself. The core keeps in the sink what is done, so another
attempt, and another run, go on where the last one ended; Prefect's own cache is not used.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext

from hfdcp_core.errors import Cancelled, HfdcpError
from hfdcp_core.state import SILENT, Cancellation, Progress

P = ParamSpec("P")
R = TypeVar("R")

PAUSES_S = (2.0, 10.0, 40.0)
"""Seconds between an attempt and the next; as many attempts follow the first. Single requests are retried below."""
JITTER = 0.5
"""A pause is longer or shorter by up to this part of it, so that many workers do not come back at once."""
TICK_S = 0.2
"""How long a pause goes on after a wish to stop."""


@dataclass(frozen=True, slots=True)
class Session:
    """What the task runs of one process share; it holds live things and never leaves the process."""

    progress: Progress = SILENT
    """Who watches."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Who may stop the threads."""
    pauses_s: tuple[float, ...] = PAUSES_S
    """Pauses between attempts, at most as many as `PAUSES_S`."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when one file has failed: those under way go on to their end, no other one is begun."""
    task_runs: set[UUID] = field(default_factory=set)
    """Every task run that began."""


_CURRENT: ContextVar[Session | None] = ContextVar("hfdcp_session", default=None)


@contextmanager
def session(shared: Session | None = None) -> Iterator[Session]:
    """Let all task runs of the context find ``shared``, or the session around it, or else a new one."""
    found = shared or _CURRENT.get() or Session()
    token = _CURRENT.set(found)
    try:
        yield found
    finally:
        _CURRENT.reset(token)


def begin() -> Session:
    """Return the session, having noted in it the task run that calls.

    Raises:
        Cancelled: A stop was asked for.
    """
    found = _CURRENT.get() or Session()
    if run := TaskRunContext.get():
        found.task_runs.add(run.task_run.id)
    found.cancellation.check()
    return found


def log() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the logger of the task run that calls, or the module's where there is none."""
    return get_run_logger() if TaskRunContext.get() else logging.getLogger(__name__)


def again(_: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Say whether the error of an attempt is worth another one, and pause before it.

    Prefect's own delay is a sleep that nothing interrupts in a task thread; this one ends with a wish to stop.
    """
    error = state.result(raise_on_failure=False)
    shared = _CURRENT.get() or Session()
    if not (isinstance(error, HfdcpError) and error.retryable) or run.run_count > len(shared.pauses_s):
        return False
    pause = shared.pauses_s[run.run_count - 1] * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
    log().warning("attempt %d failed, the next one follows in %.1f s: %s", run.run_count, pause, error)
    return _sleep(pause, shared.cancellation)


def _sleep(seconds: float, cancellation: Cancellation) -> bool:
    """Sleep; return False as soon as a stop is wished for."""
    end = time.monotonic() + seconds
    try:
        cancellation.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, TICK_S))
            cancellation.check()
    except Cancelled:
        return False
    return True


def _close(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> None:  # noqa: ARG001 - Prefect's names
    """Let no other file be begun once one has failed for good; its thread says so before it takes the next."""
    (_CURRENT.get() or Session()).closed.set()


def step(name: str, *, run_name: str | None = None) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a function the task of one step; ``run_name`` may name its parameters in braces."""
    return task(
        name=name,
        task_run_name=run_name or name,
        retries=len(PAUSES_S),
        retry_delay_seconds=0,
        retry_condition_fn=again,
        on_failure=[_close],
        cache_policy=NO_CACHE,
        persist_result=False,
    )
