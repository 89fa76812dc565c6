"""To operate is to make a box of a tensor out of boxes of its operands, as the references do; arrays in, arrays out.

The references: ``torch.Tensor.to``; torch's ``QuantizedHuggingFaceStorageReader`` (``F8`` numbers as float32 times a
scale, then to the target) and its MXFP4 table, which is transformers' too; DeepSeek's block quantisation
(``scale = absmax / 448`` for each block, ``number / scale`` to the nearest ``F8_E4M3``). Arrays hold elements as
unsigned integers, as they lie in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hfdcp_core.box import Box
from hfdcp_core.numeric import (
    CHUNK,
    Bits,
    Floats,
    Workspace,
    cast,
    decode,
    encode,
    flat,
    quantized,
    scaled,
    scales_of,
    unpack_mxfp4,
)
from hfdcp_core.operation import (
    CAST,
    DEQUANTIZE,
    DEQUANTIZE_MXFP4,
    MXFP4_BYTES,
    MXFP4_NUMBERS,
    QUANTIZE,
    Operation,
    mxfp4_box,
    pull,
)

ROWS_TO_TURN = 512
"""Rows that are turned into columns at once: their columns are then written in runs of a few lines of cache."""


def operate(operation: Operation, box: Box, operands: Sequence[Bits], out: Bits, workspace: Workspace) -> int:
    """Make a box of the outcome.

    Args:
        operation: What is done.
        box: Which elements are made.
        operands: The boxes of the operands that `hfdcp_core.operation.pull` names.
        out: Where the elements go, of the box's shape.
        workspace: What is worked on.

    Returns:
        How many numbers the target's dtype cannot hold.
    """
    if operation.kind == CAST:
        source, target = operation.operands[0].spec.dtype, operation.target.dtype
        return cast(source, target, operands[0].reshape(-1), flat(out), workspace)
    if operation.kind == DEQUANTIZE:
        return _dequantize(operation, box, operands, out, workspace)
    if operation.kind == DEQUANTIZE_MXFP4:
        return _dequantize_mxfp4(operation, box, operands, out, workspace)
    return _quantize(operation, box, operands[0], out, workspace)


def _spans(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


# ---- F8 numbers and scales ------------------------------------------------------------------------------------------


def _dequantize(operation: Operation, box: Box, operands: Sequence[Bits], out: Bits, workspace: Workspace) -> int:
    raw, raw_scales = operands
    scales = np.empty(raw_scales.size, np.float32)
    decode(operation.operands[1].spec.dtype, np.ascontiguousarray(raw_scales).reshape(-1), scales)
    more = (0,) * (2 - len(box.shape))  # what has no rows is one
    offset, block = more + box.offset, tuple(1 for _ in more) + operation.block
    shape = tuple(1 for _ in more) + box.shape
    which = [np.arange(a, a + n) // size - a // size for a, n, size in zip(offset, shape, block, strict=True)]
    scales = scales.reshape([int(numbers[-1]) + 1 for numbers in which])
    dtypes = operation.operands[0].spec.dtype, operation.target.dtype
    lost = 0
    for lead in np.ndindex(*shape[:-2]):
        matrix = scales[tuple(int(numbers[i]) for numbers, i in zip(which, lead, strict=False))]
        lost += _rows(dtypes, raw.reshape(shape)[lead], (matrix, *which[-2:]), out.reshape(shape)[lead], workspace)
    return lost


Scales = tuple[Floats, npt.NDArray[np.intp], npt.NDArray[np.intp]]
"""Scales of blocks, and which of their rows and columns belongs to each row and column of the numbers."""


def _rows(dtypes: tuple[str, str], raw: Bits, scales: Scales, out: Bits, workspace: Workspace) -> int:
    lost = 0
    matrix, of_rows, of_columns = scales
    height, width = raw.shape
    for columns in _spans(width, CHUNK):
        for rows in _spans(
            height, CHUNK // min(width, CHUNK)
        ):  # where rows are cut, one at a time: they are contiguous
            factors = _factors(matrix, of_rows[rows], of_columns[columns])
            lost += scaled(dtypes, raw[rows, columns], factors, out[rows, columns], workspace)
    return lost


def _factors(matrix: Floats, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> Floats:
    """Return what some rows are multiplied with, no larger than broadcasting needs it."""
    if rows[0] == rows[-1]:
        return np.asarray(matrix[rows[0], columns])
    if columns[0] == columns[-1]:
        return np.asarray(matrix[rows, columns[0]][:, np.newaxis])
    return np.asarray(matrix[np.ix_(rows, columns)])


# ---- MXFP4 ----------------------------------------------------------------------------------------------------------


def _dequantize_mxfp4(operation: Operation, box: Box, operands: Sequence[Bits], out: Bits, workspace: Workspace) -> int:
    unpacked = mxfp4_box(operation, box)
    rows = 1 if len(unpacked.shape) == 1 else unpacked.shape[-2]
    lead, groups = unpacked.shape[:-2], operands[1].shape[-1]
    blocks = operands[0].reshape(*lead, rows, groups, MXFP4_BYTES)
    exponents = operands[1].reshape(*lead, rows, groups)
    placed = np.swapaxes(out, -1, -2) if operation.transposed else out.reshape(*lead, rows, unpacked.shape[-1])
    before = unpacked.offset[-1] % MXFP4_NUMBERS
    return sum(
        _matrix_of_mxfp4(operation, (blocks[index], exponents[index]), before, placed[index], workspace)
        for index in np.ndindex(*lead)
    )


def _matrix_of_mxfp4(
    operation: Operation, packed: tuple[Bits, Bits], before: int, out: Bits, workspace: Workspace
) -> int:
    """Unpack rows of blocks, and leave out what lies before the first number that is wanted, and behind the last."""
    blocks, exponents = packed
    height, groups = exponents.shape
    most = ROWS_TO_TURN if operation.transposed else CHUNK
    lost = 0
    for at in _spans(groups, max(1, CHUNK // MXFP4_NUMBERS // min(height, most))):
        first = at.start * MXFP4_NUMBERS - before
        start, stop = max(0, first), min(out.shape[1], at.stop * MXFP4_NUMBERS - before)
        for rows in _spans(height, min(most, CHUNK // MXFP4_NUMBERS // (at.stop - at.start))):
            values = unpack_mxfp4(
                np.ascontiguousarray(blocks[rows, at]).reshape(-1),
                np.ascontiguousarray(exponents[rows, at]).reshape(-1),
                workspace,
            )
            wanted = values.reshape(rows.stop - rows.start, -1)[:, start - first : stop - first]
            made = np.empty(wanted.shape, out.dtype)
            lost += encode(
                operation.target.dtype, np.ascontiguousarray(wanted).reshape(-1), made.reshape(-1), workspace
            )
            out[rows, start:stop] = made
    return lost


# ---- block quantisation ---------------------------------------------------------------------------------------------


def _quantize(operation: Operation, box: Box, raw: Bits, out: Bits, workspace: Workspace) -> int:
    """Make numbers, or their scales, block by block; what is made of a block beyond the box is left out."""
    [held] = pull(operation, box)
    height, width = operation.block
    lost = 0
    for rows in _spans(held.shape[0], height):
        for columns in _spans(held.shape[1], max(1, CHUNK // height // width) * width):
            part = Box(
                (held.offset[0] + rows.start, held.offset[1] + columns.start),
                (rows.stop - rows.start, columns.stop - columns.start),
            )
            values = workspace.values[: part.volume]
            decode(operation.operands[0].spec.dtype, np.ascontiguousarray(raw[rows, columns]).reshape(-1), values)
            shaped = values.reshape(part.shape)
            scales = scales_of(shaped, width)
            if operation.kind == QUANTIZE:
                lost += _put_quantized(shaped, np.repeat(scales, width)[: part.shape[1]], (part, box), out, workspace)
            else:
                row, column = part.offset[0] // height - box.offset[0], part.offset[1] // width - box.offset[1]
                out[row, column : column + len(scales)] = scales.view(np.uint32)
    return lost


def _put_quantized(values: Floats, scales: Floats, boxes: tuple[Box, Box], out: Bits, workspace: Workspace) -> int:
    part, box = boxes
    made = np.empty(part.shape, np.uint8)
    quantized(values, scales, made, workspace)
    shared = part.intersect(box)
    assert shared is not None
    source, target = shared.relative_to(part), shared.relative_to(box)
    inside = tuple(map(slice, source.offset, source.stop))
    out[tuple(map(slice, target.offset, target.stop))] = made[inside]
    return int(np.count_nonzero(np.isinf(values[inside])))
