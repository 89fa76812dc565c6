"""Which copy of a file counts, and of which place a single item is taken: found out, and never guessed.

1. Every ``.metadata`` must be the same bytes: two of them are two checkpoints.
2. Of the copies of one file those count that are whole: as long as ``.metadata`` says, or as a safetensors file's own
   header says. Where none is, the longest stands for it, and whoever gathers says what it lacks.
3. Of several such copies, each item is taken from the first place where it is sound: its archive can be read, and its
   payload has the CRC-32 that it states. So the payload of a file that lies in several places is read here, once.
4. Sound items must say the same in all places. Where two sound ones differ, or where no checksum tells which of two
   is right, one is of another save, and it is an error that names both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from hfdcp_core.catalog import FileStamp, Shard, Span
from hfdcp_core.distcp_file import TorchItem, read_metadata
from hfdcp_core.errors import CorruptFile, SourceError, StorageNotFound
from hfdcp_core.homes import METADATA
from hfdcp_core.manifest import INDEX_PATH
from hfdcp_core.read import check_item, open_item, page_aligned, same_bytes
from hfdcp_core.safetensors_file import header_length, parse_header
from hfdcp_core.union import Union

COMPARED_AT_ONCE = 8
"""Items that are compared at the same time."""
STEP_BYTES = 2 << 20
"""How much of one item is held in memory while its checksum is computed."""
OTHER_SAVE = "hold different bytes; one is of another save, or damaged where no checksum tells"
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Settled:
    """Several places, with a copy chosen for everything in them."""

    union: Union
    """The places as one source."""
    said: tuple[str, ...]
    """What a person should hear: which copies are damaged, and where what counts was taken from."""


def settle(union: Union) -> Settled:
    """Choose a copy for every file of a checkpoint that lies directly in several places.

    Raises:
        CorruptFile: Places hold different metadata, or different bytes where nothing tells which are right.
        StorageNotFound: No place has the folder.
    """
    copies: dict[str, dict[int, FileStamp]] = {}
    for number, listing in union.listings(""):
        for stamp in listing.files:
            copies.setdefault(stamp.path, {})[number] = stamp
    several = {path: found for path, found in copies.items() if len(found) > 1}
    chosen = _Copies(union, several)
    holders = {path: min(found) for path, found in copies.items()} | chosen.holders()
    return Settled(Union(union.places, holders, chosen.elsewhere), tuple(chosen.said))


class _Copies:
    """The files that lie in more than one place."""

    def __init__(self, union: Union, several: Mapping[str, Mapping[int, FileStamp]]) -> None:
        self._places = union.places
        self._several = several
        self.elsewhere: dict[str, tuple[tuple[int, int, int], ...]] = {}
        self.said: list[str] = []

    def holders(self) -> dict[str, int]:
        """Return the place of the copy that counts, for every file that a checkpoint is made of."""
        told = [path for path in self._several if path.endswith(METADATA) or path == INDEX_PATH]
        self._refuse(
            "say different things; they are of two checkpoints", {path: [*self._several[path]] for path in told}
        )
        headed = [path for path in self._several if path.endswith(".safetensors")]
        whole = {path: [n for n in self._several[path] if self._is_whole(path, n)] for path in headed}
        self._refuse(OTHER_SAVE, whole)
        weights = [path for path in self._several if path.endswith(".distcp")]
        return self._shards(weights) | {path: (whole[path] or self._longest(path))[0] for path in headed}

    def _refuse(self, what: str, copies: Mapping[str, Sequence[int]]) -> None:
        """Refuse files whose copies in the given places are not the same bytes."""
        self._raise(what, (problem for path, numbers in copies.items() for problem in self._differences(path, numbers)))

    def _raise(self, what: str, problems: Iterable[str]) -> None:
        CorruptFile.raise_for(f"files of one name {what}: leave out the place that does not belong here", problems)

    def _differences(self, path: str, numbers: Sequence[int]) -> Iterable[str]:
        for other in numbers[1:]:
            sizes = [self._several[path][number].size for number in (numbers[0], other)]
            if sizes[0] != sizes[1] or not self._same(numbers[0], other, Span(path, 0, sizes[0])):
                yield self._told_apart(path, numbers[0], other)

    def _told_apart(self, what: str, first: int, other: int) -> str:
        return f"{what}: in {self._places[first].url} and in {self._places[other].url}"

    def _same(self, first: int, other: int, span: Span) -> bool:
        return same_bytes(self._places[first], span, self._places[other], span)

    def _longest(self, path: str) -> list[int]:
        """Return the places of the longest copies."""
        most = max(stamp.size for stamp in self._several[path].values())
        return [number for number, stamp in self._several[path].items() if stamp.size == most]

    # ---- safetensors: the size that a file's own header states ----

    def _is_whole(self, path: str, number: int) -> bool:
        place, size = self._places[number], self._several[path][number].size
        where = f"{place.url}/{path}"
        try:
            length = header_length(place.read(path, 0, min(8, size)), path=where)
            parse_header(place.read(path, 0, min(8 + length, size)), path=where, file_size=size)
        except SourceError:
            return False
        return True

    # ---- distributed checkpoints: the size that .metadata states, and the checksums of its items ----

    def _shards(self, paths: Sequence[str]) -> dict[str, int]:
        if not paths:
            return {}
        stated = self._stated()
        if stated is None:  # nothing says how long they must be
            self._refuse(
                "hold different bytes; one is of another save, or cut short", {p: [*self._several[p]] for p in paths}
            )
            return {}
        extents, items, others = stated
        alike = {path: self._of_size(path, extents.get(path)) for path in paths}
        self._refuse(OTHER_SAVE, {path: alike[path] for path in paths if path in extents and path not in items})
        pairs = [(path, span) for path, spans in others.items() if path in alike for span in spans]
        self._raise(OTHER_SAVE, (p for path, span in pairs for p in self._span_differences(span, alike[path])))
        return {path: self._holder(path, alike[path], items.get(path, ())) for path in paths}

    def _of_size(self, path: str, size: int | None) -> list[int]:
        """Return the places whose copies are as long as stated; where none is, those of the longest ones."""
        whole = [number for number, stamp in self._several[path].items() if size in (None, stamp.size)]
        return whole or self._longest(path)

    def _stated(self) -> tuple[Mapping[str, int], dict[str, list[Shard]], dict[str, list[Span]]] | None:
        """Return what ``.metadata`` says: how long files are, their tensors' items, and those of other objects."""
        source = Union(self._places)
        try:
            size = source.stat(METADATA).size
        except StorageNotFound:
            return None
        found = read_metadata(source.read(METADATA, 0, size), path=f"{source.url}/{METADATA}")
        items: dict[str, list[Shard]] = {}
        others: dict[str, list[Span]] = {}
        for shard in found.shards:  # a file that may hold its tensors otherwise is compared as a whole
            if shard.span.path not in found.bare:
                items.setdefault(shard.span.path, []).append(shard)
        for entry in found.objects:
            if entry.span.path in items:
                others.setdefault(entry.span.path, []).append(entry.span)
        return found.extents, items, others

    def _span_differences(self, span: Span, numbers: Sequence[int]) -> Iterable[str]:
        for other in numbers[1:]:
            if not self._same(numbers[0], other, span):
                yield self._told_apart(str(span), numbers[0], other)

    def _holder(self, path: str, numbers: Sequence[int], shards: Sequence[Shard]) -> int:
        """Choose a place for every item of a file, and return the place that holds most of them."""
        if len(numbers) == 1:
            return numbers[0]
        chosen = _each(lambda shard: self._choose(shard, numbers), shards)
        self._raise(OTHER_SAVE, (each for each in chosen if isinstance(each, str)))
        places = [each for each in chosen if isinstance(each, int)]
        holder = max(numbers, key=places.count)
        moved = [(s.span.start, s.span.stop, n) for s, n in zip(shards, places, strict=True) if n != holder]
        if moved:
            self.elsewhere[path] = tuple(sorted(moved))
        return holder

    def _choose(self, shard: Shard, numbers: Sequence[int]) -> int | str:
        """Return the first place where an item is sound, or say which places contradict each other."""
        opened = {number: item for number in numbers if (item := self._open(shard, number)) is not None}
        readable, kinds = list(opened), set(opened.values())
        if any(item.crc32 is None for item in kinds):
            other = next(iter(self._span_differences(shard.span, readable)), None)
            return readable[0] if other is None else other
        sound: list[int] = []
        for number in readable:
            if not (sound and len(kinds) == 1) and self._is_sound(shard, number):  # where one is sound, its equals are
                sound.append(number)
        if len({opened[number] for number in sound}) > 1:
            return self._told_apart(str(shard), *sound[:2])
        if not sound:
            return numbers[0]  # whoever reads it says what is wrong with it
        self.said += [
            f"{self._places[number].url}: {shard} is damaged; taken from {self._places[sound[0]].url}"
            for number in numbers[: numbers.index(sound[0])]
        ]
        return sound[0]

    def _open(self, shard: Shard, number: int) -> TorchItem | None:
        try:
            return open_item(self._places[number], shard)[0]
        except SourceError:
            return None

    def _is_sound(self, shard: Shard, number: int) -> bool:
        try:
            check_item(self._places[number], shard, scratch=page_aligned(STEP_BYTES))
        except SourceError:
            return False
        return True


def _each(function: Callable[[_Given], _Made], given: Iterable[_Given]) -> list[_Made]:
    with ThreadPoolExecutor(COMPARED_AT_ONCE, "hfdcp-compare") as pool:
        return list(pool.map(function, given))
