"""The stage: a branch of the repository where files gather until all are there and were found right.

What is committed there is durable and can be found again by anybody who knows the plan: beside each file lies its
record, so that another machine goes on where this one ended. Nobody loads from it, and the last step of a push takes
it away. Files are committed in groups, since the Hub counts commits by the hour.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from hfdcp_core import wire
from hfdcp_core.consolidate import Creator
from hfdcp_core.errors import Conflict, HubRejected, HubUnavailable, ValidationError
from hfdcp_core.hub_client import (
    Change,
    Committed,
    LfsUpload,
    RemoteFile,
    Repository,
    Sent,
    Small,
    Stored,
    XetUpload,
    xet_is_used,
)
from hfdcp_core.manifest import FileRecord
from hfdcp_core.state import SILENT, Progress

STAGE_PREFIX = "hfdcp/"
"""In front of the names of our branches."""
NAME_LENGTH = 16
"""Hexadecimal digits of the plan's digest in a branch's name."""
FLUSH_FILES, FLUSH_S = 50, 60.0
"""How many files, and for how long, wait for their commit at most while further ones are sent."""
LFS_TRIES = 3
"""How often a file is sent by LFS, which cannot go on in the middle of one."""
RECORDS_FOLDER = ".hfdcp-records"
"""Where the records lie on the branch; they never reach another one."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A file on the stage."""

    plan_digest: str
    """The plan that it belongs to."""
    record: FileRecord
    """What was sent."""


def _record(path: str) -> str:
    return f"{RECORDS_FOLDER}/{path}.json"


def difference(record: FileRecord, remote: RemoteFile | None) -> str | None:
    """Say how a large file on the Hub differs from its record, as far as the Hub says.

    Of a regular file, which the Hub keeps no SHA-256 of, only the size is compared here.
    """
    if remote is None:
        return f"{record.path}: not there"
    if remote.size != record.size:
        return f"{record.path}: {remote.size} bytes, expected {record.size}"
    if remote.sha256 is not None and remote.sha256 != record.sha256:
        return f"{record.path}: sha256 is {remote.sha256}, expected {record.sha256}"
    if record.xet and remote.xet and remote.xet != record.xet:
        return f"{record.path}: Xet hash is {remote.xet}, expected {record.xet}"
    return None


@dataclass(slots=True)
class Waiting:
    """Files whose bytes the storage has, and that no commit names yet: of all threads that send to one stage."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while they are looked at, and while they are committed: the Hub takes one commit to a branch at a time."""
    records: dict[str, FileRecord] = field(default_factory=dict)
    """What was sent, by path."""
    since_s: float = 0.0
    """When the first of them came."""
    xet_is_down: bool = False
    """Whether a file could not be sent by Xet: the others do not wait for it, too."""


class Stage:
    """The branch of one plan. Safe to use from many threads."""

    def __init__(self, repository: Repository, plan_digest: str, waiting: Waiting | None = None) -> None:
        self.repository = repository
        self.branch = STAGE_PREFIX + plan_digest[:NAME_LENGTH]
        """Its name: the same plan, the same branch."""
        self._plan_digest = plan_digest
        self._waiting = waiting or Waiting()

    @property
    def by_xet(self) -> bool:
        """Whether files are to be sent by Xet."""
        return xet_is_used() and not self._waiting.xet_is_down

    def give_up_xet(self) -> None:
        """Send all further files by LFS."""
        self._waiting.xet_is_down = True

    def exists(self) -> bool:
        """Whether something was begun."""
        return self.branch in self.repository.branches()

    def open(self, start: str) -> None:
        """Make the branch at a commit, unless it is there."""
        self.repository.create_branch(self.branch, start)

    def files(self, paths: Sequence[str]) -> Mapping[str, RemoteFile]:
        """Return what is there of some files.

        Raises:
            Conflict: The branch was taken away.
        """
        with self._there():
            return self.repository.files(paths, self.branch)

    @contextmanager
    def _there(self) -> Iterator[None]:
        """Tell a branch that somebody took away from other refusals."""
        try:
            yield
        except HubRejected as error:
            if self.exists():
                raise
            why = "another publish of the same has ended meanwhile; run again to see what is there now"
            raise Conflict(f"{self.repository.name} has no branch {self.branch} any more: {why}") from error

    def records(self, paths: Sequence[str]) -> Mapping[str, FileRecord]:
        """Return the records of those files that an earlier run committed here for the same plan."""
        there = self.files([_record(path) for path in paths])
        found = {}
        for path in paths:
            if _record(path) in there:
                with suppress(ValidationError):  # of another version, or not ours: the file is made again
                    staged = wire.loads("record", Staged, self.repository.read(_record(path), self.branch))
                    if staged.plan_digest == self._plan_digest and staged.record.path == path:
                        found[path] = staged.record
        return found

    def add(self, record: FileRecord) -> None:
        """Take a file whose bytes the storage has; commit a group where it is time."""
        waiting = self._waiting
        with waiting.lock:
            if not waiting.records:
                waiting.since_s = time.monotonic()
            waiting.records[record.path] = record
            if len(waiting.records) >= FLUSH_FILES or time.monotonic() - waiting.since_s >= FLUSH_S:
                self._flush()

    def flush(self) -> None:
        """Commit what waits.

        Raises:
            HubRejected: The storage does not have the bytes of a file; none of the group is committed.
        """
        with self._waiting.lock:
            self._flush()

    def _flush(self) -> None:
        waiting = self._waiting
        while waiting.records:
            group = list(waiting.records.values())[:FLUSH_FILES]
            changes = [change for record in group for change in self._changes(record)]
            message = f"Stage {len(group)} files (hfdcp)"
            commit = partial(self.repository.commit, self.branch, changes, message=message)
            with self._there():
                self.repository.settled(commit, partial(self._committed, group))
            for record in group:
                del waiting.records[record.path]
        waiting.since_s = time.monotonic()

    def _committed(self, records: Sequence[FileRecord]) -> Committed | None:
        return None if self.problems(records) else Committed("")

    def _changes(self, record: FileRecord) -> tuple[Change, Change]:
        document = wire.dumps("record", Staged(self._plan_digest, record))
        return Stored(record.path, record.size, record.sha256), Small(_record(record.path), document)

    def problems(self, records: Sequence[FileRecord]) -> list[str]:
        """Say which files are not here as their records say."""
        there = self.files([record.path for record in records])
        found = (difference(record, there.get(record.path)) for record in records)
        return [problem for problem in found if problem]

    def forget(self) -> None:
        """Give up what waits."""
        with self._waiting.lock:
            self._waiting.records.clear()

    def remove(self) -> None:
        """Take the branch away."""
        self.repository.delete_branch(self.branch)


def send(
    stage: Stage,
    path: str,
    size: int,
    produce: Callable[[Creator], None],
    *,
    digest: Callable[[], str],
    progress: Progress = SILENT,
) -> Sent:
    """Send the bytes of a large file; they are to be added to the stage then.

    By Xet, and once more where that fails or stalls; then by LFS, as all files after it. Where the user has switched
    Xet off it is LFS at once.

    Args:
        stage: Where the file will lie.
        path: Its name.
        size: Its bytes.
        produce: Makes it into what it is given, from its first byte on, once for each try.
        digest: Finds its SHA-256, which LFS wants to know before.
        progress: Hears of what fails.

    Raises:
        HubError: The Hub refused or failed in every way.
    """
    if stage.by_xet:
        for then in ("once more", "now by LFS"):
            by_xet = _Beginning(lambda: stage.repository.xet_upload(path, stage.branch))
            try:
                produce(by_xet)
            except HubUnavailable as fault:
                progress.say(f"{fault.message} ({then})")
            else:
                return by_xet.sent
        stage.give_up_xet()
    sha256 = digest()
    for left in range(LFS_TRIES - 1, -1, -1):
        upload = stage.repository.lfs_upload(path, sha256, size, stage.branch)
        if upload is None:
            return Sent(sha256, deduplicated_bytes=size)
        by_lfs = _Beginning(lambda begun=upload: begun)  # type: ignore[misc]
        try:
            produce(by_lfs)
        except HubUnavailable as fault:
            if not left:
                raise
            progress.say(f"{fault.message} (once more)")
        else:
            return by_lfs.sent
    raise AssertionError("the last try returns or raises")


class _Beginning:
    """What a file is made into: begins the upload when it is asked for."""

    def __init__(self, begin: Callable[[], XetUpload | LfsUpload]) -> None:
        self._begin = begin
        self._upload: XetUpload | LfsUpload | None = None

    def create(self, _path: str, _size: int) -> XetUpload | LfsUpload:
        """Begin."""
        self._upload = self._begin()
        return self._upload

    @property
    def sent(self) -> Sent:
        """What was sent."""
        sent = self._upload and self._upload.sent
        assert sent  # whoever makes a file commits it
        return sent


def recommit(stage: Stage, records: Iterable[FileRecord]) -> bool:
    """Commit files that were sent and never committed; return False where the storage does not have them any more."""
    for record in records:
        stage.add(record)
    try:
        stage.flush()
    except HubRejected:
        stage.forget()
        return False
    return True
