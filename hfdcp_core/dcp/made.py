"""What a recipe makes of a checkpoint, for a reader: a catalog of its targets, and boxes of them on demand.

A target that is a source tensor under another name keeps its shards. Any other one appears as a single chunk, of which
boxes are put together when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, Shard, Span
from hfdcp_core.defining import defined
from hfdcp_core.job import Job
from hfdcp_core.read import Array
from hfdcp_core.recipe import Definition
from hfdcp_core.single import Stream, Tensors
from hfdcp_core.store import Source

MADE = "made"
"""Encoding of a chunk that lies nowhere: it is put together."""
WINDOW_BYTES = 4 << 20
"""How much of a box is put together at a time."""


@dataclass(frozen=True, slots=True)
class Made:
    """The targets of a recipe."""

    catalog: Catalog
    """The targets, as if they lay somewhere."""
    arranged: Mapping[str, Definition]
    """Those that are put together, by name."""
    tensors: Tensors
    """What they are made of."""

    @classmethod
    def of(cls, catalog: Catalog, source: Source, job: Job) -> Made:
        """Apply a recipe to what is there.

        Raises:
            PlanError: It does not fit.
            UsageError: There is no such recipe.
        """
        definitions = defined(catalog, catalog.tensors, source, job).definitions
        plain: dict[str, list[str]] = {}  # of what is tied, one source is two targets
        for made in definitions:
            if not made.arrangements and not made.operation:
                plain.setdefault(made.source, []).append(made.fqn)
        arranged = {made.fqn: made for made in definitions if made.arrangements or made.operation}
        shards = [replace(shard, fqn=name) for shard in catalog.shards for name in plain.get(shard.fqn, ())]
        shards += (
            Shard(name, made.spec.dtype, Box.whole(made.spec.shape), Span("recipe", 0, made.spec.nbytes), MADE)
            for name, made in arranged.items()
        )
        specs = {made.fqn: made.spec for made in definitions}
        named = replace(catalog, tensors=specs, shards=tuple(shards), nesting={}, unsupported={})
        return cls(named, arranged, Tensors(catalog))

    def read_into(self, fqn: str, box: Box, source: Source, target: Array) -> None:
        """Put a box of a target together, in a dense array of its shape.

        Raises:
            PlanError: What it is made of is not there as a whole.
            CorruptFile: The source is damaged.
            StorageError: Reading failed.
        """
        plan = self.tensors.plan(self.arranged[fqn], window_bytes=WINDOW_BYTES, box=box)
        Stream(plan, source).read_into(target.reshape(-1).view(np.uint8).data)
