"""torch's `QuantizedHuggingFaceStorageReader` on any storage: scaled numbers become plain ones on the way in.

``X`` of eight bits with ``X_scale_inv`` or ``X_scale``, and ``X_blocks`` with ``X_scales`` (MXFP4), as
`hfdcp_core.quantization` tells them. Each request reads the numbers and the scales of its own box. Where torch's own
reader goes wrong without a word (another block size than 128, scales of rows, MXFP4 of which it fills the first part
only, numbers in several shards) the values here are right; the metadata states the dtype and shape that come out.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import EllipsisType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, Shard, TensorSpec
from hfdcp_core.dcp.measured import Range
from hfdcp_core.dcp.metadata import StoredShard
from hfdcp_core.dcp.reader import HuggingFaceStorageReader
from hfdcp_core.dcp.shard_file import ShardFile, read_box
from hfdcp_core.dcp.tensors import memory_of, stored_name, torch_dtype
from hfdcp_core.errors import PlanError, StorageNotFound
from hfdcp_core.manifest import CONFIG_PATH, Numerics
from hfdcp_core.numeric import Bits, Workspace
from hfdcp_core.operate import operate
from hfdcp_core.operation import Operation, pull, tiles
from hfdcp_core.quantization import companions, settle
from hfdcp_core.quantization_config import stated_block
from hfdcp_core.recipe import Definition

ROOM_BYTES = 8 << 20
"""How much of each operand is held while a request is worked off."""


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads a quantised checkpoint into plain tensors.

    A drop-in for the class of the same name in `torch.distributed.checkpoint` (2.13); names are torch's: MXFP4 numbers
    keep the name ``X_blocks`` and have the shape ``[…, G * 32]``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 0,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
        **options: Any,
    ) -> None:
        """Name a checkpoint; nothing is read yet.

        Args:
            path: Its folder, as `HuggingFaceStorageReader` takes it.
            thread_count: Requests that are read at once; 0 for 8.
            target_dtype: Dtype that the metadata states for what was quantised.
            block_size: Rows and columns of a block, where neither ``config.json`` nor the shapes say it.
            **options: As `HuggingFaceStorageReader` takes them.
        """
        super().__init__(path, thread_count, **options)
        self.target_dtype, self.block_size = target_dtype, block_size
        self._made: dict[str, Operation] = {}
        self._shards: dict[str, list[Shard]] = {}

    def _metadata_of(self, catalog: Catalog) -> Metadata:
        metadata = super()._metadata_of(catalog)
        self._shards = {name: [] for name in catalog.tensors}
        for shard in catalog.shards:
            self._shards[shard.fqn].append(shard)
        self._made = self._operations(catalog)
        for name, operation in self._made.items():
            self._restate(metadata, name, operation)
        return metadata

    def _operations(self, catalog: Catalog) -> dict[str, Operation]:
        """Say how each quantised tensor becomes a plain one."""
        plain = [Definition(name, spec, name) for name, spec in catalog.tensors.items()]
        if not companions({definition.fqn: definition for definition in plain}):
            return {}
        block = self._stated_block() or (self.block_size, self.block_size)
        asked = Numerics(dtype="", dequantize=True, block_size=block)
        made = (definition for definition in settle(plain, asked).definitions if definition.operation)
        target = stored_name(self.target_dtype)
        return {
            definition.source: replace(definition.operation, target=replace(definition.spec, dtype=target))
            for definition in made
            if definition.operation is not None
        }

    def _stated_block(self) -> tuple[int, ...]:
        try:
            size = self._source.stat(CONFIG_PATH).size
            return stated_block(self._source.read(CONFIG_PATH, 0, size).decode())
        except StorageNotFound:
            return ()

    def _restate(self, metadata: Metadata, name: str, operation: Operation) -> None:
        """Let the metadata say what comes out: one whole chunk of another dtype, and of another shape for MXFP4."""
        shape = torch.Size(as_torch(operation, Box.whole(operation.target.shape)).shape)
        start = torch.Size([0] * len(shape))
        stored = StoredShard(
            f"{self._source.url}/{self._shards[name][0].span.path}",
            shape,
            self.target_dtype,
            Shard(name, operation.target.dtype, Box.whole(tuple(shape)), self._shards[name][0].span),
        )
        storage: dict[MetadataIndex, Any] = metadata.storage_data
        for index in [index for index in storage if index.fqn == name]:
            del storage[index]
        storage[MetadataIndex(name, start)] = stored
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype=self.target_dtype), shape, [ChunkStorageMetadata(start, shape)]
        )

    def _range_of(self, request: ReadItem) -> Range | None:
        return None if request.storage_index.fqn in self._made else super()._range_of(request)

    def _process_read_request(self, f: ShardFile, req: ReadItem, planner: LoadPlanner) -> None:
        operation = self._made.get(req.storage_index.fqn)
        if operation is None:
            super()._process_read_request(f, req, planner)
            return
        box = Box(tuple(req.storage_offsets), tuple(req.lengths))
        target = planner.resolve_tensor(req).detach()
        if tuple(target.size()) != box.shape:
            raise PlanError(f"{req.storage_index.fqn}: asked for {box}, to fill a tensor of {list(target.size())}")
        made = torch.empty(as_torch(operation, box).shape, dtype=self.target_dtype)
        self._make(operation, as_torch(operation, box), made)
        target.copy_(made.transpose(-1, -2) if operation.transposed else made)
        planner.commit_tensor(req, target)

    def _make(self, operation: Operation, box: Box, out: torch.Tensor) -> None:
        """Make a box of what an operation makes, in tiles whose operands are small."""
        workspace, elements = Workspace(), array_of(out)
        for tile in tiles(operation, box, [ROOM_BYTES for _ in operation.operands]):
            operands = [
                self._read(operand.fqn, operand.spec, needed)
                for operand, needed in zip(operation.operands, pull(operation, tile), strict=True)
            ]
            inside = tile.relative_to(box)
            where: tuple[slice | EllipsisType, ...] = (*map(slice, inside.offset, inside.stop), ...)
            operate(operation, tile, operands, elements[where], workspace)

    def _read(self, name: str, spec: TensorSpec, box: Box) -> Bits:
        """Read a box of a tensor from the shards that hold it."""
        tensor = torch.empty(box.shape, dtype=torch_dtype(spec.dtype))
        for shard in self._shards[name]:
            if shared := shard.box.intersect(box):
                inside = shared.relative_to(box)
                part = tensor[tuple(map(slice, inside.offset, inside.stop))]
                read_box(self._data, shard, shared.relative_to(shard.box), part)
        return array_of(tensor)


def array_of(tensor: torch.Tensor) -> Bits:
    """Return the memory of a tensor that was made here."""
    array = memory_of(tensor)
    if array is None:
        raise TypeError(f"a tensor of {tensor.dtype} has no plain memory")
    return array


def as_torch(operation: Operation, box: Box) -> Box:
    """Turn a box of what an operation makes into torch's, or back: torch does not transpose stacked experts."""
    if not operation.transposed:
        return box
    return Box((*box.offset[:-2], *box.offset[:-3:-1]), (*box.shape[:-2], *box.shape[:-3:-1]))
