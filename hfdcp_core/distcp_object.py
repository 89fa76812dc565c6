r"""Reads the items of entries that are no tensors: numbers, texts, lists and dictionaries, and nothing that is alive.

Such an item is a ``torch.save`` archive of *any* pickle. torch executes it; an unpickler that resolves only harmless
names would still have to be given what they stand for. Here no unpickler is used at all. `Machine` walks over the
opcodes itself and can make exactly these: None, booleans, integers, floats, text, bytes, lists, tuples, dictionaries
(ordered ones too). It has no way to look a name up and none to call anything. Whatever else a pickle holds is named,
and makes the whole entry one that is not saved:

- a name that is neither ``collections.OrderedDict`` nor the ``_codecs.encode`` by which protocol 2 writes bytes;
- a persistent id, which stands for the storage of a tensor;
- an opcode that no plain value needs.

Every opcode makes one small value at most, and the pickle is bounded, hence so is the memory. What its parts describe
when they are written out, one shared part again and again, is bounded too, and so is the depth.

In JSON, what JSON does not have is an object of one key that begins with ``$``::

    nan, inf, -inf      {"$float": "NaN"}, {"$float": "Infinity"}, {"$float": "-Infinity"}
    bytes               {"$bytes": "<base64>"}
    a dictionary whose keys are not all text, or that has a key with a leading $
                        {"$items": [[key, value], …]}
    a tuple             a list
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hfdcp_core import distcp_zip
from hfdcp_core.distcp_machine import TENSORS, DamagedError, Items, Machine, Name, NotPlainError
from hfdcp_core.errors import CorruptFile

__all__ = ["TENSORS", "Json", "ObjectContent", "hides_tensors", "plain_value", "read_object", "sound_records"]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MOST_PICKLE_BYTES = 1 << 20
"""A larger pickle is not looked into."""
MOST_DEPTH = 64
"""Lists in lists; deeper ones are not written."""
MOST_RECORD_BYTES = 16 << 20
"""A larger record is not read to find out whether it is sound."""
_MOST_DIRECTORY_BYTES = 8 << 20
"""A whole model that hides in one object has a record for each of its tensors: about 100,000 of them."""
_WRITTEN = 16
"""Characters and values that may be written for each byte of a pickle."""


@dataclass(frozen=True, slots=True)
class ObjectContent:
    """What one item holds."""

    value: Json
    """The plain value, as JSON has it; None also where it is none."""
    problem: str = ""
    """Why it is no plain value, as in "holds Foo of module.x"; empty where it is one."""


def read_object(fetch: Callable[[int, int], bytes], length: int, *, where: str) -> ObjectContent:
    """Read the plain value that an item of ``length`` bytes holds, or say what it holds instead.

    Args:
        fetch: Returns the bytes ``[start, stop)`` of the item.
        length: Bytes of the item.
        where: What it is, for messages.

    Raises:
        CorruptFile: The archive or its pickle is damaged.
    """
    item = distcp_zip.Item(fetch, length, where)
    pickled, storages = _records(item)
    if storages:
        return ObjectContent(None, TENSORS)
    if pickled.size > MOST_PICKLE_BYTES:
        problem = f"holds a pickle of {pickled.size} bytes; at most {MOST_PICKLE_BYTES} are looked into"
        return ObjectContent(None, problem)
    return plain_value(distcp_zip.content(item, pickled, most=MOST_PICKLE_BYTES), where=f"{where}: data.pkl")


def hides_tensors(fetch: Callable[[int, int], bytes], length: int, *, where: str) -> bool:
    """Whether an item that should hold no tensor does, by the directory of its archive alone.

    Raises:
        CorruptFile: The archive is damaged.
    """
    return _records(distcp_zip.Item(fetch, length, where))[1]


def sound_records(fetch: Callable[[int, int], bytes], length: int, *, where: str) -> Mapping[str, int] | None:
    """Read all records of an item, and return the CRC-32 of each by name; None where one of them states none.

    Raises:
        CorruptFile: The archive is damaged, or a record is, or it is too large to be looked at.
    """
    item = distcp_zip.Item(fetch, length, where)
    records = distcp_zip.directory(item, most=_MOST_DIRECTORY_BYTES)
    for record in records.values():
        distcp_zip.content(item, record, most=MOST_RECORD_BYTES)
    told = all(record.crc32 or not record.size for record in records.values())
    return {name: record.crc32 for name, record in records.items()} if told else None


def _records(item: distcp_zip.Item) -> tuple[distcp_zip.Record, bool]:
    """Return the record of the pickle, and whether there are any of the storages that tensors lie in."""
    records = distcp_zip.directory(item, most=_MOST_DIRECTORY_BYTES)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        item.fail(f"expected one record data.pkl in it, found {len(pickles)}")
    data = f"{pickles[0].removesuffix('.pkl')}/"
    return records[pickles[0]], any(name.startswith(data) for name in records)


def plain_value(raw: bytes, *, where: str) -> ObjectContent:
    r"""Return the plain value that a pickle holds, or what it holds instead; nothing of it is executed.

    Raises:
        CorruptFile: It is no pickle.

    >>> import pickle
    >>> plain_value(pickle.dumps({"step": 3, "lr": [1e-3, float("inf")]}), where="x").value
    {'step': 3, 'lr': [0.001, {'$float': 'Infinity'}]}
    >>> plain_value(b"cos\nsystem\n(X\x02\x00\x00\x00lstR.", where="x").problem
    'holds system of os'
    """
    machine = Machine(raw)
    try:
        value = machine.run()
        if machine.problem:
            return ObjectContent(None, machine.problem)
        return ObjectContent(_Writer(_WRITTEN * len(raw)).json(value, 0))
    except NotPlainError as other:
        return ObjectContent(None, machine.problem or str(other))
    except (DamagedError, IndexError, struct.error, UnicodeDecodeError) as broken:
        raise CorruptFile(f"{where}: a damaged pickle: {broken} (byte {machine.position})") from broken


class _Writer:
    """Turns plain values into what JSON has, in at most so many characters and values."""

    def __init__(self, budget: int) -> None:
        self._left = budget

    def json(self, value: object, depth: int) -> Json:
        """Return a value as JSON has it."""
        self._spend(1)
        if depth > MOST_DEPTH:
            raise NotPlainError(f"holds lists in lists, more than {MOST_DEPTH} deep")
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, str):
            self._spend(len(value))
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": _odd_float(value)}
        if isinstance(value, bytes):
            self._spend(len(value))
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Items):
            return self._dictionary(value, depth)
        if isinstance(value, list | tuple):
            return [self.json(item, depth + 1) for item in value]
        assert isinstance(value, Name)  # anything else was noted when it was made
        raise NotPlainError(f"holds {value.name} of {value.module}")

    def _dictionary(self, items: Items, depth: int) -> Json:
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return {str(key): item for key, item in self._values(items, depth)}
        return {"$items": [[self.json(key, depth + 1), item] for key, item in self._values(items, depth)]}

    def _values(self, items: Items, depth: int) -> Iterator[tuple[object, Json]]:
        for key, item in items:
            if isinstance(key, str):
                self._spend(len(key))
            yield key, self.json(item, depth + 1)

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise NotPlainError("its parts are shared so often that they describe far more than the file holds")


def _odd_float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
