"""To locate is to find the one checkpoint that is meant below the places that a user named.

A named place may be the checkpoint itself, a folder around it (accelerate's, the Hub's cache, a training run), or the
parent of many steps. Rules:

- A place that is a checkpoint is the one that is meant, whatever else lies in it.
- Else one looks into its folders, to a depth of a few and in a bounded number of listings. Exactly one checkpoint
  there is the one; several are listed, and the user names one. Weights that cannot be read count too, so that nobody
  gets other weights than the ones they meant.
- ``--latest``: of the folders that are named after a step, in the order of their numbers, the newest that is complete.
  A step that is not (nothing says that it was saved to its end, or files are absent or short) is passed over, and said.
  What a tracker file such as ``latest`` says is not believed: it may be moved before the files are there.

With several places (``--also``) everything is done on their union.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hfdcp_core import extras, homes
from hfdcp_core import gather as gathering
from hfdcp_core.catalog import Catalog
from hfdcp_core.copies import settle
from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, SourceError, StorageNotFound, UnknownFormat
from hfdcp_core.homes import Folder, Home
from hfdcp_core.job import Job
from hfdcp_core.run import Pinned
from hfdcp_core.store import Source, open_store
from hfdcp_core.union import Union, below

DEPTH = 3
"""How many folders deep a checkpoint is looked for."""
MOST_LISTINGS = 256
"""How many folders are listed at most."""
MOST_QUESTION_BYTES = 64 << 10
"""A file that is read to tell a home is not larger."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that holds weights of some kind."""

    folder: str
    """Relative to the source."""
    home: Home
    """What it is."""

    def __str__(self) -> str:
        """Say where it is, what it is, and what is the matter with it."""
        trouble = {"unfinished": f"; not finished: {self.home.advice}", "foreign": "; cannot be read"}
        return f"{self.folder}: {self.home.kind}{trouble.get(self.home.verdict, '')}"


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
    source = _named(job)
    search = _Search(source)
    found = _latest(source, search, job) if job.latest else None
    if not found:
        chosen = search.only()
        found = _gathered(source, chosen.folder, job, (f"found in {chosen}",) if chosen.folder else ())
    if deep:
        return replace(found, catalog=gathering.gather(found.source, world_size=job.world_size, deep=True))
    return found


def _latest(source: Source, search: _Search, job: Job) -> Located | None:
    """Gather the newest step that is complete; None where no folder is named after a step."""
    said: list[str] = []
    for step in search.newest_first():
        tried = [(candidate, _attempt(source, candidate, job)) for candidate in step]
        said += [f"passed over {candidate.folder}: {why}" for candidate, why in tried if isinstance(why, str)]
        complete = [(candidate, found) for candidate, found in tried if isinstance(found, Located)]
        if len(complete) > 1:
            raise _several(source.url, [candidate for candidate, _ in complete])
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


def _attempt(source: Source, candidate: Candidate, job: Job) -> Located | str:
    """Gather a step, or say why it is not complete."""
    if candidate.home.verdict != "checkpoint":
        return candidate.home.advice or candidate.home.kind
    found, said = _opened(source, candidate.folder)  # places that contradict each other are no unfinished step
    try:
        return _listed(found, candidate.folder, job, said)
    except (IncompleteCheckpoint, CorruptFile) as error:
        return "; ".join([error.message, *error.problems[:3]])


# ---- looking ---------------------------------------------------------------------------------------------------------


class _Search:
    """A bounded look at the folders below a source."""

    def __init__(self, source: Source, most_listings: int = MOST_LISTINGS) -> None:
        self._source = source
        self._most = most_listings
        self._listings = 0
        self._unseen = 0
        self._seen: dict[str, tuple[Folder, Home | None] | None] = {}

    def only(self) -> Candidate:
        """Return the one checkpoint that lies here; the source itself where it is one.

        Raises:
            UnknownFormat: There is none, or more than one.
        """
        root, home = self._look_at_root()
        if home and home.verdict in {"checkpoint", "unfinished"}:
            return Candidate("", home)
        found = self._candidates("", DEPTH)
        if len(found) == 1 and found[0].home.verdict != "foreign" and not self._unseen:
            return found[0]
        raise self._refusal(root, found)

    def newest_first(self) -> Iterator[Sequence[Candidate]]:
        """Give what lies in the folders that are named after steps, newest first; nothing where there are none.

        Raises:
            UnknownFormat: More than one folder holds steps, or one step holds several checkpoints.
        """
        parents = self._parents_of_steps()
        if len(parents) > 1:
            lines = [
                f"{parent or '.'}: steps {min(steps)} to {max(steps)}" for parent, steps in sorted(parents.items())
            ]
            raise UnknownFormat(f"{self._source.url}: several folders hold steps; name one of them", lines)
        for parent, steps in parents.items():
            for number in sorted(steps, reverse=True):
                yield [self._of_step(_join(parent, name)) for name in steps[number]]

    def _of_step(self, folder: str) -> Candidate:
        found = self._candidates(folder, DEPTH - 1)
        if self._unseen:
            raise UnknownFormat(
                f"{self._source.url}: {self._most} folders were listed, up to {folder}; name a closer one"
            )
        if len(found) > 1:
            raise _several(self._source.url, found)
        return found[0] if found else Candidate(folder, Home("nothing that looks like weights", "unfinished"))

    def _parents_of_steps(self) -> dict[str, dict[int, list[str]]]:
        """Return the folders that hold steps: for each the names of those, by number."""
        parents: dict[str, dict[int, list[str]]] = {}
        queue = deque([("", 0)])
        while queue:
            path, depth = queue.popleft()
            folder, home = self._look_at_root() if not path else (self._look(path) or (None, None))
            if folder is None:
                continue
            steps = {name: number for name in folder.folders if (number := homes.step_of(name)) is not None}
            for name, number in sorted(steps.items()):
                parents.setdefault(path, {}).setdefault(number, []).append(name)
            if depth + 1 < DEPTH and (home is None or home.verdict == "foreign"):
                queue.extend((_join(path, name), depth + 1) for name in folder.folders if name not in steps)
        return parents

    def _candidates(self, start: str, depth: int) -> list[Candidate]:
        """Return everything that holds weights in a folder and below, the newest step last."""
        found: list[Candidate] = []
        queue = deque([(start, 0)])
        while queue:
            path, level = queue.popleft()
            folder, home = self._look_at_root() if not path else (self._look(path) or (None, None))
            if folder is None:
                continue
            if home and home.verdict != "around":
                found.append(Candidate(path, home))
            if home is None or home.verdict == "foreign":
                inner = folder.folders if level < depth else ()
            else:
                inner = home.inside
            queue.extend((_join(path, name), level + 1) for name in sorted(inner, key=_newest_first))
        return sorted(found, key=_step_last)

    def _look_at_root(self) -> tuple[Folder, Home | None]:
        if "" not in self._seen:
            self._seen[""] = self._open("")
        root = self._seen[""]
        assert root is not None
        return root

    def _look(self, path: str) -> tuple[Folder, Home | None] | None:
        """Look at a folder once; None where it is not there, is not worth it, or was one too many."""
        if path not in self._seen:
            if self._listings >= self._most:
                self._unseen += 1
                return None
            try:
                seen = self._open(path)
            except StorageNotFound:
                self._seen[path] = None
            else:
                self._seen[path] = None if homes.no_home(seen[0]) else seen
        return self._seen[path]

    def _open(self, path: str) -> tuple[Folder, Home | None]:
        self._listings += 1
        listing = self._source.list(path)
        name = (path or self._source.url.rstrip("/}")).rpartition("/")[2]
        folder = Folder(
            name,
            {_last(stamp.path): stamp.size for stamp in listing.files},
            tuple(map(_last, listing.folders)),
        )
        texts = {name: raw for name in homes.questions(folder) if (raw := self._small(_join(path, name))) is not None}
        folder = Folder(folder.name, folder.files, folder.folders, texts)
        return folder, homes.recognise(folder)

    def _small(self, path: str) -> bytes | None:
        try:
            size = self._source.stat(path).size
            return self._source.read(path, 0, size) if size <= MOST_QUESTION_BYTES else None
        except StorageNotFound:
            return None

    def _refusal(self, root: Folder, found: Sequence[Candidate]) -> SourceError:
        url = self._source.url
        if not found and not self._unseen:
            names = [*sorted(root.files)[:5], *(f"{name}/" for name in root.folders[:5])]
            return UnknownFormat(
                f"{url}: no checkpoint here (no {homes.METADATA}, no *.safetensors); "
                f"found {', '.join(names) or 'nothing'}"
            )
        foreign = [candidate for candidate in found if candidate.home.verdict == "foreign"]
        if foreign and len(foreign) == len(found):
            kinds = {candidate.home.kind: candidate for candidate in foreign}
            return UnknownFormat(
                f"{url}: no checkpoint that can be read here",
                [f"{c.folder or '.'}: {kind}: {c.home.advice}" for kind, c in kinds.items()],
            )
        return _several(url, found, unseen=self._unseen)


def _several(url: str, found: Sequence[Candidate], *, unseen: int = 0) -> UnknownFormat:
    steps = sum(_step_last(candidate)[0] >= 0 for candidate in found)
    hint = ", or take the newest complete step with --latest" if steps > 1 else ""
    if not steps and any(candidate.home.verdict == "unfinished" for candidate in found):
        hint = ", or all that hold files of the same save: --also URL joins places"
    lines = [str(Candidate(candidate.folder or ".", candidate.home)) for candidate in found]
    if unseen:
        lines.append(f"and {unseen} folders that were not looked into")
    return UnknownFormat(f"{url}: more than one could be meant; name one of them{hint}", lines)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _newest_first(name: str) -> tuple[int, str]:
    step = homes.step_of(name)
    return (0 if step is None else -step, name)


def _step_last(candidate: Candidate) -> tuple[int, str]:
    numbers = [step for part in candidate.folder.split("/") if (step := homes.step_of(part)) is not None]
    return (numbers[-1] if numbers else -1, candidate.folder)
