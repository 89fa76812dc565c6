"""Which copy of a file counts, and of which place a single item is taken: found out, and never guessed.

1. Every ``.metadata`` must be the same bytes: two of them are two checkpoints.
2. Of the copies of one file those count that are whole: as long as ``.metadata`` says, or as a safetensors file's own
   header says. Where none is, the longest stands for it, and whoever gathers says what it lacks.
3. Of several such copies, each item is taken from the first place where its archive can be read. Where archives say
   the same of themselves, CRC-32 included, the data are not read: they are when they are copied, and held against that
   CRC-32 then. Where they say different things, the data tell which is damaged.
4. Where data turn out damaged while they are copied, `mend` finds the place where the same item is sound.
5. Where two sound items differ, or where no checksum tells which of two is right, one is of another save, and it is an
   error that names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hfdcp_core.catalog import RAW, FileStamp, Shard, Span
from hfdcp_core.distcp_file import DcpMetadata, read_metadata
from hfdcp_core.errors import SourceError
from hfdcp_core.homes import METADATA
from hfdcp_core.item_copies import OTHER_SAVE, Items, raise_for_copies, same_in, told_apart
from hfdcp_core.manifest import INDEX_PATH
from hfdcp_core.safetensors_file import header_length, parse_header
from hfdcp_core.store import Source
from hfdcp_core.union import Union

NOT_READ = (
    "in several places: their copies say the same of themselves, checksums included; the data are held against those "
    "when they are copied (inspect --deep: every copy, now)"
)


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
    chosen = _Copies(union, copies)
    holders = {path: min(found) for path, found in copies.items()} | chosen.holders()
    return Settled(Union(union.places, holders, chosen.elsewhere), tuple(chosen.said))


def mend(source: Source, shards: Iterable[Shard]) -> Settled | None:
    """Read the items of shards wherever they lie, and take those that are damaged from a place where they are sound.

    Returns:
        The source with other places for some items; None where there is nothing better than what it has.

    Raises:
        CorruptFile: Places hold the item with different values, each of them sound.
    """
    if not isinstance(source, Union):
        return None
    items = Items(source.places, trusting=False)
    asked = [shard for shard in shards if shard.encoding != RAW]
    alike = {path: source.alike(path) for path in {shard.span.path for shard in asked}}
    asked = [shard for shard in asked if len(alike[shard.span.path]) > 1]
    now = [source.place_of(shard.span.path, shard.span.start) for shard in asked]
    chosen = items.choose_all(
        (shard, [number, *(n for n in alike[shard.span.path] if n != number)])
        for shard, number in zip(asked, now, strict=True)
    )
    moved = {shard.span: new for shard, old, new in zip(asked, now, chosen, strict=True) if new != old}
    return Settled(source.with_moved(moved), tuple(items.said)) if moved else None


def moved_items(source: Source, shards: Iterable[Shard]) -> tuple[str, ...]:
    """Return the spans of shards that are read from another place than the rest of their file."""
    elsewhere = source.elsewhere if isinstance(source, Union) else {}
    spans = {(path, start, stop) for path, moved in elsewhere.items() for start, stop, _ in moved}
    return tuple(str(s.span) for s in shards if (s.span.path, s.span.start, s.span.stop) in spans)


class _Copies:
    """The files of a checkpoint, and those of them that lie in more than one place."""

    def __init__(self, union: Union, copies: Mapping[str, Mapping[int, FileStamp]]) -> None:
        self._places = union.places
        self._copies = copies
        self._several = {path: found for path, found in copies.items() if len(found) > 1}
        self._items = Items(union.places, trusting=True)
        self.elsewhere: dict[str, tuple[tuple[int, int, int], ...]] = {}
        self.said: list[str] = []

    def holders(self) -> dict[str, int]:
        """Return the place of the copy that counts, for every file that a checkpoint is made of."""
        told = [path for path in self._several if path.endswith(METADATA) or path == INDEX_PATH]
        two = "say different things; they are of two checkpoints"
        self._refuse(two, {path: [*self._several[path]] for path in told})
        headed = [path for path in self._several if path.endswith(".safetensors")]
        whole = {path: [n for n in self._several[path] if self._is_whole(path, n)] for path in headed}
        self._refuse(OTHER_SAVE, whole)
        for path in filter(whole.__getitem__, headed):
            self._say_passed_over(path, whole[path], "not as long as its header says")
        weights = [path for path in self._several if path.endswith(".distcp")]
        return self._shards(weights) | {path: (whole[path] or self._longest(path))[0] for path in headed}

    def _refuse(self, what: str, copies: Mapping[str, Sequence[int]]) -> None:
        """Refuse files whose copies in the given places are not the same bytes."""
        raise_for_copies(
            what, (problem for path, numbers in copies.items() for problem in self._differences(path, numbers))
        )

    def _differences(self, path: str, numbers: Sequence[int]) -> Iterable[str]:
        for other in numbers[1:]:
            sizes = [self._several[path][number].size for number in (numbers[0], other)]
            if sizes[0] != sizes[1] or not same_in(self._places, Span(path, 0, sizes[0]), numbers[0], other):
                yield told_apart(self._places, path, numbers[0], other)

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
            what = "hold different bytes; one is of another save, or cut short"
            self._refuse(what, {path: [*self._several[path]] for path in paths})
            return {}
        alike = {path: self._of_size(path, stated.extents.get(path)) for path in paths}
        self._refuse(OTHER_SAVE, {p: alike[p] for p in paths if p in stated.extents and p not in stated.items})
        self._take(stated, {path: numbers for path, numbers in alike.items() if len(numbers) > 1})
        return {path: numbers[0] for path, numbers in alike.items()}

    def _of_size(self, path: str, size: int | None) -> list[int]:
        """Return the places whose copies are as long as stated; where none is, those of the longest ones."""
        found = self._several[path]
        whole = [number for number, stamp in found.items() if size in (None, stamp.size)]
        if whole:
            self._say_passed_over(path, whole, f"expected {size}")
        return whole or self._longest(path)

    def _say_passed_over(self, path: str, whole: Sequence[int], why: str) -> None:
        self.said += [
            f"{self._places[number].url}/{path}: {stamp.size} bytes, {why}; taken from {self._places[whole[0]].url}"
            for number, stamp in self._several[path].items()
            if number not in whole
        ]

    def _stated(self) -> _Stated | None:
        """Return what the ``.metadata``, or those of all ranks, say together."""
        stated = _Stated()
        told = sorted(path for path in self._copies if path.endswith(METADATA))
        for path in told[:1] if METADATA in told else told:
            number = min(self._copies[path])
            place, size = self._places[number], self._copies[path][number].size
            stated.add(read_metadata(place.read(path, 0, size), path=f"{place.url}/{path}"))
        return stated if told else None

    def _take(self, stated: _Stated, alike: Mapping[str, Sequence[int]]) -> None:
        """Choose a place for every item of files that lie in several places."""
        objects = [(span, alike[path]) for path, spans in stated.objects.items() if path in alike for span in spans]
        shards = [(shard, alike[path]) for path, held in stated.items.items() if path in alike for shard in held]
        spans = [*(span for span, _ in objects), *(shard.span for shard, _ in shards)]
        chosen = [*self._items.choose_objects(objects), *self._items.choose_all(shards)]
        moved: dict[str, set[tuple[int, int, int]]] = {}
        for span, number in zip(spans, chosen, strict=True):
            if number != alike[span.path][0]:
                moved.setdefault(span.path, set()).add((span.start, span.stop, number))
        self.elsewhere = {path: tuple(sorted(found)) for path, found in moved.items()}
        if self._items.trusted:
            files = len({span.path for span in self._items.trusted})
            self.said.append(f"{files} {'file' if files == 1 else 'files'} {NOT_READ}")
        self.said += self._items.said


@dataclass(frozen=True, slots=True)
class _Stated:
    """What metadata say of files."""

    extents: dict[str, int] = field(default_factory=dict)
    """How long each must be."""
    items: dict[str, list[Shard]] = field(default_factory=dict)
    """The items of tensors; not of a file that may hold its tensors otherwise, which is compared as a whole."""
    objects: dict[str, list[Span]] = field(default_factory=dict)
    """Those of other objects, in such files."""

    def add(self, found: DcpMetadata) -> None:
        for path, size in found.extents.items():
            self.extents[path] = max(size, self.extents.get(path, 0))
        for shard in found.shards:
            if shard.span.path not in found.bare:
                self.items.setdefault(shard.span.path, []).append(shard)
        for entry in found.objects:
            if entry.span.path not in found.bare:
                self.objects.setdefault(entry.span.path, []).append(entry.span)
