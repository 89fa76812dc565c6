"""To settle ties is to find the model's config, compare the tensors that it ties, and leave out what is there twice.

What decides is in `hfdcp_core.ties`; here the config is read and the tensors are. They are compared by the digests of
their bytes, made as a file is made (windows, checksums of the source, bounded memory) but into nothing. Only tensors
that the config ties are read, so for most checkpoints nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfdcp_core import ties
from hfdcp_core.catalog import Catalog
from hfdcp_core.consolidate import Nowhere, consolidate
from hfdcp_core.errors import PlanError, SourceError, StorageNotFound
from hfdcp_core.job import Job
from hfdcp_core.layout import lay_out
from hfdcp_core.manifest import CONFIG_PATH
from hfdcp_core.plan import reshard
from hfdcp_core.recipe import Definition
from hfdcp_core.store import Source, open_store
from hfdcp_core.ties import Config, Ties

MOST_CONFIG_BYTES = 16 << 20
"""A larger file is no config."""
WINDOW_BYTES = 1 << 20
"""How much of a tensor is held at a time while it is compared."""
WAY_OUT = (
    "--untie writes every tensor and sets tie_word_embeddings to false in the output's config.json; if this config "
    "is not the model's, name the right one (--config)"
)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Settled:
    """What is written, now that it is known what is there twice."""

    definitions: tuple[Definition, ...]
    """The tensors to write."""
    tied: Mapping[str, str]
    """What is left out, and the tensor of the same bytes that is kept."""
    file_index: Mapping[str, int] | None
    """The given numbers of files, without what is left out."""
    config: bytes | None = None
    """The config that belongs to the output, where it had to be changed."""


def config_at_hand(job: Job, source: Source) -> Config | None:
    """Return the config that the job names, or its base has, or else one that lies in the checkpoint's folder.

    Raises:
        SourceError: It is no config, or the one that is named is not there.
    """
    if not job.config and not job.base:
        return _read_config(source, CONFIG_PATH)
    folder, path = _folder_of(job.config) if job.config else (base_url(job.base), CONFIG_PATH)
    named = _read_config(open_store(folder), path)
    if named is None:
        raise SourceError(
            f"{job.config or job.base}: there is no {path}; --config is a config.json, or a folder with one, and "
            "--base a model's folder or repository"
        )
    return named


def base_url(text: str) -> str:
    """Return the URL of a base: a name of the Hub, where no such folder is here, is taken for a repository.

    >>> base_url("org/model"), base_url("org/model@v1"), base_url("gs://b/m"), base_url("./m"), base_url("/data/m")
    ('hf://org/model', 'hf://org/model@v1', 'gs://b/m', './m', '/data/m')
    """
    local = open_store(text).local_path(CONFIG_PATH) if "://" not in text else None
    here = local is not None and local.parent.is_dir()
    return f"hf://{text}" if not here and _HUB_NAME.fullmatch(text) else text


def _folder_of(url: str) -> tuple[str, str]:
    """Return the folder and the name of a config.

    >>> _folder_of("gs://b/m/config.json"), _folder_of("models/7b/"), _folder_of("my.json"), _folder_of("/c.json")
    (('gs://b/m', 'config.json'), ('models/7b/', 'config.json'), ('.', 'my.json'), ('/', 'c.json'))
    """
    if not url.endswith(".json"):
        return url, CONFIG_PATH
    folder, slash, path = url.rpartition("/")
    return folder or slash or ".", path


def _read_config(store: Source, path: str) -> Config | None:
    try:
        size = store.stat(path).size
        raw = store.read(path, 0, min(size, MOST_CONFIG_BYTES))
    except StorageNotFound:
        return None
    where = f"{store.url}/{path}"
    if size > MOST_CONFIG_BYTES:
        raise SourceError(f"{where}: {size} bytes are no config")
    return ties.read_config(raw, where=where)


def settle(
    catalog: Catalog,
    source: Source,
    definitions: tuple[Definition, ...],
    job: Job,
    *,
    more: Mapping[str, str] | None = None,
) -> Settled:
    """Leave out tensors that the config ties to another one of the same bytes; both are kept where it says nothing.

    Raises:
        PlanError: The config ties tensors that differ, or a head to an embedding that is not there.
        SourceError: The config cannot be read, or a tied tensor is damaged.
    """
    whole = Settled(definitions, {}, job.file_index)
    names = [definition.fqn for definition in definitions]
    found = ties.find([*names, *(job.file_index or {})], more)
    needed = bool(job.config or job.untie or found.kept or found.lost)
    config = config_at_hand(job, source) if needed else None
    if job.untie:
        return Settled(definitions, {}, job.file_index, _untied(config, job))
    if config is None or not config.claims:
        return whole
    tied, problems = _compared(catalog, source, definitions, found)
    PlanError.raise_for(f"{config.where} says tie_word_embeddings: true, and the tensors do not; {WAY_OUT}", problems)
    if not config.tied:
        return whole  # it says both: nobody is hurt by a tensor too many
    left = tuple(definition for definition in definitions if definition.fqn not in tied)
    dropped = {name: kept for name, kept in found.kept.items() if name in tied or name not in names}
    return Settled(left, tied, _without(job.file_index, dropped))


def foresee(source: Source, definitions: Iterable[Definition], job: Job) -> tuple[str, ...]:
    """Say, without reading a tensor, which ones the config ties.

    Raises:
        PlanError: A head is tied to an embedding that is not there.
        SourceError: The config cannot be read.
    """
    found = ties.find(definition.fqn for definition in definitions)
    config = config_at_hand(job, source) if job.config or found.kept or found.lost else None
    if job.untie or config is None or not config.claims:
        return ()
    lost = [f"{head}: no embedding that it could be tied to" for head in found.lost]
    PlanError.raise_for(f"{config.where} says tie_word_embeddings: true; {WAY_OUT}", lost)
    return tuple(
        f"{name} is tied to {kept} by {config.where}: left out if its bytes are the same"
        for name, kept in found.kept.items()
    )


def _untied(config: Config | None, job: Job) -> bytes | None:
    if config is None:
        raise PlanError(
            f"--untie changes the model's config, and there is no {CONFIG_PATH} in {job.source}; name it (--config)"
        )
    return ties.untied(config)


def _compared(
    catalog: Catalog, source: Source, definitions: Iterable[Definition], found: Ties
) -> tuple[dict[str, str], list[str]]:
    """Return the tensors that are there twice, and what stands against their being tied."""
    by_name = {definition.fqn: definition for definition in definitions}
    tied: dict[str, str] = {}
    problems = [f"{head}: no embedding that it could be tied to" for head in found.lost if head in by_name]
    for kept in dict.fromkeys(found.kept.values()):
        names = [name for name, root in found.kept.items() if root == kept and name in by_name]
        if kept not in by_name:
            problems += [f"{name}: tied to {kept}, which is not there" for name in names]
            continue
        digests = _digests(catalog, source, [by_name[name] for name in [kept, *names]]) if names else {}
        for name in names:
            one, other = by_name[name], by_name[kept]
            if one.spec != other.spec:
                problems.append(f"{name} is {one.spec}, {kept} is {other.spec}")
            elif digests and digests[name] != digests[kept]:
                problems.append(f"{name} and {kept} hold different values")
            elif digests:
                tied[name] = kept
    return tied, problems


def _digests(catalog: Catalog, source: Source, definitions: list[Definition]) -> Mapping[str, str]:
    """Return the digests of tensors; none where one of them has a hole, which the plan will tell of with all others."""
    target = lay_out(definitions, max_file_size=sum(d.spec.nbytes for d in definitions) or 1)
    try:
        plan = reshard(catalog, target, window_bytes=WINDOW_BYTES)
    except PlanError:
        return {}
    records = [consolidate(file, source, Nowhere()) for file in plan.files]
    return {name: digest for record in records for name, digest in record.tensors.items()}


def tied_problems(
    catalog: Catalog, source: Source, definitions: Iterable[Definition], tied: Mapping[str, str]
) -> tuple[str, ...]:
    """Hold what was once left out against what a source holds today."""
    by_name = {definition.fqn: definition for definition in definitions}
    problems = [f"{name}: the source no longer holds it" for name in tied if name not in by_name]
    for name, kept in tied.items():
        if name in by_name and kept in by_name:
            digests = _digests(catalog, source, [by_name[name], by_name[kept]])
            if digests and digests[name] != digests[kept]:
                problems.append(f"{name} was left out as equal to {kept}, and no longer is")
    return tuple(problems)


def _without(file_index: Mapping[str, int] | None, dropped: Mapping[str, str]) -> Mapping[str, int] | None:
    """Take names out of the given numbers of files; a file that held nothing else goes, and later ones move up.

    >>> _without({"a": 1, "b": 2, "c": 3}, {"b": "a"})
    {'a': 1, 'c': 2}
    """
    if file_index is None:
        return None
    left = {name: number for name, number in file_index.items() if name not in dropped}
    gone = {file_index[name] for name in dropped if name in file_index} - set(left.values())
    return {name: number - sum(1 for other in gone if other < number) for name, number in left.items()}
