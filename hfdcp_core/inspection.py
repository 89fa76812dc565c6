"""To inspect is to say what lies at a URL and whether it would do, without writing.

Metadata alone show holes, overlaps, wrong and missing files. Reading every item once (``deep``) shows the rest: flipped
bytes, and items of another dtype, shape or layout than they should have. All that is wrong is told, not the first.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hfdcp_core import defining, examine, extras, recipe, tying
from hfdcp_core.catalog import Catalog, Shard, Skipped, TensorSpec
from hfdcp_core.copies import NOT_READ
from hfdcp_core.errors import CorruptFile, PlanError, SourceError, UsageError
from hfdcp_core.job import Job
from hfdcp_core.layout import lay_out
from hfdcp_core.locate import Located, locate
from hfdcp_core.plan import reshard
from hfdcp_core.state import SILENT, Progress
from hfdcp_core.store import Source
from hfdcp_core.windows import refuse_split_bytes

NEAR_NAMES = 5
"""How many names are offered for one that is unknown."""


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
class Tensor:
    """One tensor that was asked for, wanted or not, and everything that it lies in."""

    fqn: str
    """Its name in the output; as saved where it would not be there."""
    source: str
    """Its name as saved."""
    spec: TensorSpec
    """Its dtype and shape."""
    shards: tuple[Shard, ...]
    """Its shards by offset, replicas too."""


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
    """Everything that is wrong: damage, holes, overlaps, clashes of names; nothing where all is well."""
    folder: str = ""
    """The folder below the URL that holds it; empty where that is the URL itself."""
    said: tuple[str, ...] = ()
    """What a person should hear of how it was found."""
    examined: int = 0
    """Shards that were read from end to end; 0 where only metadata were asked."""
    damaged: int = 0
    """How many of the problems are items that are not what they should be."""
    spoilt_copies: int = 0
    """Damaged copies of items that are whole in another place, of a checkpoint in several."""
    tensor: Tensor | None = None
    """The one tensor that was asked for."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that would be in the output."""
        return sum(tensor.spec.nbytes for tensor in self.wanted)

    @property
    def exit_status(self) -> int:
        """Status of the fault that is shown: the source's own, before what cannot be made of it; 0 without any.

        That is the status with which a run would end, had it to read everything first.
        """
        if self.damaged:
            return SourceError.exit_status
        return PlanError.exit_status if self.problems else 0


def inspect(job: Job, *, tensor: str = "", deep: bool = False, progress: Progress = SILENT) -> Inspection:
    """Look at ``job.source``, with the job's choice of tensors and names; ``job.sink`` is not used.

    Args:
        job: Where the checkpoint is, and what of it is wanted.
        tensor: Name of one tensor to tell more of, as in the output or as saved; empty for none.
        deep: Whether every item is opened and read once.
        progress: Hears how far the reading is.

    Raises:
        SourceError: What lies there is no checkpoint, or shows that it is damaged.
        StorageError: It cannot be read.
        UsageError: There is no such recipe, or no such tensor.
    """
    found = locate(job)
    damage: tuple[str, ...] = ()
    spoilt: tuple[str, ...] = ()
    if deep:
        found, damage, spoilt = _read_through(found, progress)
    catalog, faults = found.catalog, list[str]()
    selection = _selection(catalog, job, faults)
    definitions = _definitions(catalog, selection.names, found.source, job, faults)
    said = _foreseen(found, definitions, job, faults)
    return Inspection(
        format=catalog.format,
        files=len(catalog.files),
        source_bytes=sum(stamp.size for stamp in catalog.files),
        wanted=_wanted(catalog, definitions),
        skipped=selection.skipped,
        unproved=catalog.unproved,
        problems=(*damage, *faults),
        folder=found.pinned.folder,
        said=(*found.said, *spoilt, *said),
        examined=len(catalog.shards) if deep else 0,
        damaged=len(damage),
        spoilt_copies=len(spoilt),
        tensor=_tensor(catalog, definitions, tensor) if tensor else None,
    )


def _read_through(found: Located, progress: Progress) -> tuple[Located, tuple[str, ...], tuple[str, ...]]:
    """Open and read every item; return what is still there to be carried over, all damage, and spoilt copies."""
    catalog = found.catalog
    progress.begin("gather", sum(TensorSpec(shard.dtype, shard.box.shape).nbytes for shard in catalog.shards))
    unsupported = examine.look(found.source, catalog.shards).unsupported
    plain = replace(
        catalog,
        tensors={name: spec for name, spec in catalog.tensors.items() if name not in unsupported},
        shards=tuple(shard for shard in catalog.shards if shard.fqn not in unsupported),
        unsupported={**catalog.unsupported, **unsupported},
    )
    read = examine.examine_copies(plain, found.source, progress)
    said = tuple(line for line in found.said if not line.endswith(NOT_READ))  # now they were
    return replace(found, catalog=plain, said=said), (*read.problems, *_damaged_objects(found)), read.said


def _damaged_objects(found: Located) -> Iterator[str]:
    try:
        extras.document(found.catalog, found.source)
    except CorruptFile as error:
        yield str(error)


# ---- would it do? ---------------------------------------------------------------------------------------------------


def _selection(catalog: Catalog, job: Job, faults: list[str]) -> recipe.Selection:
    """Choose what is wanted; where some of it cannot be carried over, go on with the rest."""
    try:
        return recipe.select(catalog, include=job.include, exclude=job.exclude)
    except PlanError as error:
        faults += [f"{error.message}: {problem}" for problem in error.problems] or [error.message]
    try:
        return recipe.select(replace(catalog, unsupported={}), include=job.include, exclude=job.exclude)
    except PlanError:
        return recipe.Selection((), catalog.skipped)


def _definitions(
    catalog: Catalog, names: tuple[str, ...], source: Source, job: Job, faults: list[str]
) -> tuple[recipe.Definition, ...]:
    """Name what is wanted and prove that it is there; where the names clash that is proved all the same."""
    try:
        definitions = defining.defined(catalog, names, source, job).definitions
    except PlanError as error:
        faults += error.problems
        _prove(catalog, recipe.define(catalog, names, recipe.recipe_named("none")), job, faults)
        return ()
    _prove(catalog, definitions, job, faults)
    return definitions


def _prove(catalog: Catalog, definitions: tuple[recipe.Definition, ...], job: Job, faults: list[str]) -> None:
    try:
        target = lay_out(definitions, max_file_size=job.max_file_size)
        refuse_split_bytes(reshard(catalog, target, window_bytes=job.window_bytes))
    except PlanError as error:
        faults += error.problems or (error.message,)


def _foreseen(
    found: Located, definitions: tuple[recipe.Definition, ...], job: Job, faults: list[str]
) -> tuple[str, ...]:
    try:
        return tying.foresee(found.source, definitions, job)
    except PlanError as error:
        faults += error.problems
        return ()


def _wanted(catalog: Catalog, definitions: tuple[recipe.Definition, ...]) -> tuple[Wanted, ...]:
    counts = Counter(shard.fqn for shard in catalog.shards)
    return tuple(Wanted(d.fqn, d.source, d.spec, counts[d.source]) for d in definitions)


# ---- one tensor -----------------------------------------------------------------------------------------------------


def _tensor(catalog: Catalog, definitions: Iterable[recipe.Definition], name: str) -> Tensor:
    """Find a tensor by its name in the output, else by its name as saved."""
    names = {definition.fqn: definition.source for definition in definitions}
    outputs = {source: fqn for fqn, source in names.items()}
    source = names.get(name, name)
    if source in catalog.unsupported:
        raise UsageError(f"{name}: there is nothing to show of it: {catalog.unsupported[source]}")
    if source not in catalog.tensors:
        near = _near(name, sorted({*names, *catalog.tensors, *catalog.unsupported}))
        raise UsageError(f"{name}: no such tensor here{', but there are' if near else ''}", near)
    shards = [shard for shard in catalog.shards if shard.fqn == source]
    shards.sort(key=lambda shard: (shard.box.offset, shard.box.shape, shard.span.path, shard.span.start))
    return Tensor(outputs.get(source, source), source, catalog.tensors[source], tuple(shards))


def _near(name: str, names: list[str]) -> list[str]:
    """Return names that may be meant: those that hold what was typed, else those that are spelt alike."""
    holding = [other for other in names if name in other]
    return holding[:NEAR_NAMES] or difflib.get_close_matches(name, names, NEAR_NAMES)
