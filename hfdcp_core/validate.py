"""To validate is to hold a store against its manifest and its source.

In a run, before the manifest is written: every file is opened again, its header is the planned one and is taken by
safetensors' own reader, sizes and records agree, index and headers agree both ways, checksums of source items that
several files share are put together, and the source is still what was gathered.

At any later day, in full: everything is read and hashed again; with the source at hand the output is made once more,
into nothing, and compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors

from hfdcp_core import extras, wire
from hfdcp_core.catalog import FileStamp
from hfdcp_core.consolidate import check_stamps
from hfdcp_core.errors import CorruptFile, HfdcpError, SourceError, StorageNotFound, ValidationError
from hfdcp_core.manifest import CONFIG_PATH, EXTRA_PATH, INDEX_PATH, MANIFEST_PATH, CrcPart, FileRecord, Manifest
from hfdcp_core.ops import EMPTY_DIGEST, combine_parts, digest_text, extend_digest
from hfdcp_core.plan import stamps_digest
from hfdcp_core.read import page_aligned
from hfdcp_core.run import PlanSummary, Run
from hfdcp_core.safetensors_file import Header, header_length, parse_header, parse_index
from hfdcp_core.state import SILENT, Progress
from hfdcp_core.statistics import merged, refuse
from hfdcp_core.store import Source

CHECKS = (
    "every wanted element comes from exactly one place",
    "source items that carry a CRC-32 match it",
    "source files unchanged from gathering to the end",
    "files opened again by safetensors' own reader",
    "headers, sizes, records and index agree both ways",
)
"""What holds where a manifest lies."""
ELSEWHERE = tuple("headers read by safetensors' own reader" if "opened again" in check else check for check in CHECKS)
"""The same of files that lie on the Hub alone: what arrived there is looked at when they are committed."""
FILES_AT_ONCE = 8
"""Files that are opened again at the same time: each takes a few requests, which wait for their round trips."""
HASHED_BYTES = 4 << 20
"""How much is read at a time when a file is hashed again."""


# ---- in the run -----------------------------------------------------------------------------------------------------


Elsewhere = Callable[[str], FileRecord | None]
"""Returns the record of a file that does not lie in the sink, where it was hashed on its way to another place."""
More = Callable[[PlanSummary, tuple[FileRecord, ...]], Mapping[str, bytes]]
"""Makes further files that lie beside the weights, when these are known."""


def _no_more(_planned: PlanSummary, _records: tuple[FileRecord, ...]) -> Mapping[str, bytes]:
    return {}


def _nothing_elsewhere(_path: str) -> FileRecord | None:
    return None


def complete(
    run: Run,
    source: Source,
    *,
    fail_on: tuple[str, ...] = (),
    more: More = _no_more,
    elsewhere: Elsewhere = _nothing_elsewhere,
) -> Manifest:
    """Check everything that was written, then write the index and, last of all, the manifest.

    Args:
        run: The run.
        source: What it was made from.
        fail_on: What no tensor may hold.
        more: Makes further files.
        elsewhere: Knows the files that do not lie in the sink.

    Raises:
        ValidationError: Something that was written is not what was meant, or a tensor holds what is refused. No index
            and no manifest are left.
        CorruptFile: Files together show that an item of the source is damaged; they are removed.
        SourceChanged: The source is not what was gathered.
    """
    planned = run.planned()
    run.sink.delete(MANIFEST_PATH)
    try:
        records, headers = _whole_records(run, planned, elsewhere)
        _combine_shared_items(run, records)
        refuse(run.sink.url, merged(records), fail_on)
        beside = {**more(planned, records), **_beside(run, planned, source)}
        check_stamps(planned.stamps, source)
        index = _write_index(run, planned)
        _hold_index_against_files(run, planned, headers)
    except HfdcpError:
        run.sink.delete(INDEX_PATH)
        raise
    checks = ELSEWHERE if any(elsewhere(record.path) for record in records) else CHECKS
    manifest = _manifest(planned, records, (*index, *run.put_beside(beside)), checks)
    run.sink.sweep()
    run.sink.put(MANIFEST_PATH, wire.dump_manifest(manifest))
    return manifest


def _whole_records(
    run: Run, planned: PlanSummary, elsewhere: Elsewhere
) -> tuple[tuple[FileRecord, ...], Mapping[str, Header]]:
    """Open every file again, and return the records and headers."""
    records: list[FileRecord] = []
    headers: dict[str, Header] = {}

    def look(number: int) -> list[str]:
        file = planned.files[number]
        away = elsewhere(file.path)
        record = away or run.record(planned.digest, file.path)
        if record is None:
            return [f"{file.path}: not whole (never finished, or changed since)"]
        records.append(record)
        raw = run.header(number)
        if not away and (problems := _differences(run.sink, file.path, raw, file.size)):
            return problems
        headers[file.path] = header = parse_header(raw, path=file.path, file_size=file.size)
        return open_as_loaders_do(None if away else run.sink, file.path, raw, header)

    with ThreadPoolExecutor(FILES_AT_ONCE, "hfdcp-validate") as pool:
        problems = [problem for own in pool.map(look, range(len(planned.files))) for problem in own]
    ValidationError.raise_for(f"{run.sink.url}: what was written is not what was planned", problems)
    return tuple(sorted(records, key=lambda record: record.path)), headers


def _differences(sink: Source, path: str, header: bytes, size: int) -> list[str]:
    """Say where a written file is not what was planned."""
    found = sink.stat(path).size
    if found != size:
        return [f"{path}: {found} bytes, expected {size}"]
    if sink.read(path, 0, len(header)) != header:
        return [f"{path}: begins with another header than the planned one"]
    return []


def open_as_loaders_do(source: Source | None, path: str, raw: bytes, header: Header) -> list[str]:
    """Let safetensors' own reader open a file, and hold the names it sees against the header's.

    It reads local files only; for a file elsewhere, or in no store at all, it is given one of the same header and size,
    without the data.
    """
    names = {entry.fqn for entry in header.entries}
    with _on_disk(source, path, raw, header.file_size) as local:
        try:
            with safetensors.safe_open(local, framework="np") as reader:
                seen = set(reader.keys())
        except (safetensors.SafetensorError, OSError) as error:
            return [f"{path}: safetensors' own reader refuses it: {error}"]
    return [] if seen == names else [f"{path}: safetensors' own reader sees other tensors: {sorted(seen ^ names)}"]


@contextlib.contextmanager
def _on_disk(source: Source | None, path: str, header: bytes, size: int) -> Iterator[Path]:
    local = getattr(source, "local_path", lambda _path: None)(path)
    if local is not None:
        yield local
        return
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as stand_in:
        stand_in.write(header)
        stand_in.truncate(size)
        stand_in.flush()
        yield Path(stand_in.name)


def _combine_shared_items(run: Run, records: Iterable[FileRecord]) -> None:
    """Put together the checksums of items that several files read parts of, and remove what a damaged one went into."""
    spoilt = shared_item_problems(records)
    for path in {path for _, paths in spoilt for path in paths}:
        run.forget(path)
    refuse_damaged_items(problem for problem, _ in spoilt)


def refuse_damaged_items(problems: Iterable[str]) -> None:
    """Raise for the items that `shared_item_problems` found."""
    CorruptFile.raise_for("items of the source are damaged; restore the files from a copy", problems)


def shared_item_problems(records: Iterable[FileRecord]) -> list[tuple[str, frozenset[str]]]:
    """Hold the parts of items that several files read against the CRC-32 of the whole.

    Returns:
        For each damaged item what is wrong, and the files that it went into.
    """
    items: dict[str, list[tuple[str, CrcPart]]] = {}
    for record in records:
        for part in record.source.parts:
            items.setdefault(part.item, []).append((record.path, part))
    found = []
    for item, parts in items.items():
        _, any_part = parts[0]
        whole = combine_parts((part.start, part.stop, part.crc32) for _, part in parts)
        if [part[:2] for part in whole] == [(0, any_part.payload_size)] and whole[0][2] != any_part.payload_crc32:
            problem = f"{item}: CRC-32 {whole[0][2]:08x}, the file states {any_part.payload_crc32:08x}"
            found.append((problem, frozenset(path for path, _ in parts)))
    return found


def _write_index(run: Run, planned: PlanSummary) -> tuple[FileRecord, ...]:
    if planned.index is None:
        return ()
    run.sink.put(INDEX_PATH, planned.index)
    return (FileRecord(INDEX_PATH, len(planned.index), hashlib.sha256(planned.index).hexdigest()),)


def _beside(run: Run, planned: PlanSummary, source: Source) -> Mapping[str, bytes]:
    """Return the files that lie beside the weights, where they were asked for: plain values, a changed config."""
    kept = extras.document(run.catalog(), source) if planned.keep_extra else None
    files = {CONFIG_PATH: planned.config, EXTRA_PATH: kept}
    return {path: data for path, data in files.items() if data is not None}


def _hold_index_against_files(run: Run, planned: PlanSummary, headers: Mapping[str, Header]) -> None:
    paths = [file.path for file in planned.files]
    problems = [
        f"{path}: a file that is not of this output"
        for path in run.output_files()
        if path not in {*paths, INDEX_PATH, MANIFEST_PATH}
    ]
    if planned.index is not None:
        raw = run.read(INDEX_PATH)
        problems += index_problems(raw or b"", headers)
    ValidationError.raise_for(f"{run.sink.url}: index and files disagree", problems)


def index_problems(raw: bytes, headers: Mapping[str, Header]) -> list[str]:
    """Hold an index against the headers of the files it should describe, both ways."""
    index = parse_index(raw, path=INDEX_PATH)
    held = {(entry.fqn, path) for path, header in headers.items() for entry in header.entries}
    named = set(index.weight_map.items())
    total = sum(entry.stop - entry.start for header in headers.values() for entry in header.entries)
    problems = [f"{fqn}: the index places it in {path}, which does not hold it" for fqn, path in sorted(named - held)]
    problems += [f"{fqn}: in {path}, but the index does not say so" for fqn, path in sorted(held - named)]
    if index.total_size != total:
        problems.append(f"total_size is {index.total_size}, the tensors have {total} bytes")
    return problems


def read_header(source: Source, path: str) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CorruptFile: It is not a whole safetensors file.
    """
    raw = read_raw_header(source, path)
    return parse_header(raw, path=f"{source.url}/{path}", file_size=source.stat(path).size)


def read_raw_header(source: Source, path: str) -> bytes:
    """Read all bytes before the data of a safetensors file.

    Raises:
        CorruptFile: It is not a whole safetensors file.
    """
    where = f"{source.url}/{path}"
    size = source.stat(path).size
    length = header_length(source.read(path, 0, min(8, size)), path=where)
    if 8 + length > size:
        raise CorruptFile(f"{where}: the header takes {length} bytes, the file has {size}")
    return source.read(path, 0, 8 + length)


def _manifest(
    planned: PlanSummary,
    records: tuple[FileRecord, ...],
    extra_files: tuple[FileRecord, ...],
    checks: tuple[str, ...],
) -> Manifest:
    return Manifest(
        plan_digest=planned.digest,
        source_digest=stamps_digest(FileStamp(s.path, s.size, "") for s in planned.stamps),
        source_format=planned.source_format,
        records=records,
        extra_files=extra_files,
        total_size=planned.total_size,
        recipe=planned.recipe,
        rules=planned.rules,
        corrections=planned.corrections,
        include=planned.include,
        exclude=planned.exclude,
        unproved=planned.unproved,
        ranks=planned.ranks,
        shard_dim=planned.shard_dim,
        skipped=planned.skipped,
        tools={name: importlib.metadata.version(name) for name in ("hfdcp", "safetensors")},
        checks=(*checks, *([planned.loads] if planned.loads else [])),
        numerics=planned.numerics,
        tied=planned.tied,
    )


# ---- at any later day -----------------------------------------------------------------------------------------------


class Hasher:
    """Hashes a file that passes from its first byte to its last: the whole, and each tensor that its header names."""

    def __init__(self, header: Header | None) -> None:
        self._sha256 = hashlib.sha256()
        self._entries = list(reversed(header.entries)) if header else []
        self._start = header.data_start if header else 0
        self._position = 0
        self._digest = EMPTY_DIGEST
        self.tensors: dict[str, str] = {}
        """Digests of the tensors that have passed."""

    @property
    def sha256(self) -> str:
        """Digest of everything that has passed."""
        return self._sha256.hexdigest()

    def update(self, block: memoryview) -> None:
        """Take the next bytes."""
        self._sha256.update(block)
        place, end = self._position - self._start, self._position + len(block) - self._start
        self._position += len(block)
        while self._entries and self._entries[-1].start <= end:
            entry = self._entries[-1]
            begun, stop = max(place, entry.start), min(end, entry.stop)
            if begun < stop:
                self._digest = extend_digest(self._digest, block[begun - place : stop - place])
            if entry.stop > end:
                return
            self.tensors[entry.fqn] = digest_text(self._digest)
            self._digest = EMPTY_DIGEST
            self._entries.pop()


def hash_again(source: Source, record: FileRecord, *, progress: Progress = SILENT) -> list[str]:
    """Read a written file once more and hold it against its record: size, header, SHA-256, tensor digests.

    Returns:
        What is wrong.
    """
    try:
        size = source.stat(record.path).size
        if size != record.size:
            return [f"{record.path}: {size} bytes, expected {record.size}"]
        hasher = Hasher(read_header(source, record.path) if record.path.endswith(".safetensors") else None)
    except (StorageNotFound, SourceError) as error:
        return [str(error)]
    buffer = page_aligned(min(HASHED_BYTES, size))
    for start in range(0, size, HASHED_BYTES):
        part = buffer[: min(HASHED_BYTES, size - start)]
        source.read_into(record.path, start, part)
        hasher.update(part)
        progress.advance(len(part))
    return digest_problems(record, size, hasher)


def digest_problems(record: FileRecord, size: int, hasher: Hasher) -> list[str]:
    """Hold what was hashed of a file against its record."""
    if size != record.size:
        return [f"{record.path}: {size} bytes, expected {record.size}"]
    problems = _compare(record, "SHA-256", hasher.sha256, record.sha256)
    for fqn in sorted(hasher.tensors.keys() | record.tensors.keys()):
        problems += _compare(record, f"digest of {fqn}", hasher.tensors.get(fqn), record.tensors.get(fqn))
    return problems


def _compare(record: FileRecord, what: str, found: str | None, expected: str | None) -> list[str]:
    return [] if found == expected else [f"{record.path}: {what} is {found}, expected {expected}"]


def validate(source: Source, manifest: Manifest, *, progress: Progress = SILENT) -> tuple[str, ...]:
    """Hold a store against a manifest, reading and hashing everything again.

    Returns:
        What is wrong; nothing where all is well.
    """
    progress.begin("validate", sum(record.size for record in manifest.files))
    problems = [problem for record in manifest.files for problem in hash_again(source, record, progress=progress)]
    expected = {record.path for record in manifest.files}
    extra = [f.path for f in source.list().files if f.path.endswith(".safetensors") and f.path not in expected]
    problems += [f"{path}: a weight file that the manifest does not name" for path in extra]
    if not problems and INDEX_PATH in expected:
        raw = source.read(INDEX_PATH, 0, source.stat(INDEX_PATH).size)
        headers = {record.path: read_header(source, record.path) for record in manifest.records}
        problems += index_problems(raw, headers)
    return tuple(problems)


def records_problems(made_again: Iterable[FileRecord], manifest: Manifest) -> tuple[str, ...]:
    """Hold what the source gives today against what the manifest says was made of it."""
    then = {record.path: record for record in manifest.records}
    problems = []
    for record in made_again:
        old = then.pop(record.path)
        odd = sorted(
            n for n in record.tensors.keys() | old.tensors.keys() if record.tensors.get(n) != old.tensors.get(n)
        )
        problems += [f"{record.path}: {name} is not what the source holds" for name in odd]
        if not odd and record.sha256 != old.sha256:
            problems.append(f"{record.path}: SHA-256 would be {record.sha256}, the manifest says {old.sha256}")
    return (*problems, *(f"{path}: the source gives no such file" for path in then))
