"""Checksums over bytes: what proves that they are the same bytes, however they were cut.

Two of them, both cyclic redundancy checks because those *compose*: from the checksums of parts, in whatever pieces a
window, a rank or another file read them, follows the checksum of the whole.

- **CRC-32** is what a ``torch.save`` archive states for each of its records.
- **CRC-64/NVME** is our digest of a tensor. It is a detector of damage and change, not of forgery: the SHA-256 of the
  file stands for that.

Measured on 4 MiB blocks (GB/s, one thread): isal CRC-32 12.5, zlib CRC-32 3.4, awscrt CRC-32 2.6, awscrt CRC-64/NVME
12.6. All release the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable

from awscrt import checksums

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

__all__ = ["EMPTY_DIGEST", "combine_parts", "crc32", "digest_text", "extend_digest"]

EMPTY_DIGEST = 0
"""CRC-64/NVME of no bytes."""


def extend_digest(digest: int, data: memoryview) -> int:
    """Return the CRC-64/NVME of the bytes behind ``digest`` followed by ``data``."""
    return int(checksums.crc64nvme(data, digest))


def digest_text(digest: int) -> str:
    """Write a tensor digest with the name of its algorithm.

    >>> digest_text(extend_digest(EMPTY_DIGEST, memoryview(b"123456789")))
    'crc64nvme:ae8b14860a799888'
    """
    return f"crc64nvme:{digest:016x}"


def combine_parts(parts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring ``(start, stop, crc32)`` parts of one payload into as few as can be.

    Returns:
        The parts that are left, by start. Parts that were read twice (the same start and stop) count once.

    >>> combine_parts([(4, 9, crc32(b"56789")), (0, 4, crc32(b"1234"))]) == [(0, 9, crc32(b"123456789"))]
    True
    """
    joined: list[tuple[int, int, int]] = []
    for start, stop, crc in sorted(set(parts)):
        if joined and joined[-1][1] == start:
            first, _, before = joined[-1]
            joined[-1] = (first, stop, int(checksums.combine_crc32(before, crc, stop - start)))
        else:
            joined.append((start, stop, crc))
    return joined
