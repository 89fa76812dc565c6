"""A source that has fetched what is about to be read: many requests in flight, each of them planned.

`hfdcp_core.fetches` says which ranges a file needs and when. Here they are asked for in that order, as many at once as
the budget allows, and given out to whoever reads; each is forgotten when the last window that takes from it is filled.
What was not planned is read as it is asked for, so a wrong guess costs time and never a byte.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np

from hfdcp_core.catalog import FileStamp
from hfdcp_core.errors import HfdcpError
from hfdcp_core.fetches import Fetch
from hfdcp_core.store import Listing, Source, url_of

IN_FLIGHT = 8
"""Requests of a file at the same time; 16 took a fifth more processor time for each byte (measured with gcsfs)."""
_LOOKED_AT = 4  # fetches that begin before a range, of which one may hold it: only the ends of items overlap


class ReadAhead:
    """A source with fetches under way. Safe to read from many threads."""

    def __init__(self, source: Source, fetches: Sequence[Fetch], *, budget_bytes: int) -> None:
        """Take what is to be fetched, in the order in which it is wanted, and begin."""
        self._source, self._fetches, self._budget = source, fetches, budget_bytes
        self._lock = threading.Lock()
        self._data: dict[int, Future[bytes]] = {}
        self._next = self._held = self._reached = 0
        self._filled: set[int] = set()
        self._ends = _ends(fetches)
        self._places = _places(fetches)
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "hfdcp-ahead")
        self._go_on()

    @property
    def url(self) -> str:
        """Where the source is."""
        return self._source.url

    def url_of(self, path: str, start: int) -> str:
        """Return where a byte of a file comes from."""
        return url_of(self._source, path, start)

    @property
    def remote(self) -> bool:
        """Whether the source is."""
        return self._source.remote

    def list(self, folder: str = "") -> Listing:
        """List a folder of the source."""
        return self._source.list(folder)

    def stat(self, path: str) -> FileStamp:
        """Look at a file of the source."""
        return self._source.stat(path)

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Look at files of the source."""
        return self._source.stamps(paths)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from what was fetched, or from the source."""
        whole = buffer.cast("B")
        found = self._found(path, start, start + len(whole)) if path in self._places else None
        if found is None:
            self._source.read_into(path, start, buffer)
        else:
            offset, data = found
            # numpy lets the loop of the library run meanwhile, as the slices of a memoryview do not.
            np.copyto(np.frombuffer(whole, np.uint8), np.frombuffer(data, np.uint8, len(whole), offset))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``."""
        found = self._found(path, start, stop) if path in self._places else None
        if found is None:
            return self._source.read(path, start, stop)
        offset, data = found
        return data[offset : offset + stop - start]

    def done(self, window: int) -> None:
        """Forget what only windows up to this one took from; they may be filled out of order."""
        with self._lock:
            self._filled.add(window)
            while self._reached in self._filled:
                self._filled.discard(self._reached)
                for number in self._ends.pop(self._reached, ()):
                    if self._data.pop(number, None):
                        self._held -= self._fetches[number].nbytes
                self._reached += 1
        self._go_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)  # after a failure nobody waits for the rest

    def _go_on(self) -> None:
        """Ask for as much as the budget allows."""
        with self._lock:
            while self._next < len(self._fetches):
                size = self._fetches[self._next].nbytes
                if self._held and self._held + size > self._budget:
                    return
                self._ask(self._next)
                self._next += 1

    def _ask(self, number: int) -> Future[bytes] | None:
        """Put a fetch under way, unless it is or its time is over."""
        fetch = self._fetches[number]
        if number not in self._data and fetch.last >= self._reached:
            self._held += fetch.nbytes
            self._data[number] = self._pool.submit(self._source.read, fetch.path, fetch.start, fetch.stop)
        return self._data.get(number)

    def _found(self, path: str, start: int, stop: int) -> tuple[int, bytes] | None:
        """Return the fetched bytes that hold a range, and where in them it begins."""
        starts, numbers = self._places[path]
        place = bisect.bisect_right(starts, start)
        for number in reversed(numbers[max(0, place - _LOOKED_AT) : place]):
            fetch = self._fetches[number]
            if stop <= fetch.stop:
                with self._lock:  # its turn may not have come yet: a reader goes before the budget
                    asked = self._ask(number)
                if asked is not None:
                    return None if isinstance(asked.exception(), HfdcpError) else (start - fetch.start, asked.result())
        return None


def _ends(fetches: Sequence[Fetch]) -> dict[int, list[int]]:
    """Return the fetches that can be forgotten after each window."""
    ends: dict[int, list[int]] = {}
    for number, fetch in enumerate(fetches):
        ends.setdefault(fetch.last, []).append(number)
    return ends


def _places(fetches: Sequence[Fetch]) -> dict[str, tuple[list[int], list[int]]]:
    """Return where the fetches of each file begin, sorted, and their numbers."""
    places: dict[str, tuple[list[int], list[int]]] = {}
    for number in sorted(range(len(fetches)), key=lambda number: fetches[number].start):
        starts, numbers = places.setdefault(fetches[number].path, ([], []))
        starts.append(fetches[number].start)
        numbers.append(number)
    return places
