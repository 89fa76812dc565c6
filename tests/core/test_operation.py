"""What a box of an outcome is made from, where it is best cut, and what is held of an operand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.operation import (
    CAST,
    DEQUANTIZE,
    DEQUANTIZE_MXFP4,
    QUANTIZE,
    SCALES,
    Operand,
    Operation,
    grain,
    hold,
    in_order,
    mxfp4_shape,
    nbytes_of,
    pull,
    tiles,
)


def operand(dtype: str, *shape: int) -> Operand:
    return Operand("t", TensorSpec(dtype, shape))


MATRIX = (300, 200)
CASTING = Operation(CAST, (operand("F32", *MATRIX),), TensorSpec("BF16", MATRIX))
SCALING = Operation(
    DEQUANTIZE, (operand("F8_E4M3", *MATRIX), operand("F32", 3, 2)), TensorSpec("BF16", MATRIX), (128, 128)
)
BY_ROW = Operation(DEQUANTIZE, (operand("F8_E4M3", *MATRIX), operand("F32", 300)), TensorSpec("BF16", MATRIX), (1, 200))
BY_TENSOR = Operation(DEQUANTIZE, (operand("F8_E4M3", *MATRIX), operand("F32")), TensorSpec("BF16", MATRIX), MATRIX)
EXPERTS = Operation(
    DEQUANTIZE_MXFP4,
    (operand("U8", 4, 6, 3, 16), operand("U8", 4, 6, 3)),
    TensorSpec("BF16", mxfp4_shape((4, 6, 3, 16))),
)
ROWS = Operation(
    DEQUANTIZE_MXFP4, (operand("U8", 6, 3, 16), operand("U8", 6, 3)), TensorSpec("BF16", mxfp4_shape((6, 3, 16)))
)
QUANTIZING = Operation(QUANTIZE, (operand("BF16", *MATRIX),), TensorSpec("F8_E4M3", MATRIX), (128, 128))
SCALES_OF = Operation(SCALES, (operand("BF16", *MATRIX),), TensorSpec("F32", (3, 2)), (128, 128))
ALL = {
    "cast": CASTING,
    "blocks": SCALING,
    "rows": BY_ROW,
    "tensor": BY_TENSOR,
    "experts": EXPERTS,
    "mxfp4": ROWS,
    "quantize": QUANTIZING,
    "scales": SCALES_OF,
}


@pytest.mark.parametrize(
    ("how", "box", "expected"),
    [
        (CASTING, "[3:5, 0:9]", ["[3:5, 0:9]"]),
        (SCALING, "[100:140, 0:9]", ["[100:140, 0:9]", "[0:2, 0:1]"]),
        (SCALING, "[256:300, 128:200]", ["[256:300, 128:200]", "[2:3, 1:2]"]),
        (BY_ROW, "[7:9, 50:60]", ["[7:9, 50:60]", "[7:9]"]),
        (BY_TENSOR, "[7:9, 50:60]", ["[7:9, 50:60]", "[]"]),
        (EXPERTS, "[1:2, 31:33, 2:5]", ["[1:2, 2:5, 0:2, 0:16]", "[1:2, 2:5, 0:2]"]),
        (ROWS, "[1:2, 64:96]", ["[1:2, 2:3, 0:16]", "[1:2, 2:3]"]),
        (QUANTIZING, "[100:140, 0:9]", ["[0:256, 0:128]"]),
        (QUANTIZING, "[299:300, 199:200]", ["[256:300, 128:200]"]),
        (SCALES_OF, "[1:3, 0:2]", ["[128:300, 0:200]"]),
    ],
)
def test_a_box_is_made_from_these(how: Operation, box: str, expected: list[str]) -> None:
    spans = [tuple(map(int, span.split(":"))) for span in box[1:-1].split(", ")]
    offset, shape = tuple(a for a, _ in spans), tuple(b - a for a, b in spans)
    assert [str(part) for part in pull(how, Box(offset, shape))] == expected


@pytest.mark.parametrize("how", ALL.values(), ids=ALL)
@given(rooms=st.lists(st.sampled_from([1, 100, 5000, 10**9]), min_size=2, max_size=2), data=st.data())
@settings(max_examples=40, deadline=None)
def test_tiles_fill_a_box_in_order_and_fit_if_they_can(how: Operation, rooms: list[int], data: st.DataObject) -> None:
    offset, shape = [], []
    for extent in how.target.shape:
        start = data.draw(st.integers(0, extent - 1))
        offset.append(start)
        shape.append(data.draw(st.integers(1, min(24, extent - start))))
    box = Box(tuple(offset), tuple(shape))
    cut = list(tiles(how, box, rooms[: len(how.operands)]))
    filled = np.zeros(box.shape, int)
    for tile in cut:
        assert tile.within(box)
        inside = tile.relative_to(box)
        filled[tuple(map(slice, inside.offset, inside.stop))] += 1
    assert np.all(filled == 1)
    assert [tile.offset for tile in cut] == sorted(tile.offset for tile in cut)
    for tile in cut:
        parts = zip(how.operands, pull(how, tile), rooms, strict=False)
        too_much = any(nbytes_of(one, part) > room for one, part, room in parts)
        steps = grain(how)
        inside = [a // step != (b - 1) // step for a, b, step in zip(tile.offset, tile.stop, steps, strict=True)]
        assert not too_much or not any(inside)


def test_tiles_are_cut_at_the_grain() -> None:
    cut = list(tiles(QUANTIZING, Box((100, 0), (200, 200)), [128 * 128 * 2]))
    assert {tile.offset for tile in cut} == {(100, 0), (100, 128), (128, 0), (128, 128), (256, 0)}


@pytest.mark.parametrize(
    ("how", "number", "held", "expected"),
    [
        (CASTING, 0, (10, 200), True),
        (SCALING, 0, (10, 200), True),
        (SCALING, 1, (3, 2), True),
        (SCALING, 1, (1, 2), False),
        (EXPERTS, 0, (1, 6, 3, 16), True),
        (EXPERTS, 0, (1, 6, 1, 16), False),
        (EXPERTS, 0, (1, 2, 3, 16), False),
        (EXPERTS, 1, (1, 6, 3), True),
        (EXPERTS, 1, (1, 6, 1), False),
        (ROWS, 0, (2, 3, 16), True),
        (ROWS, 0, (2, 1, 16), False),
        (ROWS, 1, (2, 3), True),
        (QUANTIZING, 0, (128, 200), False),
        (QUANTIZING, 0, MATRIX, True),
    ],
)
def test_an_operand_comes_in_order_if_no_later_box_needs_it_again(
    how: Operation, number: int, held: tuple[int, ...], *, expected: bool
) -> None:
    whole = Box.whole(how.operands[number].spec.shape)
    assert in_order(how, number, Box((0,) * len(held), held), within=whole) is expected


@given(
    shape=st.lists(st.integers(1, 6), max_size=3).map(tuple),
    room=st.integers(0, 300),
    data=st.data(),
)
def test_what_is_held_has_what_is_needed_and_fits_if_that_does(
    shape: tuple[int, ...], room: int, data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    needed = Box(offset, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(offset, shape, strict=True)))
    held = hold(operand("U8", *shape), needed, room, within=Box.whole(shape))
    assert needed.within(held)
    assert held.within(Box.whole(shape))
    assert held == needed or math.prod(held.shape) <= room
