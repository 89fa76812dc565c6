"""To consolidate is to carry out one file's copies from a source into a sink, hashing on the way.

The file is made in *windows*: consecutive bytes of it, a few MiB, each of whole rows of a tensor (or of a part of one
row where a row is larger, or of many small tensors). Each is

- filled: a row-sharded part is read straight into its place, any other box is read whole and put there by one strided
  copy;
- hashed: SHA-256 of the file, digest of each tensor;
- written, in file order,

by three threads on three windows where processors are free for them, by one where other files need them all
(`hfdcp_core.crew`). So each source byte is read once, checked, placed, hashed and written once, and a 100 GB tensor
takes no more memory than a small one. The file becomes visible only when everything in it was found right.

Of a source in several places, an item that turns out damaged is looked for in the other ones, and the file is made
once more (`hfdcp_core.mending`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from hfdcp_core.catalog import FileStamp
from hfdcp_core.copies import moved_items
from hfdcp_core.crew import Crew, Helper, usable_processors
from hfdcp_core.errors import CorruptFile, SourceChanged
from hfdcp_core.fetches import fetches_of
from hfdcp_core.fill import Filler
from hfdcp_core.manifest import FileRecord, SourceCheck
from hfdcp_core.mending import Furthest, mended, taken_in_parts
from hfdcp_core.ops import EMPTY_DIGEST, digest_text, extend_digest
from hfdcp_core.plan import AHEAD_BYTES, BUFFERS, FilePlan
from hfdcp_core.read import page_aligned
from hfdcp_core.read_ahead import ReadAhead
from hfdcp_core.state import SILENT, Cancellation, Progress
from hfdcp_core.statistics import BASIC, Counter, refuse
from hfdcp_core.store import Source, Upload, name_in
from hfdcp_core.windows import LARGEST_ITEM, Window, windows_of


class Creator(Protocol):
    """All that is asked of a sink here; it may be a disk, a bucket, the Hub, or nothing at all."""

    def create(self, path: str, size: int) -> Upload:
        """Begin a file; see `hfdcp_core.store.Sink.create`."""
        ...


class Nowhere:
    """A sink that keeps nothing: what is made into it is only hashed."""

    def create(self, _path: str, _size: int) -> Nowhere:
        """Begin a file that nobody will see."""
        return self

    def write(self, buffer: memoryview) -> None:
        """Forget the bytes."""

    def commit(self) -> None:
        """Do nothing: there is nothing to show."""

    def abort(self) -> None:
        """Do nothing: there is nothing to remove."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a file is made; none of it changes a byte."""

    cancellation: Cancellation = field(default_factory=Cancellation)
    """Heeded between windows, and between the tensors of one."""
    crew: Crew = field(default_factory=lambda: Crew(usable_processors()))
    """Shared by all files that are made at the same time."""
    hashing: bool = True
    """Whether to hash what is written; the source is held against its own checksums in any case."""
    statistics: str = BASIC
    """How much is counted of the numbers, see `hfdcp_core.statistics.LEVELS`."""
    fail_on: tuple[str, ...] = ()
    """What no tensor of the file may hold, of `hfdcp_core.statistics.REFUSABLE`."""


def consolidate(
    plan: FilePlan, source: Source, sink: Creator, *, progress: Progress = SILENT, terms: Terms | None = None
) -> FileRecord:
    """Make one file.

    Args:
        plan: The file and the copies that fill it.
        source: The store that its shards lie in.
        sink: The store that it is written to.
        progress: Hears of every window.
        terms: How; by default alone on the machine, and hashed.

    Returns:
        What was written: size, SHA-256 and the digest of each tensor unless nothing was to be hashed, and how far the
        source's own checksums went.

    Raises:
        CorruptFile: The source is damaged, in every place that it lies in; nothing appears in the sink.
        SourceChanged: The source is not what was gathered; nothing appears in the sink.
        StorageError: Reading or writing failed; nothing appears in the sink.
        ValidationError: A tensor holds what the terms refuse; nothing appears in the sink.
    """
    terms, furthest = terms or Terms(), Furthest(progress)
    best = mended(source, taken_in_parts(plan), progress) or source
    try:
        return _made(plan, best, sink, furthest, terms)
    except CorruptFile:
        better = mended(best, plan.shards, progress)
        if better is None:
            raise
    furthest.again()
    return _made(plan, better, sink, furthest, terms)


def _made(plan: FilePlan, source: Source, sink: Creator, progress: Progress, terms: Terms) -> FileRecord:
    check_stamps(plan.stamps, source)
    upload = sink.create(plan.path, plan.size)
    try:
        with terms.crew.making_a_file(), _ahead(plan, source) as ahead:
            record = _Work(plan, ahead, upload, progress, terms).run()
        check_stamps(plan.stamps, source)
        refuse(plan.path, record.statistics, terms.fail_on)
        upload.commit()
    except BaseException:
        upload.abort()
        raise
    return replace(record, source=replace(record.source, mended=moved_items(source, plan.shards)))


def check_stamps(stamps: Iterable[FileStamp], source: Source) -> None:
    """Hold files of the source against their stamps.

    Raises:
        SourceChanged: One of them is not what was gathered.
    """
    gathered = tuple(stamps)
    found = source.stamps([stamp.path for stamp in gathered])
    SourceChanged.raise_for(
        f"{source.url} changed since it was gathered; start again when nothing writes to it any more",
        [
            f"{name_in(source, stamp.path) if stamp.path in found else stamp.path}{problem}"
            for stamp in gathered
            if (problem := _difference(stamp, found.get(stamp.path)))
        ],
    )


def _difference(stamp: FileStamp, now: FileStamp | None) -> str | None:
    if now is None:
        return " is gone"
    if now == stamp:
        return None
    return f": {now.size} bytes ({now.tag}), gathered with {stamp.size} bytes ({stamp.tag})"


def _ahead(plan: FilePlan, source: Source) -> ReadAhead:
    """Begin to fetch what the file needs; of a source on this machine nothing, since its pages are read at once."""
    fetches = fetches_of(plan, budget_bytes=AHEAD_BYTES) if source.remote else ()
    return ReadAhead(source, fetches, budget_bytes=AHEAD_BYTES)


# ---- work: threads and buffers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Begun:
    """A window that is being filled."""

    window: Window
    buffer: memoryview
    wait: Callable[[], None]


class _Work:
    """One file being made."""

    def __init__(self, plan: FilePlan, source: ReadAhead, upload: Upload, progress: Progress, terms: Terms) -> None:
        self._plan, self._source, self._upload = plan, source, upload
        self._windows = 0
        self._progress, self._terms = progress, terms
        self._filler = Filler(plan, source, terms.cancellation)
        self._hashes: _Hashes | _Unhashed = _Hashes(plan) if terms.hashing else _Unhashed(plan)
        self._counter = Counter(((fqn, spec.dtype) for fqn, spec in plan.tensors), level=terms.statistics)

    def run(self) -> FileRecord:
        header = memoryview(self._plan.header)
        self._hashes.header(header)
        self._upload.write(header)
        crew = self._terms.crew
        free = [page_aligned(max(self._plan.window_bytes, LARGEST_ITEM)) for _ in range(BUFFERS)]
        begun: deque[_Begun] = deque()
        with Helper(crew, "hfdcp-fill") as filling, Helper(crew, "hfdcp-hash") as hashing:
            for window in windows_of(self._plan):
                while begun and (crew.crowded or not free):
                    free.append(self._finish(begun.popleft(), hashing))
                buffer = free.pop()  # the one that was used last: it is still in the processor's cache
                begun.append(_Begun(window, buffer, filling.begin(partial(self._filler.fill, window, buffer))))
            while begun:
                self._finish(begun.popleft(), hashing)
        record = self._hashes.record(self._filler.check())
        return replace(record, overflowed=self._filler.overflowed(), statistics=self._counter.found())

    def _finish(self, begun: _Begun, hashing: Helper) -> memoryview:
        self._terms.cancellation.check()
        begun.wait()
        self._source.done(self._windows)
        self._windows += 1
        data = begun.buffer[: sum(piece.nbytes for piece in begun.window)]
        hashed = hashing.begin(partial(self._hashes.window, begun.window, data))
        try:
            self._upload.write(data)
            self._counter.window(((piece.tensor, piece.nbytes) for piece in begun.window), data)  # hashing takes longer
        finally:
            hashed()
        self._progress.advance(len(data))
        return begun.buffer


class _Hashes:
    """What is hashed of a file while it passes."""

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan
        self._sha256 = hashlib.sha256()
        self._digests = [EMPTY_DIGEST] * len(plan.tensors)

    def header(self, data: memoryview) -> None:
        self._sha256.update(data)

    def window(self, window: Window, data: memoryview) -> None:
        self._sha256.update(data)
        start = 0
        for piece in window:
            part = data[start : start + piece.nbytes]
            self._digests[piece.tensor] = extend_digest(self._digests[piece.tensor], part)
            start += piece.nbytes

    def record(self, check: SourceCheck) -> FileRecord:
        names = (fqn for fqn, _ in self._plan.tensors)
        digests = dict(zip(names, map(digest_text, self._digests), strict=True))
        return FileRecord(self._plan.path, self._plan.size, self._sha256.hexdigest(), digests, check)


class _Unhashed:
    """What is known of a file that nobody hashes."""

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan

    def header(self, data: memoryview) -> None:
        """Pass over it."""

    def window(self, window: Window, data: memoryview) -> None:
        """Pass over it."""

    def record(self, check: SourceCheck) -> FileRecord:
        names = (fqn for fqn, _ in self._plan.tensors)
        return FileRecord(self._plan.path, self._plan.size, "", dict.fromkeys(names, ""), check)
