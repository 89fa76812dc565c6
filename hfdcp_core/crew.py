"""Who helps whom while files are made: threads side by side where a processor is free for them, and none where not.

A file is made by one thread, and by helpers that work ahead of it: one fills windows, one hashes. With fewer files
than processors that is what makes a file faster than one thread can: reading and writing hide behind the SHA-256.
With as many files as processors helpers only cost, for each window changes hands twice and every hand-over waits for
a thread to be woken: then whoever would ask a helper does the work alone. Which of the two holds is looked at again
for every window, so the last large file of a run gets its helpers as soon as the others are done.

Measured on a machine that was busy with other work (2 GB in four files, two processors, tmpfs): a file's threads gave
way 694 times with helpers throughout (one run), 231, 252 and 661 times without (three runs), with about half of the
page faults; that the whole takes less processor time was lost in the noise. Smaller windows gained nothing: reading,
both checksums, SHA-256 and writing took 3.4 to 3.6 s of processor time with 128 KiB as with 4 MiB.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Self


def usable_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


class Crew:
    """The processors that files which are made at the same time share."""

    def __init__(self, processors: int) -> None:
        """Share so many."""
        self._processors = processors
        self._files = 0
        self._lock = threading.Lock()

    @property
    def crowded(self) -> bool:
        """Whether no processor is free for helpers."""
        return self._files >= self._processors

    @contextmanager
    def making_a_file(self) -> Iterator[None]:
        """Take a processor for as long as the context lasts."""
        with self._lock:
            self._files += 1
        try:
            yield
        finally:
            with self._lock:
                self._files -= 1


@lru_cache
def crew_of(processors: int) -> Crew:
    """Return the crew of so many processors that all files share which this process makes.

    >>> crew_of(3) is crew_of(3)
    True
    """
    return Crew(processors)


class Helper:
    """Does one thing after the other, beside whoever asks for it; or at once, where the crew is crowded."""

    def __init__(self, crew: Crew, name: str) -> None:
        """Help in a crew; the thread starts when it is asked for something first."""
        self._crew = crew
        self._pool = ThreadPoolExecutor(1, name)
        self._last: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin ``work``, in the order of asking, and return what waits for its end and raises what it raised."""
        if self._crew.crowded and (self._last is None or self._last.done()):
            work()
            return _nothing
        self._last = self._pool.submit(work)
        return self._last.result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def _nothing() -> None:
    """Wait for what is done already."""
