"""How far a run is, and whether it should go on."""

from __future__ import annotations

import threading
from typing import Protocol

from hfdcp_core.errors import Cancelled


def in_bytes(number: float) -> str:
    """Write a number of bytes as a person reads it.

    >>> in_bytes(512), in_bytes(2_048_000), in_bytes(5e9)
    ('512 B', '2.0 MB', '5.0 GB')
    """
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if number < 999.95 or unit == "TB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError("the loop returns")


class Progress(Protocol):
    """Whoever wants to know how far a run is. All methods are called from many threads."""

    def begin(self, step: str, total_bytes: int) -> None:
        """One of the five steps (gather, reshard, consolidate, validate, push) begins; so many bytes lie ahead."""
        ...

    def advance(self, nbytes: int) -> None:
        """So many more bytes of the step are done."""
        ...

    def say(self, line: str) -> None:
        """Take one line for a person."""
        ...


class _Silent:
    """Takes every report and does nothing with it."""

    def begin(self, step: str, total_bytes: int) -> None:
        """Ignore a step."""

    def advance(self, nbytes: int) -> None:
        """Ignore bytes."""

    def say(self, line: str) -> None:
        """Ignore a line."""


SILENT: Progress = _Silent()
"""For callers that do not want to know."""


class Cancellation:
    """A wish to stop, made in one thread (or a signal handler) and heeded in others.

    >>> wish = Cancellation()
    >>> wish.check()
    >>> wish.cancel()
    >>> wish.check()
    Traceback (most recent call last):
    hfdcp_core.errors.Cancelled: stopped on request; run the same command again to go on from here
    """

    def __init__(self) -> None:
        self._wished = threading.Event()

    def cancel(self) -> None:
        """Ask for a stop."""
        self._wished.set()

    @property
    def wished(self) -> bool:
        """Whether a stop was asked for."""
        return self._wished.is_set()

    def wait(self, seconds: float) -> None:
        """Wait, unless a stop is asked for.

        Raises:
            Cancelled: A stop was asked for.
        """
        self._wished.wait(seconds)
        self.check()

    def check(self) -> None:
        """Go on, or stop here.

        Raises:
            Cancelled: A stop was asked for.
        """
        if self._wished.is_set():
            raise Cancelled("stopped on request; run the same command again to go on from here")
