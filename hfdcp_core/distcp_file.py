"""Reads the files of PyTorch's distributed checkpoints: ``.metadata``, and the ``torch.save`` items in ``.distcp``.

The one door to pickle. torch reads both with an unpickler that calls whatever they name; here an unpickler resolves
only the names in two tables, to inert records of our own, and never sees an opcode that `hfdcp_core.distcp_scan` has
not looked at. Nothing of torch is imported, and no tensor is unpickled: its payload is found by the zip directory.

- `distcp_scan`: which opcodes a pickle may use, and dictionaries as flat lists;
- `distcp_records`, `distcp_metadata`: the inert records, and what a ``.metadata`` says with them;
- `distcp_zip`, `distcp_item`: the zip directory of an item, and where its payload lies;
- `distcp_form`: what was learned of one item holds for those like it;
- `distcp_object`: the plain value that an item holds which is no tensor, read without any unpickler.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping

from hfdcp_core import distcp_records as records
from hfdcp_core.collector import without_collector
from hfdcp_core.distcp_form import Known
from hfdcp_core.distcp_item import StorageRef, TensorRef, TorchItem, item_of
from hfdcp_core.distcp_metadata import DcpMetadata, metadata_of
from hfdcp_core.distcp_object import TENSORS, ObjectContent, hides_tensors, read_object, sound_records
from hfdcp_core.distcp_scan import Budget, Rules, TamePickle
from hfdcp_core.distcp_zip import Item
from hfdcp_core.dtypes import NOT_IN_SAFETENSORS, TABLE
from hfdcp_core.errors import CorruptFile, SourceError, UnsafePickle

__all__ = [
    "TENSORS",
    "DcpMetadata",
    "ObjectContent",
    "TorchItem",
    "hides_tensors",
    "payload_at_a_glance",
    "read_item",
    "read_metadata",
    "read_object",
    "sound_records",
]

MOST_METADATA_BYTES = 1 << 29
"""About four million shards."""

_MOST_ARGUMENTS = 256
"""Of a call whose result is not looked at: the parts of a path, for instance."""

_EMPTY_BYTES = 96
"""Of a list with its first places."""

_SEARCHED_FOR_NAMES = 1 << 20
"""How much of a refused pickle is looked through for what it names."""

_OTHER_DTYPES = {
    *NOT_IN_SAFETENSORS, "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "bcomplex32",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
}  # fmt: skip
"""torch's dtypes that are not in our table: a checkpoint may have one beside tensors that can be converted."""
_DTYPES = {
    ("torch", name): records.TorchDtype(name) for name in [*(row.torch for row in TABLE if row.torch), *_OTHER_DTYPES]
}


def _unread(*arguments: object) -> None:
    """Stand for a call whose result is not looked at.

    Python copies the arguments, which may be shared: were there millions, a few bytes could have them copied.
    """
    if len(arguments) > _MOST_ARGUMENTS:
        raise ValueError(f"a call with {len(arguments)} arguments")


def _argument(argument: object) -> object:
    """Stand for a call that only wraps its argument, such as ``torch.Size((2, 3))``."""
    return argument


def _empty() -> list[object]:
    """Stand for a dictionary of another class; its items come later. The unpickler lets it be paid."""
    return []


_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_METADATA_GLOBALS: Mapping[tuple[str, str], object] = {
    (_METADATA, "Metadata"): records.MetadataRecord,
    (_METADATA, "TensorStorageMetadata"): records.TensorRecord,
    (_METADATA, "BytesStorageMetadata"): records.BytesRecord,
    (_METADATA, "TensorProperties"): records.PropertiesRecord,
    (_METADATA, "ChunkStorageMetadata"): records.ChunkRecord,
    (_METADATA, "MetadataIndex"): records.IndexRecord,
    (_METADATA, "StorageMeta"): records.StorageMetaRecord,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _unread,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): records.StorageRecord,
    # OLMo-core has a class of its own, with the fields of torch's.
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): records.StorageRecord,
    # torch 2.1 and 2.2 keep the properties with the ShardedTensor.
    (_OLD_METADATA, "TensorProperties"): records.PropertiesRecord,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): _unread,
    # Megatron-core keeps the save plans of all ranks in the same pickle, and newer ones derive classes of their own.
    (_PLANNER, "SavePlan"): records.Record,
    (_PLANNER, "WriteItem"): records.Record,
    (_PLANNER, "TensorWriteData"): records.Record,
    (_PLANNER, "WriteItemType"): _unread,
    (_MEGATRON, "MCoreSavePlan"): records.Record,
    (_MEGATRON, "MCoreMetadata"): records.MetadataRecord,
    ("torch", "Size"): _argument,
    ("torch.serialization", "_get_layout"): _unread,
    ("collections", "OrderedDict"): _empty,
    **{
        (module, f"{flavour}Path"): _unread
        for module in ("pathlib", "pathlib._local")
        for flavour in ("Posix", "Windows", "PurePosix", "PureWindows")
    },
    **_DTYPES,
}
"""Everything that some writer's ``.metadata`` was seen to name, and what stands for it."""

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


class _StorageKind(str):
    """A class of storages, as the torch dtype of its elements; empty for the untyped one."""

    __slots__ = ()


def _rebuild_v2(  # noqa: PLR0917 - torch calls it with positions
    storage: object,
    offset: object,
    size: object,
    strides: object,
    _grad: object,
    hooks: object,
    marks: object = None,
    /,
) -> TensorRef:
    return TensorRef(storage, offset, size, strides, hooks, None, marks)


def _rebuild_v3(  # noqa: PLR0917 - torch calls it with positions
    storage: object, offset: object, size: object, strides: object, _grad: object, hooks: object, dtype: object,
    marks: object = None, /,
) -> TensorRef:  # fmt: skip
    return TensorRef(storage, offset, size, strides, hooks, dtype, marks)


_TENSOR_GLOBALS: Mapping[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch.storage", "UntypedStorage"): _StorageKind(),
    ("torch", "UntypedStorage"): _StorageKind(),
    ("collections", "OrderedDict"): _empty,
    ("torch", "Size"): _argument,
    **{("torch", name): _StorageKind(dtype) for name, dtype in _STORAGES.items()},
    **_DTYPES,
}
"""Everything that the pickle of one plain dense tensor names."""


def _paid_empty(budget: Budget) -> Callable[[], list[object]]:
    def empty() -> list[object]:
        budget.spend(_EMPTY_BYTES)
        return _empty()

    return empty


class _Unpickler(pickle.Unpickler):
    """Resolves names in one table only; what stands there calls nothing outside of this module."""

    def __init__(self, tame: TamePickle, rules: Rules) -> None:
        super().__init__(tame)
        self._rules = rules
        self._paid_empty = _paid_empty(rules.budget)

    def find_class(self, module: str, name: str, /) -> object:
        """Return what stands for a global."""
        found = self._rules.check_global(module, name)
        return self._paid_empty if found is _empty else found

    def persistent_load(self, pid: object, /) -> StorageRef:
        """Return the storage that ``("storage", kind, name, location, count)`` names."""
        match pid:
            case ("storage", _StorageKind() as kind, str(name), _, int(count)) if type(count) is int and count >= 0:
                return StorageRef(str(kind) or None, name, count)
        raise CorruptFile(f"{self._rules.where}: a persistent id that names no storage")


def read_metadata(raw: bytes, *, path: str) -> DcpMetadata:
    """Read the ``.metadata`` of a DCP checkpoint.

    Raises:
        CorruptFile: It is damaged, or its parts contradict each other.
        UnsafePickle: It names something that no writer of DCP names.
        UnknownFormat: It states a version of the format that came after this reader.
    """
    if len(raw) > MOST_METADATA_BYTES:
        raise CorruptFile(f"{path}: {len(raw)} bytes; at most {MOST_METADATA_BYTES} are read")
    rules = Rules(path, _checker(_METADATA_GLOBALS, path), Budget(path, len(raw)))
    with without_collector():
        return metadata_of(_load(raw, rules), where=path, budget=rules.budget)


_ALIKE: Known[TorchItem] = Known()
"""What was learned of items: those of many small tensors are much the same."""


def read_item(
    fetch: Callable[[int, int], bytes], length: int, *, where: str, known: Known[TorchItem] = _ALIKE
) -> TorchItem:
    """Find the payload of one ``torch.save`` item of ``length`` bytes, in a few small reads.

    Args:
        fetch: Returns the bytes ``[start, stop)`` of the item.
        length: Bytes of the item.
        where: What it is, for messages.
        known: What was learned of items before, and is learned of this one.

    Raises:
        CorruptFile: The archive is damaged, or its parts contradict each other.
        UnsafePickle: It holds something other than a plain dense tensor.
        UnknownDtype: safetensors cannot hold its dtype.
    """

    def load(raw: bytes, name: str) -> object:
        return _load(raw, Rules(name, _checker(_TENSOR_GLOBALS, name), Budget(name, len(raw)), persistent_ids=True))

    return item_of(Item(fetch, length, where), load=load, known=known)


def payload_at_a_glance(
    raw: bytes, dtype: str, shape: tuple[int, ...], *, known: Known[TorchItem] = _ALIKE
) -> tuple[int, int, int | None] | None:
    """Find the payload of a whole item that is like a known one and holds just the elements of a box, as wanted.

    Returns:
        Where the payload begins and ends, and the CRC-32 that is stated for it, if any; None where the item has to be
        opened by `read_item`, which also says what is wrong with it.
    """
    item = Item(lambda start, stop: raw[start:stop], len(raw), "")
    recalled = known.recall(item)
    if recalled is None:
        return None
    form, alike = recalled
    if alike.dtype != dtype or alike.shape != shape or not alike.as_wanted:
        return None
    return alike.start, alike.stop, form.crc32(item)


def _checker(table: Mapping[tuple[str, str], object], where: str) -> Callable[[str, str], object]:
    """Return what looks names up in one table, and refuses all others."""

    def allowed(module: str, name: str) -> object:
        try:
            return table[module, name]
        except KeyError:
            raise UnsafePickle(
                f"{where}: names {records.named(f'{module}.{name}')}, which is not among what such a file needs; "
                "it was neither imported nor called"
            ) from None

    return allowed


def _load(raw: bytes, rules: Rules) -> object:
    try:
        loaded = _Unpickler(TamePickle(raw, rules), rules).load()
    except SourceError:
        for module, name in _globals_at_start(raw):
            rules.check_global(module, name)  # a name says more than "not a pickle of protocol 2 to 5" or an opcode
        raise
    except Exception as broken:
        # As broad as it is wide: a damaged pickle makes the unpickler raise nearly anything.
        raise CorruptFile(f"{rules.where}: a damaged pickle: {type(broken).__name__}: {broken}") from broken
    rules.budget.take_back()
    return loaded


def _globals_at_start(raw: bytes) -> Iterator[tuple[str, str]]:
    """Yield what a pickle of any protocol names, as far as its start can be cut into opcodes; nothing is executed."""
    texts, memo = [""], dict[int, str]()
    try:
        for opcode, value, _ in pickletools.genops(raw[:_SEARCHED_FOR_NAMES]):
            if opcode.name in {"GLOBAL", "INST"}:
                module, _, name = str(value).partition(" ")
                yield module, name
            elif opcode.name == "STACK_GLOBAL":
                yield texts[-2], texts[-1]
            elif isinstance(value, str):
                texts = [texts[-1], value]
            elif "PUT" in opcode.name or opcode.name == "MEMOIZE":
                memo[len(memo) if value is None else value] = texts[-1]
            elif "GET" in opcode.name:
                texts = [texts[-1], memo.get(value or 0, "")]
    except (ValueError, IndexError, RecursionError, Warning):  # Warning: where those are made errors
        return
