"""To search is to list what lies below a source and holds weights of any kind, in a bounded number of listings.

What is found is told by the names in a folder; whether it is complete is another question, which is asked of those that
are listed for a person to choose from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hfdcp_core import homes
from hfdcp_core.errors import SourceError, StorageNotFound, UnknownFormat
from hfdcp_core.homes import Folder, Home
from hfdcp_core.store import Source

DEPTH = 3
"""How many folders deep a checkpoint is looked for."""
MOST_LISTINGS = 256
"""How many folders are listed at most."""
MOST_QUESTION_BYTES = 64 << 10
"""A file that is read to tell a home is not larger."""
MOST_BESIDE = 16
"""Of so many folders in a checkpoint it is said what else they hold."""
MOST_TRIED = 32
"""Of a longer list only the newest are tried."""


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


TroubleOf = Callable[[Candidate], str]
"""Says why a checkpoint that was found cannot be used; an empty text where it can."""


def _nothing_tried(_candidate: Candidate) -> str:
    return ""


class Search:
    """A bounded look at the folders below a source."""

    def __init__(
        self, source: Source, *, trouble_of: TroubleOf = _nothing_tried, most_listings: int = MOST_LISTINGS
    ) -> None:
        """Look below ``source``, in so many listings; ``trouble_of`` is asked of what is listed for a choice."""
        self._source = source
        self._trouble_of = trouble_of
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

    def also_here(self) -> tuple[Candidate, ...]:
        """Return what else holds weights in the folders of a source that is a checkpoint itself."""
        root, _ = self._look_at_root()
        seen = ((name, self._look(name)) for name in sorted(root.folders, key=_newest_first)[:MOST_BESIDE])
        return tuple(Candidate(name, look[1]) for name, look in seen if look and look[1])

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
            raise several(self._source.url, found, trouble_of=self._trouble_of)
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
        return several(url, found, trouble_of=self._trouble_of, unseen=self._unseen)


def several(
    url: str, found: Sequence[Candidate], *, trouble_of: TroubleOf = _nothing_tried, unseen: int = 0
) -> UnknownFormat:
    """Return the refusal to choose: what could be meant, the newest step last, and what is the matter with each."""
    steps = sum(_step_last(candidate)[0] >= 0 for candidate in found)
    hint = ", or take the newest complete step with --latest" if steps > 1 else ""
    if not steps and any(candidate.home.verdict == "unfinished" for candidate in found):
        hint = ", or all that hold files of the same save: --also URL joins places"
    tried = {candidate.folder for candidate in found[-MOST_TRIED:]}
    lines = [_line(candidate, trouble_of if candidate.folder in tried else _not_tried) for candidate in found]
    if unseen:
        lines.append(f"and {unseen} folders that were not looked into")
    return UnknownFormat(f"{url}: more than one could be meant; name one of them{hint}", lines)


def _line(candidate: Candidate, trouble_of: TroubleOf) -> str:
    trouble = trouble_of(candidate) if candidate.home.verdict == "checkpoint" else ""
    return f"{Candidate(candidate.folder or '.', candidate.home)}{trouble and f'; {trouble}'}"


def _not_tried(_candidate: Candidate) -> str:
    return "not looked into"


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
