"""Lay out what is wanted: which tensor goes into which file, where, under what file name.

The result is a catalog again: one whole box for each tensor, in files named as Hugging Face names them. Files are
filled in the checkpoint's order, so that layers stay together; inside a file the tensors lie by item size, largest
first, then by name, so that every one is aligned without a hole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, Shard, Span
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import SHOWN_PROBLEMS, PlanError
from hfdcp_core.recipe import Definition
from hfdcp_core.safetensors_file import file_names, write_header, write_index

METADATA: Mapping[str, str] = {"format": "pt"}
"""What loaders insist on in a header's ``__metadata__``."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file that is wanted."""

    path: str
    """Its name."""
    header: bytes
    """All bytes before the data."""
    size: int
    """Bytes of the whole file."""
    tensors: tuple[Definition, ...]
    """What it holds, in the order of the data."""


@dataclass(frozen=True, slots=True)
class Target:
    """Everything that is wanted."""

    catalog: Catalog
    """The tensors and where each will lie."""
    files: tuple[TargetFile, ...]
    """The files, in the order of their names."""
    index: bytes | None
    """The Hugging Face index; None where one file needs none."""
    total_size: int
    """Bytes of all tensors."""


def lay_out(
    definitions: Iterable[Definition], *, max_file_size: int, file_index: Mapping[str, int] | None = None
) -> Target:
    """Pack tensors into files.

    Args:
        definitions: The wanted tensors, in the order in which they should be packed.
        max_file_size: Tensor bytes in one file at most; a larger tensor gets a file of its own.
        file_index: Number of the file (from 1) of every tensor by its target name; replaces the packing.

    Raises:
        PlanError: The given index does not fit the tensors.
    """
    definitions = tuple(definitions)
    groups = _by_size(definitions, max_file_size) if file_index is None else _by_index(definitions, file_index)
    files = tuple(_file(path, group) for path, group in zip(file_names(len(groups)), groups, strict=True))
    total = sum(definition.spec.nbytes for definition in definitions)
    return Target(_catalog(definitions, files), files, _index(files, total), total)


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


def _file(path: str, group: list[Definition]) -> TargetFile:
    ordered = tuple(sorted(group, key=lambda d: (-dtype_named(d.spec.dtype).bits, d.fqn)))
    header, entries = write_header({d.fqn: d.spec for d in ordered}, metadata=METADATA)
    return TargetFile(path, header, len(header) + sum(entry.stop - entry.start for entry in entries), ordered)


def _catalog(definitions: tuple[Definition, ...], files: tuple[TargetFile, ...]) -> Catalog:
    shards: list[Shard] = []
    for file in files:
        start = len(file.header)
        for fqn, spec in ((d.fqn, d.spec) for d in file.tensors):
            span = Span(file.path, start, start + spec.nbytes)
            shards.append(Shard(fqn, spec.dtype, Box.whole(spec.shape), span))
            start = span.stop
    return Catalog("safetensors", {d.fqn: d.spec for d in definitions}, tuple(shards))


def _index(files: tuple[TargetFile, ...], total_size: int) -> bytes | None:
    if len(files) == 1:
        return None
    weight_map = {d.fqn: file.path for file in files for d in file.tensors}
    parameters = sum(Box.whole(d.spec.shape).volume for file in files for d in file.tensors)
    return write_index(weight_map, total_size=total_size, total_parameters=parameters)
