"""A structured recipe as plain data, the way YAML or JSON gives it, and back.

```yaml
name: mine
about: one line
sizes: {heads: num_attention_heads, head_dim: head_dim or hidden_size / num_attention_heads}
rules:
- rename: {tok_embeddings.weight: model.embed_tokens.weight}
- from: layers.{i}.attention.wq.weight
  to: model.layers.{i}.self_attn.q_proj.weight
  ops: [rope: {heads: heads, head_dim: head_dim, to: half}]
  shape: [heads * head_dim, hidden_size]
- from: layers.{i}.moe.w13                      # experts, gate and up together
  to: {gate: "model.layers.{i}.mlp.experts.{e}.gate_proj.weight", up: "model.layers.{i}.mlp.experts.{e}.up_proj.weight"}
  ops: [unbind: {dim: 0, as: e}, split: {dim: 0}]
- drop: "**.inv_freq"
- tie: {lm_head.weight: model.embed_tokens.weight}
- cast: {"**": bfloat16, "**.A_log": float32}
```

What is unknown, or of another kind than it should be, is an error that names the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hfdcp_core.dtypes import TABLE
from hfdcp_core.equations import Drop, Equation, Equations
from hfdcp_core.errors import UsageError
from hfdcp_core.name_patterns import Pattern
from hfdcp_core.operation import CASTABLE
from hfdcp_core.sizes import Expression
from hfdcp_core.structure import Option, Step, checked

_TOP = {"name", "about", "sizes", "rules"}
_KINDS = ("from", "rename", "drop", "tie", "cast")
"""One of them says what kind of rule an entry is."""
_BESIDE: Mapping[str, set[str]] = {
    "from": {"to", "ops", "shape", "optional", "alternative"},
    "rename": {"optional", "alternative"},
    "drop": {"optional", "when"},
    "tie": set(),
    "cast": set(),
}
"""What may stand beside it."""


def read_recipe(data: object, *, where: str) -> Equations:
    """Read a recipe from plain data.

    Raises:
        UsageError: It is none; the message names the rule.
    """
    top = _mapping(data, where)
    _refuse_odd(top, _TOP, where)
    rules: list[Equation] = []
    drops: list[Drop] = []
    ties: dict[str, str] = {}
    casts: dict[str, str] = {}
    for number, entry in enumerate(_list(top.get("rules", []), f"{where}: rules"), 1):
        place = f"{where}: rule {number}"
        kind, rule = _kind(entry, place)
        if kind in {"from", "rename"}:
            rules += _equations(kind, rule, place)
        elif kind == "drop":
            drops += _drops(rule, place)
        else:
            (ties if kind == "tie" else casts).update(_pairs(rule[kind], place))
    if not rules:
        raise UsageError(f"{where}: a recipe without a rule for any tensor")
    return Equations(
        name=_text(top.get("name", where), where),
        rules=tuple(rules),
        drops=tuple(drops),
        ties=ties,
        casts={pattern: _dtype(dtype, where) for pattern, dtype in casts.items()},
        sizes={
            name: _expression(size, f"{where}: size {name}")
            for name, size in _mapping(top.get("sizes", {}), where).items()
        },
        about=_text(top.get("about", ""), where),
    )


def _kind(entry: object, place: str) -> tuple[str, Mapping[str, object]]:
    rule = _mapping(entry, place)
    kinds = [kind for kind in _KINDS if kind in rule]
    if len(kinds) != 1:
        raise UsageError(f"{place}: it has one of {', '.join(_KINDS)}, not {', '.join(map(str, rule)) or 'nothing'}")
    _refuse_odd(rule, {kinds[0], *_BESIDE[kinds[0]]}, place)
    return kinds[0], rule


def _drops(rule: Mapping[str, object], place: str) -> Iterator[Drop]:
    if rule.get("when", "zero") != "zero":
        raise UsageError(f"{place}: when is `zero`, or left out, not {rule['when']!r}")
    for text in _texts(rule["drop"], place):
        yield Drop(_pattern(text, place), _flag(rule, "optional", place, otherwise=True), "when" in rule)


def _equations(kind: str, rule: Mapping[str, object], place: str) -> Iterator[Equation]:
    optional, alternative = (_flag(rule, name, place, otherwise=False) for name in ("optional", "alternative"))
    optional = optional or alternative
    if kind == "rename":
        for old, new in _pairs(rule[kind], place).items():
            yield _equation(
                place,
                {"": _pattern(old, place)},
                {"": _pattern(new, place)},
                optional=optional,
                alternative=alternative,
            )
        return
    if "to" not in rule:
        raise UsageError(f"{place}: `from` without `to`")
    steps = tuple(_step(entry, place) for entry in _list(rule.get("ops", []), f"{place}: ops"))
    shape = tuple(_expression(extent, f"{place}: shape") for extent in _list(rule.get("shape", []), f"{place}: shape"))
    sides = _side(rule["from"], place), _side(rule["to"], place)
    yield _equation(place, *sides, steps=steps, shape=shape, optional=optional, alternative=alternative)


def _equation(
    place: str,
    sources: Mapping[str, Pattern],
    targets: Mapping[str, Pattern],
    *,
    steps: tuple[Step, ...] = (),
    shape: tuple[Expression, ...] = (),
    optional: bool,
    alternative: bool,
) -> Equation:
    try:
        return Equation(sources, targets, steps, shape, optional, alternative)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _side(data: object, place: str) -> Mapping[str, Pattern]:
    """Return patterns by label: of a list, numbers are the labels."""
    if isinstance(data, str):
        return {"": _pattern(data, place)}
    if isinstance(data, list):
        return {str(number): _pattern(text, place) for number, text in enumerate(_texts(data, place))}
    return {label: _pattern(text, place) for label, text in _pairs(data, place).items()}


def _step(data: object, place: str) -> Step:
    entry = {data: {}} if isinstance(data, str) else _mapping(data, place)
    if len(entry) != 1:
        raise UsageError(f"{place}: each of `ops` is one step, not {', '.join(entry) or 'nothing'}")
    [(kind, given)] = entry.items()
    stated = dict(_mapping(given if given is not None else {}, f"{place}: {kind}"))
    on = stated.pop("only", [])
    labels = tuple(_texts(on, f"{place}: {kind}: only"))
    try:
        return checked(Step(kind, {name: _option(value, f"{place}: {kind}") for name, value in stated.items()}, labels))
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _option(value: object, place: str) -> Option:
    if isinstance(value, list):
        return tuple(_expression(item, place) for item in value)
    return _expression(value, place)


def _expression(value: object, place: str) -> Expression:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UsageError(f"{place}: {value!r} is no size: a number, a name, or a sum of them")
    return value


def _pattern(text: object, place: str) -> Pattern:
    try:
        return Pattern(_text(text, place))
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _dtype(name: str, where: str) -> str:
    for row in TABLE:
        if row.name in CASTABLE and name in {row.name, row.torch}:
            return row.name
    raise UsageError(f"{where}: cast: {name!r} is no dtype that numbers can be cast to")


def _flag(rule: Mapping[str, object], name: str, place: str, *, otherwise: bool) -> bool:
    value = rule.get(name, otherwise)
    if not isinstance(value, bool):
        raise UsageError(f"{place}: {name} is true or false, not {value!r}")
    return value


def _mapping(data: object, place: str) -> Mapping[str, object]:
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{place}: expected names and what they stand for, found {data!r}")
    return data


def _list(data: object, place: str) -> list[object]:
    if not isinstance(data, list):
        raise UsageError(f"{place}: expected a list, found {data!r}")
    return data


def _texts(data: object, place: str) -> list[str]:
    return [_text(item, place) for item in (data if isinstance(data, list) else [data])]


def _text(data: object, place: str) -> str:
    if not isinstance(data, str):
        raise UsageError(f"{place}: expected a text, found {data!r}")
    return data


def _pairs(data: object, place: str) -> dict[str, str]:
    return {key: _text(value, place) for key, value in _mapping(data, place).items()}


def _refuse_odd(data: Mapping[str, object], known: set[str], place: str) -> None:
    if odd := sorted(data.keys() - known):
        raise UsageError(f"{place}: unknown {', '.join(odd)}; known are {', '.join(sorted(known))}")


# ---- back to data ---------------------------------------------------------------------------------------------------


def write_recipe(recipe: Equations) -> dict[str, object]:
    """Return a recipe as plain data, which `read_recipe` takes."""
    rules: list[object] = [_written(rule) for rule in recipe.rules]
    rules += (_written_drop(drop) for drop in recipe.drops)
    rules += [{"tie": dict(recipe.ties)}] if recipe.ties else []
    rules += [{"cast": dict(recipe.casts)}] if recipe.casts else []
    sizes = {"sizes": dict(recipe.sizes)} if recipe.sizes else {}
    return {"name": recipe.name, "about": recipe.about, **sizes, "rules": rules}


def _written_drop(drop: Drop) -> dict[str, object]:
    when = {"when": "zero"} if drop.zero else {}
    return {"drop": drop.pattern.text, "optional": drop.optional, **when}


def _written(rule: Equation) -> dict[str, object]:
    written: dict[str, object] = {"from": _written_side(rule.sources), "to": _written_side(rule.targets)}
    if rule.steps:
        written["ops"] = [_written_step(step) for step in rule.steps]
    if rule.shape:
        written["shape"] = list(rule.shape)
    if rule.optional:
        written["optional"] = True
    if rule.alternative:
        written["alternative"] = True
    return written


def _written_side(side: Mapping[str, Pattern]) -> object:
    return side[""].text if side.keys() == {""} else {label: pattern.text for label, pattern in side.items()}


def _written_step(step: Step) -> dict[str, object]:
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in step.options.items()}
    return {step.kind: {**options, "only": list(step.on)} if step.on else options}
