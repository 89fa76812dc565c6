"""A piece that an operation makes is cut into tiles; reader and filler learn the same of what is read for them."""

from __future__ import annotations

from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.operation import CAST, DEQUANTIZE, Operand, Operation
from hfdcp_core.plan import Making
from hfdcp_core.tiling import reads_of, rooms_of, tiles_of
from hfdcp_core.windows import Piece

NUMBERS, SCALES = Operand("w", TensorSpec("F8_E4M3", (8, 16))), Operand("s", TensorSpec("F32", (2, 4)))
SCALING = Operation(DEQUANTIZE, (NUMBERS, SCALES), TensorSpec("BF16", (8, 16)), (4, 4))
CASTING = Operation(CAST, (Operand("w", TensorSpec("F32", (8, 16))),), TensorSpec("BF16", (8, 16)))


def test_most_room_is_for_the_numbers() -> None:
    assert rooms_of(SCALING, 100) == (300, 100)
    assert rooms_of(CASTING, 100) == (300,)


def test_a_plain_piece_is_read_as_it_is() -> None:
    piece = Piece(3, Box((0,), (4,)), 16)
    assert list(reads_of(None, piece, 64)) == [piece]


def test_a_part_of_a_tensor_is_made_from_its_own_place_in_the_operands() -> None:
    making = Making(0, SCALING, Box((4, 0), (4, 16)), (5, 6))
    [tile] = tiles_of(making, Piece(0, Box((1, 0), (3, 16)), 96), 64)
    assert (tile.box, tile.inside) == (Box((5, 0), (3, 16)), Box((0, 0), (3, 16)))
    numbers, scales = tile.held
    assert numbers.piece == Piece(5, Box((4, 0), (4, 16)), 64)  # all that the part needs fits
    assert (numbers.needed, numbers.in_order) == (Box((5, 0), (3, 16)), True)
    assert scales.piece == Piece(6, Box((1, 0), (1, 4)), 16)
    assert (scales.needed, scales.in_order) == (Box((1, 0), (1, 4)), True)


def test_what_does_not_fit_is_read_tile_by_tile() -> None:
    making, piece = Making(0, CASTING, Box.whole((8, 16)), (1,)), Piece(0, Box((2, 0), (4, 16)), 128)
    read = list(reads_of(making, piece, 48))
    assert read == [Piece(1, Box((2, 0), (2, 16)), 128), Piece(1, Box((4, 0), (2, 16)), 128)]
    assert [tile.inside for tile in tiles_of(making, piece, 48)] == [Box((0, 0), (2, 16)), Box((2, 0), (2, 16))]
