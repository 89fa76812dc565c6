"""A gathered catalog as torch's `Metadata`: what the planners of ``dcp.load`` match a state dict against."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hfdcp_core.catalog import Catalog, Shard, TensorSpec
from hfdcp_core.dcp.tensors import torch_dtype, torch_shape
from hfdcp_core.errors import PlanError, UnknownDtype
from hfdcp_core.plan import tile

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredShard:
    """What `Metadata.storage_data` holds for each chunk; the first three are torch's own."""

    relative_path: str
    """URL of the file."""
    shape: torch.Size
    """Shape of the chunk, as torch counts it."""
    dtype: torch.dtype
    """Its dtype as stored."""
    shard: Shard
    """The shard itself."""


def metadata_of(catalog: Catalog, url: str, *, strict: bool) -> Metadata:
    """Translate a catalog; of replicas one is taken.

    Args:
        catalog: What was gathered.
        url: Where, without secrets.
        strict: Whether a tensor with holes or overlaps is an error.

    Raises:
        PlanError: The shards do not hold every element exactly once; ``problems`` has every tensor and box.
    """
    by_name: dict[str, list[Shard]] = {name: [] for name in catalog.tensors}
    for shard in catalog.shards:
        by_name[shard.fqn].append(shard)
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, StoredShard] = {}
    problems: list[str] = []
    for name, spec in catalog.tensors.items():
        shards, found = _chosen(spec, by_name[name], strict=strict)
        problems += [f"{name}: {problem}" for problem in found]
        try:
            tensors[name] = _tensor(spec, shards)
        except UnknownDtype as error:
            _LOG.warning("%s: %s is left out: %s", url, name, error)
            continue
        storage.update(_stored(shards, url))
    PlanError.raise_for(f"{url}: the checkpoint does not hold every element exactly once", problems)
    # torch 2.7 asks what is in planner_data, also where there is none
    return Metadata(state_dict_metadata={**tensors}, planner_data={}, storage_data=storage)


def _chosen(spec: TensorSpec, shards: list[Shard], *, strict: bool) -> tuple[list[Shard], list[str]]:
    """Choose one shard for each box, and say what is wrong with them."""
    if 0 in spec.shape:
        return shards[:1], []
    kinds = [f"{s} is {s.dtype}, the tensor is {spec.dtype}" for s in shards if s.dtype != spec.dtype]
    chosen, problems = ([], kinds) if kinds else tile(spec, shards)
    if strict or not problems:
        return chosen, problems
    return list({(s.box.offset, s.box.shape): s for s in shards if s.dtype == spec.dtype}.values()), []


def _tensor(spec: TensorSpec, shards: Iterable[Shard]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(
            torch.Size(torch_shape(spec.dtype, shard.box.offset)), torch.Size(torch_shape(spec.dtype, shard.box.shape))
        )
        for shard in shards
    ]
    size = torch.Size(torch_shape(spec.dtype, spec.shape))
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(spec.dtype)), size, chunks)


def _stored(shards: Iterable[Shard], url: str) -> Mapping[MetadataIndex, StoredShard]:
    return {
        MetadataIndex(shard.fqn, torch.Size(torch_shape(shard.dtype, shard.box.offset))): StoredShard(
            f"{url}/{shard.span.path}",
            torch.Size(torch_shape(shard.dtype, shard.box.shape)),
            torch_dtype(shard.dtype),
            shard,
        )
        for shard in shards
    }
