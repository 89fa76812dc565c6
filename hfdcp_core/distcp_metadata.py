"""What a DCP ``.metadata`` says: its tensors, the boxes that are stored, and the items that hold them.

Three tables are joined: `state_dict_metadata` (tensors and their chunks, each a box), `storage_data` (which bytes of
which file hold the chunk at some offset) and `planner_data` (where a flat name stood in the nested state dict).

- A chunk that no item holds is a hole: the tensor lacks that shard, and who plans a copy reports it.
- An item without a chunk, two items of one chunk, or two different boxes at one offset contradict the file: an error.
  Chunks that hold no element are the exception, since they may share the offset of one that does; they give no shard.
- A tensor that safetensors cannot hold, or whose items are transformed, is listed as unsupported; the rest is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, Shard, Skipped, Span, TensorSpec
from hfdcp_core.distcp_records import (
    BytesRecord,
    ChunkRecord,
    Fields,
    IndexRecord,
    MetadataRecord,
    PropertiesRecord,
    StorageMetaRecord,
    StorageRecord,
    TensorRecord,
    TorchDtype,
    described,
    named,
)
from hfdcp_core.dtypes import Dtype, dtype_of_torch
from hfdcp_core.errors import UnknownDtype, UnknownFormat

_RESERVED = "__metadata__"
_VERSION = "1"


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The tensors of a DCP checkpoint and the items that hold their boxes."""

    tensors: Mapping[str, TensorSpec]
    """Every tensor that can be converted, in the saved order; one may lack some or all of its shards."""
    shards: tuple[Shard, ...]
    """One for each stored box that holds an element; the span is the whole ``torch.save`` item."""
    skipped: tuple[Skipped, ...] = ()
    """Entries that hold no tensor."""
    nesting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where the writer stated it: the keys of the nested state dict that lead to a tensor."""
    save_id: str | None = None
    """What tells this save from another to the same place, where the writer stated it."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Tensors that cannot be converted, and why; ``tensors`` and ``shards`` do not have them."""
    extents: Mapping[str, int] = field(default_factory=dict)
    """Every file that holds an item, and where its last item ends: as long as the file must be."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor, while its items are being found."""

    spec: TensorSpec
    boxes: dict[tuple[int, ...], Box]
    """Its stored boxes by their offset in torch's elements."""
    unseen: set[tuple[int, ...]]
    """Offsets of the boxes whose items were not met yet."""


def metadata_of(loaded: object, *, where: str, budget: int) -> DcpMetadata:
    """Build the values from a loaded pickle whose lists may have ``budget`` items in all.

    Raises:
        CorruptFile: A field is missing, of another type, or contradicts another.
        UnknownFormat: The writer states a version of the format that this reader does not know.
    """
    fields = Fields(where, budget)
    top = fields.of(loaded, MetadataRecord, "the pickle")
    _check_version(fields, top.get("version"), where)
    tensors, skipped, unsupported = _entries(fields, top.get("state_dict_metadata"))
    others = {entry.name for entry in skipped} | unsupported.keys()
    extents: dict[str, int] = {}
    shards = list(_shards(fields, top.get("storage_data"), tensors, others, unsupported, extents))
    specs = {fqn: tensor.spec for fqn, tensor in tensors.items() if fqn not in unsupported}
    return DcpMetadata(
        tensors=specs,
        shards=tuple(shard for shard in shards if shard.fqn in specs),
        skipped=tuple(Skipped(_printable(entry.name), entry.reason) for entry in skipped),
        nesting={fqn: path for fqn, path in _nesting(fields, top.get("planner_data")) if fqn in specs},
        save_id=_save_id(fields, top.get("storage_meta")),
        unsupported={_printable(fqn): reason for fqn, reason in unsupported.items()},
        extents=extents,
    )


def _check_version(fields: Fields, version: object, where: str) -> None:
    if version is not None and fields.text(version, "version").partition(".")[0] != _VERSION:
        raise UnknownFormat(
            f"{where}: version {described(version)} of the format; this hfdcp reads version {_VERSION} "
            "and files that state none: a newer hfdcp may read it"
        )


def _entries(fields: Fields, value: object) -> tuple[dict[str, _Tensor], list[Skipped], dict[str, str]]:
    """Sort the entries into tensors, those that hold none, and those that cannot be converted."""
    tensors: dict[str, _Tensor] = {}
    skipped: list[Skipped] = []
    unsupported: dict[str, str] = {}
    for fqn, entry in fields.mapping(value, "state_dict_metadata"):
        if isinstance(entry, BytesRecord):
            skipped.append(Skipped(fqn, "not a tensor: a pickled Python object"))
            continue
        try:
            tensors[fqn] = _tensor(fields, fqn, entry)
        except UnknownDtype as unfit:
            unsupported[fqn] = unfit.message
    return tensors, skipped, unsupported


def _tensor(fields: Fields, fqn: str, entry: object) -> _Tensor:
    what = named(fqn)
    tensor = fields.of(entry, TensorRecord, what)
    size = fields.counts(tensor.get("size"), f"{what}: size")
    chunks = fields.sequence(tensor.get("chunks"), f"{what}: chunks")
    dtype = _dtype(fields, tensor.get("properties"), what)
    if fqn == _RESERVED or _printable(fqn) != fqn:
        raise UnknownDtype("safetensors cannot hold a tensor of that name")
    if dtype.packed > 1 and not size:
        raise UnknownDtype(f"torch.{dtype.torch} without a dimension: its elements are halves of bytes")
    shape = _logical(size, dtype)
    boxes: dict[tuple[int, ...], Box] = {}
    for chunk in chunks:
        offset, box = _chunk(fields, chunk, dtype, what)
        other = boxes.get(offset)
        if not box.within(Box.whole(shape)):
            fields.fail(f"{what}: its chunk {box} lies outside of its shape {list(shape)}")
        if other and other != box and other.volume and box.volume:
            fields.fail(f"{what}: two chunks at one offset, {other} and {box}")
        if not other or box.volume:
            boxes[offset] = box
    return _Tensor(TensorSpec(dtype.name, shape), boxes, set(boxes))


def _dtype(fields: Fields, properties: object, what: str) -> Dtype:
    state = properties[0] if isinstance(properties, PropertiesRecord) and len(properties) == 1 else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, TorchDtype):
        fields.fail(f"{what}: properties: expected a dtype, found {described(dtype)}")
    return dtype_of_torch(dtype)


def _chunk(fields: Fields, chunk: object, dtype: Dtype, what: str) -> tuple[tuple[int, ...], Box]:
    record = fields.of(chunk, ChunkRecord, f"{what}: a chunk")
    offset = fields.counts(record.get("offsets"), f"{what}: a chunk's offsets")
    sizes = fields.counts(record.get("sizes"), f"{what}: a chunk's sizes")
    if len(offset) != len(sizes):
        fields.fail(f"{what}: a chunk with offsets {list(offset)} and sizes {list(sizes)}")
    return offset, Box(_logical(offset, dtype), _logical(sizes, dtype))


def _logical(numbers: tuple[int, ...], dtype: Dtype) -> tuple[int, ...]:
    """Count the last dimension in logical elements, of which torch packs several into one of its own."""
    return (*numbers[:-1], numbers[-1] * dtype.packed) if dtype.packed > 1 and numbers else numbers


def _shards(
    fields: Fields,
    value: object,
    tensors: Mapping[str, _Tensor],
    others: set[str],
    unsupported: dict[str, str],
    extents: dict[str, int],
) -> Iterator[Shard]:
    """Yield the shards that hold an element.

    Notes in ``unsupported`` the tensors whose items are transformed, and in ``extents`` how far each file reaches.
    """
    for key, stored in fields.items(value, "storage_data"):
        index = fields.of(key, IndexRecord, "storage_data: a key")
        fqn = fields.text(index.get("fqn"), "storage_data: a key's fqn")
        info = fields.of(stored, StorageRecord, f"storage_data: {named(fqn)}")
        span = _span(fields, info, fqn, extents)
        tensor = tensors.get(fqn)
        if tensor is None:
            if fqn not in others:
                fields.fail(f"storage_data: an item of {named(fqn)}, which state_dict_metadata does not have")
            continue
        box = _claim(fields, tensor, index.get("offset"), fqn)
        if transforms := info.get("transform_descriptors"):
            unsupported.setdefault(fqn, f"its items are stored transformed by {_listed(fields, transforms)}")
        if box.volume:
            yield Shard(fqn, tensor.spec.dtype, box, span, TORCH_SAVE)


def _claim(fields: Fields, tensor: _Tensor, value: object, fqn: str) -> Box:
    """Return the box at an offset, which no other item may have claimed."""
    offset = fields.counts(value, f"storage_data: {named(fqn)}: offset")
    if offset not in tensor.boxes:
        fields.fail(f"storage_data: {named(fqn)}: an item at {list(offset)}, where the tensor has no chunk")
    if offset not in tensor.unseen:
        fields.fail(f"storage_data: {named(fqn)}: two items at {list(offset)}")
    tensor.unseen.remove(offset)
    return tensor.boxes[offset]


def _span(fields: Fields, info: Mapping[str, object], fqn: str, extents: dict[str, int]) -> Span:
    path = fields.text(info.get("relative_path"), f"storage_data: {named(fqn)}: relative_path")
    if path not in extents:
        if not path or "\0" in path or _printable(path) != path or not {"", ".", ".."}.isdisjoint(path.split("/")):
            fields.fail(f"storage_data: {named(fqn)}: {named(path)} is no path inside the checkpoint")
    start = fields.count(info.get("offset"), f"storage_data: {named(fqn)}: offset")
    length = fields.count(info.get("length"), f"storage_data: {named(fqn)}: length")
    extents[path] = max(extents.get(path, 0), start + length)
    return Span(path, start, start + length)


def _listed(fields: Fields, value: object) -> str:
    names = fields.sequence(value, "transform_descriptors")
    return ", ".join(named(fields.text(name, "transform_descriptors")) for name in names)


def _nesting(fields: Fields, value: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield flat names and paths; some writers have no such table, or one of another kind."""
    if type(value) is not list:
        return
    for fqn, path in fields.mapping(value, "planner_data"):
        if type(path) is not tuple or not set(map(type, path)) <= {str, int}:
            fields.fail(f"planner_data: {named(fqn)}: expected a path of names and numbers, found {described(path)}")
        fields.spend(len(path))
        yield fqn, tuple(map(str, path))


def _save_id(fields: Fields, value: object) -> str | None:
    if value is None:
        return None
    save_id = fields.of(value, StorageMetaRecord, "storage_meta").get("save_id")
    return None if save_id is None else fields.text(save_id, "storage_meta: save_id")


def _printable(text: str) -> str:
    """Return the text itself, or with escapes where it cannot be encoded (a lone surrogate)."""
    return text.encode("utf-8", "backslashreplace").decode()
