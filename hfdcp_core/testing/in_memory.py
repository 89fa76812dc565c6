"""Small checkpoints in memory: files go in as bytes, and what comes out is read by safetensors' own reader.

For questions that one tensor and a few files decide; real writers and real processes are in
`hfdcp_core.testing.checkpoints`::

    files = {"model.safetensors": weights_file({"w": Piece.of(np.ones((2, 2), np.float32))})}
    assert publish_files(files).tensors["w"].shape == (2, 2)
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import safetensors

from hfdcp_core import publish
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import HfdcpError
from hfdcp_core.job import Job
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH, Manifest
from hfdcp_core.safetensors_file import SHARDING_INFO, write_header
from hfdcp_core.store import Sink, open_store

Files = Mapping[str, bytes]
"""Content of each file by its name."""
_KINDS = {"f": "F", "i": "I", "u": "U", "c": "C"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or a box of one, as it lies in a file."""

    dtype: str
    """What safetensors calls it."""
    shape: tuple[int, ...]
    """Its elements along each dimension."""
    data: bytes
    """Its elements, row-major."""
    at: tuple[int, ...] | None = None
    """Where the box starts in its tensor; None for a whole one that says nothing of it."""

    @classmethod
    def of(cls, array: npt.ArrayLike, *, at: Sequence[int] | None = None) -> Piece:
        """Take the elements of an array.

        >>> Piece.of(np.float32(2.5)).dtype, Piece.of(np.array([True])).dtype
        ('F32', 'BOOL')
        """
        values = np.asarray(array)
        kind = values.dtype.kind
        dtype = "BOOL" if kind == "b" else f"{_KINDS[kind]}{8 * values.itemsize}"
        return cls(dtype, values.shape, values.tobytes(), None if at is None else tuple(at))


@dataclass(frozen=True, slots=True)
class Output:
    """What a run made."""

    manifest: Manifest
    """What it says of itself."""
    files: Files
    """Everything that a loader sees, by name."""
    tensors: Mapping[str, Piece]
    """Each tensor, as safetensors' own reader gives it."""

    def file_of(self, fqn: str) -> str:
        """Return the one file that really holds a tensor."""
        (path,) = [path for path, raw in self.files.items() if path.endswith(".safetensors") and fqn in _read(raw)]
        return path


def _as_torch_counts(piece: Piece) -> tuple[int, ...]:
    """Return where a piece starts in torch's own elements, of which one may be two of the format's."""
    at = piece.at or ()
    return (*at[:-1], at[-1] // dtype_named(piece.dtype).packed) if at else at


def weights_file(pieces: Mapping[str, Piece], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file; where a piece says at which offset it lies, so does the header, as torch's does."""
    offsets = {
        name: {"saved_offsets": _as_torch_counts(piece)} for name, piece in pieces.items() if piece.at is not None
    }
    said = {"DCP_VERSION": "1.0", SHARDING_INFO: json.dumps(offsets)} if offsets else {}
    specs = {name: TensorSpec(piece.dtype, piece.shape) for name, piece in pieces.items()}
    header, _ = write_header(specs, metadata={"format": "pt", **said} if metadata is None else metadata)
    return header + b"".join(piece.data for piece in pieces.values())


def rank_files(*ranks: Mapping[str, Piece]) -> Files:
    """Return the files that torch's Hugging Face writer leaves, one for each rank."""
    return {
        f"shard-{number:05d}-model-00001-of-00001.safetensors": weights_file(pieces)
        for number, pieces in enumerate(ranks, 1)
    }


def stored(files: Files) -> Sink:
    """Return a store with these files; a name may begin with folders."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for path, raw in files.items():
        store.put(path, raw)
    return store


def publish_files(files: Files, **options: object) -> Output:
    """Run the whole chain, but the push, upon these files.

    Args:
        files: The checkpoint.
        options: What a `Job` is asked beside source and sink.

    Raises:
        HfdcpError: As the chain does.
    """
    sink = stored({})
    manifest = publish.make(_job(files, sink, options))
    found = {name: sink.read(name, 0, sink.stat(name).size) for name in _seen(sink)}
    read = [_read(raw) for name, raw in found.items() if name.endswith(".safetensors")]
    return Output(manifest, found, {fqn: piece for file in read for fqn, piece in file.items()})


def refusal_of(files: Files, **options: object) -> HfdcpError:
    """Run the chain, which must fail and leave nothing under a name that a loader looks for; return why it failed."""
    sink = stored({})
    try:
        publish.make(_job(files, sink, options))
    except HfdcpError as error:
        assert not _seen(sink), f"left behind: {', '.join(_seen(sink))}"
        return error
    raise AssertionError(f"was not refused, but made {', '.join(_seen(sink))}")


def _job(files: Files, sink: Sink, options: Mapping[str, object]) -> Job:
    plain = {"source": stored(files).url, "sink": sink.url, "workers": 1, **options}
    return Job(**plain)  # type: ignore[arg-type]  # options are passed on as they come


def _seen(sink: Sink) -> list[str]:
    """List what a loader or a person would take for an output."""
    names = [stamp.path for stamp in sink.list().files]
    return sorted(name for name in names if name.endswith(".safetensors") or name in (INDEX_PATH, MANIFEST_PATH))


def _read(raw: bytes) -> dict[str, Piece]:
    entries = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]  # it has no types
    return {name: Piece(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in entries}
