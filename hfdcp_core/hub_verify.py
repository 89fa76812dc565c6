"""To read back is to take what is on the Hub as anybody else would, and to hold it against its records.

The Hub's own word for a file (size, SHA-256, Xet hash) costs one question for hundreds of files, and is what a client
once claimed. A sample reads of each file the header and some tensors, against the digests that the record has of them;
in full every byte is read and hashed. Nothing of it touches a disk.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hfdcp_core.errors import CorruptFile, HubRejected, SourceError
from hfdcp_core.hub_client import Repository
from hfdcp_core.job import FULL, SAMPLE
from hfdcp_core.manifest import FileRecord
from hfdcp_core.ops import EMPTY_DIGEST, digest_text, extend_digest
from hfdcp_core.safetensors_file import Entry, Header, header_length, parse_header
from hfdcp_core.state import SILENT, Progress
from hfdcp_core.validate import Hasher, digest_problems

FILES_AT_ONCE = 4
"""Files that are read back at the same time."""
SAMPLED_TENSORS, SAMPLED_BYTES = 4, 4 << 20
"""Tensors of a file that a sample reads, and how large each may be, but for the smallest, which always is read."""
HEADER_BYTES = 64 << 10
"""As much of a file as is asked for at first: most headers are shorter."""


def read_back(
    repository: Repository, revision: str, records: Sequence[FileRecord], level: str, progress: Progress = SILENT
) -> list[str]:
    """Read files of a revision, and say what is wrong with them.

    Args:
        repository: Where they lie.
        revision: The revision, best a commit.
        records: What they should be.
        level: `SAMPLE` or `FULL`; at any other one nothing is read.
        progress: Hears of the bytes that a full reading has read.

    Raises:
        HubError: The Hub refused or failed.
    """
    if level not in {SAMPLE, FULL}:
        return []

    def look(record: FileRecord) -> list[str]:
        try:
            if level == SAMPLE:
                return _sampled(repository, revision, record)
            return _in_full(repository, revision, record, progress)
        except SourceError as error:
            return [str(error)]
        except HubRejected as error:  # what it stored of this one cannot be had, and it says so
            return [f"{record.path}: {error}"]

    with ThreadPoolExecutor(FILES_AT_ONCE, "hfdcp-read-back") as pool:
        return [problem for own in pool.map(look, records) for problem in own]


def _in_full(repository: Repository, revision: str, record: FileRecord, progress: Progress) -> list[str]:
    """Read every byte, and hold the digests of the file and its tensors against the record."""
    hasher = Hasher(_header(repository, revision, record) if record.tensors else None)
    size = 0
    for block in repository.blocks(record.path, revision):
        hasher.update(memoryview(block))
        progress.advance(len(block))
        size += len(block)
    return digest_problems(record, size, hasher)


def _sampled(repository: Repository, revision: str, record: FileRecord) -> list[str]:
    """Read the header and some tensors, or all of a file that has none."""
    if not record.tensors:
        found = hashlib.sha256(repository.read(record.path, revision)).hexdigest()
        return [] if found == record.sha256 else [f"{record.path}: SHA-256 is {found}, expected {record.sha256}"]
    header = _header(repository, revision, record)
    if {entry.fqn for entry in header.entries} != record.tensors.keys():
        return [f"{record.path}: its header names other tensors"]
    problems = []
    for entry in _some(header.entries):
        data = repository.read_span(
            record.path, revision, header.data_start + entry.start, header.data_start + entry.stop
        )
        digest = digest_text(extend_digest(EMPTY_DIGEST, memoryview(data)))
        if digest != record.tensors[entry.fqn]:
            problems.append(f"{record.path}: digest of {entry.fqn} is {digest}, expected {record.tensors[entry.fqn]}")
    return problems


def _header(repository: Repository, revision: str, record: FileRecord) -> Header:
    """Read the header of a file.

    Raises:
        CorruptFile: It has none.
    """
    where = f"{repository.name}@{revision}/{record.path}"
    raw = repository.read_span(record.path, revision, 0, min(HEADER_BYTES, record.size))
    stop = 8 + header_length(raw[:8], path=where)
    if stop > record.size:
        raise CorruptFile(f"{where}: the header takes {stop - 8} bytes, the file has {record.size}")
    if stop > len(raw):
        raw += repository.read_span(record.path, revision, len(raw), stop)
    return parse_header(raw[:stop], path=where, file_size=record.size)


def _some(entries: Sequence[Entry]) -> list[Entry]:
    """Choose tensors by chance, so that each further look sees others; and always the last, which a cut would take."""
    smallest = min(entries, key=lambda entry: entry.stop - entry.start)
    fitting = [entry for entry in entries if entry.stop - entry.start <= SAMPLED_BYTES]
    chosen = random.sample(fitting, min(SAMPLED_TENSORS, len(fitting)))
    last = [entry for entry in fitting if entry is max(entries, key=lambda one: one.stop)]
    return list({entry.fqn: entry for entry in (*chosen, *last, smallest)}.values())
