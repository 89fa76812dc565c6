"""Which boxes a ``.distcp`` file holds that torch wrote with ``SerializationFormat.SAFETENSORS``.

Such a file begins with the pickled objects, each a ``torch.save`` archive, and ends with one safetensors file. The
offset and length in ``.metadata`` are no byte range there: each item is said to start where the safetensors file
starts, and to be as long as its elements. The header alone says where a tensor lies, and under `DCP_SHARDING_INFO`
which box of it that is.

The header knows one box for each name. Where a rank saves two boxes of a tensor into one file, torch keeps the last
one and lists both: the other box is lost, which is told here and never guessed away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, Shard, Span, TensorSpec
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import CorruptFile
from hfdcp_core.safetensors_file import Entry, Header, sharding_info

SEARCHED_BYTES = 64
"""How far behind the place that ``.metadata`` states the header may begin: there is an empty frame before it where a
stream transform was asked for besides."""
_MOST_HEADERS = 4


@dataclass(frozen=True, slots=True)
class Tail:
    """The safetensors file with which a ``.distcp`` file ends."""

    header: Header
    """What its header says."""
    start: int
    """Where it begins in the file."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one file holds of the boxes that it is said to hold."""

    shards: tuple[Shard, ...]
    """The boxes that are there, as raw spans."""
    lost: tuple[Shard, ...]
    """Boxes in whose place another box of the same tensor lies, as ``.metadata`` has them."""


def header_places(window: bytes, room: int) -> Iterator[tuple[int, int]]:
    """Yield where in ``window`` a safetensors header may begin, and where it would end, counted in the window too.

    Args:
        window: The bytes from the stated place on, `SEARCHED_BYTES` and nine more where there are so many.
        room: Bytes from the stated place to the end of the file.

    >>> list(header_places((2).to_bytes(8, "little") + b"{}", 10))
    [(0, 10)]
    """
    found = 0
    for start in range(max(0, min(SEARCHED_BYTES, len(window) - 9) + 1)):
        stop = start + 8 + int.from_bytes(window[start : start + 8], "little")
        if window[start + 8] == ord("{") and stop <= room and found < _MOST_HEADERS:
            found += 1
            yield start, stop


def boxes_held(tail: Tail, shards: Iterable[Shard], tensors: Mapping[str, TensorSpec], *, path: str) -> Held:
    """Find the boxes of ``shards``, all said to lie in one file, behind its header.

    Args:
        tail: What the file ends with.
        shards: What ``.metadata`` says of the file.
        tensors: Every tensor that ``.metadata`` has.
        path: The file's name, for messages.

    Raises:
        CorruptFile: The header and ``.metadata`` contradict each other; ``problems`` has every tensor.
    """
    data_start = tail.start + tail.header.data_start
    found = {entry.fqn: _raw(entry, data_start, path) for entry in tail.header.entries}
    found = _at_their_offsets(found, tail.header, path)
    said: dict[str, list[Shard]] = {}
    for shard in shards:
        said.setdefault(shard.fqn, []).append(shard)
    unknown = {fqn for fqn, shard in found.items() if shard.box.volume and fqn not in said}
    problems = [f"{found[fqn]}: not in .metadata" for fqn in sorted(unknown & tensors.keys())]
    kept, lost = list[Shard](), list[Shard]()
    for fqn, listed in said.items():
        here = found.get(fqn)
        same = [shard for shard in listed if here and (shard.dtype, shard.box) == (here.dtype, here.box)]
        if here is None or not same:
            problems.append(f"{listed[0]}: {f'the file holds {here.dtype}{here.box}' if here else 'not in the file'}")
            continue
        kept.append(replace(same[0], span=here.span, encoding=RAW))
        lost += [shard for shard in listed if shard is not same[0]]
    CorruptFile.raise_for(f"{path}: its header and .metadata contradict each other: of another save?", problems)
    return Held(tuple(kept), tuple(lost))


def _raw(entry: Entry, data_start: int, path: str) -> Shard:
    span = Span(path, data_start + entry.start, data_start + entry.stop)
    return Shard(entry.fqn, entry.dtype, Box.whole(entry.shape), span)


def _at_their_offsets(found: Mapping[str, Shard], header: Header, path: str) -> dict[str, Shard]:
    """Move each box to where its tensor has it; torch counts its own elements, of which one may be two."""
    offsets = sharding_info(header, path=path)
    if offsets is None:
        raise CorruptFile(f"{path}: its header does not say which boxes of their tensors it holds")
    return {
        fqn: replace(shard, box=Box(_logical(offsets[fqn], dtype_named(shard.dtype).packed), shard.box.shape))
        for fqn, shard in found.items()
    }


def _logical(offset: tuple[int, ...], packed: int) -> tuple[int, ...]:
    return (*offset[:-1], offset[-1] * packed) if offset else offset
