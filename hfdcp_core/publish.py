"""The one chain: gather → reshard → consolidate → validate → push. The command line and the flow share it.

A step takes a `Job` (what was asked, a small value without secrets) and leaves what it made in the sink, where the next
step finds it. So the steps can run in one process or on many machines, and a chain that broke is taken up by running
it again: what is whole is not made twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from hfdcp_core import consolidate as consolidating
from hfdcp_core import gather as gathering
from hfdcp_core import hub, recipe
from hfdcp_core import validate as validating
from hfdcp_core.catalog import Catalog
from hfdcp_core.errors import (
    Cancelled,
    IncompleteCheckpoint,
    NoSpace,
    PlanError,
    SinkOccupied,
    UsageError,
    ValidationError,
)
from hfdcp_core.job import MEMORY_AT_START, Gathered, Job, Planned, PlannedFile
from hfdcp_core.layout import lay_out
from hfdcp_core.manifest import FileRecord, Manifest
from hfdcp_core.plan import Plan, stamps_digest
from hfdcp_core.plan import reshard as join
from hfdcp_core.run import FileSummary, PlanSummary, Run
from hfdcp_core.state import SILENT, Cancellation, Progress
from hfdcp_core.store import open_store

__all__ = ["Gathered", "Job", "Planned", "PlannedFile"]


@contextmanager
def hold(job: Job) -> Iterator[None]:
    """Keep every other process from writing to the job's sink while a chain runs.

    Raises:
        SinkOccupied: Another one is at it.
    """
    with Run(open_store(job.sink)).hold():
        yield


# ---- the five steps -------------------------------------------------------------------------------------------------


def gather(job: Job, *, progress: Progress = SILENT) -> Gathered:
    """List the tensors of the source and the shards they lie in.

    Raises:
        SourceError: What lies there is no checkpoint, or shows that it is damaged.
        PlanError: The patterns choose nothing, or something that cannot be carried.
    """
    progress.begin("gather", 0)
    _refuse_own_source(job)
    catalog = gathering.gather(open_store(job.source), world_size=job.world_size)
    gathered = _gathered(catalog, job)
    Run(open_store(job.sink)).save_catalog(catalog)
    return gathered


def _refuse_own_source(job: Job) -> None:
    """Refuse to write into the checkpoint itself: what is replaced there may be what is read."""
    source, sink = (open_store(url) for url in (job.source, job.sink))
    places = [local.resolve() if (local := store.local_path("x")) else store.url for store in (source, sink)]
    if places[0] == places[1]:
        raise SinkOccupied(f"{job.sink} is the checkpoint itself; choose another folder for the output")


def _gathered(catalog: Catalog, job: Job) -> Gathered:
    selection = recipe.select(catalog, include=job.include, exclude=job.exclude)
    return Gathered(
        format=catalog.format,
        tensors=len(selection.names),
        shards=len(catalog.shards),
        files=len(catalog.files),
        nbytes=sum(catalog.tensors[name].nbytes for name in selection.names),
        skipped=selection.skipped,
        source_digest=stamps_digest(catalog.files),
        unproved=catalog.unproved,
    )


def reshard(job: Job, *, progress: Progress = SILENT) -> Planned:
    """Join what is there with what is wanted, and make room for it in the sink.

    Raises:
        PlanError: The checkpoint does not hold every wanted element exactly once, or names clash.
        IncompleteCheckpoint: Nothing proves that no shard is lost, and the job does not accept that.
        SinkOccupied: The sink holds another output.
        NoSpace: The sink cannot hold the output.
    """
    progress.begin("reshard", 0)
    run = Run(open_store(job.sink))
    summary, plan = _plan(run.catalog(), job)
    run.occupy(summary, overwrite=job.overwrite)
    run.sink.sweep()
    run.save_plan(summary, plan)
    planned = _planned(run, summary, plan, job)
    _refuse_full_sink(run, planned)
    return planned


def _plan(catalog: Catalog, job: Job) -> tuple[PlanSummary, Plan]:
    if catalog.unproved and not job.accept_unproved:
        raise IncompleteCheckpoint(f"{job.source}: it cannot be shown that every shard is there: {catalog.unproved}")
    rules = recipe.recipe_named(job.recipe)
    selection = recipe.select(catalog, include=job.include, exclude=job.exclude)
    definitions = recipe.define(catalog, selection.names, rules)
    target = lay_out(definitions, max_file_size=job.max_file_size, file_index=job.file_index)
    plan = join(catalog, target, window_bytes=job.window_bytes)
    return _summary(catalog, job, plan, selection), plan


def _summary(catalog: Catalog, job: Job, plan: Plan, selection: recipe.Selection) -> PlanSummary:
    return PlanSummary(
        digest=plan.digest,
        files=tuple(FileSummary(file.path, file.size, file.peak_bytes) for file in plan.files),
        index=plan.index,
        total_size=plan.total_size,
        tensors=len(selection.names),
        source_format=catalog.format,
        stamps=catalog.files,
        recipe=job.recipe,
        include=job.include,
        exclude=job.exclude,
        skipped=tuple(entry.name for entry in selection.skipped),
        unproved=catalog.unproved,
    )


def _planned(run: Run | None, summary: PlanSummary, plan: Plan, job: Job) -> Planned:
    files = tuple(
        PlannedFile(file.path, file.size, run is not None and run.record(summary.digest, file.path) is not None)
        for file in summary.files
    )
    peaks = sorted((file.peak_bytes for file in plan.files), reverse=True)
    return Planned(
        digest=summary.digest,
        files=files,
        tensors=summary.tensors,
        nbytes=summary.nbytes,
        copies=sum(len(file.copies) for file in plan.files),
        peak_bytes=MEMORY_AT_START + sum(peaks[: job.files_at_once]),
    )


def _refuse_full_sink(run: Run, planned: Planned) -> None:
    needed = sum(file.size for file in planned.files if not file.done)
    free = run.sink.free_bytes()
    if free is not None and free < needed:
        raise NoSpace(f"{run.sink.url}: the output takes {needed} bytes, {free} are free")


def consolidate(
    job: Job, index: int, *, progress: Progress = SILENT, cancellation: Cancellation | None = None
) -> FileRecord:
    """Make one output file, counted from 0, unless it is already whole.

    Raises:
        PlanError: There is no plan, or no such file in it.
        SourceError: The source is damaged, or not what was gathered; the file does not appear.
        StorageError: Reading or writing failed; the file does not appear.
    """
    run = Run(open_store(job.sink))
    plan, digest = run.file_plan(index), run.planned().digest
    record = run.record(digest, plan.path)
    if record is not None:
        progress.advance(plan.size - len(plan.header))
        return record
    record = consolidating.consolidate(
        plan, open_store(job.source), run.sink, progress=progress, cancellation=cancellation
    )
    run.save_record(digest, record)
    return record


def consolidate_all(
    job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None
) -> tuple[FileRecord, ...]:
    """Make every output file, several at once.

    When one fails the others stop at their next window, and the first fault is raised.
    """
    summary = Run(open_store(job.sink)).planned()
    progress.begin("consolidate", summary.total_size)
    stop = cancellation or Cancellation()
    with ThreadPoolExecutor(job.files_at_once, "hfdcp-file") as pool:
        futures = [
            pool.submit(consolidate, job, index, progress=progress, cancellation=stop)
            for index in range(len(summary.files))
        ]
        _stop_at_first_fault(futures, stop)
    faults = [fault for future in futures if not future.cancelled() and (fault := future.exception())]
    if faults:
        raise next((fault for fault in faults if not isinstance(fault, Cancelled)), faults[0])
    return tuple(future.result() for future in futures)


def _stop_at_first_fault(futures: list[Future[FileRecord]], stop: Cancellation) -> None:
    try:
        finished, _ = wait(futures, return_when="FIRST_EXCEPTION")
    except BaseException:
        stop.cancel()
        raise
    if any(future.exception() for future in finished):
        for future in futures:
            future.cancel()
        stop.cancel()


def validate(job: Job, *, progress: Progress = SILENT) -> Manifest:
    """Check everything that was written, then write the index and, last of all, the manifest.

    Raises:
        ValidationError: Something that was written is not what was meant.
        SourceError: The source is damaged, or not what was gathered.
    """
    progress.begin("validate", 0)
    return validating.complete(Run(open_store(job.sink)), open_store(job.source))


def push(job: Job, *, progress: Progress = SILENT) -> hub.Receipt:
    """Commit what the manifest names to the Hub.

    Raises:
        PlanError: The sink holds no complete output, or no repository is named.
        HubError: The Hub refused or failed.
    """
    if not job.repo:
        raise UsageError("no repository is named")
    run = Run(open_store(job.sink))
    manifest = run.manifest()
    if manifest is None:
        raise PlanError(f"{job.sink}: no manifest: the output is not complete, so there is nothing to push")
    return hub.push(
        manifest,
        run.sink,
        job.repo,
        revision=job.revision,
        endpoint=job.endpoint,
        message=job.message,
        allow_public=job.allow_public,
        overwrite=job.overwrite,
        progress=progress,
    )


def make(job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None) -> Manifest:
    """Gather, reshard, consolidate and validate: everything but the push, without Prefect."""
    with hold(job):
        gather(job, progress=progress)
        reshard(job, progress=progress)
        consolidate_all(job, progress=progress, cancellation=cancellation)
        return validate(job, progress=progress)


def publish(job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None) -> hub.Receipt:
    """Carry out all five steps, without Prefect."""
    make(job, progress=progress, cancellation=cancellation)
    return push(job, progress=progress)


# ---- without a run --------------------------------------------------------------------------------------------------


def plan_only(job: Job) -> tuple[Gathered, Planned]:
    """Say what a run would do, and write nothing: ``job.sink`` may be empty.

    Raises:
        SourceError: As `gather`.
        PlanError: As `reshard`, but for the sink.
    """
    catalog = gathering.gather(open_store(job.source), world_size=job.world_size)
    gathered = _gathered(catalog, job)
    summary, plan = _plan(catalog, job)
    return gathered, _planned(Run(open_store(job.sink)) if job.sink else None, summary, plan, job)


def validate_again(job: Job, *, progress: Progress = SILENT) -> Manifest:
    """Hold a finished output against its manifest, reading and hashing everything once more.

    Where ``job.source`` is given, what the source holds today is compared too; where ``job.repo`` is given, what the
    Hub has.

    Raises:
        ValidationError: They differ; ``problems`` has every difference.
        PlanError: The sink holds no complete output.
    """
    sink = open_store(job.sink)
    manifest = Run(sink).manifest()
    if manifest is None:
        raise PlanError(f"{job.sink}: no manifest: the output is not complete")
    problems = validating.validate(sink, manifest, progress=progress)
    if job.source:
        problems += validating.records_problems(_made_again(job, manifest), manifest)
    if job.repo:
        problems += hub.compare(manifest, job.repo, revision=job.revision, endpoint=job.endpoint)
    ValidationError.raise_for(f"{job.sink} is not what its manifest says", problems)
    return manifest


def _made_again(job: Job, manifest: Manifest) -> Iterator[FileRecord]:
    """Make the output once more, into nothing, in the files and under the names that the manifest has."""
    catalog = gathering.gather(open_store(job.source), world_size=job.world_size)
    wanted = {name: number for number, record in enumerate(manifest.records, 1) for name in record.tensors}
    selection = recipe.select(catalog, include=manifest.include, exclude=manifest.exclude)
    definitions = recipe.define(catalog, selection.names, recipe.recipe_named(manifest.recipe))
    target = lay_out(definitions, max_file_size=job.max_file_size, file_index=wanted)
    plan = join(catalog, target, window_bytes=job.window_bytes)
    for file in plan.files:
        yield consolidating.consolidate(file, open_store(job.source), validating.Nowhere())
