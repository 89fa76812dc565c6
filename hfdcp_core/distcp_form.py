"""What was learned of one ``torch.save`` archive holds for all that are like it.

The items of a checkpoint's small tensors differ in their payload and in a few checksums, and in nothing else. To open
one takes a zip directory, three local headers and a pickle, which is far more work than to read its elements. So what
an item turned out to be is remembered together with its *form*: every byte that was looked at when it was opened. An
item of the same length with the same bytes in those places can only turn out to be the same, but for one thing: the
directory's checksums of records that are not read while opening may differ, and are taken from the item at hand.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from hfdcp_core.distcp_zip import Item, Record, is_streamed

MOST_BYTES = 2 << 10
"""Of a form; an archive of one tensor, as torch writes it, has about one KiB around its payload."""
MOST_OF_ONE_LENGTH, MOST_LENGTHS = 8, 128
_CRC32 = struct.Struct("<I")
_Meaning = TypeVar("_Meaning")


@dataclass(frozen=True, slots=True)
class Form:
    """All that was looked at in an item, but for the checksums that may differ in items of the same meaning."""

    parts: tuple[tuple[int, bytes], ...]
    """Where bytes were looked at, and which; from the last to the first, as the directory at the end is at hand."""
    payload: int
    """Where the directory states the payload's checksum."""
    others: tuple[int, ...]
    """Where it states those of records that are not read."""
    computed: bool
    """Whether the checksums of the records that are read show that the writer computed any."""

    @classmethod
    def of(cls, item: Item, records: Mapping[str, Record], *, payload: Record, read: Collection[str]) -> Form | None:
        """Return the form of an item that was just opened; None where its checksums stand in more than one place.

        Args:
            item: The item.
            records: All its records.
            payload: The one with the elements.
            read: Names of those whose content was read and compared with its checksum.
        """
        if not is_streamed(item, payload):
            return None
        free = sorted(record.crc32_at for name, record in records.items() if name not in read)
        spans = [*_without(_united(item.looked_at), free)]
        if sum(stop - start for start, stop in spans) > MOST_BYTES:
            return None
        return cls(
            parts=tuple((start, item.read(start, stop)) for start, stop in reversed(spans)),
            payload=payload.crc32_at,
            others=tuple(at for at in free if at != payload.crc32_at),
            computed=not payload.size or any(records[name].crc32 for name in read),
        )

    def fits(self, item: Item) -> bool:
        """Whether an item of the same length is of this form."""
        return item.holds(self.parts)

    def crc32(self, item: Item) -> int | None:
        """Return the checksum that an item of this form states for its payload.

        A writer that computes no checksums states 0 for every record; else 0 is the true CRC-32 of the payload.
        """
        stated = _stated(item, self.payload)
        computed = self.computed or stated or any(_stated(item, at) for at in self.others)
        return stated if computed else None


class Known(Generic[_Meaning]):
    """What items of some forms mean; the oldest are forgotten. Safe to use from many threads."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[int, tuple[tuple[Form, _Meaning], ...]] = {}

    def recall(self, item: Item) -> tuple[Form, _Meaning] | None:
        """Return the form that an item is of, and what such items mean; None where it is a new one."""
        return next((known for known in self._known.get(item.length, ()) if known[0].fits(item)), None)

    def remember(self, item: Item, form: Form, meaning: _Meaning) -> None:
        """Keep what items of a form mean."""
        if len(self._known) >= MOST_LENGTHS and item.length not in self._known:
            self._known = {}  # whoever reads the older one goes on doing so
        alike = self._known.get(item.length, ())
        self._known[item.length] = ((form, meaning), *alike)[:MOST_OF_ONE_LENGTH]


def _stated(item: Item, at: int) -> int:
    number: int = _CRC32.unpack(item.read(at, at + _CRC32.size))[0]
    return number


def _united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that meet or touch.

    >>> _united([(8, 9), (0, 4), (2, 5), (5, 6)])
    [(0, 6), (8, 9)]
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _without(spans: Iterable[tuple[int, int]], free: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Cut checksums, which do not overlap, out of spans.

    >>> [*_without([(0, 20), (30, 40)], [2, 16])]
    [(0, 2), (6, 16), (30, 40)]
    """
    for first, stop in spans:
        start = first
        for at in free:
            if first <= at < stop:
                yield from [(start, at)] if start < at else []
                start = at + _CRC32.size
        yield from [(start, stop)] if start < stop else []
