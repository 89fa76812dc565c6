"""The ranks of a process group that work on something together, however long it takes each.

A collective that waits for a slow disk runs into the group's timeout. So work is done in a thread, while the ranks only
tell one another, again and again, whether they are done; and what went wrong on one of them is raised on all.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

from hfdcp_core.errors import HfdcpError

Value = TypeVar("Value")
BEAT_S = 0.02
"""How long to wait before the first further question whether all are done."""
SLOWEST_BEAT_S = 2.0
"""How long at most."""
LEAVE_S = 0.1
"""How long a rank that ends lets torch's threads have the interpreter."""


class Ranks:
    """The ranks of a process group, or one alone where there is none."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        """Take a group; without one, all ranks where `torch.distributed` is set up, or this one ``alone``."""
        self._together = not alone and dist.is_available() and dist.is_initialized()
        self._group = group
        self.rank = dist.get_rank(group) if self._together else 0
        self.size = dist.get_world_size(group) if self._together else 1

    def share(self, value: Value) -> list[Value]:
        """Return what every rank has to say; a short collective."""
        if not self._together:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def own(self, work: Callable[[], Value]) -> Value:
        """Do this rank's work and return what it made, when every rank has done its own.

        Raises:
            HfdcpError: That of the first rank on which it failed, on every rank.
        """
        with ThreadPoolExecutor(1, "hfdcp-rank") as thread:
            future = thread.submit(work)
            self._wait(future)
        faults = self.share(_told(future.exception()))
        first = next((rank for rank, fault in enumerate(faults) if fault is not None), None)
        if first is not None and (fault := faults[first]) is not None and first != self.rank:
            raise fault.within(f"rank {first}")
        return future.result()

    def _wait(self, future: Future[Value]) -> None:
        beat = BEAT_S
        while not all(self.share(future.done())):
            time.sleep(beat)
            beat = min(2 * beat, SLOWEST_BEAT_S)


def _told(fault: BaseException | None) -> HfdcpError | None:
    """Return a fault as other ranks can be told of it."""
    return fault if fault is None or isinstance(fault, HfdcpError) else HfdcpError(f"{type(fault).__name__}: {fault}")


def leave_gently() -> None:
    """Let this process end well, where it is one of several ranks.

    Gloo's threads drop the tensors of a collective after it has returned, and need the interpreter for that. Where it
    is being taken down, Python ends such a thread, torch has no way out, and the rank aborts (SIGABRT) though all that
    it saved is whole: in one of ten runs on a busy machine, with torch's own writers too.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _wait_at_exit()


@cache
def _wait_at_exit() -> None:
    atexit.register(time.sleep, LEAVE_S)
