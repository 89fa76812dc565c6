"""How a piece of a tensor that an operation makes is worked off: in which tiles, and what is read for each.

Both who reads ahead and who fills windows ask here, so they agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hfdcp_core.box import Box
from hfdcp_core.operation import OPERAND_WINDOWS, Operation, hold, in_order, nbytes_of, pull, tiles
from hfdcp_core.plan import Making
from hfdcp_core.windows import Piece


@dataclass(frozen=True, slots=True)
class Held:
    """A box of an operand that is in memory while a tile is made."""

    piece: Piece
    """What is read; the same for all tiles in turn that need something of it."""
    needed: Box
    """The part of it that the tile is made from, counted in the whole operand."""
    in_order: bool
    """Whether the whole operand is read once and in order."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a piece that is made at once."""

    box: Box
    """Which elements, counted in the whole tensor."""
    inside: Box
    """The same, counted in the piece."""
    held: tuple[Held, ...]
    """What it is made from."""


def rooms_of(operation: Operation, window_bytes: int) -> tuple[int, ...]:
    """Return how many bytes may be held of each operand: most of them of the numbers, the rest of their scales."""
    return ((OPERAND_WINDOWS - 1) * window_bytes, *(window_bytes for _ in operation.operands[1:]))


def tiles_of(making: Making, piece: Piece, window_bytes: int) -> Iterator[Tile]:
    """Cut a piece into the tiles in which it is made, in order."""
    operation = making.operation
    rooms = rooms_of(operation, window_bytes)
    start = tuple(map(sum, zip(making.box.offset, piece.box.offset, strict=True)))
    whole = Box(start, piece.box.shape)
    for box in tiles(operation, whole, rooms):
        yield Tile(
            box, box.relative_to(whole), tuple(_held(making, number, box, room) for number, room in enumerate(rooms))
        )


def _held(making: Making, number: int, box: Box, room: int) -> Held:
    operation = making.operation
    operand, needed, within = operation.operands[number], pull(operation, box)[number], making.needed[number]
    held = hold(operand, needed, room, within=within)
    piece = Piece(making.operands[number], held, nbytes_of(operand, held))
    return Held(piece, needed, in_order(operation, number, held, within=within))


def reads_of(making: Making | None, piece: Piece, window_bytes: int) -> Iterator[Piece]:
    """Yield the pieces of tensors or operands that are read from the source for a piece of the file, in order."""
    if making is None:
        yield piece
        return
    for tile in tiles_of(making, piece, window_bytes):
        yield from (held.piece for held in tile.held)
