"""Gather a distributed checkpoint (DCP): ``.metadata``, or one such file for each rank, and the items it names.

1. ``.metadata`` speaks for the whole. Where every rank wrote its own (``dcp.save(use_collectives=False)``), each
   ``__R.metadata`` lists the boxes of one rank only, and the checkpoint is their union. No rank may be missing: a gap
   in the numbers, or a box that nobody lists, is an error that names the file.
2. Each file must be there and as long as it is said to be, or end with the safetensors file that
   ``SerializationFormat.SAFETENSORS`` puts into it (`hfdcp_core.distcp_tail`).
3. Items of an unusual length are looked into, all if asked: ``.metadata`` calls some tensors plain that are not.

Files that are not named belong to another save and do not count.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hfdcp_core.catalog import Catalog, FileStamp, ObjectItem, Shard
from hfdcp_core.distcp_file import DcpMetadata, read_metadata
from hfdcp_core.distcp_tail import SEARCHED_BYTES, Held, Tail, boxes_held, header_places
from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, StorageNotFound
from hfdcp_core.examine import is_unusual, look
from hfdcp_core.homes import METADATA, of_rank
from hfdcp_core.plan import tile
from hfdcp_core.replicas import differing
from hfdcp_core.safetensors_file import parse_header
from hfdcp_core.store import Source, name_in, url_of

FILES_IN_FLIGHT = 8
"""Files whose metadata or header are read at once."""
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
_OF_ONE_RANK = re.compile(r"__(\d+)\.metadata")


def metadata_files(stamps: Mapping[str, FileStamp]) -> tuple[FileStamp, ...]:
    """Return the files that make a folder a distributed checkpoint: the one for all, else those of the ranks."""
    if METADATA in stamps:
        return (stamps[METADATA],)
    ranks = {int(match[1]): stamp for path, stamp in stamps.items() if (match := _OF_ONE_RANK.fullmatch(path))}
    return tuple(ranks[rank] for rank in sorted(ranks))


def gather_dcp(
    source: Source, stamps: Mapping[str, FileStamp], *, world_size: int | None = None, deep: bool = False
) -> Catalog:
    """List what the metadata of a distributed checkpoint name.

    Args:
        source: The folder that holds the checkpoint itself.
        stamps: The files in it; `metadata_files` finds at least one.
        world_size: How many ranks saved it, where each wrote its own metadata.
        deep: Whether to open every item, not only those of an unusual length.

    Raises:
        IncompleteCheckpoint: A file or box that they name is absent, or a rank's metadata.
        CorruptFile: Metadata, files and items contradict each other.
        UnsafePickle: They would call something.
    """
    told = metadata_files(stamps)
    ranks = [stamp.path for stamp in told if stamp.path != METADATA]
    _refuse_gaps(source.url, ranks, world_size)
    found = _joined(source.url, _each(lambda stamp: _read_one(source, stamp), told))
    if ranks:
        _refuse_holes(source.url, found, ranks)
    files = _present_files(source, stamps, found)
    shards, lost = _with_tails(source, files, found)
    _refuse_shared_bytes(source.url, shards, found)
    looked = look(source, shards if deep else filter(is_unusual, shards))
    CorruptFile.raise_for(
        f"{source.url}: items are damaged, or other tensors than {told[0].path} says", looked.problems
    )
    unsupported = {**found.unsupported, **lost, **looked.unsupported}
    if ranks:  # each rank may have saved values of its own under one name
        unsupported |= differing(source, (shard for shard in shards if shard.fqn not in unsupported))
    return Catalog(
        format="dcp",
        tensors={fqn: spec for fqn, spec in found.tensors.items() if fqn not in unsupported},
        shards=tuple(shard for shard in shards if shard.fqn not in unsupported),
        files=(*told, *files.values()),
        skipped=found.skipped,
        nesting={fqn: path for fqn, path in found.nesting.items() if fqn not in unsupported},
        unsupported=unsupported,
        objects=found.objects,
    )


# ---- metadata -------------------------------------------------------------------------------------------------------


def _read_one(source: Source, stamp: FileStamp) -> tuple[str, DcpMetadata]:
    raw = source.read(stamp.path, 0, stamp.size)
    return stamp.path, read_metadata(raw, path=f"{url_of(source, stamp.path)}/{stamp.path}")


def _refuse_gaps(url: str, ranks: Sequence[str], world_size: int | None) -> None:
    """Refuse metadata of ranks that are not all ranks from 0 on."""
    if not ranks:
        return
    last = int(ranks[-1].removeprefix("__").removesuffix(METADATA))
    expected = [f"__{rank}{METADATA}" for rank in range(world_size or last + 1)]
    problems = [f"{path} is not there" for path in expected if path not in ranks]
    problems += [f"{path}: of another save, of more than {world_size} ranks" for path in ranks if path not in expected]
    IncompleteCheckpoint.raise_for(f"{url}: not the metadata of all ranks", problems)


def _joined(url: str, parts: Sequence[tuple[str, DcpMetadata]]) -> DcpMetadata:
    """Return the union of what ranks say; they must agree on what they share."""
    whole, problems = parts[0][1], list[str]()
    for path, part in parts[1:]:
        problems += [
            f"{path}: {fqn} is {spec}, elsewhere {whole.tensors[fqn]}"
            for fqn, spec in part.tensors.items()
            if whole.tensors.get(fqn, spec) != spec
        ]
        problems += [
            f"{path}: {file} is {size} bytes long, elsewhere {whole.extents[file]}"
            for file, size in part.extents.items()
            if whole.extents.get(file, size) != size
        ]
        whole = _union(whole, part)
    CorruptFile.raise_for(f"{url}: the ranks' metadata contradict each other: of two saves?", problems)
    return whole


def _union(one: DcpMetadata, other: DcpMetadata) -> DcpMetadata:
    unsupported = {**other.unsupported, **one.unsupported}
    skipped = {entry.name: entry for entry in (*other.skipped, *one.skipped)}
    return DcpMetadata(
        tensors={fqn: spec for fqn, spec in {**one.tensors, **other.tensors}.items() if fqn not in unsupported},
        shards=tuple(shard for shard in (*one.shards, *other.shards) if shard.fqn not in unsupported),
        skipped=tuple(skipped.values()),
        nesting={**other.nesting, **one.nesting},
        unsupported=unsupported,
        extents={**one.extents, **other.extents},
        objects=tuple(dict.fromkeys((*one.objects, *other.objects))),  # each rank's own: they may differ
        bare={**one.bare, **other.bare},
    )


def _refuse_holes(url: str, found: DcpMetadata, ranks: Sequence[str]) -> None:
    """Refuse boxes that no rank lists: nothing says how many ranks there were, but the whole shapes are known."""
    listed = _by_name(found.shards)
    problems = [
        f"{fqn}: {problem}" for fqn, spec in found.tensors.items() for problem in tile(spec, listed.get(fqn, ()))[1]
    ]
    IncompleteCheckpoint.raise_for(
        f"{url}: what {ranks[0]} to {ranks[-1]} list is not the whole checkpoint; __{len(ranks)}{METADATA} and later "
        "ones may be lost, or some of these are of another save",
        problems,
    )


def _by_name(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    named: dict[str, list[Shard]] = {}
    for shard in shards:
        named.setdefault(shard.fqn, []).append(shard)
    return named


# ---- files ----------------------------------------------------------------------------------------------------------


def _present_files(source: Source, stamps: Mapping[str, FileStamp], found: DcpMetadata) -> dict[str, FileStamp]:
    files = {path: stamps.get(path) or _stat(source, path) for path in sorted(found.extents)}
    IncompleteCheckpoint.raise_for(
        f"{source.url}: {METADATA} names files that are not there (shards of other ranks or nodes left behind? "
        "--also URL joins places)",
        [of_rank(path) for path, stamp in files.items() if stamp is None],
    )
    return {path: stamp for path, stamp in files.items() if stamp is not None}


def _refuse_shared_bytes(url: str, shards: Iterable[Shard], found: DcpMetadata) -> None:
    """Refuse items that claim the same bytes: every writer gives each its own."""
    held: list[Shard | ObjectItem] = [*shards, *found.objects]
    in_file: dict[str, list[tuple[int, int, int]]] = {}
    for number, span in enumerate([entry.span for entry in held]):
        if span.start < span.stop:
            in_file.setdefault(span.path, []).append((span.start, span.stop, number))
    CorruptFile.raise_for(
        f"{url}: {METADATA} gives the same bytes to several items",
        [
            f"{_shown(held[one[2]])} and {_shown(held[other[2]])}: {path}[{other[0]}:{min(one[1], other[1])}]"
            for path, rows in sorted(in_file.items())
            for one, other in itertools.pairwise(sorted(rows))
            if other[0] < one[1]
        ],
    )


def _shown(entry: Shard | ObjectItem) -> str:
    return entry.name if isinstance(entry, ObjectItem) else f"{entry.fqn}{entry.box}"


def _stat(source: Source, path: str) -> FileStamp | None:
    try:
        return source.stat(path)
    except StorageNotFound:
        return None


def _with_tails(
    source: Source, files: Mapping[str, FileStamp], found: DcpMetadata
) -> tuple[tuple[Shard, ...], dict[str, str]]:
    """Return the shards, those of safetensors files inside of ``.distcp`` files as raw spans, and what is lost there.

    Raises:
        CorruptFile: A file is not as long as it must be.
    """
    heads = _each(lambda path: (path, _tail(source, files[path], found.bare[path])), sorted(found.bare))
    tails = {path: tail for path, tail in heads if tail}
    CorruptFile.raise_for(
        f"{source.url}: files are not as long as {METADATA} says",
        [
            f"{name_in(source, path)}: {problem}"
            for path, stamp in files.items()
            if path not in tails and (problem := _wrong_length(stamp, found.extents[path]))
        ],
    )
    if not tails:
        return found.shards, {}
    inside: dict[str, list[Shard]] = {path: [] for path in tails}
    shards: list[Shard] = []
    for shard in found.shards:
        (inside[shard.span.path] if shard.span.path in tails else shards).append(shard)
    held = [boxes_held(tails[path], listed, found.tensors, path=path) for path, listed in inside.items()]
    shards += [shard for part in held for shard in part.shards]
    return tuple(shards), _lost(held, shards, found)


def _wrong_length(stamp: FileStamp, expected: int) -> str | None:
    if stamp.size == expected:
        return None
    why = "cut short" if stamp.size < expected else f"longer: of another save than {METADATA}"
    return f"{stamp.size} bytes, expected {expected} ({why})"


def _tail(source: Source, stamp: FileStamp, start: int) -> Tail | None:
    """Return the safetensors file with which a file ends; None without one.

    Raises:
        CorruptFile: There is one, but it is damaged or cut short.
    """
    room = stamp.size - start
    window = source.read(stamp.path, start, start + max(0, min(room, SEARCHED_BYTES + 9)))
    damage = None
    for first, stop in header_places(window, room):
        raw = source.read(stamp.path, start + first, start + stop)
        try:
            header = parse_header(raw, path=f"{url_of(source, stamp.path)}/{stamp.path}", file_size=room - first)
            return Tail(header, start + first)
        except CorruptFile as error:
            if raw[8:].startswith(b'{"__metadata__"'):
                damage = damage or error
    if damage:
        raise damage
    return None


def _lost(held: Iterable[Held], shards: Iterable[Shard], found: DcpMetadata) -> dict[str, str]:
    """Say which tensors lack a box that torch overwrote, unless another file holds the same box."""
    lost = _by_name(shard for part in held for shard in part.lost)
    there = _by_name(shard for shard in shards if shard.fqn in lost)
    return {
        fqn: f"its box {boxes[0].box} was lost when it was saved: {boxes[0].span.path} keeps one box of a tensor only "
        "(SerializationFormat.SAFETENSORS), and a later one took its place"
        for fqn, boxes in lost.items()
        if tile(found.tensors[fqn], there[fqn])[1]
    }


def _each(function: Callable[[_Given], _Made], given: Iterable[_Given]) -> list[_Made]:
    with ThreadPoolExecutor(FILES_IN_FLIGHT, "hfdcp-heads") as pool:
        return list(pool.map(function, given))
