"""How far a run is, for a person: bars on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from hfdcp_core.state import SILENT, Progress, in_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

PLAIN_EVERY_S = 5.0
"""Seconds between two plain lines about the same step."""
WORTH_A_LINE_S = 0.5
"""A step that moves no bytes gets a line if it takes as long."""


class Screen(Progress, Protocol):
    """Progress that is shown, until it is closed."""

    def close(self, *, whole: bool) -> None:
        """Finish what is on the screen; the last step is ``whole``, or was broken off."""
        ...


class PlainLines:
    """One line when a step begins to take time, one every few seconds, one when it ends: for logs and pipes."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._step, self._total, self._done = "", 0, 0
        self._began_s = self._shown_s = 0.0

    def begin(self, step: str, total_bytes: int) -> None:
        """Close the step before and start to count anew."""
        with self._lock:
            self._end()
            self._step, self._total, self._done = step, total_bytes, 0
            self._began_s = self._shown_s = self._clock()

    def advance(self, nbytes: int) -> None:
        """Count, and say so now and then."""
        with self._lock:
            self._done += nbytes
            now = self._clock()
            if now - self._shown_s >= PLAIN_EVERY_S and self._done < self._total:
                self._shown_s = now
                self._write(f"{self._step}: {in_bytes(self._done)} of {in_bytes(self._total)}{self._pace(now)}")

    def say(self, line: str) -> None:
        """Write the line."""
        with self._lock:
            self._write(line)

    def close(self, *, whole: bool) -> None:
        """Close the last step."""
        with self._lock:
            if whole:
                self._end()
            elif self._done:
                self._write(f"{self._step}: stopped at {in_bytes(self._done)} of {in_bytes(self._total)}")
            self._step, self._done = "", 0

    def _end(self) -> None:
        spent_s = self._clock() - self._began_s
        if self._step and (self._done or spent_s >= WORTH_A_LINE_S):
            self._write(f"{self._step}: {f'{in_bytes(self._done)} in ' if self._done else ''}{spent_s:.1f} s")

    def _pace(self, now: float) -> str:
        rate = self._done / max(now - self._began_s, 1e-9)
        return f", {in_bytes(rate)}/s, {(self._total - self._done) / max(rate, 1e-9):.0f} s left"

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveBars:
    """One bar for each step: bytes, rate, time left."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._lock = threading.Lock()
        self._task: TaskID | None = None
        bars.start()

    def begin(self, step: str, total_bytes: int) -> None:
        """Complete the bar before and start one for this step."""
        with self._lock:
            self._end()
            self._task = self._bars.add_task(step, total=total_bytes or None, counted=total_bytes > 0)

    def advance(self, nbytes: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bars.advance(self._task, nbytes)

    def say(self, line: str) -> None:
        """Write the line above the bars."""
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self, *, whole: bool) -> None:
        """Leave the bars as they are; one that was broken off stays half full."""
        with self._lock:
            if whole:
                self._end()
            self._task = None
            self._bars.stop()

    def _end(self) -> None:
        """Fill the bar: a step that ended is done, whether its bytes were counted or not."""
        if self._task is not None:
            task = next(task for task in self._bars.tasks if task.id == self._task)
            total = task.total or max(task.completed, 1)
            self._bars.update(self._task, total=total, completed=total)
            self._bars.stop_task(self._task)


def live_bars() -> LiveBars:
    """Return bars on the terminal that stderr is."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class WhereCounted(ProgressColumn):
        """Another column, for steps whose bytes are counted."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self.column = column

        def render(self, task: Task) -> RenderableType:
            """Render the other column, or nothing."""
            return self.column.render(task) if task.fields["counted"] else Text()

    numbers = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    columns = (TextColumn("{task.description:<12}"), BarColumn(), *map(WhereCounted, numbers))
    return LiveBars(Progress(*columns, console=Console(stderr=True)))


@contextmanager
def shown(kind: str) -> Iterator[Progress]:
    """Show progress as ``bars``, as ``lines`` or, for anything else, not at all.

    >>> with shown("quiet") as progress:
    ...     progress.say("nobody reads this")
    """
    if kind not in {"bars", "lines"}:
        yield SILENT
        return
    screen: Screen = live_bars() if kind == "bars" else PlainLines(sys.stderr)
    whole = False
    try:
        yield screen
        whole = True
    finally:
        screen.close(whole=whole)
