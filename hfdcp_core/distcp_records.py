"""Inert records that the classes in a DCP pickle are loaded as, and typed access to their fields.

The unpickler makes a `Record` where the pickle names one of the writer's classes, and a `TorchDtype` where it names a
dtype. A record is a list that holds its state and nothing else, so that loading runs in C from end to end: ``NEWOBJ``
makes the empty list, ``BUILD`` appends the state. Dictionaries arrive as flat lists (`hfdcp_core.distcp_scan`).

Nothing is known of a record's content until `Fields` has looked: each field must be there and of its type. A million
records that are all alike are looked at by columns first; where a column is not as expected, each record is. Records
may share their parts, so a small pickle can describe very much; `Fields` therefore bounds what is walked by the size
of the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar, NoReturn, TypeGuard, TypeVar, cast

from hfdcp_core.distcp_scan import Budget, pairs
from hfdcp_core.errors import CorruptFile

MAX_DIMENSIONS = 64
"""What numpy and torch's own kernels can handle."""
_Kind = TypeVar("_Kind")
_LIMIT = 2**63
_MOST_FIELDS = 64
_SHOWN = 200
_SET_PLACE = 64
"""Bytes of memory that an item of a set takes at most while the set grows."""


class TorchDtype(str):
    """A dtype that a pickle names, as the attribute of ``torch``."""

    __slots__ = ()


class Record(list[object]):
    """An instance of one of the writer's classes."""

    __slots__ = ()
    __setstate__ = list.append
    kind: ClassVar[str] = "ignored"
    """The writer's name of the class."""

    def __init__(self) -> None:
        """Refuse to be called: writers' pickles make records by NEWOBJ, which calls no initializer."""
        raise TypeError("a record is made without a call")


class MetadataRecord(Record):
    """The whole: tensors, where they are stored, and notes of the writer."""

    __slots__ = ()
    kind = "Metadata"


class TensorRecord(Record):
    """A tensor: its properties, its size, its chunks."""

    __slots__ = ()
    kind = "TensorStorageMetadata"


class BytesRecord(Record):
    """An entry that holds no tensor."""

    __slots__ = ()
    kind = "BytesStorageMetadata"


class PropertiesRecord(Record):
    """Properties of a tensor: a tuple that begins with the dtype."""

    __slots__ = ()
    kind = "TensorProperties"


class ChunkRecord(Record):
    """Offsets and sizes of one box."""

    __slots__ = ()
    kind = "ChunkStorageMetadata"


class IndexRecord(Record):
    """Which box of which tensor an item holds."""

    __slots__ = ()
    kind = "MetadataIndex"


class StorageRecord(Record):
    """Which bytes of which file an item takes."""

    __slots__ = ()
    kind = "_StorageInfo"


class StorageMetaRecord(Record):
    """The writer's notes, of which the save id is kept."""

    __slots__ = ()
    kind = "StorageMeta"


class Fields:
    """Access to the fields of records, with budgets of steps for all lists of a file, and of memory for what is made.

    Every method takes ``what``, the field that a message names; `about` says which tensor it belongs to.
    """

    def __init__(self, where: str, budget: Budget) -> None:
        """Read records of the file ``where``; its lists may have as many items in all as it has bytes."""
        self._where = where
        self._steps = budget.size
        self.budget = budget
        """What is made of the records is paid from it."""
        self.pay = budget.spend
        self.about: str | None = None

    def fail(self, problem: str) -> NoReturn:
        """Raise `CorruptFile` for this file."""
        place = self._where if self.about is None else f"{self._where}: {named(self.about)}"
        raise CorruptFile(f"{place}: {problem}")

    def values(self, record: object, kind: type[Record], names: list[str]) -> list[object]:
        """Return the fields of a record in the order of ``names``, None for those that it does not have."""
        if type(record) is not kind:
            self.fail(f"expected a {kind.kind}, found {described(record)}")
        state = record[0] if len(record) == 1 else None
        if type(state) is not list or len(state) > 2 * _MOST_FIELDS:
            self.fail(f"the {kind.kind} has no state with named fields")
        keys, values = state[::2], state[1::2]
        if len(keys) == len(values) and keys == names[: len(keys)]:
            # The order in which the writer's class declares them: a million records come by here.
            return values + [None] * (len(names) - len(keys))
        found = {self.text(key, "a field's name"): value for key, value in self._pairs(state, kind.kind)}
        return [found.get(name) for name in names]

    def has(self, record: object, name: str) -> bool:
        """Whether a record, whose `values` were looked at before, has a field of that name."""
        assert isinstance(record, Record)
        return name in cast("list[object]", record[0])[::2]

    def mapping(self, value: object, what: str) -> Iterator[tuple[str, object]]:
        """Yield the items of a dictionary whose keys are text, each key once."""
        seen: set[str] = set()
        for key, item in self.items(value, what):
            name = self.text(key, f"{what}: a key")
            if name in seen:
                self.fail(f"{what}: {named(name)} stands there twice")
            self.pay(_SET_PLACE)
            seen.add(name)
            yield name, item

    def items(self, value: object, what: str) -> Iterator[tuple[object, object]]:
        """Yield the items of a dictionary with keys of any kind."""
        return self._pairs(self.sequence(value, what), what)

    def sequence(self, value: object, what: str) -> list[object]:
        """Return a list, once its length has been taken off the budget."""
        if type(value) is not list:
            self.fail(f"{what}: expected a list or dictionary, found {described(value)}")
        self.spend(len(value))
        return value

    def spend(self, steps: int) -> None:
        """Take the length of a sequence off the budget."""
        self._steps -= steps
        if self._steps < 0:
            self.fail("the lists share their parts so often that they describe more than the file can hold")

    def text(self, value: object, what: str) -> str:
        """Return a string."""
        if type(value) is not str:
            self.fail(f"{what}: expected text, found {described(value)}")
        return value

    def count(self, value: object, what: str) -> int:
        """Return a number of bytes or elements."""
        if type(value) is not int or not 0 <= value < _LIMIT:
            self.fail(f"{what}: expected a count, found {described(value)}")
        return value

    def counts(self, value: object, what: str) -> tuple[int, ...]:
        """Return extents or offsets, one for each dimension."""
        if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
            self.fail(f"{what}: expected at most {MAX_DIMENSIONS} counts, found {described(value)}")
        for number in value:
            if type(number) is not int or not 0 <= number < _LIMIT:
                self.fail(f"{what}: expected counts, found {described(value)}")
        return value

    def _pairs(self, flat: list[object], what: str) -> Iterator[tuple[object, object]]:
        try:
            yield from pairs(flat)
        except ValueError as odd:
            self.fail(f"{what}: {odd}")


def columns(records: Sequence[object], kind: type[Record], names: list[str]) -> list[Sequence[object]] | None:
    """Return the fields of many records, a column for each name, without a step of Python for each record.

    Returns:
        None where a record is not as the writer's class declares it, or has other fields than the others; then
        `Fields.values` looks at each.
    """
    if not are(records, kind) or set(map(len, records)) != {1}:
        return None
    states = [record[0] for record in records]
    if not are(states, list) or len(set(map(len, states))) != 1 or len(states[0]) > 2 * len(names):
        return None
    mixed = cast("list[Sequence[object]]", [*zip(*states, strict=True)])
    keys, values = mixed[::2], mixed[1::2]
    if len(keys) != len(values) or any(key.count(name) != len(records) for key, name in zip(keys, names, strict=False)):
        return None
    missing: list[Sequence[object]] = [(None,) * len(records)] * (len(names) - len(values))
    return values + missing


def are(values: Sequence[object], kind: type[_Kind]) -> TypeGuard[Sequence[_Kind]]:
    """Whether all values are exactly of a type."""
    return set(map(type, values)) <= {kind}


def are_counts(values: Sequence[object]) -> TypeGuard[Sequence[int]]:
    """Whether all values are numbers of bytes or elements, as `Fields.count` wants them."""
    if not are(values, int):
        return False
    return min(values, default=0) >= 0 and max(values, default=0) < _LIMIT


def are_places(values: Sequence[object]) -> TypeGuard[Sequence[tuple[int, ...]]]:
    """Whether all values are extents or offsets, as `Fields.counts` wants them."""
    if not are(values, tuple) or max(map(len, values), default=0) > MAX_DIMENSIONS:
        return False
    return are_counts(list(itertools.chain.from_iterable(values)))


def named(name: str) -> str:
    """Write a name from a file so that a message stays one short line."""
    return repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}… ({len(name)} characters)"


def described(value: object) -> str:
    """Say what a value is without walking into it: its parts may be shared without end."""
    if value is None:
        return "nothing"
    if isinstance(value, Record):
        return f"a {value.kind}"
    if isinstance(value, str):
        return named(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple) and set(map(type, value[:MAX_DIMENSIONS])) <= {int, bool, float}:
        return repr(list(value[:MAX_DIMENSIONS]))
    return f"a {type(value).__name__}"
