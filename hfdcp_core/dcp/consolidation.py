"""torch's consolidation functions: one writer's shards become whole tensors, on one rank or on many.

Same names and arguments as in `torch.distributed.checkpoint._consolidate_hf_safetensors` (2.13), which torchtitan and
transformers import. A missing shard, a name that is mapped but not there (or there but not mapped), two dtypes of one
tensor or a file of another save are errors; nothing appears before everything was made, and the index appears last.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch.distributed as dist

from hfdcp_core import recipe
from hfdcp_core.catalog import Catalog, FileStamp
from hfdcp_core.consolidate import Creator, consolidate
from hfdcp_core.dcp.ranks import Ranks
from hfdcp_core.dcp.together import Together, complete, withdraw
from hfdcp_core.errors import PlanError
from hfdcp_core.gather import gather
from hfdcp_core.layout import lay_out
from hfdcp_core.manifest import INDEX_PATH, FileRecord, Manifest
from hfdcp_core.plan import FilePlan, Plan, reshard, stamps_digest
from hfdcp_core.store import Source, open_store
from hfdcp_core.validate import refuse_damaged_items, shared_item_problems

_LOG = logging.getLogger(__name__)
WINDOW_BYTES = 4 << 20
"""How much of a file is made at a time."""
MAX_FILE_SIZE = 5_000_000_000
"""Tensor bytes in one file at most, where no mapping is given."""
Path = str | os.PathLike[str]


def consolidate_safetensors_files(
    input_dir: Path,
    output_dir: Path,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    *,
    storage_options: Mapping[str, object] | None = None,
    max_file_size: int = MAX_FILE_SIZE,
    strict: bool = True,
    world_size: int | None = None,
) -> None:
    """Make whole tensors of the shards in a folder, in this process.

    Args:
        input_dir: Folder or URL of the shards.
        output_dir: Folder or URL of the result; it is made where it is not there.
        fqn_to_index_mapping: Number of the file, from 1, for every tensor; without it files are filled up in turn.
        num_threads: Files that are made at once.
        storage_options: Options of the filesystem of either.
        max_file_size: Tensor bytes in one file at most, where no mapping is given.
        strict: Whether the mapping must name exactly the tensors that are there. Where not, names without a tensor
            are passed over, and tensors without a name go to the first file.
        world_size: How many ranks wrote the shards; with it the loss of any rank's file is an error.

    Raises:
        SourceError: The shards are damaged or not complete. Nothing appears.
        PlanError: A tensor has a hole, or the mapping does not fit. Nothing appears.
        StorageError: Reading or writing failed.
    """
    task = _Task(input_dir, output_dir, fqn_to_index_mapping, storage_options, max_file_size, strict, world_size)
    _consolidate(task, num_threads, Ranks(alone=True))


def consolidate_safetensors_files_on_every_rank(
    input_dir: Path,
    output_dir: Path,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
    *,
    storage_options: Mapping[str, object] | None = None,
    max_file_size: int = MAX_FILE_SIZE,
    strict: bool = True,
    world_size: int | None = None,
) -> None:
    """Make whole tensors of the shards in a folder that all ranks see; each makes some of the files.

    Arguments and errors are those of `consolidate_safetensors_files`; what fails on one rank is raised on all of them.
    Without a ``process_group`` all ranks take part, or this process alone where `torch.distributed` is not set up.
    """
    task = _Task(input_dir, output_dir, fqn_to_index_mapping, storage_options, max_file_size, strict, world_size)
    _consolidate(task, num_threads, Ranks(process_group))


@dataclass(frozen=True, slots=True)
class _Task:
    """What was asked."""

    input_dir: Path
    output_dir: Path
    mapping: Mapping[str, int] | None
    options: Mapping[str, object] | None
    max_file_size: int
    strict: bool
    world_size: int | None

    def gather(self, source: Source) -> Catalog:
        catalog = gather(source, world_size=self.world_size)
        if catalog.unproved:
            _LOG.warning("%s: it cannot be shown that every shard is there: %s", source.url, catalog.unproved)
        return catalog

    def plan(self, catalog: Catalog, save: str) -> Plan:
        names = recipe.select(catalog, include=("*",)).names
        definitions = recipe.define(catalog, names, recipe.recipe_named("none"))
        target = lay_out(
            definitions,
            max_file_size=self.max_file_size,
            file_index=self._fitting(names),
            as_torch=True,
            save=save,
        )
        return reshard(catalog, target, window_bytes=WINDOW_BYTES)

    def _fitting(self, names: Iterable[str]) -> Mapping[str, int] | None:
        if self.mapping is None or self.strict:
            return self.mapping
        return {name: self.mapping.get(name, 1) for name in names}


def _consolidate(task: _Task, num_threads: int, ranks: Ranks) -> None:
    sink = open_store(task.output_dir, storage_options=task.options)
    source = open_store(task.input_dir, storage_options=task.options)
    held = Together(sink)
    try:
        catalog = ranks.own(lambda: task.gather(source))
        save = ranks.share(_save_of(catalog))[0]
        plan = ranks.own(lambda: task.plan(catalog, save))
        if len(set(ranks.share(plan.digest))) > 1:
            raise PlanError(f"{source.url}: the ranks see different files; every rank must see all of them")
        mine = plan.files[ranks.rank :: ranks.size]
        made = ranks.own(lambda: _make(mine, source, held, num_threads))
        records = sorted(itertools.chain.from_iterable(ranks.share(made)), key=lambda record: record.path)
        refuse_damaged_items(problem for problem, _ in shared_item_problems(records))
        manifest = _manifest(catalog, plan, tuple(records))
        former = ranks.own(lambda: withdraw(sink) if ranks.rank == 0 else frozenset())
        ranks.own(held.commit)
        ranks.own(lambda: complete(sink, manifest, plan.index or b"", former) if ranks.rank == 0 else None)
    finally:
        held.abort()


def _save_of(catalog: Catalog) -> str:
    """Say which save the shards are of, for the headers of the output.

    A process that dies while files get their names leaves some of this output and some of an older one, and only their
    headers tell. The same shards, untouched, give the same output again where their storage dates them.
    """
    dated = all(stamp.tag for stamp in catalog.files)
    return stamps_digest(catalog.files) if dated else uuid.uuid4().hex


def _make(files: Iterable[FilePlan], source: Source, sink: Creator, num_threads: int) -> list[FileRecord]:
    with ThreadPoolExecutor(max(num_threads, 1), "hfdcp-file") as pool:
        return list(pool.map(lambda file: consolidate(file, source, sink), files))


def _manifest(catalog: Catalog, plan: Plan, records: tuple[FileRecord, ...]) -> Manifest:
    index = plan.index or b""
    return Manifest(
        plan_digest=plan.digest,
        source_digest=stamps_digest(FileStamp(stamp.path, stamp.size, "") for stamp in catalog.files),
        source_format=catalog.format,
        records=records,
        extra_files=(FileRecord(INDEX_PATH, len(index), hashlib.sha256(index).hexdigest()),),
        total_size=plan.total_size,
        unproved=catalog.unproved,
        skipped=tuple(entry.name for entry in catalog.skipped),
    )
