"""Hold copies of one box against each other, where ranks may each have saved values of their own.

Where one ``.metadata`` speaks for all ranks, torch's planner chose one of the equal copies of a replicated tensor.
Where each rank wrote metadata for itself, a name may stand for copies, or for another value on every rank; nothing but
the bytes tells which. Items that lie alike are compared by the CRC-32 that they state, so that few bytes are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, Shard
from hfdcp_core.read import open_item, open_payload, page_aligned, same_run
from hfdcp_core.store import Source
from hfdcp_core.windows import Lattice

COMPARED_AT_ONCE = 8
"""Pairs of copies that are compared at the same time."""
STEP_BYTES = 1 << 20
"""How much of each copy is held in memory while their bytes are compared."""


def differing(source: Source, shards: Iterable[Shard]) -> dict[str, str]:
    """Return the tensors of which one box is there with several values, and where.

    Raises:
        CorruptFile: An item is damaged.
    """
    copies: dict[tuple[str, Box], list[Shard]] = {}
    for shard in shards:
        copies.setdefault((shard.fqn, shard.box), []).append(shard)
    pairs = [(held[0], other) for (_, box), held in copies.items() if box.volume for other in held[1:]]
    with ThreadPoolExecutor(COMPARED_AT_ONCE, "hfdcp-replicas") as pool:
        equal = list(pool.map(lambda pair: _equal(source, *pair), pairs))
    return {
        one.fqn: f"ranks saved different values under this name: its box {one.box} in {one.span} and in {other.span}"
        for (one, other), same in zip(pairs, equal, strict=True)
        if not same
    }


def _equal(source: Source, one: Shard, other: Shard) -> bool:
    stated = [_stated(source, shard) for shard in (one, other)]
    return stated[0] == stated[1] if None not in stated else _equal_elements(source, one, other)


def _stated(source: Source, shard: Shard) -> int | None:
    """Return the CRC-32 that an item states of exactly its elements in order; None where it states none such."""
    if shard.encoding == RAW:
        return None
    item, _ = open_item(source, shard)
    size = Lattice.of(shard.dtype, shard.box.shape).nbytes
    in_order = item.row_major and item.storage_offset == 0 and item.storage_bytes == size
    return item.crc32 if in_order and not (item.big_endian or item.conjugate) else None


def _equal_elements(source: Source, one: Shard, other: Shard) -> bool:
    lattice = Lattice.of(one.dtype, one.box.shape)
    step = max(STEP_BYTES // lattice.itemsize, 1) * lattice.itemsize
    first, second = (open_payload(source, shard, scratch=page_aligned(STEP_BYTES)) for shard in (one, other))
    return same_run(first.read_into, second.read_into, lattice.nbytes, step=step)
