"""What a DCP ``.metadata`` says: its tensors, the boxes that are stored, and the items that hold them.

Three tables are joined: `state_dict_metadata` (tensors and their chunks, each a box), `storage_data` (which bytes of
which file hold the chunk at some offset) and `planner_data` (where a flat name stood in the nested state dict).

- A chunk that no item holds is a hole: the tensor lacks that shard, and who plans a copy reports it.
- An item without a chunk, two items of one chunk, or two different boxes at one offset contradict the file: an error.
  Chunks that hold no element are the exception, since they may share the offset of one that does; they give no shard.
- A tensor that safetensors cannot hold, or whose items are transformed in a way that we cannot undo, is listed as
  unsupported; the rest is kept.
- Where the items of a file are exactly as long as their elements, no archive has room in them: torch was asked for
  ``SerializationFormat.SAFETENSORS``, and the file ends with one safetensors file (`hfdcp_core.distcp_tail`).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import add, le
from typing import TypeVar, cast

from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, TORCH_SAVE_ZSTD, ObjectItem, Shard, Skipped, Span, TensorSpec
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
    are,
    are_counts,
    are_places,
    columns,
    described,
    named,
)
from hfdcp_core.distcp_scan import Budget
from hfdcp_core.dtypes import Dtype, dtype_named, dtype_of_torch
from hfdcp_core.errors import UnknownDtype, UnknownFormat

_BLOCK = 1 << 12
"""Records that are looked at together."""
_MOST_KNOWN = 1 << 15
"""Boxes that are remembered to be used again."""
_RESERVED = "__metadata__"
_VERSION = "1"
_METADATA_FIELDS = ["state_dict_metadata", "storage_data", "planner_data", "storage_meta", "version", "mcore_data"]
_FLATTENED = "nd_reformulated_orig_global_shape"
_ZSTD = ["stream.zstd/1"]
_TENSOR_FIELDS = ["properties", "size", "chunks"]
_CHUNK_FIELDS = ["offsets", "sizes"]
_INDEX_FIELDS = ["fqn", "index", "offset"]
_STORAGE_FIELDS = ["relative_path", "offset", "length", "transform_descriptors"]
_MOST_PATH = 4096
"""Characters of a path, as file systems and object stores allow."""
_TENSOR_BYTES, _BOX_BYTES, _ITEM_BYTES, _PATH_BYTES, _ENTRY_BYTES, _NESTING_BYTES = 210, 48, 225, 300, 300, 200
"""Memory that is taken at most for a tensor, a box, an item, a new path, another entry, and where a name is nested:
values with their places in dictionaries, sets and lists, while these grow."""
_TENSOR_LENT, _BOX_LENT = 280, 150
"""Memory for a tensor and for each box beside the first until all items are found."""
_STEP_BYTES = 8
"""Memory for a step on the way to a nested name; a number is turned into a text."""
_NUMBER_BYTES = 16
"""Memory for each number of a place and a size that is made anew."""
_NUMBER_TEXT_BYTES = 80
_REASON_BYTES = 300
"""Memory for each name in a reason."""


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
    objects: tuple[ObjectItem, ...] = ()
    """The items of the entries that hold no tensor; one that is stored transformed in an unknown way is left out."""
    bare: Mapping[str, int] = field(default_factory=dict)
    """Files whose items have no room for an archive, and where the last item is said to start."""


_Boxes = dict[tuple[int, ...], Box | None]
_Known = dict[tuple[tuple[int, ...], tuple[int, ...]], Box]
"""Boxes by offset and shape: ranks cut most tensors in the same way."""
_Item = TypeVar("_Item")


_Stored = tuple[str, str, int, int, object, object]
"""An item of storage_data: name, path, start, length, place (looked at where the name is a tensor's), transforms."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor, while its items are being found."""

    spec: TensorSpec
    boxes: _Boxes
    """Its stored boxes by their offset in torch's elements; None once the item was met."""


@dataclass(frozen=True, slots=True)
class _Items:
    """What the items of storage_data are held against, and what is noted of them."""

    tensors: Mapping[str, _Tensor]
    others: set[str]
    """Names of entries that are no tensors, or that cannot be converted."""
    unsupported: dict[str, str]
    extents: dict[str, int]
    objects: list[ObjectItem] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    """Names of the entries that ``objects`` are of."""
    starts: dict[str, int] = field(default_factory=dict)
    """The last start of an item of a tensor in each file."""
    archives: set[str] = field(default_factory=set)
    """Files with an item of a tensor that is not exactly as long as its elements."""


def metadata_of(loaded: object, *, where: str, budget: Budget) -> DcpMetadata:
    """Build the values from a loaded pickle within what its loading left of the budget.

    Raises:
        CorruptFile: A field is missing, of another type, or contradicts another.
        UnknownFormat: The writer states a version of the format that this reader does not know.
    """
    fields = Fields(where, budget)
    state_dict, storage, planner, notes, version, megatron = fields.values(loaded, MetadataRecord, _METADATA_FIELDS)
    _check_version(fields, version, where)
    if not fields.has(loaded, "planner_data"):
        fields.fail("it has no field planner_data, which every writer has, if only to say None")
    tensors, skipped, unsupported = _entries(fields, state_dict)
    others = {entry.name for entry in skipped} | unsupported.keys()
    unsupported |= {fqn: reason for fqn, reason in _flattened(fields, megatron) if fqn in tensors}
    items = _Items(tensors, others, unsupported, {})
    shards = list(_shards(fields, storage, items))
    fields.about = None
    specs = {fqn: tensor.spec for fqn, tensor in tensors.items() if fqn not in unsupported}
    tensors.clear()
    fields.budget.take_back()
    return DcpMetadata(
        tensors=specs,
        shards=tuple(shard for shard in shards if shard.fqn in specs),
        skipped=tuple(Skipped(_printable(entry.name), entry.reason) for entry in skipped),
        nesting=_nesting(fields, planner, {*specs, *unsupported}),
        save_id=_save_id(fields, notes),
        unsupported={_printable(fqn): reason for fqn, reason in unsupported.items()},
        extents=items.extents,
        objects=tuple(items.objects),
        bare={path: start for path, start in items.starts.items() if path not in items.archives},
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
    known: _Known = {}
    for fqn, entry in fields.mapping(value, "state_dict_metadata"):
        if isinstance(entry, BytesRecord):
            fields.pay(_ENTRY_BYTES + len(fqn))
            skipped.append(Skipped(fqn, "not a tensor: a pickled Python object"))
            continue
        fields.about = fqn
        try:
            tensors[fqn] = _tensor(fields, fqn, entry, known)
        except UnknownDtype as unfit:
            fields.pay(_REASON_BYTES + len(fqn))
            unsupported[fqn] = unfit.message
        fields.about = None
    return tensors, skipped, unsupported


def _tensor(fields: Fields, fqn: str, entry: object, known: _Known) -> _Tensor:
    properties, size, listed = fields.values(entry, TensorRecord, _TENSOR_FIELDS)
    extents = fields.counts(size, "size")
    chunks = fields.sequence(listed, "chunks")
    dtype = _dtype(fields, properties)
    if fqn == _RESERVED or _printable(fqn) != fqn:
        raise UnknownDtype("safetensors cannot hold a tensor of that name")
    if dtype.packed > 1 and not extents:
        raise UnknownDtype(f"torch.{dtype.torch} without a dimension: its elements are halves of bytes")
    boxes: _Boxes = {}
    anew = 2 * _NUMBER_BYTES * len(extents) if dtype.packed > 1 else 0
    fields.pay(_TENSOR_BYTES + anew + (_BOX_BYTES + anew) * len(chunks))
    fields.budget.lend(_TENSOR_LENT + _BOX_LENT * (len(chunks) - 1))
    for block in _blocks(chunks):
        plain = _plain_boxes(block, extents, known) if dtype.packed == 1 else {}
        if len(plain) == len(block) and plain.keys().isdisjoint(boxes):
            boxes |= plain
        else:
            _add_boxes(fields, boxes, block, (extents, dtype))
    return _Tensor(TensorSpec(dtype.name, _logical(extents, dtype)), boxes)


def _blocks(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    rest = iter(items)
    while block := list(itertools.islice(rest, _BLOCK)):
        yield block


def _plain_boxes(chunks: list[object], extents: tuple[int, ...], known: _Known) -> _Boxes:
    """Return the boxes by their offset, looked at by columns; fewer than the chunks where one needs a closer look."""
    offsets, sizes = columns(chunks, ChunkRecord, _CHUNK_FIELDS) or ((), ())
    if not are_places(offsets) or not are_places(sizes) or {*map(len, offsets), *map(len, sizes)} != {len(extents)}:
        return {}
    for first, length, extent in zip(zip(*offsets, strict=True), zip(*sizes, strict=True), extents, strict=True):
        if max(map(add, first, length)) > extent:
            return {}
    cuts = list(zip(offsets, sizes, strict=True))
    if len(known) > _MOST_KNOWN:
        known.clear()
    known.update((cut, Box(*cut)) for cut in cuts if cut not in known)
    return dict(zip(offsets, map(known.__getitem__, cuts), strict=True))


def _add_boxes(fields: Fields, boxes: _Boxes, chunks: Iterable[object], whole: tuple[tuple[int, ...], Dtype]) -> None:
    """Add the boxes of chunks one by one, and say what is wrong with one."""
    extents, dtype = whole
    for chunk in chunks:
        offset, sizes = _chunk(fields, chunk, extents)
        box, other = Box(_logical(offset, dtype), _logical(sizes, dtype)), boxes.get(offset)
        if other and other != box and other.volume and box.volume:
            fields.fail(f"two chunks at one offset, {other} and {box}")
        if not other or box.volume:
            boxes[offset] = box


def _dtype(fields: Fields, properties: object) -> Dtype:
    state = properties[0] if isinstance(properties, PropertiesRecord) and len(properties) == 1 else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, TorchDtype):
        fields.fail(f"properties: expected a dtype, found {described(dtype)}")
    return dtype_of_torch(dtype)


def _chunk(fields: Fields, chunk: object, extents: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and sizes of a chunk that lies inside of its tensor, in torch's elements."""
    offsets, sizes = fields.values(chunk, ChunkRecord, _CHUNK_FIELDS)
    offset, size = fields.counts(offsets, "a chunk's offsets"), fields.counts(sizes, "a chunk's sizes")
    if not len(offset) == len(size) == len(extents) or not all(map(le, map(add, offset, size), extents)):
        fields.fail(f"a chunk of sizes {list(size)} at {list(offset)} is outside of its shape {list(extents)}")
    return offset, size


def _logical(numbers: tuple[int, ...], dtype: Dtype) -> tuple[int, ...]:
    """Count the last dimension in logical elements, of which torch packs several into one of its own."""
    return (*numbers[:-1], numbers[-1] * dtype.packed) if dtype.packed > 1 else numbers


def _shards(fields: Fields, value: object, items: _Items) -> Iterator[Shard]:
    """Yield the shards that hold an element, and note in ``items`` what else is seen on the way."""
    for name, path, start, length, offset, transforms in _stored(fields, value, items.tensors):
        fields.about = name
        stop = start + length
        if stop > items.extents.get(path, -1):
            _extend(fields, items.extents, path, stop)
        span = Span(path, start, stop)
        tensor = items.tensors.get(name)
        if tensor is None:
            if name not in items.others:
                fields.fail("an item of it is stored, but state_dict_metadata does not have it")
            if name not in items.unsupported and offset is not None:
                fields.fail("an item of it is a box of a tensor, but state_dict_metadata says that it is none")
            if name not in items.unsupported and (not transforms or _listed(fields, transforms) == _ZSTD):
                encoding = TORCH_SAVE_ZSTD if transforms else TORCH_SAVE
                if name in items.claimed:
                    fields.fail("two items of it")
                fields.pay(_ENTRY_BYTES + len(name))
                items.claimed.add(name)
                items.objects.append(ObjectItem(_printable(name), span, encoding))
            continue
        box = _claim(fields, tensor, cast("tuple[int, ...]", offset))
        dtype = tensor.spec.dtype
        _note_place(items, span, dtype, box)
        if transforms and (names := _listed(fields, transforms)) != _ZSTD:
            reason = f"its items are stored transformed by {', '.join(map(named, names))}"
            items.unsupported.setdefault(name, reason)
        if 0 not in box.shape:
            yield Shard(name, dtype, box, span, TORCH_SAVE_ZSTD if transforms else TORCH_SAVE)


def _stored(fields: Fields, value: object, tensors: Container[str]) -> Iterator[_Stored]:
    """Yield the items that are stored."""
    for block in _blocks(fields.items(value, "storage_data")):
        fields.about = None
        fields.pay(_ITEM_BYTES * len(block))
        yield from _plain_items(block) or (_item(fields, key, stored, tensors) for key, stored in block)


def _plain_items(block: list[tuple[object, object]]) -> Iterator[_Stored] | None:
    """Return items that are looked at by columns; None where one needs a closer look."""
    keys, values = zip(*block, strict=True)
    indices, stored = columns(keys, IndexRecord, _INDEX_FIELDS), columns(values, StorageRecord, _STORAGE_FIELDS)
    if indices is None or stored is None:
        return None
    (names, _, offsets), (paths, starts, lengths, transforms) = indices, stored
    if not (are(names, str) and are(paths, str) and are_counts(starts) and are_counts(lengths) and are_places(offsets)):
        return None
    return zip(names, paths, starts, lengths, offsets, transforms, strict=True)


def _item(fields: Fields, key: object, value: object, tensors: Container[str]) -> _Stored:
    """Return one item, or say what is wrong with it."""
    fields.about = None
    fqn, _, offset = fields.values(key, IndexRecord, _INDEX_FIELDS)
    fields.about = name = fields.text(fqn, "storage_data: a key's fqn")
    path, start, length, transforms = fields.values(value, StorageRecord, _STORAGE_FIELDS)
    span = (
        fields.text(path, "relative_path"),
        fields.count(start, "an item's offset"),
        fields.count(length, "an item's length"),
    )
    if name in tensors:
        offset = fields.counts(offset, "an item's place in its tensor")
    return name, *span, offset, transforms


def _note_place(items: _Items, span: Span, dtype: str, box: Box) -> None:
    if span.start >= items.starts.get(span.path, 0):
        items.starts[span.path] = span.start
    if span.path not in items.archives and span.length * 8 != dtype_named(dtype).bits * box.volume:
        items.archives.add(span.path)


def _claim(fields: Fields, tensor: _Tensor, offset: tuple[int, ...]) -> Box:
    """Return the box at an offset, which no other item may have claimed."""
    box = tensor.boxes.get(offset)
    if box is None:
        met = offset in tensor.boxes
        fields.fail(
            f"two items at {list(offset)}" if met else f"an item at {list(offset)}, where the tensor has no chunk"
        )
    tensor.boxes[offset] = None
    return box


def _extend(fields: Fields, extents: dict[str, int], path: str, stop: int) -> None:
    """Note how far a file must reach; a path that is new is looked at."""
    if path not in extents:
        fields.pay(_PATH_BYTES)
        if (
            len(path) > _MOST_PATH
            or "\0" in path
            or _printable(path) != path
            or not {"", ".", ".."}.isdisjoint(path.split("/"))
        ):
            fields.fail(f"relative_path: {named(path)} is no path inside the checkpoint")
    extents[path] = stop


def _listed(fields: Fields, value: object) -> list[str]:
    if value == _ZSTD:  # all that torch writes itself
        return _ZSTD
    names = fields.sequence(value, "transform_descriptors")
    fields.pay(_REASON_BYTES * len(names))
    return [fields.text(name, "transform_descriptors") for name in names]


def _flattened(fields: Fields, value: object) -> Iterator[tuple[str, str]]:
    """Yield the tensors that Megatron-core's distributed optimizer saved in another shape than their own."""
    for fqn, notes in fields.mapping([] if value is None else value, "mcore_data"):
        if any(name == _FLATTENED for name, _ in fields.mapping(notes, f"mcore_data: {named(fqn)}")):
            fields.pay(_ENTRY_BYTES)
            yield fqn, "Megatron-core saved it flattened, in another shape than its own: an optimizer state, no weight"


def _nesting(fields: Fields, value: object, fqns: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the paths of tensors by flat name; some writers have no such table, or one of another kind.

    Names are cleaned by it, so it must fit: each path spells its name, and where there is one, all tensors have one.
    """
    if type(value) is not list or not value:
        return {}
    nesting: dict[str, tuple[str, ...]] = {}
    for fqn, path in fields.mapping(value, "planner_data"):
        if type(path) is tuple:
            fields.spend(len(path))
        if type(path) is not tuple or not set(map(type, path)) <= {str, int}:
            fields.fail(f"planner_data: {named(fqn)}: expected a path of names and numbers, found {described(path)}")
        fields.pay(_NESTING_BYTES + sum(_NUMBER_TEXT_BYTES if type(step) is int else _STEP_BYTES for step in path))
        steps = tuple(map(str, path))
        # The length is looked at first: a path may name one long text again and again.
        if sum(map(len, steps)) + len(path) - 1 != len(fqn) or ".".join(steps) != fqn:
            fields.fail(f"planner_data: {named(fqn)}: the path {described(path)} spells another name")
        if fqn in fqns:
            nesting[_printable(fqn)] = steps
            fqns.remove(fqn)
    if fqns:
        fields.fail(f"planner_data: {named(min(fqns))} is not in it, as all names are that are saved")
    return nesting


def _save_id(fields: Fields, value: object) -> str | None:
    if value is None:
        return None
    [save_id] = fields.values(value, StorageMetaRecord, ["save_id"])
    return None if save_id is None else fields.text(save_id, "storage_meta: save_id")


def _printable(text: str) -> str:
    """Return the text itself, or with escapes where it cannot be encoded (a lone surrogate)."""
    encoded = text.encode("utf-8", "backslashreplace").decode()
    return text if encoded == text else encoded
