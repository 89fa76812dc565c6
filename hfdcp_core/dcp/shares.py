"""Which rank makes which file, and what the others hand over for it: planned before any data move.

Files are shared out balanced by their bytes, the largest first. What a rank hands over is one run of bytes, its boxes
in the order of the files that they go to; so a file plan reads from ranks as any other reads from files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hfdcp_core.catalog import Catalog, Shard, Span, TensorSpec
from hfdcp_core.dcp.orders import Boxes, HandedBox, Key, Order, Place, Share, box_of
from hfdcp_core.dcp.pieces import rank_name
from hfdcp_core.layout import Target
from hfdcp_core.plan import FilePlan, reshard

WINDOW_BYTES = 4 << 20
"""How much of a file is made at a time."""


def shared_out(ranks: Sequence[Boxes], target: Target, orders: Sequence[Order]) -> list[Order]:
    """Let single ranks make files to which all ranks have something.

    Args:
        ranks: What each rank has.
        target: The files.
        orders: Where each box goes, rank by rank.
    """
    handed = [_handed(boxes, order.places) for boxes, order in zip(ranks, orders, strict=True)]
    shards = [
        Shard(box.key[0], dtype, box_of(dtype, box.key, box.shape), Span(rank_name(rank), box.start, end))
        for rank, run in enumerate(handed)
        for box in run
        for dtype, end in [(ranks[rank].specs[box.key[0]].dtype, box.start + box.nbytes)]
    ]
    specs = {name: spec for boxes in ranks for name, spec in boxes.specs.items()}
    plans = reshard(Catalog("live", specs, tuple(shards)), target, window_bytes=WINDOW_BYTES).files
    return [
        replace(order, share=Share(rank, run, made))
        for rank, (order, run, made) in enumerate(zip(orders, handed, balanced(plans, len(ranks)), strict=True))
    ]


def _handed(boxes: Boxes, places: Mapping[Key, Place]) -> tuple[HandedBox, ...]:
    """Put the boxes of a rank in a row."""
    run, start = [], 0
    shapes = dict(zip(boxes.keys, boxes.shapes, strict=True))
    for key in sorted(shapes, key=lambda key: (places[key].file, places[key].start, places[key].at)):
        dtype = boxes.specs[key[0]].dtype
        nbytes = TensorSpec(dtype, box_of(dtype, key, shapes[key]).shape).nbytes
        if nbytes:
            run.append(HandedBox(key, shapes[key], start, nbytes))
            start += nbytes
    return tuple(run)


def balanced(plans: Sequence[FilePlan], ranks: int) -> list[tuple[FilePlan, ...]]:
    """Share files out so that no rank writes many more bytes than another."""
    shares: list[list[FilePlan]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for plan in sorted(plans, key=lambda plan: -plan.size):
        least = loads.index(min(loads))
        shares[least].append(plan)
        loads[least] += plan.size
    return [tuple(share) for share in shares]
