"""A structured recipe: rules that say target tensors in terms of source tensors, compiled before a byte is read.

A rule is an equation between patterns of names, with the steps that lead from one side to the other
(`hfdcp_core.structure`). Compiling holds the rules against the tensors that are there:

- every source tensor is taken by exactly one rule, or dropped by name;
- every rule takes something, unless it is optional, and has all the tensors that it needs;
- no two tensors come out under one name, and each has the shape that its rule states.

Whatever is wrong is reported at once, with the nearest names. `Equations.inverse` turns a recipe around: the same
equations, read from right to left.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hfdcp_core.arrangement import Arrangement, arranged, is_plain, merged
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.name_patterns import Bindings, Pattern, collapsed, skeleton
from hfdcp_core.operation import CAST, Operand, Operation
from hfdcp_core.sizes import Expression, Sizes
from hfdcp_core.structure import Counts, Flow, Key, Step, applied, inverted

NEAREST = 3
"""How many candidates are named for a name that fits nothing."""
_LIKENESS = 0.6
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_ANY = "_"
"""An extent that a rule leaves open."""


@dataclass(frozen=True, slots=True)
class Equation:
    """A rule: the tensors of some names become tensors of other names."""

    sources: Mapping[str, Pattern]
    """Patterns of source names, by label; the label of a single one is empty."""
    targets: Mapping[str, Pattern]
    """Patterns of target names, by label."""
    steps: tuple[Step, ...] = ()
    """What leads from one to the other, in order."""
    shape: tuple[Expression, ...] = ()
    """The shape of each target, where it is stated; ``_`` leaves an extent open."""
    optional: bool = False
    """Whether it may take nothing."""
    alternative: bool = False
    """Whether it is another way in which the same tensors may have been saved: taken, but never made by an inverse."""

    def __post_init__(self) -> None:
        """Refuse variables that come from nowhere, and targets that no name can be made of."""
        for pattern in self.targets.values():
            if not pattern.is_name:
                raise UsageError(f"{self}: {pattern.text!r} is a pattern, not a name that can be made")
        made = {str(step.options["as"]) for step in self.steps if step.kind == "unbind"}
        known = {name for pattern in self.sources.values() for name in pattern.variables} | made
        for pattern in self.targets.values():
            if lost := [name for name in pattern.variables if name not in known]:
                raise UsageError(f"{self}: nothing says what {{{lost[0]}}} in {pattern.text!r} is")
        gone = known - {name for pattern in self.targets.values() for name in pattern.variables} - self.stacked
        if gone:
            raise UsageError(f"{self}: {{{min(gone)}}} is in no name that comes out, and nothing is stacked over it")

    @property
    def stacked(self) -> frozenset[str]:
        """The variables that tensors are stacked over."""
        return frozenset(str(step.options["over"]) for step in self.steps if step.kind == "stack")

    @property
    def told(self) -> str:
        """The rule with its steps, for a person."""
        return f"{self}: {', '.join(map(str, self.steps))}" if self.steps else str(self)

    def __str__(self) -> str:
        """Write which names become which."""
        sides = (", ".join(pattern.text for pattern in side.values()) for side in (self.sources, self.targets))
        return " -> ".join(sides)


@dataclass(frozen=True, slots=True)
class Drop:
    """A rule: tensors of some names are left out."""

    pattern: Pattern
    """Which ones."""
    optional: bool = True
    """Whether there may be none."""
    zero: bool = False
    """Whether that is right only where all their elements are zero."""


@dataclass(frozen=True, slots=True)
class Equations:
    """A structured recipe."""

    name: str
    """How it is called."""
    rules: tuple[Equation, ...]
    """What becomes of tensors."""
    drops: tuple[Drop, ...] = ()
    """What is left out."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Targets that may stand for another one of the same bytes: name to leave out, and name to keep."""
    casts: Mapping[str, str] = field(default_factory=dict)
    """Safetensors dtypes by pattern of target names; the first that fits counts."""
    sizes: Mapping[str, Expression] = field(default_factory=dict)
    """What sizes are called."""
    about: str = ""
    """What it is for, in a line."""
    inverted: bool = False
    """Whether it is read from right to left: then what is tied is made again where it lacks."""

    def inverse(self) -> Equations:
        """Return the recipe that leads back: from the names and shapes of the targets to those of the sources.

        Raises:
            UsageError: A rule does not say what that would need.
        """
        rules = tuple(
            Equation(
                rule.targets,
                rule.sources,
                tuple(inverted(step) for step in reversed(rule.steps)),
                optional=rule.optional,
            )
            for rule in self.rules
            if not rule.alternative
        )
        ties = dict(_tied_sources(self))
        return Equations(f"inverse:{self.name}", rules, (), ties, {}, self.sizes, self.about, not self.inverted)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One target tensor of a compiled recipe."""

    fqn: str
    """Its name."""
    arrangement: Arrangement
    """What it is made of."""
    dtype: str
    """What it is cast to; its own dtype where it is not."""
    rule: str
    """The rule that it comes from."""

    @property
    def operation(self) -> Operation | None:
        """How it is cast, if it is."""
        if self.dtype == self.arrangement.dtype:
            return None
        operand = Operand(self.arrangement.sources[0], self.arrangement.spec)
        return Operation(CAST, (operand,), TensorSpec(self.dtype, self.arrangement.shape))


def _tied_sources(given: Equations) -> Iterator[tuple[str, str]]:
    """Yield, for targets that may be tied, what they are called at the source."""
    plain = {
        target.text: rule.sources[""].text
        for rule in given.rules
        for target in rule.targets.values()
        if "" in rule.sources and not rule.alternative
    }
    yield from ((plain[left], plain[kept]) for left, kept in given.ties.items() if left in plain and kept in plain)


# ---- compiling ------------------------------------------------------------------------------------------------------


def compile_rules(
    recipe: Equations, tensors: Mapping[str, tuple[str, TensorSpec]], sizes: Sizes
) -> tuple[Compiled, ...]:
    """Hold a recipe against the tensors that are there.

    Args:
        recipe: The rules.
        tensors: By the name that rules see: the name as saved, and what it is.
        sizes: What names of sizes stand for.

    Returns:
        The targets, in the order of the first tensor that each is made of.

    Raises:
        PlanError: ``problems`` has everything that does not fit.
    """
    matched = _Matched.of(recipe, tensors)
    problems = [*matched.problems()]
    order = {name: number for number, name in enumerate(tensors)}
    made: list[tuple[int, Compiled]] = []
    for rule, groups in matched.groups.items():
        for group in groups.values():
            try:
                targets = list(_targets(recipe.rules[rule], group, tensors, sizes))
            except PlanError as error:
                problems.append(f"{_example(group)}: {error} (rule {recipe.rules[rule]})")
                continue
            first = min(order[name] for name in group.values())
            made += ((first, replace(target, dtype=_dtype_of(recipe, target))) for target in targets)
    made.sort(key=lambda row: row[0])
    compiled = [target for _, target in made]
    if recipe.inverted and sizes.holds("tie_word_embeddings"):
        compiled += _untied(recipe, compiled)
    problems += _clashes(compiled)
    PlanError.raise_for(f"the recipe {recipe.name!r} does not fit the checkpoint", _in_short(problems))
    return tuple(compiled)


def _dtype_of(recipe: Equations, target: Compiled) -> str:
    fitting = (dtype for pattern, dtype in recipe.casts.items() if Pattern(pattern).match(target.fqn) is not None)
    dtype = next(fitting, "") or target.dtype
    if dtype == target.dtype or not dtype_named(target.dtype).floating:
        return target.dtype
    if target.dtype not in _PLAIN:
        raise PlanError(f"{target.fqn}: {target.dtype} numbers may have scales, and cannot be cast by a rule")
    return dtype


def _untied(recipe: Equations, compiled: Iterable[Compiled]) -> list[Compiled]:
    """Return what lacks because it was tied, made of what it is tied to."""
    by_name = {target.fqn: target for target in compiled}
    return [
        replace(by_name[kept], fqn=left)
        for left, kept in recipe.ties.items()
        if left not in by_name and kept in by_name
    ]


_Group = Mapping[Key, str]
"""Names of the tensors that one application of a rule takes, by label and counts."""


@dataclass(slots=True)
class _Matched:
    """Which tensors the rules take."""

    recipe: Equations
    groups: dict[int, dict[tuple[tuple[str, int | str], ...], dict[Key, str]]] = field(default_factory=dict)
    dropped: dict[int, list[str]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, recipe: Equations, tensors: Iterable[str]) -> _Matched:
        matched = cls(recipe)
        for name in tensors:
            matched._take(name)
        return matched

    def _take(self, name: str) -> None:
        fits = list(self._fits(name))
        drops = [number for number, drop in enumerate(self.recipe.drops) if drop.pattern.match(name) is not None]
        if len(fits) + len(drops) > 1:
            rules = [str(self.recipe.rules[rule]) for rule, _, _ in fits]
            rules += [f"drop {self.recipe.drops[number].pattern.text}" for number in drops]
            self.twice.append(f"{name}: two rules take it: {'; '.join(rules)}")
        for number in drops:
            self.dropped.setdefault(number, []).append(name)
        for rule, label, bindings in fits:
            self._put(name, rule, label, bindings)
        if not fits and not drops:
            self.unmatched.append(name)

    def _fits(self, name: str) -> Iterator[tuple[int, str, Bindings]]:
        for number, rule in enumerate(self.recipe.rules):
            for label, pattern in rule.sources.items():
                if (bindings := pattern.match(name)) is not None:
                    yield number, label, bindings

    def _put(self, name: str, rule: int, label: str, bindings: Bindings) -> None:
        stacked = self.recipe.rules[rule].stacked
        key = tuple(sorted((k, v) for k, v in bindings.items() if k not in stacked))
        counts: Counts = tuple(sorted((k, int(v)) for k, v in bindings.items() if k in stacked))
        self.groups.setdefault(rule, {}).setdefault(key, {})[label, counts] = name

    def problems(self) -> Iterator[str]:
        """Yield what is taken by no rule, or two, and which rules take nothing."""
        yield from self.twice
        idle = [
            rule for number, rule in enumerate(self.recipe.rules) if number not in self.groups and not rule.optional
        ]
        patterns = [pattern.text for rule in self.recipe.rules for pattern in rule.sources.values()]
        for name in _one_of_each(self.unmatched):
            near = nearest(name, [_filled(pattern, name) for pattern in patterns])
            [line] = collapsed(other for other in self.unmatched if skeleton(other) == skeleton(name))
            near_rules = _perhaps(near, "rules are for")
            yield f"{line}: no rule says what becomes of it{near_rules}; a rule `drop` leaves it out"
        for rule in idle:
            for pattern in rule.sources.values():
                near = nearest(_VARIABLE.sub("0", pattern.text), self.unmatched)
                yield f"no tensor is called {pattern.text} (rule {rule}){_perhaps(near, 'there is')}"
        for number, drop in enumerate(self.recipe.drops):
            if number not in self.dropped and not drop.optional:
                yield f"no tensor is called {drop.pattern.text}, which would be dropped"
        yield from self._incomplete()

    def _incomplete(self) -> Iterator[str]:
        for number, groups in self.groups.items():
            rule = self.recipe.rules[number]
            for key, group in groups.items():
                lacking = rule.sources.keys() - {label for label, _ in group}
                names = [_rendered(rule.sources[label], dict(key)) for label in rule.sources if label in lacking]
                if lacking:
                    yield f"{_example(group)} is there, and {', '.join(names)} is not (rule {rule})"


_VARIABLE = re.compile(r"\{\w+\}")


def _rendered(pattern: Pattern, bindings: Bindings) -> str:
    return _VARIABLE.sub(lambda found: str(bindings.get(found[0][1:-1], found[0])), pattern.text)


def _filled(pattern: str, name: str) -> str:
    """Return a pattern with the numbers of a name for its variables, so that both can be compared."""
    numbers = iter(re.findall(r"(?<![^.])\d+(?![^.])", name))
    return _VARIABLE.sub(lambda _: next(numbers, "0"), pattern)


def _one_of_each(names: Iterable[str]) -> list[str]:
    return list({skeleton(name): name for name in reversed(list(names))}.values())[::-1]


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidates that are most like a name, the best first.

    >>> nearest("layers.0.attn.wq", ["layers.0.attention.wq", "norm", "layers.0.attention.wk"])
    ['layers.0.attention.wq', 'layers.0.attention.wk']
    """
    return difflib.get_close_matches(name, dict.fromkeys(candidates), NEAREST, _LIKENESS)


def _perhaps(near: list[str], words: str) -> str:
    return f"; {words} {', '.join(near)}" if near else ""


def _example(group: _Group) -> str:
    first, *rest = group.values()
    return first + (f" and {len(rest)} more" if rest else "")


def _targets(
    rule: Equation, group: _Group, tensors: Mapping[str, tuple[str, TensorSpec]], sizes: Sizes
) -> Iterator[Compiled]:
    """Apply a rule to the tensors of one group."""
    labels = tuple(rule.sources)
    ordered = sorted(group.items(), key=lambda row: (labels.index(row[0][0]), row[0][1]))
    flow: Flow = {key: arranged(*tensors[name]) for key, name in ordered}
    bindings: dict[str, int | str] = {}
    for (label, _), name in ordered:
        bindings |= rule.sources[label].match(name) or {}
    for step in rule.steps:
        flow = applied(step, flow, sizes, tuple(rule.targets))
    for (label, counts), given in flow.items():
        if label not in rule.targets:
            raise PlanError(
                f"{len(flow)} tensors come out, for the names {', '.join(p.text for p in rule.targets.values())}"
            )
        _refuse_shape(rule, given, sizes)
        name = rule.targets[label].render(bindings | dict(counts))
        yield Compiled(name, merged(given), given.dtype, rule.told)


def _refuse_shape(rule: Equation, given: Arrangement, sizes: Sizes) -> None:
    if not rule.shape:
        return
    wanted = [None if extent == _ANY else sizes.number(extent) for extent in rule.shape]
    if len(wanted) != len(given.shape) or any(
        w not in {None, there} for w, there in zip(wanted, given.shape, strict=True)
    ):
        stated = ", ".join(
            f"{extent}" if w is None or str(extent) == str(w) else f"{extent} = {w}"
            for extent, w in zip(rule.shape, wanted, strict=True)
        )
        raise PlanError(f"comes out as {list(given.shape)}, and [{stated}] is expected")


def _clashes(compiled: Iterable[Compiled]) -> Iterator[str]:
    seen: dict[str, Compiled] = {}
    for target in compiled:
        if target.fqn in seen:
            rules = dict.fromkeys((seen[target.fqn].rule, target.rule))
            yield f"{target.fqn}: comes out twice (rule {' and '.join(rules)})"
        seen[target.fqn] = target


def _in_short(problems: Iterable[str]) -> list[str]:
    """Say once what is wrong in every layer."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"\d+", "#", problem), []).append(problem)
    return [alike[0] + (f" [and {len(alike) - 1} more like this]" if alike[1:] else "") for alike in kinds.values()]


def plain_source(target: Compiled, tensors: Mapping[str, TensorSpec]) -> str | None:
    """Return the source tensor that a target is as it is, or None where it is arranged.

    Args:
        target: A target.
        tensors: The source tensors, by name as saved.
    """
    sources = target.arrangement.sources
    if len(sources) == 1 and is_plain(target.arrangement, tensors[sources[0]]):
        return sources[0]
    return None
