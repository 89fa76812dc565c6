"""Faults that a test asks for, and the journal of every request that came in."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

EVER = 1 << 60
"""As ``times`` of a fault: it never ends."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with the requests that match."""

    path: str = ".*"
    """Regular expression, searched in the path with its query."""
    method: str = "*"
    """HTTP method, or ``*`` for every one."""
    status: int | None = None
    """Answer with this status instead of doing the work."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of that answer."""
    body: str = '{"error":"injected"}'
    """Body of that answer."""
    after: bool = False
    """Do the work, then close the connection instead of answering."""
    drop_after: int | None = None
    """Close the connection once that many bytes of the request's body have come in."""
    corrupt: bool = False
    """Flip one bit of the request's body."""
    delay_s: float = 0.0
    """Seconds to wait before anything else; leaving the Hub ends the wait."""
    times: int = 1
    """How many matching requests fail."""
    skip: int = 0
    """How many matching requests pass before the first one fails."""

    def matches(self, method: str, path: str) -> bool:
        """Whether a request is meant."""
        return self.method in ("*", method) and re.search(self.path, path) is not None


@dataclass(frozen=True, slots=True)
class Call:
    """One request that came in. No token is kept, only whether there was one."""

    method: str
    """HTTP method."""
    path: str
    """Path with query, as sent."""
    status: int
    """Status of the answer; 0 where the connection was closed without one."""
    received_bytes: int
    """Bytes of the request's body."""
    authorized: bool
    """Whether the request carried an Authorization header."""
    faulted: bool
    """Whether a fault was injected."""
    sent_bytes: int = 0
    """Bytes of the answer's body."""


@dataclass(slots=True)
class _Armed:
    """A fault and how often it still skips and strikes."""

    fault: Fault
    skip: int
    times: int

    def strikes(self, method: str, path: str) -> bool:
        """Count a request; True if it is one that fails."""
        if self.times <= 0 or not self.fault.matches(method, path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Journal:
    """Which faults wait, and which calls came; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []
        self._calls: list[Call] = []

    def arm(self, fault: Fault) -> None:
        """Let the next matching requests fail."""
        with self._lock:
            self._armed.append(_Armed(fault, fault.skip, fault.times))

    def disarm(self) -> None:
        """Let no further request fail."""
        with self._lock:
            self._armed.clear()

    def take(self, method: str, path: str) -> Fault | None:
        """Return the fault that this request meets."""
        with self._lock:
            return next((armed.fault for armed in self._armed if armed.strikes(method, path)), None)

    def note(self, call: Call) -> None:
        """Write a call down."""
        with self._lock:
            self._calls.append(call)

    def calls(self, path: str, method: str) -> tuple[Call, ...]:
        """Return the calls whose path matches a regular expression, oldest first."""
        with self._lock:
            calls = tuple(self._calls)
        return tuple(call for call in calls if method in ("*", call.method) and re.search(path, call.path))
