"""To locate is to find the one checkpoint that is meant below the places that a user named.

A named place may be the checkpoint itself, a folder around it (accelerate's, the Hub's cache, a training run), or the
parent of many steps. Rules:

- A place that is a checkpoint is the one that is meant, whatever else lies in it; that is said.
- Else one looks into its folders, to a depth of a few and in a bounded number of listings. Exactly one checkpoint
  there is the one; several are listed, and the user names one. Weights that cannot be read count too, so that nobody
  gets other weights than the ones they meant.
- ``--latest``: of the folders that are named after a step, in the order of their numbers, the newest that is complete.
  A step that is not (nothing says that it was saved to its end, or files are absent or short) is passed over, and said.
  What a tracker file such as ``latest`` says is not believed: it may be moved before the files are there.

With several places (``--also``) everything is done on their union.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfdcp_core import extras, homes
from hfdcp_core import gather as gathering
from hfdcp_core.catalog import Catalog
from hfdcp_core.copies import settle
from hfdcp_core.errors import (
    CorruptFile,
    HfdcpError,
    IncompleteCheckpoint,
    SourceError,
    StorageError,
    StorageNotFound,
    UnknownFormat,
)
from hfdcp_core.homes import Folder
from hfdcp_core.job import Job
from hfdcp_core.run import Pinned
from hfdcp_core.search import Candidate, Search, several
from hfdcp_core.store import Source, open_store
from hfdcp_core.union import Union, below

SHOWN_BESIDE = 5
"""How many other checkpoints in the folders of one are named."""
SHOWN_FAULTS = 3
"""How many faults of one that is not complete are named."""


@dataclass(frozen=True)
class Located:
    """A checkpoint that was found; it holds an open source, so it is no value."""

    source: Source
    """What it is read from."""
    catalog: Catalog
    """What lies in it."""
    pinned: Pinned
    """With which the same source is opened again."""
    said: tuple[str, ...]
    """What a person should hear of how it was found."""


def locate(job: Job, *, deep: bool = False) -> Located:
    """Find the checkpoint that a job means, and gather it; ``deep``: opening every item of it.

    Raises:
        UnknownFormat: Nothing that can be read lies there, or more than one checkpoint; ``problems`` lists them.
        SourceError: What was found is damaged or not complete.
        StorageNotFound: A named place is not there.
    """
    try:
        found = _found(_named(job), job)
    except StorageNotFound:
        for url in (job.source, *job.also):
            _refuse_file(url)
        raise
    if deep:
        return replace(found, catalog=gathering.gather(found.source, world_size=job.world_size, deep=True))
    return found


def _found(source: Source, job: Job) -> Located:
    search = Search(source, trouble_of=lambda candidate: _trouble(source, candidate, job))
    if job.latest and (latest := _latest(source, search, job)):
        return latest
    chosen = search.only()
    return _gathered(source, chosen.folder, job, (f"found in {chosen}",) if chosen.folder else _beside(search))


def _beside(search: Search) -> tuple[str, ...]:
    """Say what else the folders of a checkpoint hold; a note, so it is left out where they cannot be looked into."""
    try:
        others = search.also_here()
    except StorageError:
        return ()
    shown = [f"{other.folder} ({other.home.kind})" for other in others[:SHOWN_BESIDE]]
    more = [f"and {len(others) - SHOWN_BESIDE} more"] if len(others) > SHOWN_BESIDE else []
    return (f"also here, and not read: {', '.join([*shown, *more])}",) if shown else ()


def _refuse_file(url: str) -> None:
    """Refuse the name of a file in the place of its folder's.

    Raises:
        UnknownFormat: It is the name of a file; the message has that of the folder, or the way out.
    """
    around, name = _folder_and_name(url)
    try:
        size = open_store(around).stat(name).size
    except HfdcpError:  # whatever it is, it is no file that we could tell of
        return
    home = homes.recognise(Folder("", {name: size}))
    if home and home.verdict == "foreign":
        raise UnknownFormat(f"{url} cannot be read: {home.kind}: {home.advice}")
    raise UnknownFormat(f"{url} is a file; give the folder that it lies in: {around}")


def _folder_and_name(url: str) -> tuple[str, str]:
    """Return the folder of a file and the file's own name.

    >>> _folder_and_name("gs://b/step-1/.metadata"), _folder_and_name("model.safetensors")
    (('gs://b/step-1', '.metadata'), ('.', 'model.safetensors'))
    """
    around, slash, name = url.rstrip("/").rpartition("/")
    return (around or slash or "."), name


def _latest(source: Source, search: Search, job: Job) -> Located | None:
    """Gather the newest step that is complete; None where no folder is named after a step."""
    said: list[str] = []
    for step in search.newest_first():
        tried = [(candidate, _attempt(source, candidate, job)) for candidate in step]
        said += [f"passed over {candidate.folder}: {why}" for candidate, why in tried if isinstance(why, str)]
        complete = [(candidate, found) for candidate, found in tried if isinstance(found, Located)]
        if len(complete) > 1:
            raise several(source.url, [candidate for candidate, _ in complete])
        for candidate, found in complete:
            return replace(found, said=(*said, f"latest complete step: {candidate}", *found.said))
    IncompleteCheckpoint.raise_for(f"{source.url}: no step is complete", said)
    return None


def reopen(job: Job, pinned: Pinned) -> Source:
    """Open the source that was located for this job."""
    stores = [below(open_store(url), pinned.folder) for url in (job.source, *job.also)]
    return Union(stores, pinned.holders, pinned.elsewhere) if job.also else stores[0]


def relocate(job: Job, pinned: Pinned) -> Located:
    """Find the checkpoint of an earlier run below the places that are named now: where it lay then, if it is there."""
    source = _named(job)
    if pinned.folder and _is_there(source, pinned.folder):
        return _gathered(source, pinned.folder, job, (f"found in {pinned.folder}, as before",))
    return locate(job)


def _is_there(source: Source, folder: str) -> bool:
    try:
        source.list(folder)
    except StorageNotFound:
        return False
    return True


def _named(job: Job) -> Source:
    """Open all places that are named; one that is not there is an error, since files would be missed without a word."""
    stores: list[Source] = [open_store(url) for url in (job.source, *job.also)]
    if not job.also:
        return stores[0]
    for store in stores:
        store.list()
    return Union(stores)


def _opened(source: Source, folder: str) -> tuple[Source, tuple[str, ...]]:
    """Open the folder that was chosen: of several places, with the copies of its files that count."""
    if isinstance(source, Union):
        settled = settle(Union([below(place, folder) for place in source.places]))
        return settled.union, settled.said
    return below(source, folder), ()


def _gathered(source: Source, folder: str, job: Job, said: tuple[str, ...]) -> Located:
    found, of_copies = _opened(source, folder)
    return _listed(found, folder, job, (*said, *of_copies))


def _listed(found: Source, folder: str, job: Job, said: tuple[str, ...]) -> Located:
    catalog = extras.look_into(gathering.gather(found, world_size=job.world_size), found, every=job.keep_extra)
    if not isinstance(found, Union):
        return Located(found, catalog, Pinned(folder), said)
    holders = {stamp.path: found.holder(stamp.path) for stamp in catalog.files}
    return Located(found, catalog, Pinned(folder, holders, found.elsewhere), said)


def _trouble(source: Source, candidate: Candidate, job: Job) -> str:
    """Try to gather a checkpoint of which somebody must choose, and say why it could not be used."""
    try:
        found, _ = _opened(source, candidate.folder)
        gathering.gather(found, world_size=job.world_size)
    except (SourceError, StorageError) as error:
        what = "not complete" if isinstance(error, IncompleteCheckpoint) else "cannot be used"
        message = error.message.removeprefix(f"{source.url}/{candidate.folder}").lstrip(":/ ")
        return f"{what}: {'; '.join([message, *error.problems[:SHOWN_FAULTS]])}"
    return ""


def _attempt(source: Source, candidate: Candidate, job: Job) -> Located | str:
    """Gather a step, or say why it is not complete."""
    if candidate.home.verdict != "checkpoint":
        return candidate.home.advice or candidate.home.kind
    found, said = _opened(source, candidate.folder)  # places that contradict each other are no unfinished step
    try:
        return _listed(found, candidate.folder, job, said)
    except (IncompleteCheckpoint, CorruptFile) as error:
        return "; ".join([error.message, *error.problems[:SHOWN_FAULTS]])
