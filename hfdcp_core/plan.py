"""To reshard is to join two catalogs into a plan: for each wanted file, the copies that fill it.

A plan exists only if every wanted element comes from exactly one place. The proof, for each tensor:

1. shards that hold no element are dropped; shards of one and the same box are replicas, and one of them is taken;
2. if the remaining boxes are exactly the cells of a grid of cuts, they tile the tensor (linear in their number, and
   what every mesh of devices writes);
3. otherwise they tile it if no two of them meet and their volumes add up; where they do not, the boxes that are
   missing are found by taking every shard away from the whole.

Everything that is wrong is reported at once, and no byte has moved. A plan is plain data. Its digest stands for the
stamps of the source files and for everything that was asked, so equal digests mean equal output.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, FileStamp, Shard, TensorSpec
from hfdcp_core.errors import PlanError
from hfdcp_core.layout import Target, TargetFile
from hfdcp_core.recipe import Definition

PLAN_VERSION = 1
"""Enters every digest: a change of what a plan means must not resume an older run."""
SHOWN_HOLES = 3
"""How many missing boxes of one tensor are named."""
BUFFERS = 3
"""Windows of one file in flight: one being filled, one hashed and written, one waiting."""
SCRATCH = 2
"""Windows' worth of room for boxes that are read apart and then put into place, and for items of odd strides."""


@dataclass(frozen=True, slots=True)
class Read:
    """An affine view of a shard: which of its elements, in which order.

    The view's extents are those of the box that it fills. Element ``(i, j, …)`` of the view is element
    ``offset + i * strides[0] + j * strides[1] + …`` of the shard, counted in the row-major order of the shard's box.
    """

    shard: int
    """Index into `FilePlan.shards`."""
    offset: int
    """First element."""
    strides: tuple[int, ...]
    """Elements from one index to the next, in each dimension of the target box."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Which box of a target tensor is filled, and from where."""

    tensor: int
    """Index into `FilePlan.tensors`."""
    box: Box
    """The elements that are filled."""
    read: Read
    """Where they come from."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One wanted file and the copies that fill it; enough to make the file on any machine."""

    path: str
    """Name of the file."""
    header: bytes
    """All bytes before the data."""
    size: int
    """Bytes of the whole file."""
    tensors: tuple[tuple[str, TensorSpec], ...]
    """Names and kinds, in the order of the data."""
    shards: tuple[Shard, ...]
    """The shards that are read."""
    copies: tuple[Copy, ...]
    """What fills the tensors; grouped by tensor, in their order, and by offset inside one."""
    stamps: tuple[FileStamp, ...]
    """The source files that are read, as they were when gathered."""
    window_bytes: int
    """How much of the file is made at a time."""

    @property
    def peak_bytes(self) -> int:
        """Bytes in flight while it is made, at most."""
        return (BUFFERS + SCRATCH) * self.window_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """All files that are wanted, and what they are made from."""

    files: tuple[FilePlan, ...]
    """The files, in the order of their names."""
    index: bytes | None
    """The Hugging Face index; None where one file needs none."""
    digest: str
    """Stands for the source's stamps and everything that was asked."""
    total_size: int
    """Bytes of all tensors."""


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense row-major array.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def reshard(source: Catalog, target: Target, *, window_bytes: int) -> Plan:
    """Join what is there with what is wanted.

    Args:
        source: The gathered catalog.
        target: The wanted files; their definitions name tensors of ``source``.
        window_bytes: How much of a file is made at a time.

    Raises:
        PlanError: Some wanted element comes from nowhere or from two places; ``problems`` has every one.
    """
    by_name = _shards_by_name(source)
    problems: list[str] = []
    chosen: dict[str, list[Shard]] = {}
    for definition in itertools.chain.from_iterable(file.tensors for file in target.files):
        found = _mismatches(definition, source, by_name)
        if not found:
            chosen[definition.fqn], found = tile(definition.spec, by_name.get(definition.source, ()))
        problems += [f"{definition.source}: {problem}" for problem in found]
    PlanError.raise_for("the checkpoint does not hold every wanted element exactly once", problems)
    stamps = {stamp.path: stamp for stamp in source.files}
    files = tuple(_file_plan(file, chosen, stamps, window_bytes) for file in target.files)
    return Plan(files, target.index, _digest(source, target), target.total_size)


def _shards_by_name(source: Catalog) -> dict[str, list[Shard]]:
    by_name: dict[str, list[Shard]] = {}
    for shard in source.shards:
        by_name.setdefault(shard.fqn, []).append(shard)
    return by_name


def _mismatches(definition: Definition, source: Catalog, by_name: dict[str, list[Shard]]) -> list[str]:
    spec = source.tensors.get(definition.source)
    if spec is None:
        return ["no such tensor in the checkpoint"]
    problems = [] if spec == definition.spec else [f"is {spec}, but {definition.spec} is wanted"]
    problems += [
        f"shard {shard.box} in {shard.span} is {shard.dtype}, the tensor is {spec.dtype}"
        for shard in by_name.get(definition.source, ())
        if shard.dtype != spec.dtype
    ]
    return problems


def tile(spec: TensorSpec, shards: Sequence[Shard]) -> tuple[list[Shard], list[str]]:
    """Choose shards that hold every element of a tensor exactly once, by offset; or say why there are none.

    Returns:
        The shards, and the problems; one of the two is empty (both, where the tensor has no element).
    """
    cells: dict[Box, Shard] = {}
    for shard in sorted(shards, key=lambda shard: (shard.box.offset, shard.span.path, shard.span.start)):
        if shard.box.volume:
            cells.setdefault(shard.box, shard)
    chosen = list(cells.values())
    volume = Box.whole(spec.shape).volume
    if volume == 0 or _is_grid(spec.shape, cells):
        return (chosen if volume else []), []
    problems = [_overlap(a, b) for a, b in itertools.islice(_meeting(chosen), SHOWN_HOLES)]
    if not problems and sum(box.volume for box in cells) == volume:
        return chosen, []
    problems += _holes(spec, cells)
    return [], problems


def _is_grid(shape: tuple[int, ...], cells: Iterable[Box]) -> bool:
    """Whether the (different) boxes are exactly the cells between the cuts at their own offsets."""
    boxes = list(cells)
    count = 1
    for axis, extent in enumerate(shape):
        starts = sorted({box.offset[axis] for box in boxes})
        if not starts or starts[0] != 0:
            return False
        stop_of = dict(zip(starts, [*starts[1:], extent], strict=True))
        if any(box.offset[axis] + box.shape[axis] != stop_of[box.offset[axis]] for box in boxes):
            return False
        count *= len(starts)
    return len(boxes) == count


def _meeting(shards: list[Shard]) -> Iterator[tuple[Shard, Shard]]:
    """Yield the pairs that share elements, sweeping along the first dimension."""
    active: list[Shard] = []
    for shard in shards:
        active = [other for other in active if not other.box.offset or other.box.stop[0] > shard.box.offset[0]]
        yield from ((other, shard) for other in active if other.box.intersect(shard.box))
        active.append(shard)


def _overlap(a: Shard, b: Shard) -> str:
    return f"boxes {a.box} in {a.span} and {b.box} in {b.span} overlap and are not the same"


def _holes(spec: TensorSpec, cells: Iterable[Box]) -> list[str]:
    left = [Box.whole(spec.shape)]
    for box in cells:
        left = [part for hole in left for part in hole.minus(box)]
    shown = [f"no shard holds {hole} of {spec}" for hole in left[:SHOWN_HOLES]]
    return [*shown, f"… and {len(left) - SHOWN_HOLES} more holes"] if len(left) > SHOWN_HOLES else shown


def _file_plan(
    file: TargetFile, chosen: dict[str, list[Shard]], stamps: dict[str, FileStamp], window_bytes: int
) -> FilePlan:
    shards = [shard for definition in file.tensors for shard in chosen[definition.fqn]]
    numbers = itertools.count()
    copies = tuple(
        Copy(position, shard.box, Read(next(numbers), 0, row_major(shard.box.shape)))
        for position, definition in enumerate(file.tensors)
        for shard in chosen[definition.fqn]
    )
    return FilePlan(
        path=file.path,
        header=file.header,
        size=file.size,
        tensors=tuple((definition.fqn, definition.spec) for definition in file.tensors),
        shards=tuple(shards),
        copies=copies,
        stamps=tuple(stamps[path] for path in sorted({shard.span.path for shard in shards} & stamps.keys())),
        window_bytes=window_bytes,
    )


def stamps_digest(stamps: Iterable[FileStamp]) -> str:
    """Return the SHA-256 that stands for a set of source files in one state."""
    rows = sorted((stamp.path, stamp.size, stamp.tag) for stamp in stamps)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _digest(source: Catalog, target: Target) -> str:
    """Hash what decides the output: the source's stamps, the headers, and which tensor is made of which."""
    digest = hashlib.sha256(f"hfdcp plan {PLAN_VERSION} {source.format} {stamps_digest(source.files)}\n".encode())
    for file in target.files:
        digest.update(json.dumps([file.path, file.size, [(d.fqn, d.source) for d in file.tensors]]).encode())
        digest.update(file.header)
    return digest.hexdigest()
