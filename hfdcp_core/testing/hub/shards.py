"""The two binary forms of Xet storage: the shard, which describes files, and the xorb, which holds chunks.

A shard is a row of 48-byte records: a header, then for each file its hash, its terms (a range of chunks of a xorb),
an optional record for each term to verify it, and an optional record with the file's sha256. A hash is written as four
little-endian 64-bit words.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hfdcp_core.testing.hub.http import Refused

RECORD_BYTES = 48
SHARD_VERSION = 2
WITH_VERIFICATION = 1 << 31
WITH_METADATA = 1 << 30
END_OF_FILES = b"\xff" * 32


@dataclass(frozen=True, slots=True)
class Term:
    """Consecutive chunks of one xorb that make a part of a file."""

    xorb: str
    """The xorb's hash."""
    size: int
    """Bytes, unpacked."""
    start: int
    """First chunk."""
    stop: int
    """Behind the last chunk."""


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file as a sequence of terms."""

    hash: str
    """Its name in Xet storage."""
    terms: tuple[Term, ...]
    """What it is made of, in order."""
    sha256: str | None
    """The digest that the client stated; nobody has verified it."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(term.size for term in self.terms)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a chunk lies in its xorb."""

    start: int
    """First byte, of its header."""
    stop: int
    """Behind the last byte."""
    size: int
    """Bytes, unpacked."""


def hash_text(raw: bytes) -> str:
    """Return how Xet writes a hash of 32 bytes.

    >>> hash_text(bytes(range(32)))[:16]
    '0706050403020100'
    """
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def parse_shard(raw: bytes) -> tuple[XetFile, ...]:
    """Return the files that a shard describes.

    Raises:
        Refused: It is no shard of the version that we know, or ends early.
    """
    try:
        return tuple(_files(raw))
    except struct.error as fault:
        raise Refused(400, "the shard ends early") from fault


def _files(raw: bytes) -> Iterator[XetFile]:
    if struct.unpack_from("<Q", raw, 32)[0] != SHARD_VERSION:
        raise Refused(400, "a shard of an unknown version")
    position = RECORD_BYTES
    while (name := raw[position : position + 32]) != END_OF_FILES:
        flags, count = struct.unpack_from("<II", raw, position + 32)
        position += RECORD_BYTES
        terms = tuple(_term(raw, position + index * RECORD_BYTES) for index in range(count))
        position += RECORD_BYTES * count * (2 if flags & WITH_VERIFICATION else 1)
        sha256 = None
        if flags & WITH_METADATA:
            sha256 = hash_text(raw[position : position + 32])
            position += RECORD_BYTES
        yield XetFile(hash_text(name), terms, sha256)


def _term(raw: bytes, position: int) -> Term:
    _flags, size, start, stop = struct.unpack_from("<IIII", raw, position + 32)
    return Term(hash_text(raw[position : position + 32]), size, start, stop)


def xorb_chunks(path: Path) -> list[Chunk]:
    """Return where the chunks of a xorb lie: each has a header of 8 bytes; a footer ends them."""
    chunks, position, total = [], 0, path.stat().st_size
    with path.open("rb") as file:
        while position + 8 <= total:
            file.seek(position)
            header = file.read(8)
            stop = position + 8 + int.from_bytes(header[1:4], "little")
            if header[0] != 0 or stop > total:
                break
            chunks.append(Chunk(position, stop, int.from_bytes(header[5:8], "little")))
            position = stop
    return chunks
