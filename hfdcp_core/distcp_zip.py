"""The zip directory of a ``torch.save`` archive: which bytes of an item hold which record.

torch streams its archives, so the local headers state neither sizes nor checksums; only the directory at the tail
does. A record's bytes start behind its *local* header, whose extra field holds the padding that aligns them. Format:
PKWARE APPNOTE 6.3.10, §4.3 (headers) and §4.5.3 (zip64), of which torch uses stored records only.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from hfdcp_core.errors import CorruptFile

_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_CRC32_AT = 16
"""Where an entry of the directory has the checksum."""
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x0001
_ZIP64 = 1
_TAIL_BYTES, _HEAD_BYTES, _WHOLE_BYTES = 1 << 10, 4 << 10, 64 << 10
_LONGEST_TAIL = _END.size + _FULL_16
_MOST_DIRECTORY_BYTES = 1 << 20
"""An archive of one tensor has about eight records."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the archive, stored as it is."""

    name: str
    """Its name with the archive's own root folder."""
    start: int
    """First byte of its local header."""
    size: int
    """Bytes of its content."""
    crc32: int
    """CRC-32 of its content as stated; 0 also where the writer was told not to compute it."""
    limit: int
    """Where the next record or the directory starts: its content must end before."""
    crc32_at: int
    """Where the directory states the checksum."""


class Item:
    """Reads parts of one item; short pieces at its two ends are fetched once.

    Args:
        fetch: Returns the bytes ``[start, stop)``, counted in the item.
        length: Bytes of the item.
        where: What it is, for messages.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], length: int, where: str) -> None:
        self.length = length
        self.where = where
        self.looked_at: list[tuple[int, int]] = []
        """Everything that what was found depends on, beside the length: spans of the item, as they were read."""
        self._fetch = fetch
        first = 0 if length <= _WHOLE_BYTES else length - _TAIL_BYTES
        self._pieces = [(first, self._fetched(first, length))]

    def fail(self, problem: str) -> NoReturn:
        """Raise `CorruptFile` for this item."""
        raise CorruptFile(f"{self.where}: {problem}")

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``."""
        if not 0 <= start <= stop <= self.length:
            self.fail(f"bytes {start} to {stop} of an item of {self.length} bytes")
        self.looked_at.append((start, stop))
        return self._read(start, stop)

    def holds(self, parts: Iterable[tuple[int, bytes]]) -> bool:
        """Whether bytes stand in their places; that they were looked at is not noted."""
        first, piece = self._pieces[0]
        if not first:  # all of it is at hand
            return all(piece.startswith(raw, start) for start, raw in parts)
        return all(self.read(start, start + len(raw)) == raw for start, raw in parts)

    def _read(self, start: int, stop: int) -> bytes:
        for first, piece in self._pieces:
            if first <= start and stop <= first + len(piece):
                return piece[start - first : stop - first]
        # What an archive says of itself lies at its two ends, so a short piece there is likely to serve again.
        ahead = min(max(stop, _HEAD_BYTES), self.length) if start < _HEAD_BYTES else stop
        self._pieces.append((start, self._fetched(start, ahead)))
        return self._pieces[-1][1][: stop - start]

    def _fetched(self, start: int, stop: int) -> bytes:
        piece = self._fetch(start, stop)
        if len(piece) != stop - start:
            self.fail(f"got {len(piece)} bytes where [{start}, {stop}) were asked for")
        return piece

    def tail(self, size: int) -> bytes:
        """Return the last ``size`` bytes, or all where there are fewer; who finds something there says so."""
        return self._read(max(0, self.length - size), self.length)


def directory(item: Item, *, most: int = _MOST_DIRECTORY_BYTES) -> Mapping[str, Record]:
    """Return the records of an archive by name; its directory may take ``most`` bytes.

    Raises:
        CorruptFile: It is no archive, is damaged, or has records that are compressed, encrypted or overlap.
    """
    start, size, count = _find_directory(item)
    if size > most or count * _ENTRY.size > size:
        item.fail(f"a zip directory of {count} records in {size} bytes")
    raw = item.read(start, start + size)
    entries: dict[str, tuple[int, int, int, int]] = {}
    position = 0
    for _ in range(count):
        name, entry, stop = _entry(item, raw, position)
        if name in entries:
            item.fail(f"two zip records of the name {name!r}")
        entries[name] = (*entry, start + position + _CRC32_AT)
        position = stop
    if position != size:
        item.fail(f"a zip directory of {size} bytes whose {count} records end at byte {position}")
    ordered = sorted(entries.items(), key=lambda named: named[1][0])
    limits = [*(entry[0] for _, entry in ordered), start][1:]
    return {
        name: Record(name, first, size, crc, limit, at)
        for (name, (first, size, crc, at)), limit in zip(ordered, limits, strict=True)
    }


def content_span(item: Item, record: Record) -> tuple[int, int]:
    """Return where the record's content lies in the item; its local header must agree with the directory."""
    header = item.read(record.start, record.start + _LOCAL.size)
    magic, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(header)
    name_start = record.start + _LOCAL.size
    if magic != b"PK\3\4" or item.read(name_start, name_start + name_bytes) != record.name.encode():
        item.fail(f"byte {record.start}: no zip header of {record.name!r}, where the directory says it is")
    # Bit 3: sizes and checksum follow the content, and zeros may stand here; all ones: a zip64 extra field has them.
    later = {0} if flags & 8 else set()
    agrees = crc in {record.crc32, *later} and {packed, size} <= {record.size, _FULL_32, *later}
    if method or flags & _ENCRYPTED or not agrees:
        item.fail(f"{record.name!r}: its zip header contradicts the directory")
    start = name_start + name_bytes + extra_bytes
    if start + record.size > record.limit:
        item.fail(f"{record.name!r} of {record.size} bytes at byte {start} runs into what follows at {record.limit}")
    return start, start + record.size


def is_streamed(item: Item, record: Record) -> bool:
    """Whether the record's checksum stands in the directory and behind its content only, as torch writes it."""
    _, _, flags, _, _, _, crc, *_ = _LOCAL.unpack(item.read(record.start, record.start + _LOCAL.size))
    return bool(flags & 8) and not crc


def content(item: Item, record: Record, *, most: int) -> bytes:
    """Return a small record's content, checked against its CRC-32 where one is stated."""
    if record.size > most:
        item.fail(f"{record.name!r} has {record.size} bytes, where at most {most} are expected")
    raw = item.read(*content_span(item, record))
    if record.crc32 and zlib.crc32(raw) != record.crc32:
        item.fail(f"{record.name!r}: CRC-32 {zlib.crc32(raw):08x}, where the directory says {record.crc32:08x}")
    return raw


def _find_directory(item: Item) -> tuple[int, int, int]:
    """Return start, size and number of records of the directory."""
    at = _find_end(item)
    _, *narrow, _ = _END.unpack(item.read(at, at + _END.size))
    # torch adds a zip64 end to every archive; the numbers of the older one are then those, or all ones.
    stop, numbers = _zip64_end(item, at) or (at, narrow)
    disk, first_disk, here, count, size, start = numbers
    fits = all(a in (b, full) for a, b, full in zip(narrow, numbers, [_FULL_16] * 4 + [_FULL_32] * 2, strict=True))
    if disk or first_disk or here != count or not fits:
        item.fail("a zip archive in several volumes, or with two ends that contradict each other")
    if start + size != stop:
        item.fail(f"a zip directory at [{start}, {start + size}), where it should end at byte {stop}")
    return start, size, count


def _find_end(item: Item) -> int:
    """Return where the end record starts: the last one whose comment ends with the item."""
    for size in (_TAIL_BYTES, _LONGEST_TAIL):
        tail = item.tail(size)
        at = len(tail)
        while (at := tail.rfind(b"PK\5\6", 0, at)) >= 0:
            if at + _END.size <= len(tail) and at + _END.size + _END.unpack_from(tail, at)[-1] == len(tail):
                found = item.length - len(tail) + at
                item.looked_at.append((found, item.length))
                return found
    raise CorruptFile(
        f"{item.where}: no zip directory at its end: cut off, overwritten, or no torch.save archive "
        "(what torch saves with SerializationFormat.SAFETENSORS cannot be read back, by torch neither)"
    )


def _zip64_end(item: Item, end: int) -> tuple[int, list[int]] | None:
    """Return where the zip64 end record starts and its numbers, if there is one."""
    at = end - _END64_LOCATOR.size
    if at < _END64.size:
        return None
    locator, _, start, _ = _END64_LOCATOR.unpack(item.read(at, end))
    if locator != b"PK\6\7":
        return None
    magic, _, _, _, *numbers = _END64.unpack(item.read(at - _END64.size, at))
    if magic != b"PK\6\6" or start != at - _END64.size:
        item.fail(f"byte {at}: the zip64 end record is not where its locator says, at byte {start}")
    return start, numbers


def _entry(item: Item, raw: bytes, position: int) -> tuple[str, tuple[int, int, int], int]:
    """Return name, start, size and checksum of the record at ``position`` of the directory, and where the next is."""
    if position + _ENTRY.size > len(raw):
        item.fail("a zip directory that is cut off")
    fields = _ENTRY.unpack_from(raw, position)
    magic, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes = fields[:13]
    disk, start = fields[13], fields[16]
    name_start = position + _ENTRY.size
    extra_start = name_start + name_bytes
    name = raw[name_start:extra_start].decode("utf-8", "replace")
    if magic != b"PK\1\2" or extra_start + extra_bytes + comment_bytes > len(raw):
        item.fail("a damaged zip directory")
    if _FULL_32 in (size, packed, start):
        extra = raw[extra_start : extra_start + extra_bytes]
        size, packed, start = _zip64_numbers(item, extra, (size, packed, start))
    if method or flags & _ENCRYPTED or packed != size or disk:
        item.fail(f"{name!r} is compressed or encrypted; torch stores records as they are")
    return name, (start, size, crc), extra_start + extra_bytes + comment_bytes


def _zip64_numbers(item: Item, extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """Replace the numbers that did not fit into 32 bits by those of the zip64 extra field, in its order."""
    wide = _zip64_field(extra)
    if len(wide) < 8 * numbers.count(_FULL_32):
        item.fail("a zip directory whose zip64 sizes are missing")
    values = iter(struct.unpack_from(f"<{len(wide) // 8}Q", wide))
    size, packed, start = (next(values) if number == _FULL_32 else number for number in numbers)
    return size, packed, start


def _zip64_field(extra: bytes) -> bytes:
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == _ZIP64:
            return extra[position + 4 : position + 4 + size]
        position += 4 + size
    return b""
