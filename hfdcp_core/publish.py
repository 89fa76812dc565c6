"""The one chain: gather → reshard → consolidate → validate → push. The command line and the flow share it.

A step takes a `Job` (what was asked, a small value without secrets) and leaves what it made in the sink, where the next
step finds it. So the steps can run in one process or on many machines, and a chain that broke is taken up by running
it again: what is whole is not made twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from hfdcp_core import consolidate as consolidating
from hfdcp_core import (
    defining,
    extras,
    hub,
    load_check,
    quantization,
    recipe,
    repository,
    statistics,
    streaming,
    tying,
    wire,
)
from hfdcp_core import explain as explaining
from hfdcp_core import validate as validating
from hfdcp_core.crew import Crew, crew_of, usable_processors
from hfdcp_core.errors import (
    Cancelled,
    CorruptFile,
    HfdcpError,
    NoSpace,
    PlanError,
    SinkOccupied,
    UsageError,
    ValidationError,
)
from hfdcp_core.hub_target import Terms
from hfdcp_core.infer import Proposal
from hfdcp_core.job import STREAM_BOTH, STREAM_ONLY, Gathered, Job, Planned, PlannedFile
from hfdcp_core.locate import Located, locate, relocate, reopen
from hfdcp_core.manifest import CONFIG_PATH, EXTRA_PATH, MANIFEST_PATH, STATE_FOLDER, FileRecord, Manifest
from hfdcp_core.name_patterns import collapsed
from hfdcp_core.plan import reshard as join
from hfdcp_core.plan import stamps_digest
from hfdcp_core.planning import draw, planned_of, target_of
from hfdcp_core.run import PlanSummary, Run
from hfdcp_core.state import SILENT, Cancellation, Progress
from hfdcp_core.store import Sink, open_store
from hfdcp_core.ties import read_config

RECEIPT_PATH = f"{STATE_FOLDER}/receipt.json"
"""What the last push did and which checks were made, those after the commit too; for people, no step reads it."""
__all__ = ["Gathered", "Job", "Planned", "PlannedFile"]


@contextmanager
def hold(job: Job) -> Iterator[None]:
    """Keep every other process from writing to the job's sink while a chain runs.

    Raises:
        SinkOccupied: Another one is at it.
    """
    sink = open_store(job.sink)
    _refuse_file_as_sink(sink, job)
    with Run(sink).hold():
        yield


def _refuse_file_as_sink(sink: Sink, job: Job) -> None:
    folder = sink.local_path(STATE_FOLDER)
    if folder is not None and folder.parent.exists() and not folder.parent.is_dir():
        raise SinkOccupied(f"{job.sink} is a file; the output needs a folder")


# ---- the five steps -------------------------------------------------------------------------------------------------


def gather(job: Job, *, progress: Progress = SILENT) -> Gathered:
    """List the tensors of the source and the shards they lie in.

    Raises:
        SourceError: What lies there is no checkpoint, or shows that it is damaged.
        PlanError: The patterns choose nothing, or something that cannot be carried.
        SinkOccupied: The sink holds an output of an older step than the latest.
    """
    progress.begin("gather", 0)
    _refuse_own_source(job, "")
    found = locate(job)
    _refuse_own_source(job, found.pinned.folder)
    gathered = _gathered(found, job)
    for line in found.said:
        progress.say(line)
    run = Run(open_store(job.sink))
    _refuse_newer_step(job, run, found.pinned.folder)
    run.save_source(found.pinned)
    run.save_catalog(found.catalog)
    return gathered


def _refuse_newer_step(job: Job, run: Run, folder: str) -> None:
    """Refuse to go on with another step than the one that the sink was begun with, and leave what is pinned there."""
    before = run.source().folder
    if job.latest and before not in {"", folder} and not job.overwrite and run.output_files():
        raise SinkOccupied(
            f"{job.sink} holds what was made of {before}, and the newest complete step is {folder} now: choose another "
            f"sink for it, or --overwrite this one; to go on with the older step, name {_below(job.source, before)} "
            f"without --latest"
        )


def _below(url: str, folder: str) -> str:
    return f"{url.rstrip('/')}/{folder}"


def _refuse_own_source(job: Job, folder: str) -> None:
    """Refuse to write into the checkpoint itself: what is replaced there may be what is read."""
    if _place(job.sink, "") in {_place(url, folder) for url in (job.source, *job.also)}:
        raise SinkOccupied(f"{job.sink} is the checkpoint itself; choose another folder for the output")


def _place(url: str, folder: str) -> str:
    """Return what two ways of naming one folder have in common."""
    store = open_store(url)
    path = f"{folder}/x" if folder else "x"
    local = store.local_path(path)
    return str(local.resolve()) if local else f"{store.url}/{path}"


def _gathered(found: Located, job: Job) -> Gathered:
    catalog = found.catalog
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
        folder=found.pinned.folder,
        said=found.said,
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
    catalog = run.catalog()
    drawn = draw(catalog, reopen(job, run.source()), job)
    summary, plan = drawn.summary, drawn.plan
    if summary.config is not None:
        run.refuse_other(CONFIG_PATH, summary.config, overwrite=job.overwrite)
    run.occupy(summary, overwrite=job.overwrite)
    run.sink.sweep()
    run.save_plan(summary, plan)
    if job.stream:
        streaming.prepare(job, run, summary, _draft_card(job, run, summary), progress)
    planned = planned_of(drawn, catalog, job, done=_done(run, summary.digest, job))
    _refuse_full_sink(run, planned, streaming.written_here(job, run, [file.path for file in planned.files]))
    for name, kept in planned.tied.items():
        progress.say(f"left out {name}: tied to {kept}, and its bytes are the same")
    for line in (*(f"left out by the recipe: {line}" for line in collapsed(planned.dropped)), *planned.said):
        progress.say(line)
    return planned


def _draft_card(job: Job, run: Run, summary: PlanSummary) -> bytes | None:
    """Return a card like the one that will be written when the weights are known."""
    return _more(run, job, summary, ()).get(hub.CARD_PATH)


def _done(run: Run, digest: str, job: Job) -> Callable[[str], bool]:
    """Return what says of a file of a plan whether it is whole already, wherever the job wants it."""

    def done(path: str) -> bool:
        sent = streaming.sent_before(job, run, digest, path) if job.stream else None
        whole = sent is not None if job.stream == STREAM_ONLY else _whole(run, digest, path, job) is not None
        return whole and (sent is not None or job.stream != STREAM_BOTH)

    return done


def _nothing_done(_path: str) -> bool:
    return False


def _refuse_full_sink(run: Run, planned: Planned, written: Collection[str]) -> None:
    needed = sum(file.size for file in planned.files if not file.done and file.path in written)
    free = run.sink.free_bytes()
    if free is not None and free < needed:
        raise NoSpace(f"{run.sink.url}: the output takes {needed} bytes, {free} are free")


def consolidate(
    job: Job,
    index: int,
    *,
    progress: Progress = SILENT,
    cancellation: Cancellation | None = None,
) -> FileRecord:
    """Make one output file, counted from 0, unless it is already whole.

    Args:
        job: What is asked.
        index: Which file.
        progress: Hears of every window.
        cancellation: Heeded between windows.

    Raises:
        PlanError: There is no plan, or no such file in it.
        SourceError: The source is damaged, or not what was gathered; the file does not appear.
        StorageError: Reading or writing failed; the file does not appear.
        ValidationError: A tensor holds what the job refuses; the file does not appear, or the manifest goes.
    """
    run = Run(open_store(job.sink))
    plan, summary = run.file_plan(index), run.planned()
    stop = cancellation or Cancellation()
    whole = _whole(run, summary.digest, plan.path, job)

    def make(into: consolidating.Creator, heard: Progress) -> FileRecord:
        terms = consolidating.Terms(stop, _crew(job), job.hashing, job.statistics, _refused_in_a_file(job))
        return consolidating.consolidate(plan, reopen(job, run.source()), into, progress=heard, terms=terms)

    with _refused_leaves_no_manifest(run):
        if job.stream:
            file = summary.files[index]
            record = streaming.stream(job, run, file, make, whole=whole, progress=progress, cancellation=stop)
        elif whole:
            record = whole
            progress.advance(plan.size - len(plan.header))
        else:
            record = make(run.sink, progress)
            run.save_record(summary.digest, record)
        statistics.refuse(plan.path, record.statistics, _refused_in_a_file(job))
    return record


@contextmanager
def _refused_leaves_no_manifest(run: Run) -> Iterator[None]:
    """Let nobody take for publishable what a later run refuses: the same run without ``fail_on`` completes it again."""
    try:
        yield
    except ValidationError:
        run.sink.delete(MANIFEST_PATH)
        raise


def _refused_in_a_file(job: Job) -> tuple[str, ...]:
    """Return what shows in a file alone: where tensors are cut over files, a part may be zero and the tensor not."""
    return tuple(kind for kind in job.fail_on if kind != "zero" or not job.ranks)


def _whole(run: Run, digest: str, path: str, job: Job) -> FileRecord | None:
    """Return the record of a file that need not be made again."""
    record = run.record(digest, path)
    whole = record is not None and (record.sha256 or not job.hashing)
    return record if record is not None and whole and statistics.covers(record.statistics, job.statistics) else None


def passes(job: Job) -> int:
    """Return how often the bytes of every file pass while they are made."""
    return streaming.passes(job) if job.stream else 1


def consolidate_all(
    job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None
) -> tuple[FileRecord, ...]:
    """Make every output file, several at once.

    When one fails the others stop at their next window, and the first fault is raised.
    """
    summary = Run(open_store(job.sink)).planned()
    progress.begin("consolidate", summary.total_size * passes(job))
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


def _crew(job: Job) -> Crew:
    """Return the processors that the files share: a remote storage lets files wait, which leaves all to helpers."""
    return crew_of(job.files_at_once + 1 if job.remote_file_bytes else usable_processors())


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


def validate(job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None) -> Manifest:
    """Check everything that was written or sent, then write the index and, last of all, the manifest.

    Raises:
        ValidationError: Something that was written is not what was meant, or holds what the job refuses.
        SourceError: The source is damaged, or not what was gathered.
        HubError: What was streamed cannot be committed to the stage.
    """
    progress.begin("validate", 0)
    run = Run(open_store(job.sink))
    if job.stream:
        streaming.settle(job, run, cancellation)
    more, elsewhere = partial(_more, run, job), streaming.elsewhere(job, run)
    try:
        manifest = validating.complete(
            run, reopen(job, run.source()), fail_on=job.fail_on, more=more, elsewhere=elsewhere
        )
    except CorruptFile:
        if job.stream:
            streaming.give_up(job, run)
        raise
    for line in statistics.told(statistics.merged(manifest.records)):
        progress.say(line)
    if job.check_logits:
        progress.say(_logits(run, job).sentence)
    return manifest


def _more(run: Run, job: Job, planned: PlanSummary, records: tuple[FileRecord, ...]) -> Mapping[str, bytes]:
    """Return the assets and the card; the card that the repository has already is kept."""
    asked = job.repo and (job.card or job.base)
    there = hub.read_card(job.repo, Terms.of(job)) if asked else ""
    return repository.files(run, planned, records, job, there)


def _logits(run: Run, job: Job) -> load_check.Logits:
    """Load what was written for real, and run it on the prompt."""
    folder = run.sink.local_path(MANIFEST_PATH)
    if folder is None:
        raise PlanError(f"--check-logits needs the model on a local disk, and {run.sink.url} is none")
    return load_check.logits(
        folder.parent, prompt=job.check_logits, reference=job.reference, tolerance=job.logits_tolerance
    )


def push(job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None) -> hub.Receipt:
    """Commit what the manifest names to the Hub.

    Raises:
        PlanError: The sink holds no complete output, or one that was never hashed.
        ValidationError: A tensor holds what the job refuses.
        HubError: The Hub refused or failed.
    """
    if not job.repo:
        raise UsageError("no repository is named")
    run = Run(open_store(job.sink))
    manifest = _manifest(run, job)
    _refuse_unhashed(job, manifest)
    statistics.refuse(job.sink, statistics.merged(manifest.records), job.fail_on)
    if manifest.ranks:
        raise PlanError(f"{job.sink} is sharded for {manifest.ranks} ranks: no model repository; consolidate it first")
    receipt = hub.push(
        manifest,
        run.sink,
        job.repo,
        Terms.of(job),
        target=run.target() if job.stream else None,
        sent=streaming.sent_files(run, manifest.plan_digest) if job.stream else {},
        progress=progress,
        cancellation=cancellation,
    )
    try:
        run.sink.put(RECEIPT_PATH, wire.dumps("receipt", receipt))
    except HfdcpError as error:  # a finished output may lie where nobody may write
        progress.say(f"everything is published, but {RECEIPT_PATH} cannot be written: {error}")
    return receipt


def _refuse_unhashed(job: Job, manifest: Manifest) -> None:
    if not manifest.hashed:
        raise PlanError(f"{job.sink} was made without hashing: nothing says what its bytes should be; make it again")


def _manifest(run: Run, job: Job) -> Manifest:
    manifest = run.manifest()
    if manifest is None:
        raise PlanError(
            f"{job.sink}: no manifest: the output is not complete, or this is not the folder that `hfdcp consolidate "
            f"SOURCE SINK` wrote; that command makes it, or goes on with it"
        )
    return manifest


def make(job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None) -> Manifest:
    """Gather, reshard, consolidate and validate: everything but the push, without Prefect."""
    with hold(job):
        gather(job, progress=progress)
        reshard(job, progress=progress)
        consolidate_all(job, progress=progress, cancellation=cancellation)
        return validate(job, progress=progress, cancellation=cancellation)


def publish(job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None) -> hub.Receipt:
    """Carry out all five steps, without Prefect."""
    make(job, progress=progress, cancellation=cancellation)
    return push(job, progress=progress, cancellation=cancellation)


# ---- without a run --------------------------------------------------------------------------------------------------


def plan_only(job: Job) -> tuple[Gathered, Planned]:
    """Say what a run would do, and write nothing: ``job.sink`` may be empty.

    Raises:
        SourceError: As `gather`.
        PlanError: As `reshard`, but for what the sink holds.
    """
    gathered, planned, _ = explain_only(job, ())
    return gathered, planned


def explain_only(job: Job, names: tuple[str, ...]) -> tuple[Gathered, Planned, tuple[explaining.Explanation, ...]]:
    """Say what a run would do, and where some tensors of its output would come from.

    Raises:
        SourceError: As `gather`.
        PlanError: As `reshard`, but for what the sink holds.
        UsageError: There is no tensor of such a name.
    """
    found = locate(job)
    if job.sink:
        _refuse_own_source(job, found.pinned.folder)
        _refuse_file_as_sink(open_store(job.sink), job)
    drawn = draw(found.catalog, found.source, job)
    done = _done(Run(open_store(job.sink)), drawn.summary.digest, job) if job.sink else _nothing_done
    told = tuple(explaining.explain(drawn.plan, drawn.definitions, name) for name in names)
    return _gathered(found, job), planned_of(drawn, found.catalog, job, done=done), told


def infer_recipe(job: Job) -> tuple[Proposal, ...]:
    """Propose a recipe, for a person to confirm.

    Raises:
        SourceError: As `gather`.
        PlanError: There is no config of a model that transformers knows.
    """
    found = locate(job)
    selection = recipe.select(found.catalog, include=job.include, exclude=job.exclude)
    return defining.proposed(found.catalog, selection.names, found.source, job)


def validate_again(job: Job, *, public_key: str = "", progress: Progress = SILENT) -> Manifest:
    """Hold a finished output against its manifest, reading and hashing everything once more.

    Where ``job.source`` is given, what the source holds today is compared too; where ``job.repo`` is given, what the
    Hub has. Without ``job.sink`` the repository is held against the manifest that lies in it.

    Args:
        job: What is looked at.
        public_key: Path of the key that the repository must be signed with; empty to look at no signature.
        progress: Hears of every block.

    Raises:
        ValidationError: They differ, ``problems`` has every difference; or a tensor holds what the job refuses.
        PlanError: The sink holds no complete output, or one that was never hashed.
        HubError: The Hub refused or failed.
    """
    if not job.sink:
        return _repository_again(job, public_key, progress)
    sink = open_store(job.sink)
    manifest = _manifest(Run(sink), job)
    _refuse_unhashed(job, manifest)
    problems = validating.validate(sink, manifest, progress=progress)
    if job.source:
        problems += _source_problems(job, manifest)
    if job.repo:
        there = hub.look_again(job.repo, Terms.of(job), manifest=manifest, public_key=public_key, progress=progress)
        problems += there.problems
    ValidationError.raise_for(f"{job.sink} is not what its manifest says", problems)
    statistics.refuse(job.sink, statistics.merged(manifest.records), job.fail_on)
    _load_again(sink, manifest, job, progress)
    return manifest


def _repository_again(job: Job, public_key: str, progress: Progress) -> Manifest:
    there = hub.look_again(job.repo, Terms.of(job), public_key=public_key, progress=progress)
    where = f"{job.repo}@{job.revision}"
    ValidationError.raise_for(f"{where} is not what its manifest says", there.problems)
    statistics.refuse(where, statistics.merged(there.manifest.records), job.fail_on)
    return there.manifest


def _load_again(sink: Sink, manifest: Manifest, job: Job, progress: Progress) -> None:
    """Ask transformers about what was written, by its headers and the config beside it, and run it where asked to."""
    run = Run(sink)
    raw = run.read(CONFIG_PATH)
    if not manifest.ranks and raw is not None:
        config = json.loads(read_config(raw, where=f"{sink.url}/{CONFIG_PATH}").text)
        headers = {record.path: validating.read_raw_header(sink, record.path) for record in manifest.records}
        for line in load_check.told(load_check.judge(config, headers, job)):
            progress.say(line)
    if job.check_logits:
        progress.say(_logits(run, job).sentence)


def _source_problems(job: Job, manifest: Manifest) -> tuple[str, ...]:
    """Hold what the source gives today against the manifest, with the choices that the manifest states."""
    found = relocate(job, Run(open_store(job.sink)).source())
    catalog = found.catalog
    wanted = {name: number for number, record in enumerate(manifest.records, 1) for name in record.tensors}
    selection = recipe.select(catalog, include=manifest.include, exclude=manifest.exclude)
    plain = defining.defined_again(catalog, selection.names, recipe=manifest.recipe, rules=manifest.rules)
    definitions = quantization.settle(plain, manifest.numerics).definitions
    written = tuple(definition for definition in definitions if definition.fqn not in manifest.tied)
    target = target_of(written, replace(job, ranks=manifest.ranks, shard_dim=manifest.shard_dim, repo=""), wanted)
    plan = join(catalog, target, window_bytes=job.window_bytes)
    made_again = (consolidating.consolidate(file, found.source, consolidating.Nowhere()) for file in plan.files)
    problems = validating.records_problems(made_again, manifest)
    problems += tying.tied_problems(catalog, found.source, definitions, manifest.tied)
    return (*problems, *_extra_problems(found, manifest))


def _extra_problems(found: Located, manifest: Manifest) -> list[str]:
    """Hold the plain values of the source against those that were saved apart, where they were."""
    then = [record.sha256 for record in manifest.extra_files if record.path == EXTRA_PATH]
    now = extras.document(found.catalog, found.source) if then else None
    same = then == ([hashlib.sha256(now).hexdigest()] if now else [])
    return [] if same else [f"{EXTRA_PATH}: the source holds other values"]
