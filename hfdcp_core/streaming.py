"""To stream is to send files to the Hub as they are made: none waits on a disk, and each is sent once.

`prepare` finds the repository, refuses early what the Hub would not take, and finds out what is there already: what was
published of the same plan, what an earlier run left on the stage, and what this one sent and could not commit any more.
`stream` makes one file into the Hub, or into the Hub and the sink at once, and keeps in the sink's ``.hfdcp/`` that it
was sent. `staged` looks to it that all of them are on the stage, before the manifest is written.

Which file is where is always asked of the Hub, and by content: an upload that no commit names may be gone tomorrow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hfdcp_core import statistics
from hfdcp_core.consolidate import Creator, Nowhere
from hfdcp_core.errors import Conflict, HubUnavailable, PlanError, ValidationError
from hfdcp_core.hub import write_from
from hfdcp_core.hub_client import xet_is_used
from hfdcp_core.hub_stage import Stage, Waiting, difference, recommit, send
from hfdcp_core.hub_target import Terms, open_target, published_manifest, refuse_large, repository_of, stale_files
from hfdcp_core.job import STREAM_BOTH, STREAM_ONLY, Job
from hfdcp_core.manifest import FileRecord
from hfdcp_core.mending import Furthest
from hfdcp_core.run import FileSummary, PlanSummary, Run, SentFile, Target
from hfdcp_core.signing import SIGNATURE_PATH, Signer
from hfdcp_core.state import SILENT, Cancellation, Progress, in_bytes
from hfdcp_core.store import Sink, Upload, open_store

SPOOL_LENGTH = 16
"""Hexadecimal digits of the plan's digest in the name of the folder that its files are spooled to."""
_WAITING: dict[tuple[str, str, str], Waiting] = {}
"""What all threads of this process sent to a stage and have not committed, by endpoint, repository and plan."""


Make = Callable[[Creator, Progress], FileRecord]
"""Makes a file of the plan once into what is given."""


def stage_of(job: Job, digest: str, cancellation: Cancellation | None = None) -> Stage:
    """Return the stage of a plan."""
    waiting = _WAITING.setdefault((job.endpoint, job.repo, digest), Waiting())
    return Stage(repository_of(job.repo, Terms.of(job), cancellation), digest, waiting)


def passes(job: Job) -> int:
    """Return how often the bytes of a file pass: LFS wants to know their digest before it takes the first."""
    return 1 if xet_is_used() or _kept(job) else 2


def _kept(job: Job) -> str:
    """Return the folder or URL that a whole file is kept in before it is sent by LFS; empty for none."""
    return job.sink if job.stream == STREAM_BOTH else job.spool


# ---- before anything is sent ----------------------------------------------------------------------------------------


def prepare(job: Job, run: Run, planned: PlanSummary, card: bytes | None, progress: Progress) -> None:
    """Find the repository, see that it would take what is planned, and find out what is there already.

    Args:
        job: What is asked.
        run: Where the state is kept.
        planned: What is planned.
        card: A card like the one that will be written; None where none is.
        progress: Hears of what need not be sent again.

    Raises:
        HubError: The Hub refused or failed; `hfdcp_core.hub.push` says how.
        UsageError: The key to sign with is none.
    """
    if job.sign:
        Signer.load(job.sign)
    _WAITING.pop((job.endpoint, job.repo, planned.digest), None)
    stage, terms = stage_of(job, planned.digest), Terms.of(job)
    if job.spool:
        open_store(f"{job.spool}/{planned.digest[:SPOOL_LENGTH]}").sweep()
    repository = stage.repository
    headers = {file.path: run.header(number) for number, file in enumerate(planned.files)}
    refuse_large({file.path: (file.size, len(headers[file.path])) for file in planned.files})
    target = open_target(repository, terms)
    stale_files(repository, target, (*headers, SIGNATURE_PATH), terms)
    _refuse_tag(stage, job, planned)
    if card is not None:
        repository.check_card(card.decode(errors="replace"), job.revision)
    large = repository.large({file.path: (file.size, headers[file.path]) for file in planned.files}, target.commit)
    before = run.target()
    run.save_target(
        replace(
            target,
            created=target.created or (before is not None and before.created and before.repo == job.repo),
            regular=tuple(path for path in headers if path not in large),
        )
    )
    _adopt(run, stage, planned, target, [path for path in headers if path in large])
    stage.open(target.commit)
    done = [file for file in planned.files if run.sent(planned.digest, file.path)]
    if done:
        size = in_bytes(sum(file.size for file in done))
        progress.say(f"{job.repo} has {len(done)} of {len(planned.files)} files already, {size}")


def _refuse_tag(stage: Stage, job: Job, planned: PlanSummary) -> None:
    commit = stage.repository.tags().get(job.tag) if job.tag else None
    if commit:
        there = published_manifest(stage.repository, commit)
        if there is None or there.plan_digest != planned.digest:
            raise Conflict(f"{job.repo} has a tag {job.tag} that names another commit", [commit])


def _adopt(run: Run, stage: Stage, planned: PlanSummary, target: Target, paths: Sequence[str]) -> None:
    """Keep in the state what the Hub has of the plan, and no more."""
    on_target = stage.repository.files(paths, target.commit)
    on_stage = stage.files(paths) if stage.exists() else {}
    known = _known(stage, planned, target, paths if on_stage else ())
    lost = []
    for path in paths:
        sent = run.sent(planned.digest, path)
        record = sent.record if sent else known.get(path)
        if record is None:
            continue
        there = not difference(record, on_target.get(path)) or not difference(record, on_stage.get(path))
        if there and not sent:
            run.save_sent(SentFile(planned.digest, record))
        if sent and not there:
            lost.append(record)
    if lost:
        stage.open(target.commit)
        if not recommit(stage, lost):
            for record in lost:  # the storage has lost some of them: each is made again, and sent where it is not there
                run.forget_sent(record.path)


def _known(stage: Stage, planned: PlanSummary, target: Target, staged: Sequence[str]) -> Mapping[str, FileRecord]:
    """Return the records of the plan's files that others left: in a manifest that is published, or on the stage."""
    published = published_manifest(stage.repository, target.commit)
    records = published.records if published and published.plan_digest == planned.digest else ()
    return {**stage.records(staged), **{record.path: record for record in records}}


def written_here(job: Job, run: Run, paths: Sequence[str]) -> Collection[str]:
    """Return which planned files the sink will hold."""
    return _target(run).regular if job.stream == STREAM_ONLY else paths


# ---- one file -------------------------------------------------------------------------------------------------------


def sent_before(job: Job, run: Run, digest: str, path: str) -> SentFile | None:
    """Return what the Hub has of a file of this plan, with everything counted in it that the job wants to know."""
    sent = run.sent(digest, path)
    return sent if sent and statistics.covers(sent.record.statistics, job.statistics) else None


def stream(
    job: Job,
    run: Run,
    file: FileSummary,
    make: Make,
    *,
    whole: FileRecord | None = None,
    progress: Progress = SILENT,
    cancellation: Cancellation | None = None,
) -> FileRecord:
    """Make a file into the Hub, and into the sink too where the job wants both.

    Args:
        job: What is asked.
        run: Where the state is kept.
        file: The file.
        make: Makes it.
        whole: Its record where the sink holds it already.
        progress: Hears of every window, and of the whole file.
        cancellation: Heeded while waiting.

    Returns:
        What the Hub has now, or the sink where the Hub takes it only with the commit.

    Raises:
        ValidationError: What arrived, or what a second pass gave, is not what was made.
        HubError: The Hub refused or failed.
        HfdcpError: As `hfdcp_core.consolidate.consolidate`.
    """
    digest = run.planned().digest
    sent = sent_before(job, run, digest, file.path)
    if sent is None and file.path not in _target(run).regular:
        return _Sending(job, run, file, make, digest, whole, progress, cancellation or Cancellation()).run_to_end()
    if whole is None and (sent is None or job.stream == STREAM_BOTH):
        whole = make(run.sink, progress)
        run.save_record(digest, whole)
    else:
        progress.advance(file.size)
    if sent and whole and sent.record.sha256 != whole.sha256:
        run.forget_sent(file.path)
        found = f"{file.path}: sha256 is {whole.sha256}, sent was {sent.record.sha256}"
        raise ValidationError("the source gives other bytes than it gave before; run again to send them", [found])
    return sent.record if sent else _made(whole)


def _target(run: Run) -> Target:
    target = run.target()
    if target is None:
        raise PlanError(f"{run.sink.url}: nobody looked for the repository: the step 'reshard' was not done here")
    return target


def _made(record: FileRecord | None) -> FileRecord:
    assert record is not None  # whoever made a file knows what it is
    return record


@dataclass(slots=True)
class _Sending:
    """One file on its way."""

    job: Job
    run: Run
    file: FileSummary
    make: Make
    digest: str
    record: FileRecord | None
    progress: Progress
    cancellation: Cancellation
    kept: Sink | None = None

    def run_to_end(self) -> FileRecord:
        """Send it, keep that it was sent, and let it be committed to the stage."""
        began_s = time.monotonic()
        path, size = self.file.path, self.file.size
        both = self.job.stream == STREAM_BOTH
        if both and self.record:
            self.kept = self.run.sink
        stage = stage_of(self.job, self.digest, self.cancellation)
        spool = None if both or not self.job.spool else open_store(f"{self.job.spool}/{self.digest[:SPOOL_LENGTH]}")
        passes = Furthest(self.progress), Furthest(self.progress)

        def produce(into: Creator) -> None:
            passes[1].again()
            if self.kept:
                write_from(self.kept, _made(self.record), into, progress=passes[1], cancellation=self.cancellation)
                return
            self.record = self.make(Both(into, self.run.sink) if both else into, passes[1])
            if both:
                self._keep(self.run.sink)

        def digest() -> str:
            self.record = self.record or self.run.hashed(self.digest, path)
            if self.record is None:
                place = self.run.sink if both else spool
                self.record = self.make(place or Nowhere(), passes[0])
                if place:
                    self._keep(place)
                else:
                    self.run.save_hashed(self.digest, self.record)
            return self.record.sha256

        try:
            sent = send(stage, path, size, produce, digest=digest, progress=self.progress)
        finally:
            if spool:
                spool.delete(path)
        record = replace(_made(self.record), xet=sent.xet)
        if sent.sha256 != record.sha256:
            problem = f"{path}: sha256 of what was sent is {sent.sha256}, of what was made {record.sha256}"
            raise ValidationError("what was sent is not what was made", [problem])
        self.run.save_sent(SentFile(self.digest, record, sent.moved_bytes, sent.deduplicated_bytes))
        moved, there = in_bytes(sent.moved_bytes), in_bytes(sent.deduplicated_bytes)
        pace = in_bytes(size / max(time.monotonic() - began_s, 1e-9))
        self.progress.say(f"{path}: {in_bytes(size)} hashed, {moved} sent, {there} there already, {pace}/s")
        stage.add(record)
        return record

    def _keep(self, place: Sink) -> None:
        """Take what the next try sends from where it lies now."""
        self.kept = place
        if place is self.run.sink:
            self.run.save_record(self.digest, _made(self.record))


@dataclass(frozen=True, slots=True)
class Both:
    """A sink of two: what is made into it goes to either."""

    first: Creator
    """The one whose end is waited for before the other one's."""
    second: Creator
    """The other one."""

    def create(self, path: str, size: int) -> _Tee:
        """Begin a file in both."""
        first = self.first.create(path, size)
        try:
            return _Tee((first, self.second.create(path, size)))
        except BaseException:
            first.abort()
            raise


@dataclass(frozen=True, slots=True)
class _Tee:
    uploads: tuple[Upload, ...]

    def write(self, buffer: memoryview) -> None:
        for upload in self.uploads:
            upload.write(buffer)

    def commit(self) -> None:
        for upload in self.uploads:
            upload.commit()

    def abort(self) -> None:
        for upload in self.uploads:
            upload.abort()


# ---- when all are sent ----------------------------------------------------------------------------------------------


def settle(job: Job, run: Run, cancellation: Cancellation | None = None) -> None:
    """Commit to the stage what was sent and is not there yet, whoever sent it.

    Raises:
        HubUnavailable: The storage does not have bytes any more that it took; they are sent again by another run.
        HubError: The Hub refused or failed.
    """
    planned, target = run.planned(), _target(run)
    stage = stage_of(job, planned.digest, cancellation)
    stage.flush()
    records = [sent.record for file in planned.files if (sent := run.sent(planned.digest, file.path))]
    paths = [record.path for record in records]
    places = stage.repository.files(paths, target.commit), stage.files(paths)
    absent = [one for one in records if all(difference(one, place.get(one.path)) for place in places)]
    if absent and not recommit(stage, absent):
        for record in absent:
            run.forget_sent(record.path)
        what = f"{job.repo}: the storage does not have files that it took; run again to send them anew"
        raise HubUnavailable(what, [record.path for record in absent])


def elsewhere(job: Job, run: Run) -> Callable[[str], FileRecord | None]:
    """Return what knows the record of a file that lies on the Hub and not in the sink."""

    def record_of(path: str) -> FileRecord | None:
        sent = sent_before(job, run, run.planned().digest, path) if job.stream == STREAM_ONLY else None
        return sent.record if sent else None

    return record_of


def give_up(job: Job, run: Run) -> None:
    """Take the stage away: what lies there was made from damaged items."""
    stage = stage_of(job, run.planned().digest)
    stage.forget()
    stage.remove()


def sent_files(run: Run, digest: str) -> Mapping[str, SentFile]:
    """Return what was sent of a plan, by path."""
    return {file.path: sent for file in run.planned().files if (sent := run.sent(digest, file.path))}
