"""Files that appear together: all are written before the first gets its name, and what names them comes last.

Until then an older output in the same folder stays as it was. While names change there is neither index nor manifest,
so that a process that dies there leaves something that nobody takes for a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from hfdcp_core import wire
from hfdcp_core.errors import CorruptFile, StorageNotFound, ValidationError
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH, Manifest
from hfdcp_core.safetensors_file import parse_index
from hfdcp_core.store import Sink, Upload, commit_all


class Together:
    """A sink whose files all wait for `commit`."""

    def __init__(self, sink: Sink) -> None:
        """Take the sink that the files are for."""
        self._sink = sink
        self._held: list[_Held] = []

    def create(self, path: str, size: int) -> _Held:
        """Begin a file that does not appear by its own commit."""
        held = _Held(self._sink.create(path, size))
        self._held.append(held)
        return held

    def commit(self) -> None:
        """Let every finished file appear.

        Raises:
            ValidationError: A file was begun and not finished.
        """
        if not all(held.whole for held in self._held):
            raise ValidationError("a file that belongs to the output was not finished")
        commit_all([held.upload for held in self._held])
        self._held.clear()

    def abort(self) -> None:
        """Remove what did not appear."""
        for held in self._held:
            held.upload.abort()
        self._held.clear()


class _Held:
    """One file, until all are there."""

    def __init__(self, upload: Upload) -> None:
        self.upload, self.whole = upload, False

    def write(self, buffer: memoryview) -> None:
        """Append bytes."""
        self.upload.write(buffer)

    def commit(self) -> None:
        """Say that the file is whole, and let it be durable before any gets its name."""
        if settle := getattr(self.upload, "settle", None):
            settle()
        self.whole = True

    def abort(self) -> None:
        """Remove the file."""
        self.upload.abort()


def withdraw(sink: Sink) -> frozenset[str]:
    """Take away what names the files of an older output, and return the names of those files."""
    named: set[str] = set()
    with suppress(StorageNotFound, CorruptFile):
        named.update(parse_index(_whole(sink, INDEX_PATH), path=INDEX_PATH).weight_map.values())
    with suppress(StorageNotFound, ValidationError):
        named.update(record.path for record in wire.load_manifest(_whole(sink, MANIFEST_PATH)).records)
    sink.delete(MANIFEST_PATH)
    sink.delete(INDEX_PATH)
    return frozenset(named)


def _whole(sink: Sink, path: str) -> bytes:
    return sink.read(path, 0, sink.stat(path).size)


def complete(sink: Sink, manifest: Manifest | None, index: bytes, former: Iterable[str]) -> None:
    """Write what names the files, the manifest last, and remove those of the older output that are not named."""
    sink.put(INDEX_PATH, index)
    if manifest is not None:
        sink.put(MANIFEST_PATH, wire.dump_manifest(manifest))
    for path in sorted({*former} - {*parse_index(index, path=INDEX_PATH).weight_map.values()}):
        sink.delete(path)
    sink.sweep()
