"""The floor: what the work takes when only the bytes count. Read once, SHA-256, written once, and nothing else.

``python floor.py SOURCE SINK THREADS hash|copy`` handles every ``.distcp`` and ``.safetensors`` file of a folder, one
file to a thread, by way of one page-aligned buffer of 1 MiB for each. ``checked`` also takes the two checksums that
hfdcp takes of every byte (CRC-32 against the source's own, CRC-64/NVME of each tensor).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = 1 << 20
Hashes = Sequence[Callable[[memoryview], object]]


def hashes_of(kind: str) -> Hashes:
    if kind == "copy":
        return ()
    if kind == "hash":
        return (hashlib.sha256().update,)
    from awscrt.checksums import crc64nvme
    from isal.isal_zlib import crc32

    return (crc32, hashlib.sha256().update, crc64nvme)


def carry(source: Path, sink: Path, hashes: Hashes) -> None:
    buffer = memoryview(mmap.mmap(-1, BLOCK))
    size, done = source.stat().st_size, 0
    read, write = os.open(source, os.O_RDONLY), os.open(sink, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    while done < size:
        part = buffer[: os.preadv(read, [buffer], done)]
        for update in hashes:
            update(part)
        done += os.pwrite(write, part, done)
    os.close(read)
    os.close(write)


def main(source: str, sink: str, threads: str, kind: str) -> None:
    files = [path for path in sorted(Path(source).iterdir()) if path.suffix in {".distcp", ".safetensors"}]
    with ThreadPoolExecutor(int(threads)) as pool:
        list(pool.map(lambda path: carry(path, Path(sink) / path.name, hashes_of(kind)), files))


if __name__ == "__main__":
    main(*sys.argv[1:])
