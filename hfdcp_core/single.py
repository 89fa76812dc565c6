"""Single tensors of a checkpoint, or boxes of them, read as a recipe defines them: a plan for each, and no file.

For those who want bytes and not an output: whoever compares, and training code that loads what a recipe makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, Shard
from hfdcp_core.fill import Filler
from hfdcp_core.layout import Part, lay_out_shards
from hfdcp_core.plan import FilePlan, reshard
from hfdcp_core.read import page_aligned
from hfdcp_core.recipe import Definition
from hfdcp_core.state import Cancellation
from hfdcp_core.store import Source
from hfdcp_core.windows import refuse_split_bytes, windows_of


class Tensors:
    """Plans single tensors; each looks at its own shards only."""

    def __init__(self, catalog: Catalog) -> None:
        """Take what is there."""
        self._catalog = replace(catalog, nesting={}, skipped=(), objects=())
        self._shards: dict[str, list[Shard]] = {}
        for shard in catalog.shards:
            self._shards.setdefault(shard.fqn, []).append(shard)

    def plan(self, definition: Definition, *, window_bytes: int, box: Box | None = None) -> FilePlan:
        """Plan a tensor, or a box of it.

        Raises:
            PlanError: What it is made of is not there as a whole.
        """
        needed = _needed(definition)
        tensors = {name: self._catalog.tensors[name] for name in needed if name in self._catalog.tensors}
        shards: Sequence[Shard] = tuple(shard for name in needed for shard in self._shards.get(name, ()))
        own = replace(self._catalog, tensors=tensors, shards=tuple(shards))
        target = lay_out_shards({definition.fqn: [Part(definition, box or Box.whole(definition.spec.shape))]}, save="")
        plan = reshard(own, target, window_bytes=window_bytes)
        refuse_split_bytes(plan)
        return plan.files[0]


def _needed(definition: Definition) -> Iterable[str]:
    """Return the names of the source tensors that a tensor is made of, each once."""
    made = {
        name
        for operand, arrangement in definition.parts
        for name in (arrangement.sources if arrangement else (operand.fqn,))
    }
    return sorted(made)


class Stream:
    """The bytes of a planned tensor or box, in order, a window at a time."""

    def __init__(self, plan: FilePlan, source: Source, cancellation: Cancellation | None = None) -> None:
        """Take a plan and the store that its shards lie in; nothing is read yet."""
        self._plan = plan
        self._filler = Filler(plan, source, cancellation or Cancellation())

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order; each piece is overwritten by the next.

        Raises:
            CorruptFile: The source is damaged.
            StorageError: Reading failed.
        """
        buffer = page_aligned(self._plan.window_bytes)
        for window in windows_of(self._plan):
            nbytes = sum(piece.nbytes for piece in window)
            self._filler.fill(window, buffer[:nbytes])
            yield buffer[:nbytes]

    def read_into(self, target: memoryview) -> None:
        """Fill a buffer with all bytes, and hold them against the source's own checksums.

        Raises:
            CorruptFile: The source is damaged.
            StorageError: Reading failed.
        """
        start = 0
        for window in windows_of(self._plan):
            nbytes = sum(piece.nbytes for piece in window)
            self._filler.fill(window, target[start : start + nbytes])
            start += nbytes
        self.check()

    def check(self) -> None:
        """Hold what was read against the source's own checksums.

        Raises:
            CorruptFile: The source is damaged.
        """
        self._filler.check()
