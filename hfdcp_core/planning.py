"""To draw up a plan for a job: a recipe meets the tensors that are there, numbers and ties are settled, files laid out.

Pure but for what settling reads: the config, tensors that may be tied, a base model's list of files, and transformers'
word on whether it would load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hfdcp_core import casting, defining, load_check, quantization, recipe, repository, tying
from hfdcp_core.catalog import Catalog
from hfdcp_core.errors import IncompleteCheckpoint
from hfdcp_core.job import Job, Planned, PlannedFile, known_bytes
from hfdcp_core.layout import Target, has_dimension, lay_out, lay_out_for_ranks
from hfdcp_core.plan import Plan
from hfdcp_core.plan import reshard as join
from hfdcp_core.run import FileSummary, PlanSummary
from hfdcp_core.store import Source
from hfdcp_core.windows import refuse_split_bytes


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plan, and what a person should hear of it."""

    summary: PlanSummary
    """The plan without its copies."""
    plan: Plan
    """The plan itself."""
    definitions: tuple[recipe.Definition, ...]
    """The tensors that are written."""
    said: tuple[str, ...]
    """What a person should hear of it."""


def draw(catalog: Catalog, source: Source, job: Job) -> Drawn:
    """Draw up a plan; nothing is written.

    Args:
        catalog: What was gathered.
        source: The store that it lies in.
        job: What is asked.

    Raises:
        IncompleteCheckpoint: Nothing proves that no shard is lost, and the job does not accept that.
        PlanError: The checkpoint does not hold every wanted element exactly once, names clash, or it would not load.
    """
    if catalog.unproved and not job.accept_unproved:
        raise IncompleteCheckpoint(f"{job.source}: it cannot be shown that every shard is there: {catalog.unproved}")
    selection = recipe.select(catalog, include=job.include, exclude=job.exclude)
    named = defining.defined(catalog, selection.names, source, job)
    made = casting.settle(source, named.definitions, job)
    tied = tying.settle(catalog, source, made.numbers.definitions, job, more=named.ties)
    settled = casting.configure(made, tied)
    target = target_of(settled.definitions, job, settled.file_index)
    plan = join(catalog, target, window_bytes=_window(catalog, target, job))
    refuse_split_bytes(plan)
    skipped = (*(entry.name for entry in (*selection.skipped, *made.numbers.skipped)), *named.dropped)
    summary = replace(
        _summary(catalog, job, plan, settled, skipped), recipe=named.recipe, rules=named.rules, dropped=named.dropped
    )
    changes = quantization.changes(settled.definitions)
    beside = repository.settle(settled, source, job)
    report = repository.judged(beside, plan, source, job)
    summary = replace(
        summary,
        numerics=made.numerics,
        changes=changes,
        config=beside.config,
        corrections=beside.corrections,
        assets=beside.assets.files,
        left_in_base=beside.assets.left_out,
        loads="" if report.why or report.problems else report.sentence,
    )
    return Drawn(summary, plan, settled.definitions, (*beside.said, *load_check.told(report)))


def _window(catalog: Catalog, target: Target, job: Job) -> int:
    """Return how much of a file is made at a time, beside what is known of all tensors."""
    parts = [part.definition for file in target.files for part in file.parts]
    pieces = sum(len(a.patches) if a else 1 for part in parts for a in (part.arrangements or (None,)))
    operated = any(part.operation for part in parts)
    return job.window_beside(_known_bytes(catalog, pieces), operated=operated)


def target_of(definitions: tuple[recipe.Definition, ...], job: Job, file_index: Mapping[str, int] | None) -> Target:
    """Lay the tensors out as the job asks: for the ranks of a training, or as a model repository."""
    if job.ranks:
        return lay_out_for_ranks(definitions, ranks=job.ranks, dim=job.shard_dim)
    return lay_out(definitions, max_file_size=job.max_file_size, file_index=file_index)


def _summary(catalog: Catalog, job: Job, plan: Plan, settled: tying.Settled, skipped: tuple[str, ...]) -> PlanSummary:
    return PlanSummary(
        digest=plan.digest,
        files=tuple(FileSummary(file.path, file.size, file.peak_bytes) for file in plan.files),
        index=plan.index,
        total_size=plan.total_size,
        tensors=len(settled.definitions),
        source_format=catalog.format,
        stamps=catalog.files,
        recipe=job.recipe,
        include=job.include,
        exclude=job.exclude,
        skipped=skipped,
        unproved=catalog.unproved,
        ranks=job.ranks,
        shard_dim=job.shard_dim,
        tied=settled.tied,
        config=settled.config,
        keep_extra=job.keep_extra,
    )


def planned_of(drawn: Drawn, catalog: Catalog, job: Job, *, done: Callable[[str], bool]) -> Planned:
    """Say what a plan will do, in short.

    Args:
        drawn: The plan.
        catalog: What was gathered.
        job: What is asked.
        done: Whether a file, by its path, is whole already.
    """
    summary, plan = drawn.summary, drawn.plan
    files = tuple(PlannedFile(file.path, file.size, done(file.path)) for file in summary.files)
    peaks = sorted((file.peak_bytes for file in plan.files), reverse=True)
    return Planned(
        digest=summary.digest,
        files=files,
        tensors=summary.tensors,
        nbytes=summary.nbytes,
        copies=sum(len(file.copies) for file in plan.files),
        peak_bytes=(
            job.start_bytes
            + _known_bytes(catalog, _pieces(plan, catalog))
            + sum(peak + job.remote_file_bytes for peak in peaks[: job.files_at_once])
        ),
        changes=summary.changes,
        tied=summary.tied,
        dropped=summary.dropped,
        said=drawn.said,
        uncut=_uncut(plan, job.shard_dim) if job.ranks else 0,
    )


def _pieces(plan: Plan, catalog: Catalog) -> int:
    """Return in how many parts tensors are written: in several files, or put together of several boxes."""
    tensors = sum(len(file.tensors) for file in plan.files)
    copies = sum(len(file.copies) for file in plan.files)
    return max(tensors, len(catalog.tensors) + copies - len(catalog.shards))


def _known_bytes(catalog: Catalog, parts: int) -> int:
    """Return what it takes to know and plan a checkpoint; a tensor that is written in several parts counts as often."""
    more = max(0, parts - len(catalog.tensors))
    return known_bytes(len(catalog.tensors) + more, len(catalog.shards) + more)


def _uncut(plan: Plan, dim: int) -> int:
    return len({name for file in plan.files for name, spec in file.tensors if not has_dimension(spec, dim)})
