"""The safetensors format: header bytes ⇄ entries, the Hugging Face index ⇄ a weight map, torch's sharding information.

A file is ``<8 bytes: length of the header><header: JSON><data>``. The header gives each tensor's dtype, shape and place
in the data, which it must cover without a hole or an overlap. The rules are those of safetensors' own reader (the Rust
crate, ``SafeTensors::read_metadata`` and ``Metadata::validate``), so that nothing is accepted here that it refuses, and
stricter where it says nothing: no name twice, no unknown field, no tensor that ends inside a byte.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import BITS, dtype_named, size_in_bytes
from hfdcp_core.errors import CorruptFile, PlanError, UnknownDtype
from hfdcp_core.json_text import indented

MOST_HEADER_BYTES = 100_000_000
"""What safetensors' own reader accepts."""
DATA_ALIGNMENT = 64
"""Mapped tensors give the same logits to the bit only where their data are aligned as allocated ones are."""
RANK_INFO = "HFDCP_INFO"
"""Key of a rank's file that hfdcp wrote: which rank of how many, and whole shapes. torch ignores it."""
SAVE_INFO = "HFDCP_SAVE"
"""Key of a file that training wrote straight to whole tensors: which save it is of. Loaders ignore it."""
SHARDING_INFO = "DCP_SHARDING_INFO"
"""Header key under which torch's `HuggingFaceStorageWriter` keeps where each shard starts in its tensor."""
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_LIMIT = 2**63
_MOST_DIGITS = 19
_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_LONG = b"0" * _MOST_DIGITS
"""Where no such run of digits is, no number is too large for a machine integer."""
_MOST_SHOWN = 80
_FIELDS = ("dtype", "shape", "data_offsets")
_FIELD_SET, _ONLY_INT = set(_FIELDS), {int}
_NOT_IN_A_NAME = frozenset("/\\\0")
_MIXED = (
    "it begins as a zip archive: torch's HuggingFaceStorageWriter puts entries that are no tensors into the same file, "
    "before the header; save without them"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    fqn: str
    """Its name."""
    dtype: str
    """Safetensors name of its dtype."""
    shape: tuple[int, ...]
    """Its extents."""
    start: int
    """First byte, counted in the data section."""
    stop: int
    """Behind the last byte, counted in the data section."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a file says."""

    entries: tuple[Entry, ...]
    """The tensors in the order of their data."""
    metadata: Mapping[str, str]
    """The free text under ``__metadata__``."""
    data_start: int
    """Where the data section begins in the file."""

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.data_start + (self.entries[-1].stop if self.entries else 0)


@dataclass(frozen=True, slots=True)
class Index:
    """What a ``model.safetensors.index.json`` says."""

    weight_map: Mapping[str, str]
    """Which file holds which tensor."""
    total_size: int | None = None
    """Bytes of all tensors, where it is stated."""


def header_length(first8: bytes, *, path: str = "the file") -> int:
    """Return how many bytes of header follow the first eight of a file.

    Raises:
        CorruptFile: There are fewer than eight, or the header is longer than any reader accepts.

    >>> header_length((1000).to_bytes(8, "little"))
    1000
    """
    if len(first8) < _LENGTH_BYTES:
        raise CorruptFile(f"{path}: {len(first8)} bytes are too few for a safetensors file")
    length = int.from_bytes(first8[:_LENGTH_BYTES], "little")
    if length > MOST_HEADER_BYTES:
        why = _MIXED if first8.startswith(b"PK\3\4") else "damaged, or no safetensors file"
        raise CorruptFile(f"{path}: a header of {length} bytes, where safetensors allows {MOST_HEADER_BYTES}: {why}")
    return length


def parse_header(raw: bytes, *, path: str, file_size: int | None = None) -> Header:
    """Read the header of a file.

    Args:
        raw: The first bytes of the file: eight, and as many more as they say.
        path: The file's name, for messages.
        file_size: Bytes of the whole file, where they are known: then the data must end there.

    Raises:
        CorruptFile: It breaks a rule of the format.
        UnknownDtype: A tensor has a dtype that is not in the table.
    """
    length = header_length(raw, path=path)
    if len(raw) != _LENGTH_BYTES + length:
        raise CorruptFile(f"{path}: {len(raw) - _LENGTH_BYTES} bytes of a header of {length}: the file is cut off")
    if length == 0 or raw[_LENGTH_BYTES] != ord("{"):
        raise CorruptFile(
            f"{path}: its header begins with {raw[_LENGTH_BYTES:][:8]!r}, where safetensors begins with {{"
        )
    members = _json_object(raw[_LENGTH_BYTES:], path)
    metadata = _texts(members.pop(_METADATA, {}), f"{path}: {_METADATA}")
    found = [_entry(fqn, value, path) for fqn, value in members.items()]
    entries = tuple(sorted(found, key=lambda entry: (entry.start, entry.stop)))
    _check_tiling(entries, path)
    header = Header(entries, metadata, len(raw))
    if file_size is not None and header.file_size != file_size:
        raise CorruptFile(f"{path}: {file_size} bytes, where its header describes {header.file_size}")
    return header


def write_header(tensors: Mapping[str, TensorSpec], *, metadata: Mapping[str, str]) -> tuple[bytes, tuple[Entry, ...]]:
    """Lay tensors out in the given order, and return the first bytes of their file and where each lies.

    The header is padded with spaces so that the data begin at a multiple of 64.

    Raises:
        PlanError: A name cannot stand in a header, or the header would be too long for any reader.

    >>> header, entries = write_header({"a": TensorSpec("F32", (2,))}, metadata={})
    >>> len(header), header[8:31], entries[0].stop
    (128, b'{"__metadata__":{"forma', 8)
    """
    entries, start = [], 0
    for fqn, spec in tensors.items():
        if fqn == _METADATA:
            raise PlanError(f"a safetensors file cannot hold a tensor named {_METADATA}: rename it, or leave it out")
        stop = start + size_in_bytes(spec.dtype, spec.shape)
        entries.append(Entry(fqn, spec.dtype, spec.shape, start, stop))
        start = stop
    members: dict[str, object] = {_METADATA: {"format": "pt", **metadata}}
    members |= {
        entry.fqn: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.start, entry.stop)}
        for entry in entries
    }
    try:
        text = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as unfit:
        raise PlanError(
            f"a name or note cannot be written as UTF-8: {unfit.object[unfit.start : unfit.end]!r}"
        ) from None
    length = len(text) + -(_LENGTH_BYTES + len(text)) % DATA_ALIGNMENT
    if length > MOST_HEADER_BYTES:
        raise PlanError(f"a header of {length} bytes, where safetensors allows {MOST_HEADER_BYTES}: use smaller files")
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length), tuple(entries)


def sharding_info(header: Header, *, path: str) -> Mapping[str, tuple[int, ...]] | None:
    """Return where each shard of the file starts in its tensor; None where the file does not say.

    Raises:
        CorruptFile: It says so of other tensors than it holds, or with another number of dimensions.
    """
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return None
    members = _json_object(text.encode(), f"{path}: {SHARDING_INFO}")
    offsets = {
        fqn: _counts(_field(value, "saved_offsets", where), where)
        for fqn, value in members.items()
        for where in [f"{path}: {SHARDING_INFO}: {fqn!r}"]
    }
    shapes = {entry.fqn: entry.shape for entry in header.entries}
    if offsets.keys() != shapes.keys():
        fqn = min(offsets.keys() ^ shapes.keys())
        raise CorruptFile(f"{path}: {SHARDING_INFO} and the tensors in the file differ, first in {fqn!r}")
    for fqn, shape in shapes.items():
        if len(offsets[fqn]) != len(shape):
            raise CorruptFile(f"{path}: {fqn!r} of shape {list(shape)} has saved offsets {list(offsets[fqn])}")
    return offsets


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank's file that hfdcp wrote says besides what torch does."""

    rank: int
    """Which rank's it is, from 1."""
    ranks: int
    """How many ranks have a file."""
    shapes: Mapping[str, tuple[int, ...]]
    """The whole shape of each tensor in the file."""
    save: str = ""
    """Which save it is of, where one process told all ranks; files of two saves are told apart by it."""


def write_rank_info(info: RankInfo) -> str:
    """Write what `rank_info` reads."""
    of_save = {"save": info.save} if info.save else {}
    return json.dumps({"rank": info.rank, "ranks": info.ranks, "shapes": dict(info.shapes), **of_save})


def rank_info(header: Header, *, path: str) -> RankInfo | None:
    """Return what a file of ours says of the other ranks and of whole shapes; None where it does not.

    Raises:
        CorruptFile: It says so of other tensors than it holds, or numbers that cannot be.
    """
    text = header.metadata.get(RANK_INFO)
    if text is None:
        return None
    where = f"{path}: {RANK_INFO}"
    members = _json_object(text.encode(), where)
    shapes = members.get("shapes")
    if not isinstance(shapes, dict):
        raise CorruptFile(f"{where}: shapes: expected a JSON object, found {_shown(shapes)}")
    info = RankInfo(
        rank=_count(members.get("rank"), f"{where}: rank"),
        ranks=_count(members.get("ranks"), f"{where}: ranks"),
        shapes={fqn: _counts(shape, f"{where}: {fqn!r}") for fqn, shape in shapes.items()},
        save=_texts({"save": members.get("save", "")}, where)["save"],
    )
    held = {entry.fqn: len(entry.shape) for entry in header.entries}
    if {fqn: len(shape) for fqn, shape in info.shapes.items()} != held or not 1 <= info.rank <= info.ranks:
        raise CorruptFile(f"{where} and the tensors in the file differ")
    return info


def parse_index(raw: bytes, *, path: str) -> Index:
    """Read a Hugging Face index.

    Raises:
        CorruptFile: It is no such index, or names a file outside of its own folder.
    """
    members = _json_object(raw, path)
    weight_map = _texts(members.get("weight_map"), f"{path}: weight_map")
    for fqn, name in weight_map.items():
        if name in {"", ".", ".."} or not _NOT_IN_A_NAME.isdisjoint(name):
            raise CorruptFile(
                f"{path}: {fqn!r} is said to lie in {name!r}, which is no name of a file beside the index"
            )
    metadata = members.get("metadata", {})
    if not isinstance(metadata, dict):
        raise CorruptFile(f"{path}: metadata: expected an object, found {_shown(metadata)}")
    if "total_size" not in metadata:
        return Index(weight_map)
    return Index(weight_map, _total_size(metadata["total_size"], f"{path}: total_size"))


def write_index(weight_map: Mapping[str, str], *, total_size: int, total_parameters: int) -> bytes:
    """Return an index as Hugging Face writes it."""
    metadata = {"total_parameters": total_parameters, "total_size": total_size}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (indented(index, 2, ascii_only=True) + "\n").encode()


def file_names(count: int) -> tuple[str, ...]:
    """Return the names that Hugging Face gives to the files of a model.

    >>> file_names(1), file_names(2)
    (('model.safetensors',), ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'))
    """
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))


def _json_object(raw: bytes, where: str) -> dict[str, object]:
    """Parse JSON as strictly as the Rust reader does: no name twice, no NaN, no half of a surrogate pair."""
    odd = b"-0" in raw or _LONG in raw.translate(_DIGITS)
    parse_int = _integer if odd else int  # the parser's own is far faster
    try:
        value: object = json.loads(
            raw.decode(), object_pairs_hook=_once, parse_int=parse_int, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as broken:
        raise CorruptFile(f"{where}: not JSON as it should be: {broken}") from broken
    if not isinstance(value, dict):
        raise CorruptFile(f"{where}: expected a JSON object, found {_shown(value)}")
    return value


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        [(name, count)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} stands there {count} times")
    "".join(members).encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return members


def _integer(text: str) -> int | float:
    """Return a float where the Rust reader sees one, too: a negative zero, and what fits no machine integer."""
    return _Number(text) if text == "-0" or len(text) > _MOST_DIGITS else int(text)


class _Number(float):
    """A number that is no machine integer; messages show it as it is written."""

    def __new__(cls, text: str) -> Self:
        """Keep the digits."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _entry(fqn: str, value: object, path: str) -> Entry:
    return _plain_entry(fqn, value) or _looked_at_entry(fqn, value, path)


def _plain_entry(fqn: str, value: object) -> Entry | None:
    """Return an entry that is as it should be; None where something about it has to be looked at and perhaps told."""
    if type(value) is not dict or value.keys() != _FIELD_SET:
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str or type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        return None
    numbers = shape + offsets
    if set(map(type, numbers)) != _ONLY_INT or min(numbers) < 0:
        return None
    start, stop = offsets
    bits = BITS.get(dtype, 0) * math.prod(shape)
    return Entry(fqn, dtype, tuple(shape), start, stop) if 0 < bits == 8 * (stop - start) and stop < _LIMIT else None


def _looked_at_entry(fqn: str, value: object, path: str) -> Entry:
    where = f"{path}: {fqn!r}"
    dtype, shape, offsets = (_field(value, name, where) for name in _FIELDS)
    if unknown := sorted(value.keys() - set(_FIELDS) if isinstance(value, dict) else ()):
        raise CorruptFile(f"{where}: unknown fields {', '.join(map(repr, unknown))}")
    if not isinstance(dtype, str):
        raise CorruptFile(f"{where}: dtype: expected text, found {_shown(dtype)}")
    extents, places = _counts(shape, f"{where}: shape"), _counts(offsets, f"{where}: data_offsets")
    if len(places) != 2 or places[0] > places[1]:
        raise CorruptFile(f"{where}: data_offsets {list(places)} are not where data begin and end")
    if places[1] - places[0] != _nbytes(dtype, extents, where):
        raise CorruptFile(f"{where}: data_offsets {list(places)} for {dtype} of shape {list(extents)}")
    return Entry(fqn, dtype, extents, *places)


def _nbytes(dtype: str, shape: tuple[int, ...], where: str) -> int:
    try:
        bits = dtype_named(dtype).bits
    except UnknownDtype as unknown:
        raise unknown.within(where) from None
    # The Rust reader multiplies in 64 bits from left to right, and refuses what overflows even if a 0 comes later.
    if bits * math.prod(extent for extent in shape if extent) >= _LIMIT:
        raise CorruptFile(f"{where}: shape {list(shape)} is larger than any file")
    if bits * math.prod(shape) % 8:
        raise CorruptFile(f"{where}: {dtype} of shape {list(shape)} ends inside a byte")
    return bits * math.prod(shape) // 8


def _check_tiling(entries: Sequence[Entry], path: str) -> None:
    stop = 0
    for entry in entries:
        if entry.start != stop:
            kind = "a hole" if entry.start > stop else "an overlap"
            raise CorruptFile(f"{path}: {kind} before {entry.fqn!r}, which begins at {entry.start} and not at {stop}")
        stop = entry.stop


def _field(value: object, name: str, where: str) -> object:
    if not isinstance(value, dict) or name not in value:
        raise CorruptFile(f"{where}: expected an object with {name!r}, found {_shown(value)}")
    return value[name]


def _texts(value: object, where: str) -> dict[str, str]:
    """Return an object whose values are all text."""
    if not isinstance(value, dict):
        raise CorruptFile(f"{where}: expected an object, found {_shown(value)}")
    for name, text in value.items():
        if not isinstance(text, str) or not _is_unicode(text):
            raise CorruptFile(f"{where}: {name!r}: expected text, found {_shown(text)}")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _counts(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise CorruptFile(f"{where}: expected a list of counts, found {_shown(value)}")
    return tuple(_count(number, where) for number in value)


def _count(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        limit = ", and a count is below 2^63" if isinstance(value, int | float) and value >= _LIMIT else ""
        raise CorruptFile(f"{where}: expected a count, found {_shown(value)}{limit}")
    return value


def _total_size(value: object, where: str) -> int:
    """Return a count that may be written as a whole float, as older versions of transformers did."""
    return _count(int(value) if isinstance(value, float) and value.is_integer() else value, where)


def _shown(value: object) -> str:
    """Write a JSON value so that a message stays one short line; it may be nested as deep as the parser goes."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = value.text if isinstance(value, _Number) else json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
