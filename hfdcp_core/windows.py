"""Cut a file into windows, and find the copies that fill each: the arithmetic of consolidating, without a byte.

A *window* is a few MiB of consecutive bytes of the file: whole rows of a tensor, or a part of one row where a row is
larger, or many small tensors. Everything here counts on the *lattice* of a tensor, whose items are whole bytes, so
that packed kinds (F4, F6) need no special case. Where the rows of such a kind end inside a byte, the lattice is the one
row of all its bytes, and whole rows that begin and end with a byte can be copied.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, TORCH_SAVE, Shard, TensorSpec
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import PlanError
from hfdcp_core.operation import grain
from hfdcp_core.plan import Copy, FilePlan, Plan, row_major
from hfdcp_core.pull_back import fine_boxes

LARGEST_ITEM = 8
"""Bytes of the widest item (F64, C64): no window is smaller."""


@dataclass(frozen=True, slots=True)
class Lattice:
    """How the elements of a dtype and shape are addressed: in whole bytes, sub-byte kinds by the byte."""

    itemsize: int
    """Bytes of one addressed item."""
    shape: tuple[int, ...]
    """Items in each dimension."""

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, dtype: str, shape: tuple[int, ...]) -> Lattice:
        """Return the lattice of a tensor or of a box of one; most of a model are of a few shapes."""
        bits = dtype_named(dtype).bits
        if bits >= 8:
            return cls(bits // 8, shape)
        if _splits_bytes(bits, shape):
            return cls(1, (bits * math.prod(shape) // 8,))
        return cls(1, (*shape[:-1], shape[-1] * bits // 8))

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return self.itemsize * math.prod(self.shape)


def _splits_bytes(bits: int, shape: tuple[int, ...]) -> bool:
    """Whether rows of a packed kind end inside a byte."""
    return shape[-1] * bits % 8 != 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of one tensor that are one box of it; or any box of an operand."""

    tensor: int
    """Index into `FilePlan.tensors`, and behind them into `FilePlan.operands`."""
    box: Box
    """Which items, on the tensor's lattice."""
    nbytes: int
    """How many bytes."""


Window = tuple[Piece, ...]
"""Consecutive pieces of a file that are made together."""


def windows_of(plan: FilePlan) -> Iterator[Window]:
    """Cut the data of a file into its windows, at the grain of the operations that make it where a window has room."""
    grains = {making.tensor: grain(making.operation) for making in plan.makings}
    return windows((spec for _, spec in plan.tensors), plan.window_bytes, grains=grains)


def windows(
    tensors: Iterable[TensorSpec], window_bytes: int, *, grains: Mapping[int, tuple[int, ...]] = MappingProxyType({})
) -> Iterator[Window]:
    """Cut the data of a file into windows of at most ``window_bytes`` (but at least one item each).

    >>> tensors = [TensorSpec("U8", (3, 4)), TensorSpec("U8", (2,))]
    >>> [[piece.nbytes for piece in window] for window in windows(tensors, 8)]
    [[8], [4, 2]]
    """
    window: list[Piece] = []
    size = 0
    for number, spec in enumerate(tensors):
        lattice = Lattice.of(spec.dtype, spec.shape)
        for piece in _pieces(number, lattice, window_bytes, grains.get(number)):
            if window and size + piece.nbytes > window_bytes:
                yield tuple(window)
                window, size = [], 0
            window.append(piece)
            size += piece.nbytes
    if window:
        yield tuple(window)


def _pieces(tensor: int, lattice: Lattice, window_bytes: int, step_of: tuple[int, ...] | None) -> Iterable[Piece]:
    """Return a tensor as one piece where that fits a window."""
    nbytes = lattice.nbytes
    if nbytes <= window_bytes or not lattice.shape:
        return (Piece(tensor, Box.whole(lattice.shape), nbytes),) if nbytes else ()
    return _slices(tensor, lattice, window_bytes, step_of)


def _slices(tensor: int, lattice: Lattice, window_bytes: int, step_of: tuple[int, ...] | None) -> Iterator[Piece]:
    """Cut a tensor along the first dimension whose rows fit a window; every dimension before it item by item."""
    shape = lattice.shape
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * lattice.itemsize > window_bytes:
        axis += 1
    row = math.prod(shape[axis + 1 :]) * lattice.itemsize
    step = max(1, window_bytes // row)
    if step_of and step >= step_of[axis]:
        step -= step % step_of[axis]
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            rows = min(step, shape[axis] - start)
            offset = (*outer, start, *itertools.repeat(0, len(shape) - axis - 1))
            yield Piece(tensor, Box(offset, (*(1 for _ in outer), rows, *shape[axis + 1 :])), rows * row)


@dataclass(frozen=True, slots=True)
class Strung:
    """Shards whose elements, one shard behind the other, are a tensor's."""

    shards: tuple[tuple[Shard, int], ...]
    """The shards, and the bytes that the elements of each take."""
    nbytes: int
    """Bytes of the tensor."""


def strung_shards(plan: FilePlan, *, most: int) -> dict[int, Strung]:
    """Return the shards of those tensors of a file that consist of whole shards in their order: rows, or one for all.

    Of ``torch.save`` archives only those of at most ``most`` bytes count.
    """
    grouped = itertools.groupby(plan.copies, key=lambda copy: copy.tensor)
    plain = ((number, copies) for number, copies in grouped if number < len(plan.tensors))
    found = ((number, _strung(plan, plan.tensors[number][1], copies, most)) for number, copies in plain)
    return {number: strung for number, strung in found if strung}


def _strung(plan: FilePlan, spec: TensorSpec, copies: Iterable[Copy], most: int) -> Strung | None:
    """Return the shards of a tensor; None where one of them is cut, or stands elsewhere, or is a large archive."""
    bits, rows, shards = dtype_named(spec.dtype).bits, 0, []
    for copy in copies:
        shard, shape = plan.shards[copy.read.shard], copy.box.shape
        nbytes = bits * math.prod(shape) // 8
        in_order = shard.box.shape == shape and copy.read.strides == row_major(shape)
        follows = shape[1:] == spec.shape[1:] and copy.box.offset[:1] == (rows,)[: len(shape)]
        alike = shard.dtype == spec.dtype and (bits >= 8 or shape == spec.shape)
        length = shard.span.length
        simple = length == nbytes if shard.encoding == RAW else shard.encoding == TORCH_SAVE and length <= most
        if not (in_order and follows and alike and simple):
            return None
        shards.append((shard, nbytes))
        rows += shape[0] if shape else 0
    total = sum(nbytes for _, nbytes in shards)
    return Strung(tuple(shards), total) if total == spec.nbytes else None


class Copies:
    """Finds the copies that meet a box of a tensor, without looking at all of them."""

    def __init__(self, plan: FilePlan) -> None:
        self._specs = [spec for _, spec in (*plan.tensors, *plan.operands)]
        self._shapes = {
            number: operand.spec.shape
            for making in plan.makings
            for number, operand in zip(making.operands, making.operation.operands, strict=True)
            if operand.spec.shape != self._specs[number].shape
        }
        self._copies: dict[int, list[Copy]] = {}
        for copy in plan.copies:
            self._copies.setdefault(copy.tensor, []).append(copy)
        self._tables: dict[int, _CopyTable] = {}

    def fine(self, piece: Piece) -> Iterator[tuple[Piece, Box]]:
        """Yield a piece as copies count, in parts where an operand is arranged: each, and where in it that lies."""
        shape, spec = self._shapes.get(piece.tensor), self._specs[piece.tensor]
        if shape is None:
            yield piece, Box.whole(piece.box.shape)
            return
        for box, part in fine_boxes(piece.box, shape, spec.shape):
            yield Piece(piece.tensor, box, TensorSpec(spec.dtype, box.shape).nbytes), part.relative_to(piece.box)

    def meeting(self, piece: Piece) -> Iterator[tuple[Copy, Box, Box]]:
        """Yield each copy with its box and the part of it that lies in the piece, both on the tensor's lattice."""
        number = piece.tensor
        if number not in self._tables:
            self._tables[number] = _CopyTable(self._specs[number], self._copies.get(number, ()))
        return self._tables[number].meeting(piece.box)


class _CopyTable:
    """The copies of one tensor, by the start of their boxes in the first dimension."""

    def __init__(self, spec: TensorSpec, copies: Iterable[Copy]) -> None:
        rows = [(lattice_box(spec.dtype, copy.box, spec.shape), copy) for copy in copies]
        self._rows = sorted(rows, key=lambda row: row[0].offset)
        self._starts = [box.offset[0] if box.offset else 0 for box, _ in self._rows]
        self._longest = max((box.shape[0] for box, _ in self._rows if box.shape), default=1)

    def meeting(self, wanted: Box) -> Iterator[tuple[Copy, Box, Box]]:
        start, stop = (wanted.offset[0], wanted.stop[0]) if wanted.offset else (0, 1)
        low = bisect.bisect_right(self._starts, start - self._longest)
        for box, copy in self._rows[low : bisect.bisect_left(self._starts, stop)]:
            if shared := box.intersect(wanted):
                yield copy, box, shared


def lattice_box(dtype: str, box: Box, shape: tuple[int, ...]) -> Box:
    """Return a box of a tensor on its lattice: packed kinds count bytes in the last dimension, or in the only one.

    Raises:
        PlanError: The box begins or ends inside a byte.

    >>> lattice_box("F4", Box((2, 4), (3, 8)), (5, 16)), lattice_box("F4", Box((2, 0), (2, 3)), (4, 3))
    (Box(offset=(2, 2), shape=(3, 4)), Box(offset=(3,), shape=(3,)))
    """
    bits = dtype_named(dtype).bits
    if bits >= 8:
        return box
    counted: Box | None = box
    if _splits_bytes(bits, shape):
        first = sum(map(math.prod, zip(box.offset, row_major(shape), strict=True)))
        counted = Box((first,), (box.volume,)) if _is_run(box, shape) else None
    if counted is None or counted.offset[-1] * bits % 8 or counted.shape[-1] * bits % 8:
        raise PlanError(f"{box} of {dtype}{list(shape)} begins or ends inside a byte, so it cannot be copied")
    offset, extents = counted.offset, counted.shape
    return Box((*offset[:-1], offset[-1] * bits // 8), (*extents[:-1], extents[-1] * bits // 8))


def _is_run(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is consecutive whole rows of a tensor.

    >>> [_is_run(Box((0, 0, 0), extents), (2, 4, 3)) for extents in ((2, 4, 3), (1, 2, 3), (2, 2, 3), (1, 1, 2))]
    [True, True, False, False]
    """
    after = itertools.dropwhile(lambda extents: extents[0] == 1, zip(box.shape[:-1], shape[:-1], strict=True))
    return box.shape[-1] == shape[-1] and all(extent == whole for extent, whole in itertools.islice(after, 1, None))


@dataclass(frozen=True, slots=True)
class Strides:
    """A strided box of items in a run of them."""

    offset: int
    """First item."""
    shape: tuple[int, ...]
    """Extents."""
    strides: tuple[int, ...]
    """Items from one index to the next; none is negative."""

    @property
    def reach(self) -> int:
        """Items from the first to the last, both counted."""
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))

    @property
    def dense(self) -> bool:
        """Whether the items lie one behind the other in row-major order."""
        return all(
            extent == 1 or stride == step
            for extent, stride, step in zip(self.shape, self.strides, row_major(self.shape), strict=True)
        )

    @property
    def solid(self) -> bool:
        """Whether the items are a run without a gap, in whatever order."""
        return self.reach == math.prod(self.shape)

    @property
    def forward(self) -> bool:
        """Whether rows of it, one after the other, lie one behind the other."""
        pairs = [row for row in zip(self.shape, self.strides, strict=True) if row[0] > 1]
        return all(slow >= fast * count for (_, slow), (count, fast) in itertools.pairwise(pairs))

    def part(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Strides:
        """Return a box of this one."""
        first = self.offset + sum(a * b for a, b in zip(offset, self.strides, strict=True))
        return Strides(first, shape, self.strides)


def view_of(copy: Copy, shard: Shard) -> Strides:
    """Return which items of a shard a copy takes, on the lattice of its dtype.

    Raises:
        PlanError: A packed kind is to be taken in another order than it lies in.
    """
    read, box = copy.read, copy.box
    if dtype_named(shard.dtype).bits >= 8:
        return Strides(read.offset, box.shape, read.strides)
    if read.strides != row_major(shard.box.shape):
        raise PlanError(f"{shard}: {shard.dtype} can only be copied as it lies")
    taken = lattice_box(shard.dtype, Box(_index(read.offset, shard.box.shape), box.shape), shard.box.shape)
    strides = row_major(Lattice.of(shard.dtype, shard.box.shape).shape)
    return Strides(0, taken.shape, strides).part(taken.offset, taken.shape)


def refuse_split_bytes(plan: Plan) -> None:
    """Refuse a plan that would take apart bytes of packed kinds, before anything is written.

    Raises:
        PlanError: ``problems`` names every tensor.
    """
    PlanError.raise_for("numbers that share a byte cannot be taken apart", dict.fromkeys(_split_bytes(plan)))


def _split_bytes(plan: Plan) -> Iterator[str]:
    for file in plan.files:
        specs = (*file.tensors, *file.operands)
        for copy in file.copies:
            name, spec = specs[copy.tensor]
            if dtype_named(spec.dtype).bits >= 8:
                continue
            try:
                lattice_box(spec.dtype, copy.box, spec.shape)
                view_of(copy, file.shards[copy.read.shard])
            except PlanError as error:
                yield f"{name}: {error}"


def _index(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the element of a row-major number lies.

    >>> _index(7, (2, 5))
    (1, 2)
    """
    index = []
    for extent in reversed(shape):
        number, inside = divmod(number, extent)
        index.append(inside)
    return tuple(reversed(index))
