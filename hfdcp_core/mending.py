"""To mend is to go on with another copy where an item of a source in several places turns out damaged.

A payload is held against the CRC-32 of its item when all of it was read. By then parts of it may be written, so the
file that was being made is made once more. What a file takes only parts of cannot be held against the checksum of the
whole: where such an item lies in several places, it is read for that beforehand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from hfdcp_core.catalog import Shard
from hfdcp_core.copies import mend
from hfdcp_core.plan import FilePlan
from hfdcp_core.state import Progress
from hfdcp_core.store import Source


def mended(source: Source, shards: Iterable[Shard], progress: Progress) -> Source | None:
    """Look for other places of damaged items, and say which were found; None where there is nothing better."""
    found = mend(source, shards)
    if found is None:
        return None
    for line in found.said:
        progress.say(line)
    return found.union


def taken_in_parts(plan: FilePlan) -> Iterator[Shard]:
    """Yield the shards that a file takes only parts of; nothing is done before somebody asks for the first."""
    taken: Counter[int] = Counter()
    for copy in plan.copies:
        taken[copy.read.shard] += copy.box.volume
    yield from (shard for number, shard in enumerate(plan.shards) if taken[number] < shard.box.volume)


class Furthest:
    """Progress of what may be done twice: bytes that were reported are not reported again."""

    def __init__(self, progress: Progress) -> None:
        """Take whoever wants to know."""
        self._progress = progress
        self._done = self._most = 0

    def begin(self, step: str, total_bytes: int) -> None:
        """Pass it on."""
        self._progress.begin(step, total_bytes)

    def advance(self, nbytes: int) -> None:
        """Pass on what is new of it."""
        self._done += nbytes
        if self._done > self._most:
            self._progress.advance(self._done - self._most)
            self._most = self._done

    def say(self, line: str) -> None:
        """Pass it on."""
        self._progress.say(line)

    def again(self) -> None:
        """Begin from the start."""
        self._done = 0
