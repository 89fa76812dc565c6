"""Copies of one item in several places: which of them is sound, found out by what the archive says of its data.

A ``torch.save`` archive states a CRC-32 of each record. An item is *sound* where its archive can be read and its data
have that CRC-32. Two sound items that are not the same are of two saves; nothing tells which is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hfdcp_core.catalog import Shard, Span
from hfdcp_core.distcp_file import TorchItem, sound_records
from hfdcp_core.errors import CorruptFile, SourceError
from hfdcp_core.read import check_item, open_item, page_aligned, same_bytes
from hfdcp_core.store import Source

COMPARED_AT_ONCE = 8
"""Items that are compared at the same time."""
STEP_BYTES = 2 << 20
"""How much of one item is held in memory while its checksum is computed."""
OTHER_SAVE = "hold different bytes; one is of another save, or damaged where no checksum tells"
_Given = TypeVar("_Given")


class Items:
    """Chooses a place for single items."""

    def __init__(self, places: Sequence[Source], *, trusting: bool) -> None:
        """Take the places, and whether archives that say the same of themselves are taken to hold the same."""
        self._places, self._trusting = places, trusting
        self.said: list[str] = []
        self.trusted: list[Span] = []

    def choose_all(self, asked: Iterable[tuple[Shard, Sequence[int]]]) -> list[int]:
        """Return a place for each item: of those that are given with it, the first where it is sound.

        Raises:
            CorruptFile: Places contradict each other.
        """
        return _agreed(lambda one: self._choose(*one), asked)

    def choose_objects(self, asked: Iterable[tuple[Span, Sequence[int]]]) -> list[int]:
        """Return a place for each item that holds no tensor."""
        return _agreed(lambda one: self._choose_object(*one), asked)

    def _choose(self, shard: Shard, numbers: Sequence[int]) -> int | str:
        """Return the first place where an item is sound, or say which places contradict each other."""
        opened = {number: item for number in numbers if (item := self._open(shard, number)) is not None}
        readable, kinds = list(opened), set(opened.values())
        if any(item.crc32 is None for item in kinds):
            sound = readable
            if (other := self._other(shard.span, readable)) is not None:
                return told_apart(self._places, str(shard), readable[0], other)
        elif self._trusting and len(kinds) == 1:
            sound = readable
            self.trusted += [shard.span] * (len(readable) > 1)
        else:
            sound = self._sound(shard, opened)
        if len({opened[number] for number in sound}) > 1:
            return told_apart(self._places, str(shard), *sound[:2])
        return self._first(str(shard), numbers, sound)

    def _first(self, what: str, numbers: Sequence[int], sound: Sequence[int]) -> int:
        if not sound:
            return numbers[0]  # whoever reads it says what is wrong with it
        self.said += [
            f"{self._places[number].url}: {what} is damaged; taken from {self._places[sound[0]].url}"
            for number in numbers[: numbers.index(sound[0])]
        ]
        return sound[0]

    def _sound(self, shard: Shard, opened: Mapping[int, TorchItem]) -> list[int]:
        """Return places whose data are what the archive says, up to the first one of each kind."""
        sound: dict[TorchItem, int] = {}
        for number, item in opened.items():
            if item not in sound and self._is_sound(shard, number):
                sound[item] = number
        return sorted(sound.values(), key=list(opened).index)

    def _choose_object(self, span: Span, numbers: Sequence[int]) -> int | str:
        other = self._other(span, numbers)
        if other is None:
            return numbers[0]
        archives = {number: _archive(self._places[number], span) for number in numbers}
        sound = [number for number, archive in archives.items() if archive is not None]
        if not sound or any(archives[number] != archives[sound[0]] for number in sound):
            return told_apart(self._places, str(span), numbers[0], other)
        return self._first(str(span), numbers, sound)

    def _other(self, span: Span, numbers: Sequence[int]) -> int | None:
        """Return a place where a span is not the same bytes as in the first one."""
        return next((n for n in numbers[1:] if not same_in(self._places, span, numbers[0], n)), None)

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


def _archive(place: Source, span: Span) -> Mapping[str, int] | None:
    """Return what an archive holds, by the CRC-32 of its records; None where it is damaged or they do not tell."""

    def fetch(start: int, stop: int) -> bytes:
        return place.read(span.path, span.start + start, span.start + stop)

    try:
        return sound_records(fetch, span.length, where=f"{place.url}: {span}")
    except CorruptFile:
        return None


def same_in(places: Sequence[Source], span: Span, first: int, other: int) -> bool:
    """Whether a span holds the same bytes in two places."""
    return same_bytes(places[first], span, places[other], span)


def told_apart(places: Sequence[Source], what: str, first: int, other: int) -> str:
    """Name the two places that contradict each other."""
    return f"{what}: in {places[first].url} and in {places[other].url}"


def raise_for_copies(what: str, problems: Iterable[str]) -> None:
    """Refuse files of one name that are not one file, where there are any."""
    CorruptFile.raise_for(f"files of one name {what}: leave out the place that does not belong here", problems)


def _agreed(choose: Callable[[_Given], int | str], asked: Iterable[_Given]) -> list[int]:
    """Choose in several threads, and refuse all contradictions at once."""
    with ThreadPoolExecutor(COMPARED_AT_ONCE, "hfdcp-compare") as pool:
        chosen = list(pool.map(choose, asked))
    raise_for_copies(OTHER_SAVE, (each for each in chosen if isinstance(each, str)))
    return [each for each in chosen if isinstance(each, int)]
