"""To reshard is to join two catalogs into a plan: for each wanted file, the copies that fill it.

A plan exists only if every wanted element comes from exactly one place. The proof, for each tensor:

1. shards that hold no element are dropped; shards of one and the same box are replicas, and one of them is taken;
2. if the remaining boxes are exactly the cells of a grid of cuts, they tile the tensor (linear in their number, and
   what every mesh of devices writes);
3. otherwise the tensor is cut wherever a cut goes through no box, again and again. A piece that is one box is whole;
   a piece without any is missing; only boxes that no cut can part (they meet, or stand like a pinwheel) are compared
   with each other.

Everything that is wrong is reported at once, and no byte has moved. A plan is plain data. Its digest stands for the
stamps of the source files and for everything that was asked, so equal digests mean equal output.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hfdcp_core.arrangement import Arrangement, Patch
from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, FileStamp, Shard, TensorSpec
from hfdcp_core.collector import without_collector
from hfdcp_core.errors import PlanError
from hfdcp_core.layout import Part, Target, TargetFile
from hfdcp_core.operation import OPERAND_WINDOWS, WORKSPACE_BYTES, Operand, Operation, pull
from hfdcp_core.pull_back import meeting, reach_of, restricted
from hfdcp_core.recipe import Definition

PLAN_VERSION = 1
"""Enters every digest: a change of what a plan means must not resume an older run."""
SHOWN_HOLES = 3
"""How many missing boxes of one tensor are named."""
BUFFERS = 3
"""Windows of one file in flight: one being filled, one hashed and written, one waiting."""
SCRATCH = 2
"""Windows' worth of room for boxes that are read apart and then put into place, and for items of odd strides."""

AHEAD_BYTES = 64 << 20
"""Bytes of a remote source that are on their way, or wait for their turn, for each file in flight."""


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
    """Index into `FilePlan.tensors`, and behind them into `FilePlan.operands`."""
    box: Box
    """The elements that are filled."""
    read: Read
    """Where they come from."""


@dataclass(frozen=True, slots=True)
class Making:
    """A tensor of the file that is made by an operation, or a part of such a tensor."""

    tensor: int
    """Index into `FilePlan.tensors`."""
    operation: Operation
    """How the whole tensor is made."""
    box: Box
    """The part that lies in this file."""
    operands: tuple[int, ...]
    """Of each operand, the number that copies and pieces know it by: its index in tensors and operands together."""

    @property
    def needed(self) -> tuple[Box, ...]:
        """The box of each operand that the part is made from."""
        if self.box.volume:
            return pull(self.operation, self.box)
        return tuple(Box((0,) * len(o.spec.shape), (0,) * len(o.spec.shape)) for o in self.operation.operands)


@dataclass(frozen=True, slots=True)
class Zeros:
    """A box of a tensor that nothing is read for: all its elements are zero."""

    tensor: int
    """As in `Copy`."""
    box: Box
    """The elements."""


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
    """Names and kinds, in the order of the data. Of one whose elements are arranged, the shape is the fine one."""
    shards: tuple[Shard, ...]
    """The shards that are read."""
    copies: tuple[Copy, ...]
    """What fills the tensors; grouped by tensor, in their order, and by offset inside one."""
    stamps: tuple[FileStamp, ...]
    """The source files that are read, as they were when gathered."""
    window_bytes: int
    """How much of the file is made at a time."""
    operands: tuple[tuple[str, TensorSpec], ...] = ()
    """What operations work on, as much as is needed: tensors of the source, or arrangements, in their fine shape."""
    makings: tuple[Making, ...] = ()
    """The tensors that operations make, in the order of the data."""
    zeros: tuple[Zeros, ...] = ()
    """What is filled with zeros."""

    @property
    def peak_bytes(self) -> int:
        """Bytes in flight while it is made, at most."""
        plain = (BUFFERS + SCRATCH) * self.window_bytes
        return plain + OPERAND_WINDOWS * self.window_bytes + WORKSPACE_BYTES if self.makings else plain


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


@functools.lru_cache(maxsize=4096)
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


@without_collector()
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
    chosen: dict[str, _Tiles] = {}
    wanted = {definition.fqn: definition for file in target.files for definition in file.tensors}
    needed = itertools.chain.from_iterable(_needed(made, source) for made in wanted.values())
    operands = {(o.fqn, o.spec.dtype, o.spec.shape): o for o in needed}
    for operand in operands.values():
        found = _mismatches(operand, source, by_name)
        if not found:
            shards, found = tile(operand.spec, by_name.get(operand.fqn, ()))
            chosen[operand.fqn] = _Tiles(operand.spec.shape, shards)
        problems += [f"{operand.fqn}: {problem}" for problem in found]
    PlanError.raise_for("the checkpoint does not hold every wanted element exactly once", problems)
    stamps = {stamp.path: stamp for stamp in source.files}
    files = tuple(_file_plan(file, chosen, stamps, window_bytes) for file in target.files)
    return Plan(files, target.index, _digest(source, target), target.total_size)


def _needed(definition: Definition, source: Catalog) -> Iterator[Operand]:
    """Yield the tensors of the source that a tensor is made from."""
    for operand, arrangement in definition.parts:
        if arrangement is None:
            yield operand
        else:
            yield from (Operand(name, source.tensors.get(name, operand.spec)) for name in arrangement.sources)


def _shards_by_name(source: Catalog) -> dict[str, list[Shard]]:
    by_name: dict[str, list[Shard]] = {}
    for shard in source.shards:
        by_name.setdefault(shard.fqn, []).append(shard)
    return by_name


def _mismatches(operand: Operand, source: Catalog, by_name: dict[str, list[Shard]]) -> list[str]:
    spec = source.tensors.get(operand.fqn)
    if spec is None:
        return ["no such tensor in the checkpoint"]
    problems = [] if spec is operand.spec or spec == operand.spec else [f"is {spec}, but {operand.spec} is wanted"]
    problems += [
        f"shard {shard.box} in {shard.span} is {shard.dtype}, the tensor is {spec.dtype}"
        for shard in by_name.get(operand.fqn, ())
        if shard.dtype != spec.dtype
    ]
    return problems


def tile(spec: TensorSpec, shards: Sequence[Shard]) -> tuple[list[Shard], list[str]]:
    """Choose shards that hold every element of a tensor exactly once, by offset; or say why there are none.

    Returns:
        The shards, and the problems; one of the two is empty (both, where the tensor has no element).
    """
    if 0 in spec.shape:
        return [], []
    if len(shards) == 1 and shards[0].box.shape == spec.shape and not any(shards[0].box.offset):
        return list(shards), []
    held = [shard for shard in shards if 0 not in shard.box.shape]
    held.sort(key=lambda shard: (shard.box.offset, shard.span.path, shard.span.start))
    cells: dict[tuple[tuple[int, ...], tuple[int, ...]], Shard] = {}
    for shard in held:
        cells.setdefault((shard.box.offset, shard.box.shape), shard)
    chosen = list(cells.values())
    if _is_grid(spec.shape, [shard.box for shard in chosen]):
        return chosen, []
    problems = _faults(spec, chosen)
    return ([] if problems else chosen), problems


def _is_grid(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether the (different) boxes are exactly the cells between the cuts at their own offsets."""
    if not boxes:
        return False
    count = 1
    offsets = zip(*(box.offset for box in boxes), strict=True)
    extents = zip(*(box.shape for box in boxes), strict=True)
    for starts, lengths, extent in zip(offsets, extents, shape, strict=True):
        cells = sorted(set(zip(starts, lengths, strict=True)))
        stops = list(itertools.starmap(int.__add__, cells))
        if [start for start, _ in cells] != [0, *stops[:-1]] or stops[-1] != extent:
            return False
        count *= len(cells)
    return len(boxes) == count


def _faults(spec: TensorSpec, shards: list[Shard]) -> list[str]:
    """Say which shards meet, and which boxes none of them holds."""
    pieces = list(_odd_pieces(Box.whole(spec.shape), shards))
    meeting = itertools.chain.from_iterable(_meeting(inside) for _, inside in pieces)
    overlaps = [_overlap(a, b) for a, b in itertools.islice(meeting, SHOWN_HOLES)]
    holes = [hole for piece, inside in pieces for hole in _left(piece, inside)]
    shown = [f"no shard holds {hole} of {spec}" for hole in holes[:SHOWN_HOLES]]
    more = [f"… and {len(holes) - SHOWN_HOLES} more holes"] if len(holes) > SHOWN_HOLES else []
    return [*overlaps, *shown, *more]


def _odd_pieces(region: Box, shards: list[Shard]) -> Iterator[tuple[Box, list[Shard]]]:
    """Cut a region wherever no shard is cut through, and yield the pieces that are not exactly one shard."""
    todo = [(region, shards)]
    while todo:
        piece, inside = todo.pop()
        axes = range(len(piece.shape))
        parts = next((cut for axis in axes if len(cut := list(_slabs(piece, inside, axis))) > 1), [])
        todo += reversed(parts)
        if not parts and len(inside) != 1:
            yield piece, inside


def _slabs(piece: Box, shards: list[Shard], axis: int) -> Iterator[tuple[Box, list[Shard]]]:
    """Yield the slabs between the cuts across one axis that go through no shard, and what lies in each."""
    first = reached = piece.offset[axis]
    inside: list[Shard] = []
    for shard in sorted(shards, key=lambda shard: shard.box.offset[axis]):
        start = shard.box.offset[axis]
        if start >= reached:
            yield from _slab(piece, axis, (first, reached), inside)
            yield from _slab(piece, axis, (reached, start), [])
            first, inside = start, []
        inside.append(shard)
        reached = max(reached, start + shard.box.shape[axis])
    yield from _slab(piece, axis, (first, reached), inside)
    yield from _slab(piece, axis, (reached, piece.stop[axis]), [])


def _slab(piece: Box, axis: int, ends: tuple[int, int], inside: list[Shard]) -> Iterator[tuple[Box, list[Shard]]]:
    start, stop = ends
    if start < stop:
        offset = (*piece.offset[:axis], start, *piece.offset[axis + 1 :])
        yield Box(offset, (*piece.shape[:axis], stop - start, *piece.shape[axis + 1 :])), inside


def _meeting(shards: list[Shard]) -> Iterator[tuple[Shard, Shard]]:
    return ((a, b) for a, b in itertools.combinations(shards, 2) if a.box.intersect(b.box))


def _overlap(a: Shard, b: Shard) -> str:
    return f"boxes {a.box} in {a.span} and {b.box} in {b.span} overlap and are not the same"


def _left(piece: Box, shards: Iterable[Shard]) -> list[Box]:
    """Return disjoint boxes of a piece that no shard holds."""
    left = [piece]
    for shard in shards:
        left = [part for hole in left for part in hole.minus(shard.box)]
    return left


def _file_plan(
    file: TargetFile, chosen: Mapping[str, _Tiles], stamps: dict[str, FileStamp], window_bytes: int
) -> FilePlan:
    drawn = _Drawn(chosen)
    tensors = [(part.definition.fqn, drawn.part(n, part)) for n, part in enumerate(file.parts)]
    makings = _makings(file)
    operands = [operand for making in makings for operand in drawn.operands(making, file.parts[making.tensor])]
    return FilePlan(
        path=file.path,
        header=file.header,
        size=file.size,
        tensors=tuple(tensors),
        shards=tuple(drawn.shards),
        copies=tuple(drawn.copies),
        stamps=tuple(stamps[path] for path in sorted({shard.span.path for shard in drawn.shards} & stamps.keys())),
        window_bytes=window_bytes,
        operands=tuple(operands),
        makings=tuple(makings),
        zeros=tuple(drawn.zeros),
    )


class _Drawn:
    """The copies of a file, drawn up tensor by tensor."""

    def __init__(self, chosen: Mapping[str, _Tiles]) -> None:
        self._chosen = chosen
        self.shards: list[Shard] = []
        self.copies: list[Copy] = []
        self.zeros: list[Zeros] = []

    def part(self, number: int, part: Part) -> TensorSpec:
        """Fill a part of the file, unless an operation makes it; return its kind, in the shape that copies count in."""
        definition = part.definition
        if definition.operation is not None:
            return part.spec
        if definition.arrangement is None:
            self._whole(number, definition.source, part.box, part.box)
            return part.spec
        arrangement = restricted(definition.arrangement, part.box)
        self._arranged(number, arrangement)
        return TensorSpec(part.spec.dtype, arrangement.fine)

    def operands(self, making: Making, part: Part) -> Iterator[tuple[str, TensorSpec]]:
        """Fill as much of each operand as is needed; yield their names and kinds, in the shape that copies count in."""
        rows = zip(making.operands, part.definition.parts, making.needed, strict=True)
        for number, (operand, arrangement), needed in rows:
            if arrangement is None:
                self._whole(number, operand.fqn, needed, Box.whole(operand.spec.shape))
                yield operand.fqn, operand.spec
            else:
                self._arranged(number, arrangement)
                yield operand.fqn, TensorSpec(operand.spec.dtype, arrangement.fine)

    def _whole(self, number: int, fqn: str, box: Box, inside: Box) -> None:
        for shard, shared in self._chosen[fqn].meeting(box):
            self.copies.append(Copy(number, shared.relative_to(inside), _read(len(self.shards), shard, shared)))
            self.shards.append(shard)

    def _arranged(self, number: int, arrangement: Arrangement) -> None:
        """Draw up the copies of an arrangement, in the order of their boxes; a shard is listed once for all of them."""
        listed: dict[int, int] = {}
        for patch in sorted(arrangement.patches, key=lambda patch: patch.box.offset):
            if not patch.source:
                self.zeros.append(Zeros(number, patch.box))
                continue
            for shard, _ in self._chosen[patch.source].meeting(reach_of(patch)):
                place = listed.setdefault(id(shard), len(self.shards))
                if place == len(self.shards):
                    self.shards.append(shard)
                self.copies += (Copy(number, box, read) for box, read in _views(patch, place, shard))


def _views(patch: Patch, place: int, shard: Shard) -> Iterator[tuple[Box, Read]]:
    """Yield what a patch takes of a shard: which box it fills, and as which view."""
    steps = row_major(shard.box.shape)
    for box, first in meeting(patch, shard.box):
        offset = sum((a - b) * step for a, b, step in zip(first, shard.box.offset, steps, strict=True))
        strides = (
            step * steps[axis] if step and extent > 1 else 0
            for (axis, step), extent in zip(patch.moves, box.shape, strict=True)
        )
        yield box, Read(place, offset, tuple(strides))


def _makings(file: TargetFile) -> list[Making]:
    makings, number = [], len(file.parts)
    for n, part in enumerate(file.parts):
        operation = part.definition.operation
        if operation is None:
            continue
        count = len(operation.operands)
        makings.append(Making(n, operation, part.box, tuple(range(number, number + count))))
        number += count
    return makings


class _Tiles:
    """The shards that tile a tensor, by offset; those that meet a box are found without a look at all of them."""

    def __init__(self, shape: tuple[int, ...], shards: Sequence[Shard]) -> None:
        self._shape = shape
        self._shards = shards

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [shard.box.offset[0] for shard in self._shards]

    @functools.cached_property
    def _longest(self) -> int:
        return max((shard.box.shape[0] for shard in self._shards), default=1)

    def meeting(self, box: Box) -> Iterator[tuple[Shard, Box]]:
        """Yield the shards that meet a box of the tensor, and what they share with it."""
        if box.shape == self._shape:  # the whole tensor, as nearly always
            return ((shard, shard.box) for shard in self._shards)
        first, stop = box.offset[0], box.stop[0]
        low = bisect.bisect_right(self._starts, first - self._longest)
        near = self._shards[low : bisect.bisect_left(self._starts, stop)]
        return ((shard, shared) for shard in near if (shared := shard.box.intersect(box)))


def _read(number: int, shard: Shard, shared: Box) -> Read:
    """Return the view of a shard that is a box inside it."""
    strides = row_major(shard.box.shape)
    if shared is shard.box:
        return Read(number, 0, strides)
    inside = shared.relative_to(shard.box).offset
    return Read(number, sum(a * b for a, b in zip(inside, strides, strict=True)), strides)


def stamps_digest(stamps: Iterable[FileStamp]) -> str:
    """Return the SHA-256 that stands for a set of source files in one state."""
    rows = sorted((stamp.path, stamp.size, stamp.tag) for stamp in stamps)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _digest(source: Catalog, target: Target) -> str:
    """Hash what decides the output: the source's stamps, the headers, and which tensor is made of which."""
    digest = hashlib.sha256(f"hfdcp plan {PLAN_VERSION} {source.format} {stamps_digest(source.files)}\n".encode())
    for file in target.files:
        digest.update(json.dumps([file.path, file.size, [_made_of(d) for d in file.tensors]]).encode())
        digest.update(file.header)
    return digest.hexdigest()


def _made_of(definition: Definition) -> tuple[str, ...]:
    how = (repr(definition.operation),) if definition.operation else ()
    arranged = (repr(definition.arrangements),) if any(definition.arrangements) else ()
    return (definition.fqn, definition.source, *how, *arranged)
