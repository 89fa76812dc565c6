"""Checkpoints of any tiling, written in one process in a few milliseconds: for laws over thousands of examples.

Real ranks cut tensors in the ways that some mesh allows, and take seconds to start. Here any boxes of any tensors are
put into any files: `distcp` makes what ``dcp.save`` leaves, out of torch's own metadata classes and ``torch.save``;
`sharded` what torch's ``HuggingFaceStorageWriter(save_distributed=True)`` leaves; `plain` a Hugging Face folder. All
return the files as bytes, so that a test can damage any of them before it stores them. The safetensors files are put
together by hand, so that they owe nothing to the writer that they test.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import zstandard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.layout import shard_name
from hfdcp_core.manifest import INDEX_PATH

Files = dict[str, bytes]
"""A checkpoint: its files by name."""
Style = Literal["plain", "permuted", "view", "zstd"]
"""How an item holds its elements: in order, transposed, inside a larger storage, compressed."""
_SLACK = 3
"""Elements before and behind those of a view."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor as it was before it was cut."""

    spec: TensorSpec
    """Its dtype and shape."""
    data: bytes
    """Its row-major little-endian bytes."""

    def part(self, box: Box) -> bytes:
        """Return the bytes of a box; its cuts fall on whole bytes.

        >>> list(Whole(TensorSpec("U8", (2, 3)), bytes(range(6))).part(Box((0, 1), (2, 2))))
        [1, 2, 4, 5]
        """
        elements, nbytes = unit(self.spec.dtype)
        if not box.shape or not self.data:
            return self.data
        units = np.frombuffer(self.data, np.uint8).reshape((*_scaled(self.spec.shape, elements), nbytes))
        stop = _scaled(box.stop, elements)
        return units[tuple(map(slice, _scaled(box.offset, elements), stop))].tobytes()


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a tensor, and the rank that saves it."""

    fqn: str
    """Name of the tensor."""
    box: Box
    """Which elements, counted as safetensors does."""
    rank: int = 0
    """Whose file it goes to."""
    style: Style = "plain"
    """How its elements lie there, in a ``.distcp`` file."""


def unit(dtype: str) -> tuple[int, int]:
    """Return the smallest number of elements that takes whole bytes, and how many.

    >>> unit("F32"), unit("F4"), unit("F6_E2M3")
    ((1, 4), (2, 1), (4, 3))
    """
    bits = dtype_named(dtype).bits
    elements = next(count for count in (1, 2, 4) if bits * count % 8 == 0)
    return elements, bits * elements // 8


def _scaled(numbers: tuple[int, ...], divisor: int) -> tuple[int, ...]:
    return (*numbers[:-1], numbers[-1] // divisor) if numbers else numbers


# ---- what dcp.save leaves -------------------------------------------------------------------------------------------


def distcp(
    tensors: Mapping[str, Whole], placed: Iterable[Placed], objects: Mapping[str, object] | None = None
) -> tuple[Metadata, Files]:
    """Write boxes into one ``.distcp`` file for each rank; ``.metadata`` is pickled by `pickled`, after any damage.

    A box that is placed twice is listed twice and stored once, as torch stores replicas. Boxes without elements that
    share their offset with another one are listed only.
    """
    files: dict[str, bytearray] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    boxes: dict[str, list[ChunkStorageMetadata]] = {fqn: [] for fqn in tensors}
    for place in sorted(placed, key=lambda place: place.box.volume == 0):
        spec = tensors[place.fqn].spec
        offset, size = (_torch_numbers(spec.dtype, numbers) for numbers in (place.box.offset, place.box.shape))
        boxes[place.fqn].append(ChunkStorageMetadata(offset, size))
        # Names that come from other ranks are other objects, which pickle spells again.
        index = MetadataIndex(place.fqn if place.rank == 0 else "".join(list(place.fqn)), offset)
        if index not in stored:
            raw = item(tensors[place.fqn], place.box, place.style)
            transforms = ["stream.zstd/1"] if place.style == "zstd" else None
            stored[index] = _appended(files, place.rank, raw, transforms)
    for name, value in (objects or {}).items():
        stored[MetadataIndex(name)] = _appended(files, 0, _saved(value), None)
    listed: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        fqn: _listed(whole.spec, boxes[fqn]) for fqn, whole in tensors.items()
    }
    listed |= {name: BytesStorageMetadata() for name in objects or {}}
    planner = {name: (name,) for name in listed}
    meta = StorageMeta(checkpoint_id="somewhere", save_id="a save")
    return Metadata(listed, planner, stored, meta, "1.0.0"), {path: bytes(data) for path, data in files.items()}


def pickled(metadata: Metadata) -> bytes:
    """Return the bytes of ``.metadata``."""
    return pickle.dumps(metadata)


def item(whole: Whole, box: Box, style: Style = "plain") -> bytes:
    """Return the ``torch.save`` archive of one box."""
    row = dtype_named(whole.spec.dtype)
    size = _torch_numbers(whole.spec.dtype, box.shape)
    data, strides, start = whole.part(box), _row_major(size), 0
    nbytes = row.bits * row.packed // 8
    if style == "permuted" and data:
        data = np.frombuffer(data, f"V{nbytes}").reshape(size).transpose().tobytes()
        strides = _row_major(size[::-1])[::-1]
    elif style == "view":
        start = _SLACK
        data = bytes(nbytes * _SLACK) + data + bytes(nbytes)
    dtype = getattr(torch, str(row.torch))
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    raw = _saved(flat.as_strided(size, strides, start))
    return zstandard.ZstdCompressor().compress(raw) if style == "zstd" else raw


def _saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _row_major(size: Sequence[int]) -> tuple[int, ...]:
    behind = itertools.accumulate(reversed(size[1:]), lambda product, extent: product * max(extent, 1), initial=1)
    return tuple(behind)[::-1] if size else ()


def _torch_numbers(dtype: str, numbers: tuple[int, ...]) -> torch.Size:
    """Count the last dimension in torch's elements, of which one may be two."""
    return torch.Size(_scaled(numbers, dtype_named(dtype).packed))


def _appended(files: dict[str, bytearray], rank: int, raw: bytes, transforms: list[str] | None) -> _StorageInfo:
    path = f"__{rank}_0.distcp"
    file = files.setdefault(path, bytearray())
    file += raw
    return _StorageInfo(path, len(file) - len(raw), len(raw), transforms)


def _listed(spec: TensorSpec, boxes: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=getattr(torch, str(dtype_named(spec.dtype).torch)))
    return TensorStorageMetadata(properties, _torch_numbers(spec.dtype, spec.shape), boxes)


# ---- safetensors ----------------------------------------------------------------------------------------------------


def sharded(tensors: Mapping[str, Whole], placed: Iterable[Placed], ranks: int) -> Files:
    """Write boxes as torch's ``HuggingFaceStorageWriter(save_distributed=True)`` does on ``ranks`` ranks.

    A file has room for one box of a tensor; a rank with several of them writes several files, and so do all ranks.
    """
    parts: dict[tuple[int, int], dict[str, Box]] = {}
    for place in placed:
        numbers = (part for part in itertools.count(1) if place.fqn not in parts.get((place.rank, part), {}))
        parts.setdefault((place.rank, next(numbers)), {})[place.fqn] = place.box
    count = max((part for _, part in parts), default=1)
    names = itertools.product(range(ranks), range(1, count + 1))
    return {
        shard_name(rank + 1, part, count): _shard_file(tensors, parts.get((rank, part), {})) for rank, part in names
    }


def _shard_file(tensors: Mapping[str, Whole], boxes: Mapping[str, Box]) -> bytes:
    offsets = {
        fqn: {"saved_offsets": list(_torch_numbers(tensors[fqn].spec.dtype, box.offset))} for fqn, box in boxes.items()
    }
    about = {"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    held = {
        fqn: Whole(TensorSpec(tensors[fqn].spec.dtype, box.shape), tensors[fqn].part(box)) for fqn, box in boxes.items()
    }
    return safetensors_file(held, about)


def plain(tensors: Mapping[str, Whole], numbers: Mapping[str, int]) -> Files:
    """Write whole tensors into files as Hugging Face names them, each into the one of its number, with an index."""
    count = max(numbers.values(), default=1)
    paths = {fqn: f"model-{number:05d}-of-{count:05d}.safetensors" for fqn, number in numbers.items()}
    files = {
        path: safetensors_file({fqn: tensors[fqn] for fqn in tensors if paths[fqn] == path}, {"format": "pt"})
        for path in sorted(set(paths.values()))
    }
    total = sum(len(whole.data) for whole in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": paths}
    return {**files, INDEX_PATH: json.dumps(index, indent=2).encode()}


def safetensors_file(tensors: Mapping[str, Whole], about: Mapping[str, str]) -> bytes:
    """Write a safetensors file, in the given order, without any of our own code for the format."""
    header: dict[str, object] = {"__metadata__": dict(about)}
    start = 0
    for fqn, whole in tensors.items():
        stop = start + len(whole.data)
        header[fqn] = {"dtype": whole.spec.dtype, "shape": list(whole.spec.shape), "data_offsets": [start, stop]}
        start = stop
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + b"".join(whole.data for whole in tensors.values())


def read_safetensors(raw: bytes) -> dict[str, Whole]:
    """Return what a right safetensors file holds, again without our own code for the format."""
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        fqn: Whole(
            TensorSpec(entry["dtype"], tuple(entry["shape"])),
            raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for fqn, entry in header.items()
    }
