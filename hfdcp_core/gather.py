"""To gather is to make a catalog of what lies in a store: which format, which tensors, in which shards.

The format is told by what is found, never by a name that a user chose:

- ``.metadata``, or ``__0.metadata`` and so on: a distributed checkpoint (DCP; `hfdcp_core.gather_dcp`);
- safetensors files with an index that names them: a plain Hugging Face folder;
- safetensors files whose headers say which box of a tensor they hold (``DCP_SHARDING_INFO``): what torch's
  `HuggingFaceStorageWriter` leaves with ``save_distributed=True``;
- other safetensors files: a plain folder without an index.

Only metadata and headers are read. What they can show to be wrong (a file that is absent, short, or of another save)
is an error here; that the boxes tile the tensors is for the plan to prove.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, FileStamp, Shard, Skipped, Span, TensorSpec
from hfdcp_core.collector import without_collector
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, UnknownFormat
from hfdcp_core.gather_dcp import gather_dcp, metadata_files
from hfdcp_core.homes import METADATA
from hfdcp_core.layout import shard_name
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH, STATE_FOLDER
from hfdcp_core.read import same_bytes
from hfdcp_core.safetensors_file import (
    SAVE_INFO,
    Entry,
    Header,
    Index,
    RankInfo,
    header_length,
    parse_header,
    parse_index,
    rank_info,
    sharding_info,
)
from hfdcp_core.store import Listing, Source, url_of

HEADS_IN_FLIGHT = 8
"""Headers that are read at once."""
HEAD_BYTES = 64 << 10
"""How much of a remote file is read at first: most headers are no longer, so one request is enough."""
SHARDED = "sharded"
"""Folder in which torch's writer leaves the shards that it consolidates."""
_SERIES = re.compile(r"(?P<stem>.*-)\d+-of-(?P<count>\d+)(?P<end>\.safetensors)")
_SHARD_NAME = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")


def gather(source: Source, *, world_size: int | None = None, deep: bool = False) -> Catalog:
    """List the tensors of a checkpoint and the shards they lie in.

    Args:
        source: The folder that holds the checkpoint itself.
        world_size: How many ranks saved it, where nothing in it states the shapes of its tensors.
        deep: Whether to open every item of a distributed checkpoint, not only those of an unusual length.

    Raises:
        UnknownFormat: No checkpoint of a kind that we know lies there.
        IncompleteCheckpoint: A file that it names is absent.
        CorruptFile: Its metadata, headers and files contradict each other.
        UnsafePickle: Its ``.metadata`` would call something.
        StorageNotFound: There is no such folder.
    """
    listing = source.list()
    stamps = {stamp.path: stamp for stamp in listing.files}
    if metadata_files(stamps):
        return gather_dcp(source, stamps, world_size=world_size, deep=deep)
    weights = [stamp for path, stamp in stamps.items() if path.endswith(".safetensors")]
    if weights:
        _refuse_unfinished(source.url, listing)
        catalog = _gather_safetensors(source, stamps, weights, world_size)
        if SHARDED in listing.folders:
            _hold_scalars_against_shards(source, catalog)
        return catalog
    raise _nothing_here(source, listing)


def _refuse_unfinished(url: str, listing: Listing) -> None:
    """Refuse an output of ours that was not finished: its files may be of two runs."""
    if STATE_FOLDER in listing.folders and MANIFEST_PATH not in {stamp.path for stamp in listing.files}:
        raise IncompleteCheckpoint(
            f"{url} is an output of hfdcp that was not finished: there is {STATE_FOLDER}/ and no {MANIFEST_PATH}; give "
            "the same command again to finish it"
        )


def _nothing_here(source: Source, listing: Listing) -> UnknownFormat | IncompleteCheckpoint:
    """Say what is amiss; that a folder below holds a checkpoint, `hfdcp_core.locate` found out before."""
    if any(stamp.path.endswith(".distcp") for stamp in listing.files):
        return IncompleteCheckpoint(
            f"{source.url}: there are .distcp files, but no {METADATA}: the save did not finish, or {METADATA} "
            "(a hidden file that rank 0 writes last) was not copied along; where the ranks wrote to several places, "
            "name them all (--also URL)"
        )
    if any(stamp.path == INDEX_PATH for stamp in listing.files):
        return IncompleteCheckpoint(f"{source.url}: there is {INDEX_PATH}, but none of the files that it names")
    found = ", ".join([stamp.path for stamp in listing.files][:5] + [f"{f}/" for f in listing.folders][:5])
    return UnknownFormat(
        f"{source.url}: no checkpoint here (no {METADATA}, no *.safetensors); found {found or 'nothing'}"
    )


# ---- safetensors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Head:
    """One safetensors file and what its header says."""

    stamp: FileStamp
    header: Header
    offsets: Mapping[str, tuple[int, ...]] | None
    info: RankInfo | None


def _read_heads(source: Source, stamps: Iterable[FileStamp]) -> list[_Head]:
    with without_collector(), ThreadPoolExecutor(HEADS_IN_FLIGHT, "hfdcp-heads") as pool:
        return list(pool.map(lambda stamp: _read_head(source, stamp), stamps))


def _read_head(source: Source, stamp: FileStamp) -> _Head:
    where = f"{url_of(source, stamp.path)}/{stamp.path}"
    if stamp.size < 8:
        raise CorruptFile(f"{where}: {stamp.size} bytes are no safetensors file")
    ahead = min(HEAD_BYTES, stamp.size) if source.remote else 0  # where a request costs more than the bytes
    first = source.read(stamp.path, 0, max(ahead, 8))
    length = header_length(first, path=where)
    if 8 + length > stamp.size:
        raise CorruptFile(f"{where}: the header takes {length} bytes, the file has {stamp.size}")
    whole = first[: 8 + length] if 8 + length <= len(first) else source.read(stamp.path, 0, 8 + length)
    header = parse_header(whole, path=where, file_size=stamp.size)
    return _Head(stamp, header, sharding_info(header, path=where), rank_info(header, path=where))


def _gather_safetensors(
    source: Source, stamps: Mapping[str, FileStamp], weights: list[FileStamp], world_size: int | None
) -> Catalog:
    index = _read_index(source, stamps)
    if index is not None and set(index.weight_map.values()) <= stamps.keys():
        named = set(index.weight_map.values())
        strays = tuple(
            Skipped(w.path, f"a file that {INDEX_PATH} does not name") for w in weights if w.path not in named
        )
        _refuse_incomplete_series(source.url, {weight.path for weight in weights}, named)
        heads = _read_heads(source, [stamps[path] for path in sorted(named)])
        _hold_against_index(heads, index, source.url)
        return _plain(heads, (stamps[INDEX_PATH],), strays, source)
    heads = _read_heads(source, weights)
    if any(head.offsets is not None for head in heads):
        return _sharded(heads, index, source, world_size)
    if index is not None:
        absent = sorted(set(index.weight_map.values()) - stamps.keys())
        raise IncompleteCheckpoint(f"{source.url}: {INDEX_PATH} names files that are not there", absent)
    _refuse_incomplete_series(source.url, {weight.path for weight in weights}, set())
    return _plain(heads, (), (), source)


def _refuse_incomplete_series(url: str, present: set[str], named: set[str]) -> None:
    """Refuse files that are named ``…-00001-of-00003``, where one of the three is absent, or an index leaves one out.

    Such names are all that states how many files there are, where no index does.
    """
    series: dict[tuple[str, str, str], set[str]] = {}
    for path in present:
        if match := _SERIES.fullmatch(path):
            series.setdefault((match["stem"], match["count"], match["end"]), set()).add(path)
    others = present - set().union(*series.values())
    if not named and len(series) + bool(others) > 1 and series:
        raise CorruptFile(f"{url}: files of several saves, and no index says which count", sorted(present))
    absent, left_out = [], []
    for (stem, count, end), paths in sorted(series.items()):
        if named and not paths & named:
            continue  # of another save, and the index says so
        whole = [f"{stem}{number:0{len(count)}d}-of-{count}{end}" for number in range(1, min(int(count), 10**6) + 1)]
        absent += [path for path in whole if path not in paths]
        left_out += [f"{path}: {INDEX_PATH} does not name it" for path in sorted(paths - named) if named]
    IncompleteCheckpoint.raise_for(f"{url}: files are absent that the names of the others count", absent)
    CorruptFile.raise_for(f"{url}: the index does not name all files of its own series", left_out)


def _read_index(source: Source, stamps: Mapping[str, FileStamp]) -> Index | None:
    stamp = stamps.get(INDEX_PATH)
    if stamp is None:
        return None
    return parse_index(source.read(INDEX_PATH, 0, stamp.size), path=f"{url_of(source, INDEX_PATH)}/{INDEX_PATH}")


def _hold_against_index(heads: list[_Head], index: Index, url: str) -> None:
    """Refuse an index and headers that do not say the same: loaders follow one or the other."""
    held = {(entry.fqn, head.stamp.path) for head in heads for entry in head.header.entries}
    named = set(index.weight_map.items())
    problems = [f"{fqn}: the index places it in {path}, which does not hold it" for fqn, path in sorted(named - held)]
    problems += [f"{fqn}: in {path}, but the index does not say so" for fqn, path in sorted(held - named)]
    CorruptFile.raise_for(f"{url}: {INDEX_PATH} and the files disagree", problems)


def _all_shards(heads: list[_Head]) -> list[Shard]:
    """List every entry of every header as a shard."""
    shards = []
    for head in heads:
        start, path, offsets = head.header.data_start, head.stamp.path, head.offsets or {}
        for entry in head.header.entries:
            offset = offsets.get(entry.fqn, ())
            box = _box(entry, offset, of_torch=head.info is None) if any(offset) else Box.whole(entry.shape)
            span = Span(path, start + entry.start, start + entry.stop)
            shards.append(Shard(entry.fqn, entry.dtype, box, span))
    return shards


def _box(entry: Entry, offset: tuple[int, ...], *, of_torch: bool) -> Box:
    """Return where an entry lies in its tensor; torch counts its own elements, of which one may be two."""
    packed = dtype_named(entry.dtype).packed if of_torch else 1
    return Box((*offset[:-1], offset[-1] * packed), entry.shape)


def _hold_scalars_against_shards(source: Source, catalog: Catalog) -> None:
    """Hold 0-d tensors against the shards that torch consolidated them from, where those lie beside.

    torch's own consolidation (2.7 to 2.14) writes 0.0 for each of them without a word.
    """
    scalars = {shard.fqn: shard for shard in catalog.shards if not shard.box.shape}
    stamps = [stamp for stamp in source.list(SHARDED).files if stamp.path.endswith(".safetensors")] if scalars else []
    parts = [shard for shard in _all_shards(_read_heads(source, stamps)) if shard.fqn in scalars]
    CorruptFile.raise_for(
        f"{source.url}: tensors without dimensions are not what {SHARDED}/ holds: torch writes 0.0 for them when it "
        f"consolidates; take {SHARDED}/ as the source (with --world-size N)",
        [
            f"{part.fqn}: in {scalars[part.fqn].span} and in {part.span}"
            for part in parts
            if part.dtype != scalars[part.fqn].dtype
            or not same_bytes(source, scalars[part.fqn].span, source, part.span)
        ],
    )


@without_collector()
def _plain(heads: list[_Head], others: tuple[FileStamp, ...], strays: tuple[Skipped, ...], source: Source) -> Catalog:
    shards = _all_shards(heads)
    tensors: dict[str, TensorSpec] = {}
    saves = {head.stamp.path: head.header.metadata.get(SAVE_INFO) for head in heads}
    problems = [f"{path}: of save {save}" for path, save in saves.items() if len(set(saves.values())) > 1]
    for shard in shards:
        if any(shard.box.offset):
            problems.append(f"{shard}: a part of a tensor, in a file that should hold whole ones")
        if shard.fqn in tensors:
            problems.append(
                f"{shard.fqn}: in more than one file, and no index says which counts; again in {shard.span}"
            )
        tensors[shard.fqn] = TensorSpec(shard.dtype, shard.box.shape)
    CorruptFile.raise_for(f"{source.url}: the files contradict each other", problems)
    return Catalog("safetensors", tensors, tuple(shards), (*others, *(head.stamp for head in heads)), strays)


@without_collector()
def _sharded(heads: list[_Head], index: Index | None, source: Source, world_size: int | None) -> Catalog:
    shards = _all_shards(heads)
    bare = [head.stamp.path for head in heads if head.offsets is None]
    CorruptFile.raise_for(f"{source.url}: files of another kind lie among the shards of a distributed save", bare)
    tensors = _shapes_stated(heads, _shapes_reached(shards, source.url), source.url)
    chosen = _without_equal_replicas(shards, source)
    catalog = Catalog("dcp-safetensors", tensors, tuple(chosen), tuple(head.stamp for head in heads))
    if any(head.info for head in heads):
        return catalog  # our own writer states what torch's does not
    return replace(catalog, unproved=_why_unproved(catalog, index, source, world_size))


def _shapes_reached(shards: list[Shard], url: str) -> dict[str, TensorSpec]:
    """Return how far the shards of each tensor reach; nothing in this format states more."""
    tensors: dict[str, TensorSpec] = {}
    problems = []
    for shard in shards:
        stop, before = shard.box.stop, tensors.get(shard.fqn)
        if before is None:
            tensors[shard.fqn] = TensorSpec(shard.dtype, stop)
        elif (shard.dtype, len(shard.box.shape)) != (before.dtype, len(before.shape)):
            problems.append(f"{shard}: {shard.dtype} in {len(shard.box.shape)} dimensions, other shards are {before}")
        else:
            tensors[shard.fqn] = TensorSpec(shard.dtype, tuple(map(max, before.shape, stop)))
    CorruptFile.raise_for(f"{url}: shards of one tensor are of different kinds", problems)
    return tensors


def _shapes_stated(heads: list[_Head], reached: dict[str, TensorSpec], url: str) -> dict[str, TensorSpec]:
    """Return the whole shapes, where the files state them; then they also state how many ranks have a file."""
    stated = {head.stamp.path: head.info for head in heads if head.info}
    if not stated:
        return reached
    silent = [f"{head.stamp.path} does not say which rank it is of" for head in heads if not head.info]
    counts = {info.ranks for info in stated.values()}
    saves = {info.save for info in stated.values()}
    several = [f"of {n} ranks" for n in counts if len(counts) > 1]
    several += [f"{path}: of save {info.save or '(none)'}" for path, info in stated.items() if len(saves) > 1]
    CorruptFile.raise_for(f"{url}: files of several saves", silent or several)
    ranks = [info.rank for info in stated.values()]
    absent = [f"rank {r}: {shard_name(r)} is not there" for r in range(1, max(counts) + 1) if r not in ranks]
    IncompleteCheckpoint.raise_for(f"{url}: files of some ranks are absent", absent)
    shapes = {(fqn, shape) for info in stated.values() for fqn, shape in info.shapes.items()}
    odd = [fqn for fqn, shape in shapes if any(map(int.__gt__, reached[fqn].shape, shape))]
    if odd or len(shapes) != len(reached):
        raise CorruptFile(f"{url}: the files state different shapes, or smaller ones than they hold")
    whole = dict(shapes)
    return {fqn: TensorSpec(spec.dtype, whole[fqn]) for fqn, spec in reached.items()}


def _without_equal_replicas(shards: list[Shard], source: Source) -> list[Shard]:
    """Keep one of several shards of one box; refuse them where their bytes differ: one must be of another save."""
    kept: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Shard] = {}
    problems = []
    for shard in shards:
        first = kept.setdefault((shard.fqn, shard.box.offset, shard.box.shape), shard)
        if first is not shard and shard.box.volume and not same_bytes(source, first.span, source, shard.span):
            problems.append(f"{shard.fqn}{shard.box}: different bytes in {first.span} and {shard.span}")
    CorruptFile.raise_for(
        f"{source.url}: files hold the same part of a tensor with different values (left over from another save?)",
        problems,
    )
    return list(kept.values())


# ---- is everything there? -------------------------------------------------------------------------------------------


def _why_unproved(catalog: Catalog, index: Index | None, source: Source, world_size: int | None) -> str | None:
    """Say why a lost shard could go unseen, or nothing where an index or the number of ranks shows that all are there.

    Raises:
        IncompleteCheckpoint: What should prove it shows that something is absent.
    """
    if index is not None and index.total_size is not None:
        _prove_by_index(catalog, index, index.total_size, source.url)
        return None
    if world_size is not None:
        _prove_by_ranks(catalog, world_size, source.url)
        return None
    return (
        "nothing in this format states the whole shape of a tensor, so that the loss of a last shard would go unseen; "
        "say how many ranks saved it (--world-size N), or go on without proof (--accept-unproved)"
    )


def _prove_by_index(catalog: Catalog, index: Index, total_size: int, url: str) -> None:
    problems = [f"{fqn}: in the index, but in no file" for fqn in index.weight_map if fqn not in catalog.tensors]
    problems += [f"{fqn}: in a file, but not in the index" for fqn in catalog.tensors if fqn not in index.weight_map]
    if not problems and catalog.nbytes != total_size:
        problems.append(f"{total_size} bytes of tensors are stated, {catalog.nbytes} are there")
    IncompleteCheckpoint.raise_for(f"{url}: the shards are not all that {INDEX_PATH} speaks of", problems)


def _prove_by_ranks(catalog: Catalog, world_size: int, url: str) -> None:
    names = [stamp.path for stamp in catalog.files]
    odd = [f"{name}: not the name of a rank's shard file" for name in names if not _SHARD_NAME.fullmatch(name)]
    IncompleteCheckpoint.raise_for(f"{url}: the number of ranks proves nothing here", odd)
    numbers = [tuple(map(int, match.groups())) for name in names if (match := _SHARD_NAME.fullmatch(name))]
    count = max(total for _, _, total in numbers)
    wanted = {(rank, part, count) for rank in range(1, world_size + 1) for part in range(1, count + 1)}
    problems = [f"rank {row[0] - 1}: {shard_name(*row)} is not there" for row in sorted(wanted - set(numbers))]
    problems += [f"{shard_name(*row)} is of another save" for row in sorted(set(numbers) - wanted)]
    IncompleteCheckpoint.raise_for(
        f"{url}: not the files that {world_size} ranks write (where a rank had nothing to write, that cannot be told "
        "from a lost file: --accept-unproved goes on)",
        problems,
    )
