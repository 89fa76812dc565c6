"""To inspect is to say what lies at a URL and whether it would do, from metadata alone and without writing."""

from __future__ import annotations

from dataclasses import dataclass

from hfdcp_core import recipe, tying
from hfdcp_core.catalog import Catalog, Skipped, TensorSpec
from hfdcp_core.errors import PlanError
from hfdcp_core.job import Job
from hfdcp_core.layout import lay_out
from hfdcp_core.locate import locate
from hfdcp_core.plan import reshard


@dataclass(frozen=True, slots=True)
class Wanted:
    """One tensor that would be in the output."""

    fqn: str
    """Its name in the output."""
    source: str
    """Its name as saved."""
    spec: TensorSpec
    """Its dtype and shape."""
    shards: int
    """In how many shards it lies, replicas counted."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What lies at a URL."""

    format: str
    """Format of the checkpoint."""
    files: int
    """Files of the checkpoint."""
    source_bytes: int
    """Bytes of all of them."""
    wanted: tuple[Wanted, ...]
    """Tensors that would be in the output, in the checkpoint's order; none where that cannot be said."""
    skipped: tuple[Skipped, ...]
    """What would be left out, and why."""
    unproved: str | None
    """Why it cannot be shown that everything is there; None where it can."""
    problems: tuple[str, ...]
    """Why no output can be made as asked: holes, overlaps, clashes of names; nothing where all is well."""
    folder: str = ""
    """The folder below the URL that holds it; empty where that is the URL itself."""
    said: tuple[str, ...] = ()
    """What a person should hear of how it was found."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that would be in the output."""
        return sum(tensor.spec.nbytes for tensor in self.wanted)


def inspect(job: Job) -> Inspection:
    """Look at ``job.source``, with the job's choice of tensors and names; ``job.sink`` is not used.

    Raises:
        SourceError: What lies there is no checkpoint, or shows that it is damaged.
        StorageError: It cannot be read.
        UsageError: There is no such recipe.
    """
    found = locate(job)
    catalog = found.catalog
    selection = recipe.Selection((), catalog.skipped)
    definitions: tuple[recipe.Definition, ...] = ()
    problems: tuple[str, ...] = ()
    said = found.said
    try:
        selection = recipe.select(catalog, include=job.include, exclude=job.exclude)
        definitions = recipe.define(catalog, selection.names, recipe.recipe_named(job.recipe))
        reshard(catalog, lay_out(definitions, max_file_size=job.max_file_size), window_bytes=job.window_bytes)
        said += tying.foresee(found.source, definitions, job)
    except PlanError as error:
        problems = error.problems or (error.message,)
    return Inspection(
        format=catalog.format,
        files=len(catalog.files),
        source_bytes=sum(stamp.size for stamp in catalog.files),
        wanted=_wanted(catalog, definitions),
        skipped=selection.skipped,
        unproved=catalog.unproved,
        problems=problems,
        folder=found.pinned.folder,
        said=said,
    )


def _wanted(catalog: Catalog, definitions: tuple[recipe.Definition, ...]) -> tuple[Wanted, ...]:
    counts: dict[str, int] = {}
    for shard in catalog.shards:
        counts[shard.fqn] = counts.get(shard.fqn, 0) + 1
    return tuple(Wanted(d.fqn, d.source, d.spec, counts.get(d.source, 0)) for d in definitions)
