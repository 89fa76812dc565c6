"""One file of shards, with the face of ``safetensors.safe_open``: what a reader's hook is handed.

Subclasses of torch's reader override ``_process_read_request(f, req, planner)`` and ask ``f`` for slices by name. Here
such a slice is one ranged read, from whatever storage, held against the checkpoint's own checksums where it is read
whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch

from hfdcp_core.box import Box
from hfdcp_core.catalog import Shard
from hfdcp_core.dcp.tensors import memory_of, torch_dtype, torch_shape
from hfdcp_core.errors import UsageError
from hfdcp_core.plan import row_major
from hfdcp_core.read import gather_strided, open_payload, page_aligned
from hfdcp_core.store import Source
from hfdcp_core.windows import Lattice, Strides

SCRATCH_BYTES = 4 << 20
"""Room for a strided box, or a part of one, before its elements are put into place."""
GAP_BYTES = 1 << 20
"""So much may lie between two runs of a strided box, and is read with them, where a request is a round trip."""


class ShardFile:
    """The shards of one file, opened for reading."""

    def __init__(self, source: Source, shards: Iterable[Shard]) -> None:
        """Take the store and the file's shards; nothing is read yet."""
        self._source = source
        self._shards = {shard.fqn: shard for shard in shards}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Hold nothing open between reads."""

    def keys(self) -> list[str]:
        """Return the names of the tensors of which the file holds a shard."""
        return list(self._shards)

    def get_slice(self, name: str) -> Slice:
        """Return a shard of which parts can be asked for."""
        return Slice(self._source, self._shards[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a whole shard."""
        return self.get_slice(name)[...]


class Slice:
    """A shard of which parts can be asked for, as torch counts its elements."""

    def __init__(self, source: Source, shard: Shard) -> None:
        """Take the store and the shard; nothing is read yet."""
        self._source, self._shard = source, shard

    def get_shape(self) -> list[int]:
        """Return the shard's shape."""
        return list(torch_shape(self._shard.dtype, self._shard.box.shape))

    def get_dtype(self) -> str:
        """Return the dtype as safetensors names it."""
        return self._shard.dtype

    def __getitem__(self, where: object) -> torch.Tensor:
        """Read a box of the shard: slices of step 1, an index or an ellipsis for each dimension, or for the first."""
        box, drop = _box(where, tuple(self.get_shape()))
        tensor = torch.empty(box.shape, dtype=torch_dtype(self._shard.dtype))
        read_box(self._source, self._shard, box, tensor)
        return tensor[tuple(0 if axis in drop else slice(None) for axis in range(len(box.shape)))] if drop else tensor


def read_box(source: Source, shard: Shard, box: Box, out: torch.Tensor) -> None:
    """Fill a tensor with a box of a shard, counted from the shard's first element, as torch counts.

    Args:
        source: The store that the shard lies in.
        shard: Which one.
        box: Which of its elements.
        out: A CPU tensor of the box's shape and the shard's dtype; its strides may be any.

    Raises:
        CorruptFile: The bytes contradict the shard or its checksum.
        StorageError: Reading failed.
    """
    memory = memory_of(out)
    if memory is None:
        raise UsageError(f"{shard}: elements cannot be read into a tensor on {out.device} of {out.dtype}")
    if 0 in box.shape:
        return
    view = view_of(shard, box)
    scratch = page_aligned(SCRATCH_BYTES)
    payload = open_payload(source, shard, scratch=page_aligned(SCRATCH_BYTES))
    gap = GAP_BYTES if source.remote else 0
    gather_strided(payload.read_into, view, memory, scratch=scratch, gap_bytes=gap)
    payload.check()


def view_of(shard: Shard, box: Box) -> Strides:
    """Return where the elements of a box lie in a shard that is stored row-major."""
    lattice = Lattice.of(shard.dtype, shard.box.shape)  # packed kinds are addressed by the byte, as torch counts them
    return Strides(0, box.shape, row_major(lattice.shape)).part(box.offset, box.shape)


def _box(where: object, shape: tuple[int, ...]) -> tuple[Box, set[int]]:
    """Turn an index into a box, and the dimensions that it drops."""
    parts = where if isinstance(where, tuple) else (where,)
    if Ellipsis in parts:
        middle = parts.index(Ellipsis)
        fill = (slice(None),) * (len(shape) - len(parts) + 1)
        parts = (*parts[:middle], *fill, *parts[middle + 1 :])
    if len(parts) > len(shape):
        raise IndexError(f"{len(parts)} indices for a tensor of {len(shape)} dimensions")
    parts = (*parts, *(slice(None),) * (len(shape) - len(parts)))
    offset, extents, drop = [], [], set()
    for axis, (part, extent) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, int):
            if not -extent <= part < extent:
                raise IndexError(f"index {part} is out of range for dimension {axis} of {extent}")
            start, stop = part % extent, part % extent + 1
            drop.add(axis)
        elif isinstance(part, slice) and part.step in (None, 1):
            start, stop, _ = part.indices(extent)
        else:
            raise IndexError(f"{part!r}: a slice is read with step 1, or by one index")
        offset.append(start)
        extents.append(max(0, stop - start))
    return Box(tuple(offset), tuple(extents)), drop
