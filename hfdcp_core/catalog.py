"""A catalog lists the tensors of a checkpoint and the shards they lie in.

Two catalogs meet in a plan: the one that was *gathered* (what is there) and the one that was laid out (what is
wanted). Both are plain values: they hold no tensor, buffer, handle or client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hfdcp_core.box import Box
from hfdcp_core.dtypes import size_in_bytes

RAW = "raw"
"""Encoding of a span that holds exactly the row-major little-endian bytes of its box."""
TORCH_SAVE = "torch_save"
"""Encoding of a span that holds one whole ``torch.save`` archive, whose payload is found by its zip directory."""
TORCH_SAVE_ZSTD = "torch_save+zstd"
"""Encoding of a span that holds such an archive, compressed with Zstandard: it can only be read from its start on."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, whatever its values."""

    dtype: str
    """Its safetensors name."""
    shape: tuple[int, ...]
    """Its extents, in logical elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return size_in_bytes(self.dtype, self.shape)

    def __str__(self) -> str:
        """Write it as ``F32[4, 8]``."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes ``[start, stop)`` of one file.

    >>> Span("a.bin", 8, 24).length
    16
    """

    path: str
    """Name of the file, relative to its store."""
    start: int
    """First byte."""
    stop: int
    """Behind the last byte."""

    def __post_init__(self) -> None:
        """Refuse a span that ends before it starts."""
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"{self.path}: [{self.start}, {self.stop}) is not a span")

    @property
    def length(self) -> int:
        """How many bytes it covers."""
        return self.stop - self.start

    def __str__(self) -> str:
        """Write it as ``file[start:stop]``."""
        return f"{self.path}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Shard:
    """One box of a tensor and the span that holds it."""

    fqn: str
    """Name of the tensor."""
    dtype: str
    """Safetensors name of its dtype."""
    box: Box
    """Which elements."""
    span: Span
    """Which bytes: the payload where the encoding is raw, else the whole item."""
    encoding: str = RAW
    """How the elements lie in the span: `RAW`, `TORCH_SAVE` or `TORCH_SAVE_ZSTD`."""

    def __str__(self) -> str:
        """Say which elements lie where."""
        return f"{self.fqn}{self.box} in {self.span}"


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one state of a file from another; it enters the plan's digest."""

    path: str
    """Name of the file, relative to its store."""
    size: int
    """Bytes."""
    tag: str
    """Generation, ETag, or modification time and inode: whatever the storage has that changes with the content."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry of the checkpoint that holds no tensor, or that nobody wants by default."""

    name: str
    """Its name in the checkpoint."""
    reason: str
    """Why it is left out, in words for a person."""


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """An entry that is no tensor, and the item that holds it: a ``torch.save`` archive of some pickled object."""

    name: str
    """Its name, as the entry in `Catalog.skipped` has it."""
    span: Span
    """The whole item."""
    encoding: str = TORCH_SAVE
    """How the archive lies in the span."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The tensors of a checkpoint, the shards they lie in, and the files that hold them.

    ``tensors`` keeps the order of the checkpoint; ``shards`` may be in any order and may hold several shards of one
    box (replicas). That every element is there is not promised here: `hfdcp_core.plan.reshard` proves it.
    """

    format: str
    """``dcp``, ``dcp-safetensors`` or ``safetensors``."""
    tensors: Mapping[str, TensorSpec]
    """Tensors by fully qualified name, in the checkpoint's order."""
    shards: tuple[Shard, ...]
    """Which box of which tensor lies where."""
    files: tuple[FileStamp, ...] = ()
    """The files that the shards lie in, and those that told us so."""
    skipped: tuple[Skipped, ...] = ()
    """Entries that hold no tensor."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are there but that no safetensors file can hold, or that we cannot read: name and why."""
    nesting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where the writer stated it: the keys of the nested state dict that lead to a tensor, its own name last."""
    unproved: str | None = None
    """Why a lost shard could go unseen: nothing states the global shapes. None where they are stated."""
    objects: tuple[ObjectItem, ...] = ()
    """Where the entries lie that are no tensors, for those of which the checkpoint says it."""

    def __post_init__(self) -> None:
        """Refuse shards that cannot belong to their tensor."""
        shapes = {fqn: spec.shape for fqn, spec in self.tensors.items()}
        # Ranks cut most tensors in the same way: each cut is looked at once.
        cuts = {(shapes.get(shard.fqn), shard.box.offset, shard.box.shape) for shard in self.shards}
        if all(_fits(Box(offset, extents), whole) for whole, offset, extents in cuts):
            return
        stray = next(shard for shard in self.shards if not _fits(shard.box, shapes.get(shard.fqn)))
        if stray.fqn not in shapes:
            raise ValueError(f"{stray}: the catalog has no tensor of that name")
        raise ValueError(f"{stray}: outside of its tensor of shape {list(shapes[stray.fqn])}")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())


def _fits(box: Box, shape: tuple[int, ...] | None) -> bool:
    return shape is not None and box.within(Box.whole(shape))
