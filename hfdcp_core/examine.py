"""Look into the items of a checkpoint, beyond what its metadata says.

``.metadata`` knows a dtype and a shape; what lies in an item may be something else: a quantised tensor, a subclass
with tensors of its own (torchao), another dtype. `look` opens items and reads no element. `examine` reads everything
there is once, against the checksums that the items state, and returns all that is wrong instead of the first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from hfdcp_core.catalog import RAW, TORCH_SAVE, Catalog, Shard
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import SourceError, UnknownDtype, UnsafePickle
from hfdcp_core.read import open_item, open_payload, page_aligned
from hfdcp_core.state import SILENT, Progress
from hfdcp_core.store import Source
from hfdcp_core.union import Union
from hfdcp_core.windows import Lattice

ITEMS_IN_FLIGHT = 8
"""Items that are looked into at once."""
STEP_BYTES = 2 << 20
"""How much of one item is held in memory while it is read."""
_USUAL_OVERHEADS = frozenset((*range(1100, 1250), *range(1500, 1720)))
"""Bytes of an archive around the elements of one plain tensor, as torch 2.1 to 2.6 and 2.7 to 2.15 write them (1116 to
1180, 1513 to 1641), with room for large numbers. A surplus of any other size is looked into, not refused."""
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look into items brought."""

    unsupported: dict[str, str]
    """Tensors that are not the plain ones that ``.metadata`` calls them, and why they cannot be carried over."""
    problems: tuple[str, ...]
    """Items that are damaged, or of another dtype or shape than they should be."""


def is_unusual(shard: Shard) -> bool:
    """Whether an item is not as long as its dtype and shape, and the archive around them, make it."""
    nbytes = dtype_named(shard.dtype).bits * math.prod(shard.box.shape) // 8
    around = shard.span.length - nbytes
    return shard.encoding == TORCH_SAVE and around not in _USUAL_OVERHEADS


def look(source: Source, shards: Iterable[Shard]) -> Findings:
    """Open the items of shards, several at once, and hold each against its shard.

    Raises:
        StorageError: An item cannot be read.
    """
    unsupported: dict[str, str] = {}
    problems: list[str] = []
    wrapped = (shard for shard in shards if shard.encoding != RAW)
    for shard, error in _in_flight(lambda shard: (shard, _opening_fault(source, shard)), wrapped):
        if isinstance(error, UnsafePickle | UnknownDtype):
            unsupported.setdefault(shard.fqn, f"its item holds something else than a plain tensor: {error.message}")
        elif error:
            problems.append(str(error))
    return Findings(unsupported, tuple(problems))


def _opening_fault(source: Source, shard: Shard) -> SourceError | None:
    try:
        open_item(source, shard)
    except SourceError as error:
        return error
    return None


def examine(catalog: Catalog, source: Source, progress: Progress = SILENT) -> tuple[str, ...]:
    """Read every shard once, replicas too, and hold it against the checksum that its item states.

    Returns:
        Everything that is wrong, each with tensor, box and file; nothing where all is well.

    Raises:
        StorageError: A file cannot be read.
    """

    def read(shard: Shard) -> str | None:
        try:
            _read_through(source, shard, progress)
        except SourceError as error:
            return str(error)
        return None

    return tuple(problem for problem in _in_flight(read, catalog.shards) if problem)


@dataclass(frozen=True, slots=True)
class Examined:
    """What came of reading every copy."""

    problems: tuple[str, ...]
    """Items that are damaged wherever they lie."""
    said: tuple[str, ...]
    """Damaged copies of items that are whole in another place."""


def examine_copies(catalog: Catalog, source: Source, progress: Progress = SILENT) -> Examined:
    """Examine a checkpoint in one or several places: of an item that lies in several, each copy.

    Raises:
        StorageError: A file cannot be read.
    """
    if not isinstance(source, Union):
        return Examined(examine(catalog, source, progress), ())
    alike = {path: source.alike(path) for path in {shard.span.path for shard in catalog.shards}}

    def read(shard: Shard) -> tuple[list[str], list[str]]:
        faults: dict[int, str] = {}
        for number in alike[shard.span.path]:
            try:
                _read_through(source.places[number], shard, progress)
            except SourceError as error:
                faults[number] = str(error)
        whole = next((source.places[number].url for number in alike[shard.span.path] if number not in faults), None)
        if whole is None:
            return [*faults.values()], []
        return [], [f"{fault}; whole in {whole}" for fault in faults.values()]

    found = list(_in_flight(read, catalog.shards))
    return Examined(tuple(p for problems, _ in found for p in problems), tuple(s for _, said in found for s in said))


def _read_through(source: Source, shard: Shard, progress: Progress) -> None:
    lattice = Lattice.of(shard.dtype, shard.box.shape)
    size = lattice.nbytes
    buffer = page_aligned(min(size, max(STEP_BYTES // lattice.itemsize, 1) * lattice.itemsize))
    payload = open_payload(source, shard, scratch=page_aligned(STEP_BYTES))
    for start in range(0, size, max(len(buffer), 1)):
        part = buffer[: size - start]
        payload.read_into(start, part)
        progress.advance(len(part))
    payload.check()


def _in_flight(function: Callable[[_Given], _Made], given: Iterable[_Given]) -> Iterator[_Made]:
    """Map in threads and in order, without entering everything into a queue first."""
    waiting: deque[Future[_Made]] = deque()
    with ThreadPoolExecutor(ITEMS_IN_FLIGHT, "hfdcp-items") as pool:
        try:
            for one in given:
                if len(waiting) == 2 * ITEMS_IN_FLIGHT:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(function, one))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
