"""What a rule of a recipe does to tensors, step by step, and how each step is taken back.

The tensors of one rule are a *flow*: each has a label (which of the rule's patterns it belongs to) and, where a rule
takes a stack apart or builds one, a number for each variable that counts. A step acts on every tensor of the flow (or
on those labels that it names), makes one of several, or several of one.

| step | does | taken back by |
|---|---|---|
| ``transpose`` | swap two dimensions | itself |
| ``permute`` | put dimensions into another order | the inverse order |
| ``unflatten`` | one dimension becomes several | ``flatten`` |
| ``flatten`` | several become one | ``unflatten`` |
| ``reshape`` | another shape of the same elements; ``from`` states the old one | the same, swapped |
| ``rope`` | rows of each head: ``pairs`` (as Meta rotates) to ``half`` (as Hugging Face), or back | the other way |
| ``trim`` | keep the first ``size`` indices; ``from`` states how many there were | ``pad`` |
| ``pad`` | zeros up to ``size``; ``from`` states how many there were | ``trim`` |
| ``split`` | one tensor becomes one for each label of ``to`` | ``cat`` |
| ``cat`` | all labels become one tensor | ``split`` |
| ``deinterleave`` | as ``split``, but labels take turns | ``interleave`` |
| ``interleave`` | as ``cat``, but labels take turns | ``deinterleave`` |
| ``unbind`` | each index of a dimension becomes a tensor, numbered by a variable | ``stack`` |
| ``stack`` | the tensors that a variable counts become one | ``unbind`` |

All of them move elements and change none, so what comes out is an `hfdcp_core.arrangement.Arrangement`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hfdcp_core import rearrange as arranging
from hfdcp_core.arrangement import Arrangement
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.sizes import Expression, Sizes

Option = Expression | tuple[Expression, ...]
"""A number, a name or expression of one, or several."""
Counts = tuple[tuple[str, int], ...]
"""Variables and their numbers, sorted by name."""
Key = tuple[str, Counts]
"""Label of a tensor, and what counts it."""
Flow = Mapping[Key, Arrangement]
"""The tensors of a rule."""
HALF, PAIRS = "half", "pairs"
"""How the rows of a head that are rotated together lie: half a head apart, or one beside the other."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a rule."""

    kind: str
    """Its name in the table above."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """What it needs to know."""
    on: tuple[str, ...] = ()
    """The labels that it acts on; all where none is named."""

    def __str__(self) -> str:
        """Write it as a recipe has it."""
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()}
        shown = ", ".join(
            f"{name}: {value}" for name, value in ({**options, "only": list(self.on)} if self.on else options).items()
        )
        return f"{self.kind}({shown})"


@dataclass(frozen=True, slots=True)
class _Frame:
    """What steps of one rule may need."""

    sizes: Sizes
    labels: tuple[str, ...]

    def number(self, step: Step, name: str) -> int:
        stated = step.options[name]
        if isinstance(stated, tuple):
            raise UsageError(f"{step}: {name} is one number")
        return self.sizes.number(stated)

    def numbers(self, step: Step, name: str) -> tuple[int, ...]:
        stated = step.options[name]
        return tuple(map(self.sizes.number, stated if isinstance(stated, tuple) else (stated,)))

    def dim(self, step: Step) -> int:
        return self.number(step, "dim") if "dim" in step.options else 0


# ---- steps on one tensor --------------------------------------------------------------------------------------------


def _transpose(given: Arrangement, step: Step, frame: _Frame) -> Arrangement:
    a, b = frame.numbers(step, "dims") if "dims" in step.options else (-2, -1)
    axes = len(given.shape)
    if not (-axes <= a < axes and -axes <= b < axes):
        raise PlanError(f"{given.spec} has no dimensions {a} and {b} to transpose")
    order = list(range(axes))
    order[a], order[b] = order[b], order[a]
    return arranging.permuted(given, order)


def _permute(given: Arrangement, step: Step, frame: _Frame) -> Arrangement:
    return arranging.permuted(given, frame.numbers(step, "order"))


def _unflatten(given: Arrangement, step: Step, frame: _Frame) -> Arrangement:
    axis, sizes = _axis(given, frame.dim(step)), frame.numbers(step, "sizes")
    known = math.prod(size for size in sizes if size != -1)
    extent = given.shape[axis]
    full = tuple(extent // known if size == -1 and known else size for size in sizes)
    if math.prod(full) != extent:
        raise PlanError(f"dimension {axis} of {given.spec} is not {' x '.join(map(str, sizes))}")
    return arranging.regrouped(given, (*given.shape[:axis], *full, *given.shape[axis + 1 :]))


def _flatten(given: Arrangement, step: Step, frame: _Frame) -> Arrangement:
    axis = _axis(given, frame.dim(step))
    sizes = frame.numbers(step, "sizes") if "sizes" in step.options else ()
    count = len(sizes) or frame.number(step, "count")
    there = given.shape[axis : axis + count]
    if len(there) < count or any(size not in {-1, extent} for size, extent in zip(sizes, there, strict=False)):
        raise PlanError(
            f"dimensions {axis} to {axis + count - 1} of {given.spec} are not {' x '.join(map(str, sizes or there))}"
        )
    return arranging.regrouped(given, (*given.shape[:axis], math.prod(there), *given.shape[axis + count :]))


def _reshape(given: Arrangement, step: Step, frame: _Frame) -> Arrangement:
    if "from" in step.options and frame.numbers(step, "from") != given.shape:
        raise PlanError(f"{given.spec} is not of the shape {list(frame.numbers(step, 'from'))}")
    return arranging.regrouped(given, frame.numbers(step, "sizes"))


def _rope(given: Arrangement, step: Step, frame: _Frame) -> Arrangement:
    axis, heads = _axis(given, frame.dim(step)), frame.number(step, "heads")
    extent = given.shape[axis]
    of_head = frame.number(step, "head_dim") if "head_dim" in step.options else extent // max(1, heads)
    if heads < 1 or of_head % 2 or heads * of_head != extent:
        raise PlanError(f"dimension {axis} of {given.spec} is not {heads} heads of {of_head} rows, an even number")
    inner = (of_head // 2, 2) if step.options["to"] == HALF else (2, of_head // 2)
    apart = arranging.regrouped(given, (*given.shape[:axis], heads, *inner, *given.shape[axis + 1 :]))
    order = list(range(len(apart.shape)))
    order[axis + 1 : axis + 3] = [axis + 2, axis + 1]
    return arranging.regrouped(arranging.permuted(apart, order), given.shape)


def _trim(given: Arrangement, step: Step, frame: _Frame) -> Arrangement:
    axis, size = _axis(given, frame.dim(step)), frame.number(step, "size")
    if size > given.shape[axis]:
        raise PlanError(f"dimension {axis} of {given.spec} has fewer than {size} indices: nothing to trim")
    return arranging.sliced(given, axis, 0, size)


def _pad(given: Arrangement, step: Step, frame: _Frame) -> Arrangement:
    axis = _axis(given, frame.dim(step))
    if "from" in step.options and given.shape[axis] != frame.number(step, "from"):
        raise PlanError(f"dimension {axis} of {given.spec} has not {frame.number(step, 'from')} indices")
    return arranging.padded(given, axis, frame.number(step, "size"))


def _axis(given: Arrangement, dim: int) -> int:
    axes = len(given.shape)
    if not -axes <= dim < axes:
        raise PlanError(f"{given.spec} has no dimension {dim}")
    return dim % axes


# ---- one of several, several of one ---------------------------------------------------------------------------------


def _by_counts(flow: Flow) -> dict[Counts, dict[str, Arrangement]]:
    found: dict[Counts, dict[str, Arrangement]] = {}
    for (label, counts), given in flow.items():
        found.setdefault(counts, {})[label] = given
    return found


def _split(flow: Flow, step: Step, frame: _Frame) -> Flow:
    result: dict[Key, Arrangement] = {}
    for counts, labelled in _by_counts(flow).items():
        [given] = _only(labelled, step)
        axis, many = _axis(given, frame.dim(step)), len(frame.labels)
        equal, rest = divmod(given.shape[axis], many)
        sizes = frame.numbers(step, "sizes") if "sizes" in step.options else (equal,) * many
        if len(sizes) != many or sum(sizes) != given.shape[axis]:
            wanted = (
                " + ".join(map(str, sizes)) if "sizes" in step.options else f"{many} equal parts (a rest of {rest})"
            )
            raise PlanError(f"dimension {axis} of {given.spec} is not {wanted}")
        start = 0
        for label, size in zip(frame.labels, sizes, strict=True):
            result[label, counts] = arranging.sliced(given, axis, start, start + size)
            start += size
    return result


def _only(labelled: Mapping[str, Arrangement], step: Step) -> Sequence[Arrangement]:
    if len(labelled) != 1:
        raise PlanError(f"{step} takes one tensor, and there are {len(labelled)}: {', '.join(labelled)}")
    return list(labelled.values())


def _cat(flow: Flow, step: Step, frame: _Frame) -> Flow:
    result: dict[Key, Arrangement] = {}
    for counts, labelled in _by_counts(flow).items():
        parts = list(labelled.values())
        axis = _axis(parts[0], frame.dim(step))
        extents = tuple(part.shape[axis] if axis < len(part.shape) else 0 for part in parts)
        if "sizes" not in step.options and len(set(extents)) > 1:
            raise PlanError(f"{step}: parts of {list(extents)} indices are not equal: state their sizes")
        if "sizes" in step.options and frame.numbers(step, "sizes") != extents:
            raise PlanError(f"{step}: parts have {list(extents)} indices, not {list(frame.numbers(step, 'sizes'))}")
        result["", counts] = arranging.joined(parts, axis)
    return result


def _deinterleave(flow: Flow, step: Step, frame: _Frame) -> Flow:
    result: dict[Key, Arrangement] = {}
    for counts, labelled in _by_counts(flow).items():
        [given] = _only(labelled, step)
        axis, many = _axis(given, frame.dim(step)), len(frame.labels)
        if given.shape[axis] % many:
            raise PlanError(f"dimension {axis} of {given.spec} cannot be taken in turns by {many}")
        apart = arranging.regrouped(given, (*given.shape[:axis], -1, many, *given.shape[axis + 1 :]))
        for number, label in enumerate(frame.labels):
            result[label, counts] = arranging.selected(apart, axis + 1, number)
    return result


def _interleave(flow: Flow, step: Step, frame: _Frame) -> Flow:
    result: dict[Key, Arrangement] = {}
    for counts, labelled in _by_counts(flow).items():
        parts = list(labelled.values())
        axis = _axis(parts[0], frame.dim(step))
        stack = arranging.stacked(parts, axis + 1)
        result["", counts] = arranging.regrouped(stack, (*stack.shape[:axis], -1, *stack.shape[axis + 2 :]))
    return result


def _unbind(flow: Flow, step: Step, frame: _Frame) -> Flow:
    variable, result = str(step.options["as"]), dict[Key, Arrangement]()
    for (label, counts), given in flow.items():
        axis = _axis(given, frame.dim(step))
        if "size" in step.options and given.shape[axis] != frame.number(step, "size"):
            raise PlanError(f"dimension {axis} of {given.spec} has not {frame.number(step, 'size')} indices")
        for index in range(given.shape[axis]):
            result[label, tuple(sorted((*counts, (variable, index))))] = arranging.selected(given, axis, index)
    return result


def _stack(flow: Flow, step: Step, frame: _Frame) -> Flow:
    variable = str(step.options["over"])
    groups: dict[Key, dict[int, Arrangement]] = {}
    for (label, counts), given in flow.items():
        number = dict(counts)[variable]
        rest = tuple(row for row in counts if row[0] != variable)
        groups.setdefault((label, rest), {})[number] = given
    result: dict[Key, Arrangement] = {}
    for key, numbered in groups.items():
        count = frame.number(step, "size") if "size" in step.options else max(numbered) + 1
        lacking = sorted(set(range(count)) ^ set(numbered))
        if lacking:
            raise PlanError(
                f"{{{variable}}} should count 0 to {count - 1}: {', '.join(map(str, lacking[:5]))} lacking or beyond"
            )
        parts = [numbered[number] for number in range(count)]
        result[key] = arranging.stacked(parts, frame.dim(step))
    return result


# ---- the table ------------------------------------------------------------------------------------------------------

_EACH: Mapping[str, Callable[[Arrangement, Step, _Frame], Arrangement]] = {
    "transpose": _transpose,
    "permute": _permute,
    "unflatten": _unflatten,
    "flatten": _flatten,
    "reshape": _reshape,
    "rope": _rope,
    "trim": _trim,
    "pad": _pad,
}
_TOGETHER: Mapping[str, Callable[[Flow, Step, _Frame], Flow]] = {
    "split": _split,
    "cat": _cat,
    "deinterleave": _deinterleave,
    "interleave": _interleave,
    "unbind": _unbind,
    "stack": _stack,
}
OPTIONS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "transpose": (frozenset(), frozenset({"dims"})),
    "permute": (frozenset({"order"}), frozenset()),
    "unflatten": (frozenset({"sizes"}), frozenset({"dim"})),
    "flatten": (frozenset(), frozenset({"dim", "sizes", "count"})),
    "reshape": (frozenset({"sizes"}), frozenset({"from"})),
    "rope": (frozenset({"heads", "to"}), frozenset({"dim", "head_dim"})),
    "trim": (frozenset({"size"}), frozenset({"dim", "from"})),
    "pad": (frozenset({"size"}), frozenset({"dim", "from"})),
    "split": (frozenset(), frozenset({"dim", "sizes"})),
    "cat": (frozenset(), frozenset({"dim", "sizes"})),
    "deinterleave": (frozenset(), frozenset({"dim"})),
    "interleave": (frozenset(), frozenset({"dim"})),
    "unbind": (frozenset({"as"}), frozenset({"dim", "size"})),
    "stack": (frozenset({"over"}), frozenset({"dim", "size"})),
}
"""What each step must be told, and what it may be told."""


def checked(step: Step) -> Step:
    """Return a step, if it is one.

    Raises:
        UsageError: There is no such step, or it lacks something or is told too much.
    """
    if step.kind not in OPTIONS:
        raise UsageError(f"there is no step {step.kind!r}: there are {', '.join(OPTIONS)}")
    must, may = OPTIONS[step.kind]
    given = set(step.options)
    if odd := sorted((must - given) | (given - must - may)):
        raise UsageError(f"{step}: {', '.join(odd)}; it needs {sorted(must) or 'nothing'} and takes {sorted(may)}")
    if step.kind == "rope" and step.options["to"] not in {HALF, PAIRS}:
        raise UsageError(f"{step}: to is {HALF} or {PAIRS}")
    if step.kind == "flatten" and len({"sizes", "count"} & given) != 1:
        raise UsageError(f"{step}: it needs sizes or count")
    if step.on and step.kind not in _EACH:
        raise UsageError(f"{step}: it acts on all labels together")
    return step


def applied(step: Step, flow: Flow, sizes: Sizes, labels: tuple[str, ...]) -> Flow:
    """Do a step.

    Args:
        step: What is done.
        flow: The tensors of one rule.
        sizes: What names of sizes stand for.
        labels: What the rule calls the tensors that come out.

    Raises:
        PlanError: The tensors are not such that it can be done.
    """
    frame = _Frame(sizes, labels)
    if step.kind in _TOGETHER:
        return _TOGETHER[step.kind](flow, step, frame)
    act = _EACH[step.kind]
    return {key: act(given, step, frame) if not step.on or key[0] in step.on else given for key, given in flow.items()}


# ---- back -----------------------------------------------------------------------------------------------------------

_BACK: Mapping[str, str] = {
    "unflatten": "flatten",
    "flatten": "unflatten",
    "trim": "pad",
    "pad": "trim",
    "split": "cat",
    "cat": "split",
    "deinterleave": "interleave",
    "interleave": "deinterleave",
    "unbind": "stack",
    "stack": "unbind",
}


def inverted(step: Step) -> Step:
    """Return the step that takes a step back.

    Raises:
        UsageError: It does not state what that would need.

    >>> str(inverted(Step("unbind", {"dim": 0, "as": "e"})))
    'stack(dim: 0, over: e)'
    """
    options = dict(step.options)
    if step.kind == "permute":
        order = options["order"]
        assert isinstance(order, tuple)
        if not all(isinstance(axis, int) and axis >= 0 for axis in order):
            raise UsageError(f"{step} cannot be taken back: its order is not of plain numbers")
        return replace(step, options={"order": tuple(order.index(axis) for axis in range(len(order)))})
    if step.kind == "rope":
        return replace(step, options={**options, "to": PAIRS if options["to"] == HALF else HALF})
    if step.kind in {"reshape", "trim", "pad"}:
        if "from" not in options:
            raise UsageError(f"{step} cannot be taken back: it does not state `from`, what was there before")
        options = {**options, "sizes" if step.kind == "reshape" else "size": options["from"]}
        options["from"] = step.options["sizes" if step.kind == "reshape" else "size"]
    if step.kind in {"flatten", "unflatten"}:
        options["dim"] = _dim_of_the_other(step)
    if step.kind in {"unbind", "stack"}:
        old, new = ("as", "over") if step.kind == "unbind" else ("over", "as")
        options[new] = options.pop(old)
    return Step(_BACK.get(step.kind, step.kind), options, step.on)


def _dim_of_the_other(step: Step) -> Option:
    """Return where dimensions that are made one begin, or where the one is: counted from the last, that differs."""
    dim, sizes = step.options.get("dim", 0), step.options.get("sizes")
    if not isinstance(sizes, tuple):
        raise UsageError(f"{step} cannot be taken back: it does not state the sizes")
    if not isinstance(dim, int) or dim >= 0:
        return dim
    return dim + (len(sizes) - 1) * (1 if step.kind == "flatten" else -1)
