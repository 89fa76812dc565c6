"""Where the payload of one tensor lies in its ``torch.save`` archive, and how its elements lie in that.

The archive's small pickle says which storage the tensor views, from which element, with which strides; the storage is
a record of the archive, stored as it is. So only the directory, that pickle and the record ``byteorder`` are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hfdcp_core import distcp_zip
from hfdcp_core.distcp_form import Form, Known
from hfdcp_core.distcp_records import Fields, TorchDtype, described
from hfdcp_core.distcp_scan import Budget
from hfdcp_core.dtypes import Dtype, dtype_of_torch
from hfdcp_core.errors import UnknownDtype

_MOST_PICKLE_BYTES = 1 << 20
_MOST_ORDER_BYTES = 16
_BYTE_ORDERS = {b"little": False, b"big": True}


@dataclass(frozen=True, slots=True)
class StorageRef:
    """The storage that a pickle names by a persistent id."""

    dtype: str | None
    """The torch dtype of its elements; None for an untyped storage, which counts bytes."""
    name: str
    """Its record is ``<root>/data/<name>``."""
    count: int
    """Elements, or bytes of an untyped storage."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The arguments with which a pickle rebuilds its tensor; nothing about them is known yet."""

    storage: object
    offset: object
    size: object
    strides: object
    hooks: object
    dtype: object
    """None where the storage says it."""
    marks: object
    """A flat list of names and values, or None."""


@dataclass(frozen=True, slots=True)
class TorchItem:
    """One stored box: its payload and the way its elements lie in it.

    ``strides`` and ``storage_offset`` count torch's elements, of ``unit_bytes`` each. They are safetensors' elements
    for every dtype but F4, where torch counts bytes that hold two: `unit_shape` is the shape to use with strides.
    """

    start: int
    """First byte of the payload (the whole storage), counted in the item."""
    stop: int
    """Behind the last byte of the payload."""
    crc32: int | None
    """CRC-32 of the payload; None where the writer was told not to compute it."""
    dtype: str
    """Safetensors name of the dtype."""
    shape: tuple[int, ...]
    """Extents of the box in logical elements."""
    strides: tuple[int, ...]
    """Distance of neighbours in each dimension."""
    storage_offset: int
    """The first element's place in the payload."""
    storage_bytes: int
    """Bytes of the payload."""
    unit_bytes: int
    """Bytes of one of torch's elements."""
    unit_shape: tuple[int, ...]
    """Extents of the box in torch's elements."""
    big_endian: bool
    """Whether the bytes of each element are in the other order than safetensors wants."""
    conjugate: bool
    """Whether the payload holds the conjugates of the (complex) elements."""

    @property
    def row_major(self) -> bool:
        """Whether the elements lie in a row, in order, so that the box is one run of bytes."""
        return row_major(self.unit_shape, self.strides)

    @property
    def as_wanted(self) -> bool:
        """Whether the payload is the elements of the box as they are wanted, and nothing else."""
        whole = self.storage_offset == 0 and self.storage_bytes == math.prod(self.unit_shape) * self.unit_bytes
        return whole and not self.big_endian and not self.conjugate and self.row_major


def row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides are those of a row-major tensor; those of extents of 1, or of an empty tensor, say nothing.

    >>> row_major((2, 3), (3, 1)), row_major((2, 1, 3), (3, 999, 1)), row_major((0, 3), (7, 7))
    (True, True, True)
    >>> row_major((2, 3), (1, 2))
    False
    """
    want = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent not in (0, 1) and stride != want:
            return 0 in shape
        want *= extent
    return True


def item_of(item: distcp_zip.Item, *, load: Callable[[bytes, str], object], known: Known[TorchItem]) -> TorchItem:
    """Read an item's directory and its small records; ``load`` turns its pickle into a `TensorRef`.

    Items like one that is ``known`` are opened at a glance.

    Raises:
        CorruptFile: The archive or its pickle is damaged, or they contradict each other.
        UnknownDtype: safetensors cannot hold the dtype.
    """
    if recalled := known.recall(item):
        form, alike = recalled
        return replace(alike, crc32=form.crc32(item))
    found, learned = _opened(item, load)
    if learned:
        known.remember(item, learned, found)
    return found


def _opened(item: distcp_zip.Item, load: Callable[[bytes, str], object]) -> tuple[TorchItem, Form | None]:
    """Open an item of a form that is not known, and return that, too."""
    where = item.where
    records = distcp_zip.directory(item)
    roots = [name.removesuffix("/data.pkl") for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1:
        item.fail(f"expected one record data.pkl in it, found {len(roots)}")
    read = pickle_name, order_name = f"{roots[0]}/data.pkl", f"{roots[0]}/byteorder"
    pickled = distcp_zip.content(item, records[pickle_name], most=_MOST_PICKLE_BYTES)
    order = distcp_zip.content(item, _record(item, records, order_name), most=_MOST_ORDER_BYTES)
    if order not in _BYTE_ORDERS:
        item.fail(f"byteorder is {order!r}, neither little nor big")
    view = _View(load(pickled, f"{where}: data.pkl"), f"{where}: data.pkl", len(pickled))
    payload = _record(item, records, f"{roots[0]}/data/{view.storage.name}")
    view.check_storage(payload.size)
    start, stop = distcp_zip.content_span(item, payload)
    # A writer that computes no checksums states 0 for every record; else 0 is the true CRC-32 of the payload.
    computed = not payload.size or any(record.crc32 for record in records.values())
    found = TorchItem(
        start=start, stop=stop, crc32=payload.crc32 if computed else None,
        dtype=view.dtype.name, shape=view.shape, strides=view.strides, storage_offset=view.offset,
        storage_bytes=payload.size, unit_bytes=view.unit_bytes, unit_shape=view.size,
        big_endian=_BYTE_ORDERS[order], conjugate=view.conjugate,
    )  # fmt: skip
    return found, Form.of(item, records, payload=payload, read=read)


def _record(item: distcp_zip.Item, records: Mapping[str, distcp_zip.Record], name: str) -> distcp_zip.Record:
    if name not in records:
        item.fail(f"it has no record {name!r}, only {', '.join(map(repr, sorted(records)[:8]))}")
    return records[name]


class _View:
    """The typed content of a `TensorRef`."""

    def __init__(self, loaded: object, where: str, size: int) -> None:
        self._fields = fields = Fields(where, Budget(where, size))
        if not isinstance(loaded, TensorRef):
            fields.fail(f"expected one plain tensor, found {described(loaded)}")
        if not isinstance(loaded.storage, StorageRef):
            fields.fail(f"expected a storage, found {described(loaded.storage)}")
        if loaded.hooks not in ([], None):
            fields.fail("its tensor has hooks")
        self.storage = loaded.storage
        self.dtype = _dtype(fields, loaded)
        self.size = fields.counts(loaded.size, "size")
        self.strides = fields.counts(loaded.strides, "strides")
        self.offset = fields.count(loaded.offset, "storage offset")
        self.unit_bytes = self.dtype.bits * self.dtype.packed // 8
        self.shape = self._logical()
        self.conjugate = "conj" in self._marks(loaded.marks)

    def _logical(self) -> tuple[int, ...]:
        if self.dtype.packed > 1 and not self.size:
            raise UnknownDtype(f"torch.{self.dtype.torch} without a dimension: its elements are halves of bytes")
        return (*self.size[:-1], self.size[-1] * self.dtype.packed) if self.dtype.packed > 1 else self.size

    def check_storage(self, nbytes: int) -> None:
        """Refuse a storage of another size than stated, or too small for the tensor."""
        unit = self.unit_bytes if self.storage.dtype else 1
        if self.storage.count * unit != nbytes:
            self._fields.fail(f"a storage of {self.storage.count} elements, where its record has {nbytes} bytes")
        if len(self.size) != len(self.strides):
            self._fields.fail(f"size {list(self.size)} with strides {list(self.strides)}")
        last = self.offset + sum((extent - 1) * stride for extent, stride in zip(self.size, self.strides, strict=True))
        if math.prod(self.size) and (last + 1) * self.unit_bytes > nbytes:
            self._fields.fail(
                f"size {list(self.size)} with strides {list(self.strides)} from element {self.offset} on reaches "
                f"behind its storage of {nbytes} bytes"
            )

    def _marks(self, value: object) -> set[str]:
        """Return the marks of the tensor that are set."""
        if value is None:
            return set()
        marks = {name for name, flag in self._fields.mapping(value, "metadata") if flag}
        if unknown := marks - {"conj"}:
            self._fields.fail(f"its tensor is marked {', '.join(sorted(unknown))}, which this hfdcp cannot undo")
        if marks and self.dtype.name != "C64":
            self._fields.fail(f"a conjugate view of {self.dtype.name}")
        return marks


def _dtype(fields: Fields, loaded: TensorRef) -> Dtype:
    assert isinstance(loaded.storage, StorageRef)
    dtype = loaded.storage.dtype if loaded.dtype is None else loaded.dtype
    if (loaded.storage.dtype is None) is not isinstance(loaded.dtype, TorchDtype) or dtype is None:
        fields.fail(f"a storage of {loaded.storage.dtype or 'bytes'} with dtype {described(loaded.dtype)}")
    return dtype_of_torch(str(dtype))
