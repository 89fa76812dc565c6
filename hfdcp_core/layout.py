"""Lay out what is wanted: which box of which tensor goes into which file, where, under what file name.

The result is a catalog again. Two layouts:

- `lay_out`: one whole box for each tensor, in files named as Hugging Face names them. Files are filled in the
  checkpoint's order, so that layers stay together.
- `lay_out_for_ranks`: one file for each rank of a training, as torch's ``HuggingFaceStorageWriter`` shards a model with
  ``save_distributed=True``; torch's own reader takes it. What torch leaves unsaid, the whole shapes and the number of
  ranks, is in a header key of ours, so that a lost file is noticed.

Inside a file the tensors lie by item size, largest first, then by name, so that every one is aligned without a hole.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, Shard, Span, TensorSpec
from hfdcp_core.collector import without_collector
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import SHOWN_PROBLEMS, PlanError
from hfdcp_core.recipe import Definition
from hfdcp_core.safetensors_file import (
    RANK_INFO,
    SAVE_INFO,
    SHARDING_INFO,
    RankInfo,
    file_names,
    write_header,
    write_index,
    write_rank_info,
)

_SHARD_NAME = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
METADATA: Mapping[str, str] = {"format": "pt"}
"""What loaders insist on in a header's ``__metadata__``."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that lies in one file."""

    definition: Definition
    """The tensor."""
    box: Box
    """Which of its elements."""

    @property
    def spec(self) -> TensorSpec:
        """What the file's header says of it."""
        whole = self.definition.spec
        return whole if self.box.shape == whole.shape else TensorSpec(whole.dtype, self.box.shape)


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file that is wanted."""

    path: str
    """Its name."""
    header: bytes
    """All bytes before the data."""
    size: int
    """Bytes of the whole file."""
    parts: tuple[Part, ...]
    """What it holds, in the order of the data."""

    @property
    def tensors(self) -> tuple[Definition, ...]:
        """The tensors that it holds, whole or in part."""
        return tuple(part.definition for part in self.parts)


@dataclass(frozen=True, slots=True)
class Target:
    """Everything that is wanted."""

    definitions: tuple[Definition, ...]
    """The tensors."""
    files: tuple[TargetFile, ...]
    """The files, in the order of their names."""
    index: bytes | None
    """The Hugging Face index; None where one file needs none."""
    total_size: int
    """Bytes of all tensors."""

    @property
    def catalog(self) -> Catalog:
        """The tensors and where each will lie."""
        return _catalog(self.definitions, self.files)


@without_collector()
def lay_out(
    definitions: Iterable[Definition],
    *,
    max_file_size: int,
    file_index: Mapping[str, int] | None = None,
    as_torch: bool = False,
    save: str = "",
) -> Target:
    """Pack tensors into files.

    Args:
        definitions: The wanted tensors, in the order in which they should be packed.
        max_file_size: Tensor bytes in one file at most; a larger tensor gets a file of its own.
        file_index: Number of the file (from 1) of every tensor by its target name; replaces the packing.
        as_torch: Whether files are named as torch names them (``model-00001-of-00001.safetensors`` for a single one
            too), always with an index.
        save: What tells this save from another, for the headers to say; nothing where it needs no telling.

    Raises:
        PlanError: The given index does not fit the tensors.
    """
    definitions = tuple(definitions)
    groups = _by_size(definitions, max_file_size) if file_index is None else _by_index(definitions, file_index)
    whole = [[Part(definition, Box.whole(definition.spec.shape)) for definition in group] for group in groups]
    names = torch_file_names(len(groups)) if as_torch else file_names(len(groups))
    metadata = {**METADATA, **({SAVE_INFO: save} if save else {})}
    files = tuple(_file(path, group, metadata) for path, group in zip(names, whole, strict=True))
    total = sum(definition.spec.nbytes for definition in definitions)
    index = _index(files, total) if as_torch or len(files) > 1 else None
    return Target(definitions, files, index, total)


def _by_size(definitions: tuple[Definition, ...], max_file_size: int) -> list[list[Definition]]:
    groups: list[list[Definition]] = []
    room = -1  # no file is begun
    for definition in definitions:
        nbytes = definition.spec.nbytes
        if nbytes > room:
            groups.append([])
            room = max_file_size
        groups[-1].append(definition)
        room -= nbytes
    return groups


def _by_index(definitions: tuple[Definition, ...], file_index: Mapping[str, int]) -> list[list[Definition]]:
    names = {definition.fqn for definition in definitions}
    count = max(file_index.values(), default=0)
    problems = [f"{name}: in no file of the given index" for name in sorted(names - file_index.keys())]
    problems += [
        f"{name}: in the given index, but no such tensor is wanted" for name in sorted(file_index.keys() - names)
    ]
    problems += [f"{name}: file {number}, but files count from 1" for name, number in file_index.items() if number < 1]
    used = {*file_index.values()}
    idle = (number for number in range(1, count + 1) if number not in used)  # may be very many
    problems += [f"no tensor is given to file {number}" for number in itertools.islice(idle, SHOWN_PROBLEMS)]
    PlanError.raise_for("the given file index does not fit the tensors", problems)
    groups: list[list[Definition]] = [[] for _ in range(count)]
    for definition in definitions:
        groups[file_index[definition.fqn] - 1].append(definition)
    return groups


@without_collector()
def lay_out_for_ranks(definitions: Iterable[Definition], *, ranks: int, dim: int) -> Target:
    """Cut every tensor along one dimension, a part for each rank, as torch's ``Shard(dim)`` does.

    A tensor without that dimension lies whole with the first rank. A rank for which nothing is left has a file all the
    same, so that its absence tells of a loss.

    Args:
        definitions: The wanted tensors.
        ranks: How many files.
        dim: The dimension that is cut; negative ones count from the last.

    Raises:
        PlanError: No tensor has that dimension.
    """
    definitions = tuple(definitions)
    _refuse_unknown_dimension(definitions, dim)
    cut = [[Part(definition, box) for box in _boxes(definition.spec, ranks, dim)] for definition in definitions]
    files = []
    for rank in range(ranks):
        group = [parts[rank] for parts in cut if rank < len(parts) and (parts[rank].box.volume or len(parts) == 1)]
        files.append(_file(shard_name(rank + 1), group, _sharding(group, rank=rank + 1, ranks=ranks)))
    total = sum(definition.spec.nbytes for definition in definitions)
    return Target(definitions, tuple(files), None, total)


def has_dimension(spec: TensorSpec, dim: int) -> bool:
    """Whether a tensor has a dimension; negative ones count from the last.

    >>> [has_dimension(TensorSpec("F32", (4, 2)), dim) for dim in (-3, -2, 1, 2)]
    [False, True, True, False]
    """
    return -len(spec.shape) <= dim < len(spec.shape)


def _refuse_unknown_dimension(definitions: tuple[Definition, ...], dim: int) -> None:
    """Refuse a dimension along which nothing would be cut; of numbers without any, the first one is no mistake."""
    most = max(definitions, key=lambda definition: len(definition.spec.shape), default=None)
    axes = max(1, len(most.spec.shape) if most else 0)
    if most and not -axes <= dim < axes:
        raise PlanError(
            f"no tensor has a dimension {dim} to cut along: {most.fqn}, {most.spec}, has the most, and takes "
            f"--shard-dim from {-axes} to {axes - 1}"
        )


def lay_out_shards(groups: Mapping[str, Iterable[Part]], *, save: str, of: tuple[int, int] | None = None) -> Target:
    """Lay out files of which each holds given boxes, as the ranks of a training hold them.

    Args:
        groups: The boxes of each file by its name; no file holds two boxes of one tensor.
        save: What tells this save from another.
        of: Which file, from 1, of how many the first one is, where these are not all files of the save; a count of 0
            where nobody knows it.
    """
    first, count = of or (1, len(groups))
    files = []
    for number, (path, group) in enumerate(groups.items(), first):
        parts = tuple(group)
        files.append(_file(path, parts, _sharding(parts, rank=number, ranks=count, save=save)))
    definitions = {part.definition.fqn: part.definition for file in files for part in file.parts}
    total = sum(definition.spec.nbytes for definition in definitions.values())
    return Target(tuple(definitions.values()), tuple(files), None, total)


def shard_name(rank: int, part: int = 1, count: int = 1) -> str:
    """Return what torch calls a file of a rank, counted from 1.

    >>> shard_name(2)
    'shard-00002-model-00001-of-00001.safetensors'
    """
    return f"shard-{rank:05d}-model-{part:05d}-of-{count:05d}.safetensors"


def is_shard_name(path: str) -> bool:
    """Whether a file is named as one of a rank's.

    >>> is_shard_name("shard-00002-model-00001-of-00001.safetensors")
    True
    """
    return _SHARD_NAME.fullmatch(path) is not None


def torch_file_names(count: int) -> tuple[str, ...]:
    """Return what torch calls the files of a consolidated checkpoint.

    >>> torch_file_names(1)
    ('model-00001-of-00001.safetensors',)
    """
    return tuple(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))


def _boxes(spec: TensorSpec, ranks: int, dim: int) -> list[Box]:
    """Return the box of each rank, or the whole one where the tensor has no such dimension, or no element."""
    axes = len(spec.shape)
    if not has_dimension(spec, dim) or 0 in spec.shape:
        return [Box.whole(spec.shape)]
    axis = dim % axes
    whole = _rows_of_bytes(spec, axis)
    if whole is None:
        return [Box.whole(spec.shape)]
    step = -(-spec.shape[axis] // whole // ranks) * whole
    return [_slab(spec.shape, axis, rank * step, (rank + 1) * step) for rank in range(ranks)]


def _rows_of_bytes(spec: TensorSpec, axis: int) -> int | None:
    """Return how many indices of a dimension end together with a byte; None where a cut would go through bytes.

    >>> [_rows_of_bytes(TensorSpec(dtype, (4, 3)), axis) for dtype, axis in (("F4", 0), ("F4", 1), ("F32", 1))]
    [2, None, 1]
    """
    bits = dtype_named(spec.dtype).bits
    if bits * spec.shape[-1] % 8 and (axis == len(spec.shape) - 1 or math.prod(spec.shape[:axis]) > 1):
        return None
    row = bits * math.prod(spec.shape[axis + 1 :])
    return math.lcm(row, 8) // row


def _slab(shape: tuple[int, ...], axis: int, start: int, stop: int) -> Box:
    start, stop = min(start, shape[axis]), min(stop, shape[axis])
    offset = (*(0 for _ in shape[:axis]), start, *(0 for _ in shape[axis + 1 :]))
    return Box(offset, (*shape[:axis], stop - start, *shape[axis + 1 :]))


def _sharding(group: Iterable[Part], *, rank: int, ranks: int, save: str = "") -> Mapping[str, str]:
    """Say in a header which boxes the file holds, for torch and for us."""
    parts = {part.definition.fqn: part for part in group}
    offsets = {fqn: {"saved_offsets": part.box.offset} for fqn, part in parts.items()}
    info = RankInfo(rank, ranks, {fqn: part.definition.spec.shape for fqn, part in parts.items()}, save)
    return {
        SHARDING_INFO: json.dumps(offsets),
        "DCP_VERSION": "1.0",
        **METADATA,
        **({RANK_INFO: write_rank_info(info)} if ranks else {}),
    }


def _file(path: str, group: Iterable[Part], metadata: Mapping[str, str] = METADATA) -> TargetFile:
    ordered = tuple(sorted(group, key=lambda p: (-dtype_named(p.definition.spec.dtype).bits, p.definition.fqn)))
    header, entries = write_header({part.definition.fqn: part.spec for part in ordered}, metadata=metadata)
    return TargetFile(path, header, len(header) + sum(entry.stop - entry.start for entry in entries), ordered)


def _catalog(definitions: tuple[Definition, ...], files: Iterable[TargetFile]) -> Catalog:
    shards: list[Shard] = []
    for file in files:
        start = len(file.header)
        for part in file.parts:
            span = Span(file.path, start, start + part.spec.nbytes)
            shards.append(Shard(part.definition.fqn, part.spec.dtype, part.box, span))
            start = span.stop
    return Catalog("safetensors", {d.fqn: d.spec for d in definitions}, tuple(shards))


def _index(files: tuple[TargetFile, ...], total_size: int) -> bytes:
    weight_map = {d.fqn: file.path for file in files for d in file.tensors}
    parameters = sum(math.prod(d.spec.shape) for file in files for d in file.tensors)
    return write_index(weight_map, total_size=total_size, total_parameters=parameters)
