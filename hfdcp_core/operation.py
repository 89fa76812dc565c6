"""An operation makes a tensor out of others, box by box: its values, and what each box of it is made from.

A plain tensor has the bytes of its source. Any other is the outcome of an operation on *operands*, which are tensors of
the source. An operation says

- which box of each operand a box of the outcome is made from (`pull`), so that a window of a file needs no more of the
  source than that;
- its *grain*: boxes that begin and end at multiples of it (or at the tensor's end) need nothing twice;
- how a box is cut into *tiles* whose operands fit the room there is, and how much of an operand is best read at once
  (`hold`).

The kinds:

| kind | what comes out |
|---|---|
| `CAST` | the same numbers in another dtype |
| `DEQUANTIZE` | ``F8`` numbers times the scale of their block, row or tensor |
| `DEQUANTIZE_MXFP4` | four-bit numbers times a power of two for every 32: ``blocks […, G, 16]``, ``scales [… G]`` |
| `QUANTIZE` | ``F8_E4M3`` numbers, to be multiplied with the scale of their block |
| `SCALES` | those scales |

Nothing here touches a number: `hfdcp_core.operate` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec

CAST = "cast"
DEQUANTIZE = "dequantize"
DEQUANTIZE_MXFP4 = "dequantize-mxfp4"
QUANTIZE = "quantize"
SCALES = "scales"

MXFP4_BYTES = 16
"""Bytes of one block of MXFP4, with two numbers in each."""
MXFP4_NUMBERS = 2 * MXFP4_BYTES

CASTABLE = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Dtypes that numbers can be cast into."""
DECODABLE = CASTABLE | {"F8_E8M0"}
"""Dtypes that numbers can be read from."""

OPERAND_WINDOWS = 4
"""Windows' worth of room for what operands hold: three for the numbers, one for their scales."""
WORKSPACE_BYTES = 4 << 20
"""What working on numbers takes beside, for each file in flight (measured: 2.4 MiB)."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of the source that an operation works on."""

    fqn: str
    """Its name as saved."""
    spec: TensorSpec
    """Its dtype and shape."""


@dataclass(frozen=True, slots=True)
class Operation:
    """How a tensor is made."""

    kind: str
    """One of the kinds above."""
    operands: tuple[Operand, ...]
    """What it is made from: the numbers first, then their scales."""
    target: TensorSpec
    """The whole tensor that comes out."""
    block: tuple[int, ...] = ()
    """Extents of a block in each dimension of the numbers; nothing where there are none."""

    @property
    def transposed(self) -> bool:
        """Whether the last two dimensions change places: of stacked experts models want ``[expert, in, out]``."""
        return self.kind == DEQUANTIZE_MXFP4 and len(self.target.shape) == 3


def ceil_div(a: int, b: int) -> int:
    """Return the quotient, rounded up.

    >>> ceil_div(7, 2), ceil_div(8, 2), ceil_div(0, 2)
    (4, 4, 0)
    """
    return -(-a // b)


def blocks_of(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return how many blocks there are in each dimension; the last may be a smaller one.

    >>> blocks_of((200, 300), (128, 128))
    (2, 3)
    """
    return tuple(map(ceil_div, shape, block))


def mxfp4_shape(blocks: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that blocks become: ``[…, out, in]``, of stacked experts ``[expert, in, out]``.

    >>> mxfp4_shape((8, 4, 16)), mxfp4_shape((2, 8, 4, 16))
    ((8, 128), (2, 128, 8))
    """
    *lead, groups, _ = blocks
    numbers = groups * MXFP4_NUMBERS
    return (lead[0], numbers, lead[1]) if len(blocks) == 4 else (*lead, numbers)


def mxfp4_box(operation: Operation, box: Box) -> Box:
    """Return a box of unpacked MXFP4 as it lies in the source: ``[…, out, in]``."""
    if not operation.transposed:
        return box
    (a, b, c), (n, m, k) = box.offset, box.shape
    return Box((a, c, b), (n, k, m))


def pull(operation: Operation, box: Box) -> tuple[Box, ...]:
    """Return the box of each operand that a box of the outcome is made from."""
    if operation.kind == CAST:
        return (box,)
    if operation.kind == DEQUANTIZE:
        return box, _own(operation.operands[1].spec.shape, _in_blocks(box, operation.block))
    if operation.kind == DEQUANTIZE_MXFP4:
        unpacked = mxfp4_box(operation, box)
        grouped = _in_blocks(unpacked, (*(1 for _ in unpacked.shape[:-1]), MXFP4_NUMBERS))
        return Box((*grouped.offset, 0), (*grouped.shape, MXFP4_BYTES)), grouped
    blocks = _in_blocks(box, operation.block) if operation.kind == QUANTIZE else box
    return (_out_of_blocks(blocks, operation.block, operation.operands[0].spec.shape),)


def _in_blocks(box: Box, block: Sequence[int]) -> Box:
    """Return the blocks that a box meets."""
    offset = tuple(a // b for a, b in zip(box.offset, block, strict=True))
    stop = map(ceil_div, box.stop, block)
    return Box(offset, tuple(b - a for a, b in zip(offset, stop, strict=True)))


def _out_of_blocks(blocks: Box, block: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the elements of blocks, of which the last in a dimension may be smaller."""
    offset = tuple(a * b for a, b in zip(blocks.offset, block, strict=True))
    stop = (min(a * b, whole) for a, b, whole in zip(blocks.stop, block, shape, strict=True))
    return Box(offset, tuple(b - a for a, b in zip(offset, stop, strict=True)))


def _own(shape: tuple[int, ...], box: Box) -> Box:
    """Return a box of scales as their tensor has it: it may leave out last dimensions in which there is one block."""
    return Box.whole(shape) if math.prod(shape) == 1 else Box(box.offset[: len(shape)], box.shape[: len(shape)])


def grain(operation: Operation) -> tuple[int, ...]:
    """Return where boxes of the outcome should begin and end, in each dimension."""
    if operation.kind == QUANTIZE:
        return operation.block
    ones = [1] * len(operation.target.shape)
    if operation.kind == DEQUANTIZE_MXFP4:
        ones[-2 if operation.transposed else -1] = MXFP4_NUMBERS
    return tuple(ones)


def tiles(operation: Operation, box: Box, rooms: Sequence[int]) -> Iterator[Box]:
    """Cut a box of the outcome, in row-major order, until what its parts are made from fits.

    Args:
        operation: What is done.
        box: What is made.
        rooms: Bytes that may be held of each operand; where even the smallest tile needs more, it is made all the same.
    """
    needed = pull(operation, box)
    fits = all(
        nbytes_of(operand, part) <= room for operand, part, room in zip(operation.operands, needed, rooms, strict=True)
    )
    halves = None if fits else _halves(box, grain(operation))
    if halves is None:
        yield box
        return
    for half in halves:
        yield from tiles(operation, half, rooms)


def nbytes_of(operand: Operand, box: Box) -> int:
    """Return the bytes of a box of an operand."""
    return TensorSpec(operand.spec.dtype, box.shape).nbytes


def _halves(box: Box, steps: Sequence[int]) -> tuple[Box, Box] | None:
    """Cut a box in two, at a multiple of the grain, across the first dimension that has one inside."""
    for axis, step in enumerate(steps):
        start, stop = box.offset[axis], box.stop[axis]
        middle = max((start + stop) // 2 // step, start // step + 1) * step
        if middle < stop:
            lower = (*box.shape[:axis], middle - start, *box.shape[axis + 1 :])
            upper = (*box.shape[:axis], stop - middle, *box.shape[axis + 1 :])
            return Box(box.offset, lower), Box((*box.offset[:axis], middle, *box.offset[axis + 1 :]), upper)
    return None


def hold(operand: Operand, box: Box, room: int, *, within: Box) -> Box:
    """Return how much of an operand to read where a box of it is needed: whole last dimensions, as long as they fit.

    So what following boxes need of the same rows is there already, and is read once.

    Args:
        operand: What is read.
        box: What is needed of it.
        room: Bytes that there is room for.
        within: What is needed of it for all boxes together.

    >>> rows, everything = Operand("w", TensorSpec("U8", (2, 4, 8))), Box.whole((2, 4, 8))
    >>> needed = Box((1, 2, 0), (1, 1, 4))
    >>> [str(hold(rows, needed, room, within=everything)) for room in (16, 32)]
    ['[1:2, 2:3, 0:8]', '[1:2, 0:4, 0:8]']
    """
    for axis in reversed(range(len(box.shape))):
        offset = (*box.offset[:axis], within.offset[axis], *box.offset[axis + 1 :])
        wider = Box(offset, (*box.shape[:axis], within.shape[axis], *box.shape[axis + 1 :]))
        if nbytes_of(operand, wider) > room:
            break
        box = wider
    return box


def in_order(operation: Operation, operand: int, held: Box, *, within: Box) -> bool:
    """Whether an operand is read once and in order, so that its checksum can come with it, if such boxes are held."""
    if held == within:
        return True
    if operation.kind in {CAST, DEQUANTIZE}:
        return operand == 0  # made in row-major order, and every number is used once
    first = 1 if operation.transposed else len(operation.target.shape) - 1
    return operation.kind == DEQUANTIZE_MXFP4 and held.shape[first:] == within.shape[first:]
