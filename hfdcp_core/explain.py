"""Where a tensor of the output comes from: sources, steps, operations, and the bytes that are read for it."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hfdcp_core.box import Box
from hfdcp_core.errors import UsageError
from hfdcp_core.operation import Operation
from hfdcp_core.plan import Copy, FilePlan, Plan
from hfdcp_core.recipe import Definition

SHOWN = 20
"""How many reads of one tensor are shown."""


@dataclass(frozen=True, slots=True)
class TakenFrom:
    """A box of a tensor, and what of which span fills it."""

    box: str
    """The elements that are filled, in the shape that copies count in."""
    shard: str
    """The shard that they are taken from, and its span."""
    first: int
    """The first element of the shard that is taken."""
    strides: tuple[int, ...]
    """Elements of the shard from one index to the next."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one tensor of the output."""

    fqn: str
    """Its name."""
    kind: str
    """Its dtype and shape."""
    path: str
    """The file that it lies in, or the first of them."""
    span: tuple[int, int]
    """Its bytes in that file."""
    rule: str
    """The rule of the recipe that makes it; empty where names are only cleaned."""
    sources: tuple[str, ...]
    """The tensors of the source that it is made of, as saved."""
    operation: str
    """What is done to its numbers; empty where they stay."""
    fine: tuple[int, ...]
    """The shape in which boxes are counted: dimensions are cut where rows change places."""
    reads: tuple[TakenFrom, ...]
    """What fills it, in order; at most `SHOWN`."""
    count: int
    """How many reads there are in all."""
    nbytes: int
    """Bytes of all spans that are read from, each once."""


def explain(plan: Plan, definitions: tuple[Definition, ...], fqn: str) -> Explanation:
    """Say where a tensor of the output comes from.

    Raises:
        UsageError: There is no such tensor; those that may be meant are named.
    """
    by_name = {definition.fqn: definition for definition in definitions}
    if fqn not in by_name:
        holding = [name for name in by_name if fqn in name][:5]
        near = holding or difflib.get_close_matches(fqn, by_name, 5)
        raise UsageError(f"{fqn}: no such tensor comes out{', but there are' if near else ''}", near)
    definition = by_name[fqn]
    file, number = next((file, n) for file in plan.files for n, (name, _) in enumerate(file.tensors) if name == fqn)
    copies = list(_copies(file, number))
    taken = [_taken(file, copy) for copy in itertools.islice(copies, SHOWN)]
    spans = {file.shards[copy.read.shard].span for copy in copies}
    return Explanation(
        fqn=fqn,
        kind=str(definition.spec),
        path=file.path,
        span=_span(file, number),
        rule=definition.rule,
        sources=tuple(dict.fromkeys(file.shards[copy.read.shard].fqn for copy in copies)),
        operation=_words(definition.operation),
        fine=file.tensors[number][1].shape,
        reads=tuple(taken),
        count=len(copies),
        nbytes=sum(span.length for span in spans),
    )


def _copies(file: FilePlan, number: int) -> Iterator[Copy]:
    """Yield what fills a tensor, or the operands that it is made from."""
    numbers = {number}
    for making in file.makings:
        if making.tensor == number:
            numbers |= {*making.operands}
    return (copy for copy in file.copies if copy.tensor in numbers)


def _taken(file: FilePlan, copy: Copy) -> TakenFrom:
    shard = file.shards[copy.read.shard]
    box = Box(copy.box.offset, copy.box.shape)
    return TakenFrom(str(box), str(shard), copy.read.offset, copy.read.strides)


def _span(file: FilePlan, number: int) -> tuple[int, int]:
    start = len(file.header) + sum(spec.nbytes for _, spec in file.tensors[:number])
    return start, start + file.tensors[number][1].nbytes


def _words(operation: Operation | None) -> str:
    if operation is None:
        return ""
    given = ", ".join(f"{operand.fqn} {operand.spec}" for operand in operation.operands)
    return f"{operation.kind} of {given} to {operation.target}"
