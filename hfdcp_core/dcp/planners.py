"""Planners for tensors whose part on a rank is several boxes, which torch's own planners take for one.

A `DTensor` with a ``_StridedShard`` placement gives each rank every second, or n-th, run of rows (or columns). torch's
planners describe what a rank has by one offset and one shape; for such a tensor these overlap, and the save is refused.
The planners here say each run by itself, and hand its part of the local tensor, as a view, to the writer or reader::

    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path), planner=StridedSavePlanner())
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), planner=StridedLoadPlanner())

All other values are planned by torch. The writer must be one that can hold several boxes of one tensor: ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from hfdcp_core.box import Box
from hfdcp_core.errors import PlanError

Parts = Mapping[tuple[int, ...], torch.Tensor]
"""The boxes of a tensor that this rank has, by where they start."""


class StridedSavePlanner(DefaultSavePlanner):
    """Plans a save as torch's default planner does, and tensors with strided placements box by box."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_save_to_lowest_rank: bool = False,
    ) -> None:
        """Take torch's options; plans are not cached.

        Args:
            flatten_state_dict: Whether nested dictionaries become flat names.
            flatten_sharded_tensors: As torch has it, for older FSDP.
            dedup_save_to_lowest_rank: Whether replicas are written by the lowest rank instead of by turns.
        """
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        self._strided: dict[str, DTensor] = {}
        self._parts: dict[str, Parts] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take a state dict, and set its strided tensors apart."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict, self._strided, self._parts = _apart(self.state_dict)

    def create_local_plan(self) -> SavePlan:
        """Say what this rank has."""
        plan = super().create_local_plan()
        items = [
            _write_item(fqn, self._strided[fqn], start, part)
            for fqn, parts in self._parts.items()
            for start, part in parts.items()
        ]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what an item of the plan is about."""
        return _part(self._parts, index) if index.fqn in self._parts else super().lookup_object(index)


class StridedLoadPlanner(DefaultLoadPlanner):
    """Plans a load as torch's default planner does, and tensors with strided placements box by box."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        """Take torch's options.

        Args:
            flatten_state_dict: Whether nested dictionaries become flat names.
            flatten_sharded_tensors: As torch has it, for older FSDP.
            allow_partial_load: Whether names that the checkpoint lacks are passed over.
        """
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self._strided: dict[str, DTensor] = {}
        self._parts: dict[str, Parts] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take a state dict, and set its strided tensors apart."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict, self._strided, self._parts = _apart(self.state_dict)

    def create_local_plan(self) -> LoadPlan:
        """Say what this rank needs.

        Raises:
            PlanError: The checkpoint lacks a strided tensor, or has it in another shape.
        """
        items = list(self._plain_plan().items)
        for fqn, tensor in self._strided.items():
            stored = None if self.metadata is None else self.metadata.state_dict_metadata.get(fqn)
            if isinstance(stored, TensorStorageMetadata) and stored.size == tensor.size():
                chunks = [
                    ChunkStorageMetadata(torch.Size(start), part.size()) for start, part in self._parts[fqn].items()
                ]
                items += create_read_items_for_chunk_list(fqn, stored, chunks)
            elif stored is not None or not self.allow_partial_load:
                found = list(stored.size) if isinstance(stored, TensorStorageMetadata) else "no such tensor"
                raise PlanError(f"{fqn}: the state dict has {list(tensor.size())}, the checkpoint {found}")
        return LoadPlan(items)

    def _plain_plan(self) -> LoadPlan:
        """Let torch plan the rest; a name that only the checkpoint has would make it try an older way of naming."""
        whole = self.metadata
        if whole is not None:
            rest = {fqn: stored for fqn, stored in whole.state_dict_metadata.items() if fqn not in self._strided}
            self.metadata = replace(whole, state_dict_metadata=rest)
        try:
            return super().create_local_plan()
        finally:
            self.metadata = whole

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the part of this rank's tensor that a request fills."""
        return _part(self._parts, index) if index.fqn in self._parts else super().lookup_tensor(index)


def _apart(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor], dict[str, Parts]]:
    """Part a flat state dict into what torch plans, and strided tensors with their boxes on this rank."""
    strided = {fqn: value for fqn, value in state.items() if isinstance(value, DTensor) and _is_strided(value)}
    rest = {fqn: value for fqn, value in state.items() if fqn not in strided}
    return rest, strided, {fqn: parts_of(tensor) for fqn, tensor in strided.items()}


def _part(parts: Mapping[str, Parts], index: MetadataIndex) -> torch.Tensor:
    return parts[index.fqn][tuple(index.offset or ())]


def _is_strided(tensor: DTensor) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def _write_item(fqn: str, tensor: DTensor, start: tuple[int, ...], part: torch.Tensor) -> WriteItem:
    offset = torch.Size(start)
    data = TensorWriteData(
        ChunkStorageMetadata(offset, part.size()), TensorProperties.create_from_tensor(part), tensor.size()
    )
    return WriteItem(MetadataIndex(fqn, offset), WriteItemType.SHARD, tensor_data=data)


def parts_of(tensor: DTensor) -> Parts:
    """Return the boxes of a tensor that this rank has, each a view of its local tensor.

    Raises:
        PlanError: A placement is neither shards nor replicas, the cut is uneven where several dimensions of the mesh
            cut the same one of the tensor (torch cuts such tensors in more than one way), or the local tensor has
            another shape than its placements say.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return {}
    axes = [_indices(tensor, dim, coordinate) for dim in range(tensor.dim())]
    local = tensor.to_local().detach()
    shape = tuple(len(axis) for axis in axes)
    if tuple(local.shape) != shape:
        raise PlanError(f"a tensor with {tensor.placements} has {list(local.shape)} on this rank, not {list(shape)}")
    parts = {}
    for runs in itertools.product(*map(_runs, axes)):
        inside = Box(tuple(run.offset[0] for run in runs), tuple(run.shape[0] for run in runs))
        start = tuple(axis[at] for axis, at in zip(axes, inside.offset, strict=True))
        parts[start] = local[tuple(map(slice, inside.offset, inside.stop))]
    return parts


def _indices(tensor: DTensor, dim: int, coordinate: Sequence[int]) -> list[int]:
    """Return which indices along one dimension this rank has, in the order in which it has them."""
    cuts = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise PlanError(f"a tensor with {tensor.placements} has sums that are still to be made")
        if not placement.is_replicate() and getattr(placement, "dim", None) == dim:
            cuts.append((axis, placement))
    size, sizes = tensor.size(dim), [tensor.device_mesh.size(axis) for axis, _ in cuts]
    if len(cuts) > 1 and size % math.prod(sizes):
        raise PlanError(f"{size} along dimension {dim} cannot be cut evenly by {tensor.placements} of sizes {sizes}")
    held = torch.arange(size).reshape([1] * dim + [size])
    for axis, placement in cuts:
        number = tensor.device_mesh.size(axis)
        split: Any = placement  # torch's own way of cutting is no public method
        pieces, _ = split._split_tensor(held, number, with_padding=False, contiguous=False)  # noqa: SLF001
        held = pieces[coordinate[axis]]
    return [int(index) for index in held.reshape(-1)]


def _runs(indices: list[int]) -> Iterator[Box]:
    """Yield the stretches, as boxes of one dimension, in which indices follow one another.

    >>> [(run.offset, run.shape) for run in _runs([0, 1, 4, 5])]
    [((0,), (2,)), ((2,), (2,))]
    """
    start = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield Box((start,), (at - start,))
            start = at
