"""What each rank is told to write: torch's plans of a save, laid out as files.

All plans are known to one rank before any data move. So the final files can be laid out then, header and all, and every
rank be told at which byte of which file each of its boxes belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, Shard, Span, TensorSpec
from hfdcp_core.dcp.peers import Address
from hfdcp_core.dcp.tensors import logical_shape, stored_name, torch_shape
from hfdcp_core.errors import PlanError, UnknownDtype
from hfdcp_core.layout import Part, Target, lay_out, lay_out_shards, shard_name
from hfdcp_core.plan import FilePlan, reshard
from hfdcp_core.recipe import Definition

Key = tuple[str, tuple[int, ...]]
"""Name of a tensor and offset of a box of it, as torch counts."""
RESERVED = "__metadata__"
"""Name that a safetensors header keeps for itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a file one box goes; all counts are torch's."""

    file: int
    """Number of the file in `Order.files`."""
    start: int
    """First byte, in the file, of what it holds of the tensor."""
    whole: tuple[int, ...]
    """Shape of what the file holds of the tensor."""
    at: tuple[int, ...]
    """Where the box starts in that."""
    shape: tuple[int, ...]
    """Its extents."""


@dataclass(frozen=True, slots=True)
class OrderedFile:
    """One file that is to be written."""

    path: str
    """Its name."""
    header: bytes
    """All bytes before the data."""
    size: int
    """Bytes of the whole file."""
    shared: str = ""
    """Where it lies while all ranks write to it; empty where one rank makes it alone."""


@dataclass(frozen=True, slots=True)
class HandedBox:
    """A box that a rank has for whoever makes the file that it belongs to."""

    key: Key
    """Which box."""
    shape: tuple[int, ...]
    """Its extents, as torch counts."""
    start: int
    """Its first byte in the run of the rank's boxes."""
    nbytes: int
    """How many there are."""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part in files that single ranks make of what all hand over."""

    rank: int
    """Its number."""
    boxes: tuple[HandedBox, ...]
    """What it hands over."""
    plans: tuple[FilePlan, ...]
    """The files that it makes; they name the ranks' runs as files of their source."""
    addresses: tuple[Address, ...] = ()
    """Where each rank listens."""


@dataclass(frozen=True, slots=True)
class Order:
    """What one rank writes."""

    files: tuple[OrderedFile, ...] = ()
    """The files."""
    places: Mapping[Key, Place] = field(default_factory=dict)
    """Where each of its boxes goes."""
    staged: bool = False
    """Whether the files are shards on the way to whole tensors."""
    leave: bool = False
    """Whether the files are left under temporary names, for the first rank to let them appear."""
    share: Share | None = None
    """Its part in files that single ranks make; None where it writes its boxes itself."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """What one rank has: a box of each tensor, or several."""

    specs: Mapping[str, TensorSpec]
    """The tensors, whole."""
    keys: tuple[Key, ...]
    """The boxes, in the plan's order."""
    shapes: tuple[tuple[int, ...], ...]
    """Their shapes, as torch counts."""


def is_tensor(item: WriteItem) -> bool:
    """Whether an item of a plan is a tensor or a part of one."""
    return item.type in (WriteItemType.TENSOR, WriteItemType.SHARD)


def key_of(item: WriteItem) -> Key:
    """Return which box an item is."""
    return item.index.fqn, tuple(data_of(item).chunk.offsets)


def data_of(item: WriteItem) -> TensorWriteData:
    """Return what the plan says of a tensor.

    Raises:
        PlanError: It says nothing.
    """
    if item.tensor_data is None:
        raise PlanError(f"{item.index.fqn}: the planner does not say which part of the tensor it is")
    return item.tensor_data


def boxes_of(plan: SavePlan) -> Boxes:
    """List the boxes of a rank's plan.

    Raises:
        PlanError: safetensors cannot hold some of them; ``problems`` names all.
    """
    specs, keys, shapes, problems = {}, [], [], []
    for item in filter(is_tensor, plan.items):
        data, name = data_of(item), item.index.fqn
        try:
            kind = stored_name(data.properties.dtype)
        except UnknownDtype as error:
            problems.append(f"{name}: {error}")
            continue
        if name == RESERVED:
            problems.append(f"{name}: the name that a safetensors header keeps for itself")
        specs[name] = TensorSpec(kind, logical_shape(kind, tuple(data.size)))
        keys.append((name, tuple(data.chunk.offsets)))
        shapes.append(tuple(data.chunk.sizes))
    PlanError.raise_for("tensors that safetensors cannot hold; leave them out of the state dict", problems)
    return Boxes(specs, tuple(keys), tuple(shapes))


def whole_target(
    ranks: Sequence[Boxes], *, mapping: Mapping[str, int] | None, max_file_size: int, save: str
) -> tuple[Target, list[Order]]:
    """Lay out files of whole tensors, to which all ranks write.

    Raises:
        PlanError: The ranks together do not have every element of every tensor once, or the mapping does not fit.
    """
    specs = {name: spec for boxes in ranks for name, spec in boxes.specs.items()}
    definitions = tuple(Definition(name, spec, name) for name, spec in specs.items())
    target = lay_out(definitions, max_file_size=max_file_size, file_index=mapping, as_torch=True, save=save)
    reshard(_held(ranks, specs), target, window_bytes=1)  # proves that every element is there once
    files = tuple(OrderedFile(file.path, file.header, file.size) for file in target.files)
    number = {file.path: index for index, file in enumerate(files)}
    spans = {shard.fqn: shard.span for shard in target.catalog.shards}
    orders = []
    for boxes in ranks:
        places = {
            key: Place(
                number[spans[key[0]].path],
                spans[key[0]].start,
                torch_shape(specs[key[0]].dtype, specs[key[0]].shape),
                key[1],
                shape,
            )
            for key, shape in zip(boxes.keys, boxes.shapes, strict=True)
        }
        orders.append(Order(files, places))
    return target, orders


def box_of(dtype: str, key: Key, shape: tuple[int, ...]) -> Box:
    """Return a box that torch counts, in the elements of safetensors."""
    return Box(logical_shape(dtype, key[1]), logical_shape(dtype, shape))


def _held(ranks: Sequence[Boxes], specs: Mapping[str, TensorSpec]) -> Catalog:
    """Return what all ranks have as a catalog whose spans say only which rank it is."""
    shards = []
    for rank, boxes in enumerate(ranks):
        for number, (key, shape) in enumerate(zip(boxes.keys, boxes.shapes, strict=True)):
            spec = specs[key[0]]
            box = box_of(spec.dtype, key, shape)
            shards.append(Shard(key[0], boxes.specs[key[0]].dtype, box, Span(f"rank {rank}", number, number + 1)))
    return Catalog("live", dict(specs), tuple(shards))


def sharded_target(
    ranks: Sequence[Boxes], *, first: int, world: int, mapping: Mapping[str, int] | None, save: str
) -> tuple[Target, list[Order]]:
    """Lay out files of which each rank writes its own, named as torch names them.

    Args:
        ranks: The boxes of the ranks that are known here.
        first: Number of the first of them, from 0.
        world: How many ranks there are in all.
        mapping: Number of the file, from 1, for every tensor; each rank has each of these files.
        save: What tells this save from another.

    Raises:
        PlanError: A tensor is in no file of the mapping.
    """
    names = {name for boxes in ranks for name in boxes.specs}
    PlanError.raise_for(
        "tensors without a file in the given mapping", [] if mapping is None else sorted(names - mapping.keys())
    )
    count = max(mapping.values(), default=1) if mapping else 1
    groups: dict[str, list[Part]] = {}
    owners: dict[str, int] = {}
    for rank, boxes in enumerate(ranks, first):
        seen: dict[str, int] = {}
        for key, shape in zip(boxes.keys, boxes.shapes, strict=True):
            name, spec = key[0], boxes.specs[key[0]]
            turn = seen.setdefault(name, 0)  # a file holds one box of a name: further ones go to further files
            seen[name] += 1
            path = shard_name(rank + 1 + turn * world, mapping[name] if mapping else 1, count)
            box = box_of(spec.dtype, key, shape)
            groups.setdefault(path, []).append(Part(Definition(name, spec, name), box))
            owners[path] = rank
    part = None if len(ranks) == world else (first + 1, world if len(groups) == 1 else 0)
    target = lay_out_shards(dict(sorted(groups.items())), save=save, of=part)
    return target, [_own_files(target, owners, rank) for rank in range(first, first + len(ranks))]


def _own_files(target: Target, owners: Mapping[str, int], rank: int) -> Order:
    files = [file for file in target.files if owners[file.path] == rank]
    places: dict[Key, Place] = {}
    for number, file in enumerate(files):
        start = len(file.header)
        for part in file.parts:
            shape, offset = (torch_shape(part.spec.dtype, each) for each in (part.box.shape, part.box.offset))
            places[part.definition.fqn, offset] = Place(number, start, shape, (0,) * len(shape), shape)
            start += part.spec.nbytes
    return Order(tuple(OrderedFile(file.path, file.header, file.size) for file in files), places)


def in_one_piece(order: Order) -> bool:
    """Whether every tensor that a rank has is one box, so that it can write its files in order."""
    starts = [(place.file, place.start) for place in order.places.values()]
    whole = all(place.shape == place.whole for place in order.places.values())
    return whole and len(set(starts)) == len(starts)
