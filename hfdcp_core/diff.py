"""Two checkpoints or repositories, tensor by tensor: names, shapes, dtypes, bytes, and how far numbers lie apart.

Both sides are gathered as for any run and named by the same recipe, so that a distributed checkpoint can be held
against what was published of it. What has one name and shape on both sides is read, a window at a time from each, so
that memory does not depend on the size of a tensor:

- where dtype and bytes are the same, so are the tensors, whatever the bytes mean;
- where they are not, numbers are compared: the largest difference, and the largest one relative to the larger of the
  two numbers. NaN against NaN in the same place is no difference; NaN against a number is an infinite one.

Damage in a source is an error here as everywhere, and no difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hfdcp_core import recipe
from hfdcp_core.catalog import Catalog, TensorSpec
from hfdcp_core.consolidate import check_stamps
from hfdcp_core.defining import defined
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.job import Job
from hfdcp_core.locate import locate
from hfdcp_core.numeric import decode
from hfdcp_core.operation import DECODABLE
from hfdcp_core.ops import EMPTY_DIGEST, digest_text, extend_digest
from hfdcp_core.plan import stamps_digest
from hfdcp_core.recipe import Definition
from hfdcp_core.single import Stream, Tensors
from hfdcp_core.state import SILENT, Cancellation, Progress
from hfdcp_core.store import Source

WINDOW_BYTES = 4 << 20
"""How much of a tensor is held of each side."""
COMPARED = 1 << 18
"""Numbers that are compared at a time."""
ONLY_A, ONLY_B, SHAPE, DTYPE, VALUES, EQUAL = "only in A", "only in B", "shape", "dtype", "values", "equal"
Numbers = npt.NDArray[np.float64]
_INTEGERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """What is known of one name on both sides."""

    fqn: str
    """The name, as the recipe has it."""
    what: str
    """`EQUAL`, or the first of these in which they differ: `ONLY_A`, `ONLY_B`, `SHAPE`, `DTYPE`, `VALUES`."""
    a: str = ""
    """Dtype and shape in A."""
    b: str = ""
    """Dtype and shape in B."""
    differing: int = 0
    """How many elements are not the same: in their bits where dtypes agree, else in their number."""
    first: tuple[int, ...] | None = None
    """Index of the first of them."""
    error_max: float | None = None
    """The largest difference of two numbers; infinite where one of them is NaN. None where nobody can tell."""
    relative_max: float | None = None
    """The largest difference relative to the larger of the two numbers."""
    digests: tuple[str, ...] = ()
    """CRC-64 of the bytes in A and in B, where they were read."""


@dataclass(frozen=True, slots=True)
class Diff:
    """All tensors of two sides."""

    tensors: tuple[TensorDiff, ...]
    """One for each name, in A's order, then what only B has."""
    nbytes: int
    """Bytes that were read of both sides together."""
    source_digests: tuple[str, str]
    """What stands for the files of each side."""

    def different(self, tolerance: float = 0.0) -> tuple[TensorDiff, ...]:
        """Return the tensors that differ by more than a relative error."""
        return tuple(one for one in self.tensors if one.what != EQUAL and not _within(one, tolerance))


def _within(one: TensorDiff, tolerance: float) -> bool:
    return one.what in {DTYPE, VALUES} and one.relative_max is not None and one.relative_max <= tolerance > 0


@dataclass(frozen=True, slots=True)
class _Side:
    """One checkpoint, ready to be read."""

    catalog: Catalog
    source: Source
    definitions: Mapping[str, Definition]
    tensors: Tensors

    @classmethod
    def of(cls, job: Job) -> _Side:
        found = locate(job)
        names = recipe.select(found.catalog, include=job.include, exclude=job.exclude).names
        definitions = defined(found.catalog, names, found.source, job).definitions
        return cls(found.catalog, found.source, {d.fqn: d for d in definitions}, Tensors(found.catalog))

    def stream(self, fqn: str, stop: Cancellation) -> Stream:
        plan = self.tensors.plan(self.definitions[fqn], window_bytes=WINDOW_BYTES)
        return Stream(plan, self.source, stop)


def diff(a: Job, b: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None) -> Diff:
    """Compare two checkpoints.

    Args:
        a: The first one: its source and how it is named.
        b: The second one.
        progress: Hears of every window.
        cancellation: Heeded between windows.

    Raises:
        SourceError: One of them is no checkpoint, or is damaged.
        PlanError: A tensor is not there as a whole.
    """
    progress.begin("gather", 0)
    one, other = _Side.of(a), _Side.of(b)
    both = [name for name in one.definitions if name in other.definitions]
    alike = [name for name in both if one.definitions[name].spec.shape == other.definitions[name].spec.shape]
    sizes = {name: one.definitions[name].spec.nbytes + other.definitions[name].spec.nbytes for name in alike}
    progress.begin("diff", sum(sizes.values()))
    stop = cancellation or Cancellation()
    found = [_compared(name, one, other, progress, stop) for name in one.definitions]
    found += [
        TensorDiff(name, ONLY_B, b=str(made.spec))
        for name, made in other.definitions.items()
        if name not in one.definitions
    ]
    for side in (one, other):
        check_stamps(side.catalog.files, side.source)
    digests = stamps_digest(one.catalog.files), stamps_digest(other.catalog.files)
    return Diff(tuple(found), sum(sizes.values()), digests)


def _compared(name: str, one: _Side, other: _Side, progress: Progress, stop: Cancellation) -> TensorDiff:
    spec = one.definitions[name].spec
    if name not in other.definitions:
        return TensorDiff(name, ONLY_A, a=str(spec))
    there = other.definitions[name].spec
    if spec.shape != there.shape:
        return TensorDiff(name, SHAPE, str(spec), str(there))
    meter = _Meter(spec.dtype, there.dtype)
    sides = one.stream(name, stop), other.stream(name, stop)
    for mine, theirs in _in_step(*(side.pieces() for side in sides), units=(_unit(spec), _unit(there))):
        meter.add(mine, theirs)
        progress.advance(len(mine) + len(theirs))
    for side in sides:
        side.check()
    return meter.result(name, spec, there)


def _unit(spec: TensorSpec) -> int:
    """Return the bytes of an element, or one where several share a byte."""
    return max(1, dtype_named(spec.dtype).bits // 8)


def _in_step(
    a: Iterator[memoryview], b: Iterator[memoryview], *, units: tuple[int, int]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield the same elements of both sides, whose windows may end in different places."""
    mine = theirs = memoryview(b"")
    while True:
        mine = mine or next(a, memoryview(b""))
        theirs = theirs or next(b, memoryview(b""))
        count = min(len(mine) // units[0], len(theirs) // units[1])
        if not count:
            return
        yield mine[: count * units[0]], theirs[: count * units[1]]
        mine, theirs = mine[count * units[0] :], theirs[count * units[1] :]


@dataclass(slots=True)
class _Meter:
    """Measures how far two runs of elements lie apart."""

    dtype: str
    other: str
    done: int = 0
    differing: int = 0
    first: int | None = None
    error_max: float = 0.0
    relative_max: float = 0.0
    digests: list[int] = field(default_factory=lambda: [EMPTY_DIGEST, EMPTY_DIGEST])

    @property
    def _measurable(self) -> bool:
        return all(
            dtype in DECODABLE or dtype in _INTEGERS or dtype == "C64" for dtype in (self.dtype, self.other)
        ) and ((self.dtype == "C64") == (self.other == "C64"))

    def add(self, mine: memoryview, theirs: memoryview) -> None:
        """Take the next elements of both sides."""
        self.digests = [extend_digest(digest, part) for digest, part in zip(self.digests, (mine, theirs), strict=True)]
        units = _unit(TensorSpec(self.dtype, ())), _unit(TensorSpec(self.other, ()))
        count = len(mine) // units[0]
        if self.dtype == self.other and mine == theirs:
            self.done += count
            return
        for start in range(0, count, COMPARED):
            stop = min(count, start + COMPARED)
            self._compare(mine[start * units[0] : stop * units[0]], theirs[start * units[1] : stop * units[1]])

    def _compare(self, mine: memoryview, theirs: memoryview) -> None:
        unit = _unit(TensorSpec(self.dtype, ()))
        if not self._measurable:
            apart = np.any(_bytes(mine, unit) != _bytes(theirs, unit), axis=1)
        else:
            a, b = _numbers(self.dtype, mine), _numbers(self.other, theirs)
            same_bits = self.dtype == self.other
            odd = _bytes(mine, unit) != _bytes(theirs, unit) if same_bits else ~_same(a, b)
            apart = np.any(odd, axis=1)
            self._measure(a[apart], b[apart])
        places = np.flatnonzero(apart)
        if len(places) and self.first is None:
            self.first = self.done + int(places[0])
        self.differing += len(places)
        self.done += len(apart)

    def _measure(self, a: Numbers, b: Numbers) -> None:
        if not len(a):
            return
        with np.errstate(all="ignore"):
            error = np.where(_same(a, b), 0.0, np.abs(a - b))
            larger = np.maximum(np.abs(a), np.abs(b))
            relative = np.where(error == 0, 0.0, error / larger)
        self.error_max = max(self.error_max, _largest(error))
        self.relative_max = max(self.relative_max, _largest(relative))

    def result(self, name: str, spec: TensorSpec, there: TensorSpec) -> TensorDiff:
        """Say what was measured."""
        what = DTYPE if spec.dtype != there.dtype else VALUES if self.differing else EQUAL
        known = self._measurable or not self.differing
        return TensorDiff(
            name,
            what,
            str(spec),
            str(there),
            self.differing,
            None if self.first is None else tuple(map(int, np.unravel_index(self.first, spec.shape))),
            self.error_max if known else None,
            self.relative_max if known else None,
            tuple(map(digest_text, self.digests)),
        )


def _same(a: Numbers, b: Numbers) -> npt.NDArray[np.bool_]:
    """Whether numbers are the same, NaN counted as one."""
    same: npt.NDArray[np.bool_] = (a == b) | (np.isnan(a) & np.isnan(b))
    return same


def _largest(values: npt.NDArray[np.float64]) -> float:
    """Return the largest of some differences; one that is no number is without end."""
    largest = float(np.max(values))
    return math.inf if math.isnan(largest) else largest


def _bytes(raw: memoryview, unit: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(raw, np.uint8).reshape(-1, unit)


def _numbers(dtype: str, raw: memoryview) -> Numbers:
    """Return a row for each element: its number in double precision, or both of a complex one.

    Whole numbers beyond 2**53 lose their last digits.
    """
    if dtype == "C64":
        return np.frombuffer(raw, np.float32).astype(np.float64).reshape(-1, 2)
    if dtype in _INTEGERS:
        kind = "u1" if dtype == "BOOL" else f"{dtype[0].lower()}{int(dtype[1:]) // 8}"
        return np.frombuffer(raw, kind).astype(np.float64).reshape(-1, 1)
    if dtype == "F64":
        return np.frombuffer(raw, np.float64).reshape(-1, 1)
    bits = np.frombuffer(raw, f"u{dtype_named(dtype).bits // 8}")
    numbers = np.empty(len(bits), np.float32)
    decode(dtype, np.ascontiguousarray(bits), numbers)
    return numbers.astype(np.float64).reshape(-1, 1)
