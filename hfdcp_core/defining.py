"""To define is to say, for one checkpoint, what each target tensor is called and what it is made of.

Here a recipe meets the tensors that are there, and the model's config: names are cleaned, rules compiled or an adapter
traced. What was decided is kept as plain data, so that the same tensors can be defined again at any later day, without
the file, the config or the code that they came from.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hfdcp_core.catalog import Catalog, TensorSpec
from hfdcp_core.consolidate import Nowhere, consolidate
from hfdcp_core.equations import Compiled, Equations, compile_rules, plain_source
from hfdcp_core.errors import PlanError, ValidationError
from hfdcp_core.infer import Proposal, propose
from hfdcp_core.job import Job
from hfdcp_core.layout import lay_out
from hfdcp_core.plan import reshard
from hfdcp_core.recipe import Definition, Recipe, define, recipe_named
from hfdcp_core.recipe_sources import Adapter, expected, resolve, traced
from hfdcp_core.recipe_text import read_recipe, write_recipe
from hfdcp_core.sizes import Sizes
from hfdcp_core.store import Source
from hfdcp_core.tying import WINDOW_BYTES, config_at_hand
from hfdcp_core.wire import decode_as, encode

CLEAN = "auto"
"""How names are cleaned before rules see them."""


@dataclass(frozen=True, slots=True)
class Defined:
    """What is wanted, by a recipe."""

    definitions: tuple[Definition, ...]
    """The target tensors."""
    recipe: str
    """What the recipe is called; never a path."""
    rules: str = ""
    """The recipe as plain data, where its name alone does not say it."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Targets that a recipe says may stand for another one: name to leave out, and name to keep."""
    dropped: tuple[str, ...] = ()
    """Tensors, as saved, that the recipe leaves out."""


def defined(catalog: Catalog, names: Iterable[str], source: Source, job: Job) -> Defined:
    """Define the targets that a job asks for.

    Args:
        catalog: What is there.
        names: The wanted tensors, as saved.
        source: The store that the checkpoint lies in; a config may lie there too.
        job: What is asked.

    Raises:
        UsageError: There is no such recipe.
        PlanError: It does not fit the checkpoint.
    """
    recipe = resolve(job.recipe)
    if isinstance(recipe, Recipe):
        return Defined(define(catalog, names, recipe), job.recipe)
    tensors = _cleaned(catalog, names)
    config = config_at_hand(job, source)
    found: Mapping[str, object] = json.loads(config.text) if config else {}
    if isinstance(recipe, Adapter):
        traced_as = traced(recipe, tensors, found)
        if not isinstance(traced_as, Equations):
            return Defined(_definitions(traced_as, catalog), _public(recipe.name), _packed(traced_as))
        recipe = traced_as
    sizes = Sizes(found, recipe.sizes, dict(job.sizes))
    made = compile_rules(recipe, tensors, sizes)
    kept = {
        "recipe": write_recipe(recipe),
        "inverted": recipe.inverted,
        "config": _numbers(found),
        "given": dict(job.sizes),
    }
    taken = {name for target in made for name in target.arrangement.sources}
    dropped = tuple(saved for saved, _ in tensors.values() if saved not in taken)
    _refuse_not_zero(catalog, source, recipe, tensors)
    return Defined(_definitions(made, catalog), recipe.name, json.dumps(kept), recipe.ties, dropped)


def _refuse_not_zero(
    catalog: Catalog, source: Source, recipe: Equations, tensors: Mapping[str, tuple[str, TensorSpec]]
) -> None:
    """Refuse to drop what may be dropped only where it is zero, and is not."""
    patterns = [drop.pattern for drop in recipe.drops if drop.zero]
    found = [saved for name, (saved, _) in tensors.items() if any(p.match(name) is not None for p in patterns)]
    definitions = [Definition(name, catalog.tensors[name], name) for name in found]
    target = lay_out(definitions, max_file_size=sum(d.spec.nbytes for d in definitions) or 1)
    plan = reshard(catalog, target, window_bytes=WINDOW_BYTES)
    zero = {name for file in plan.files for name in consolidate(file, source, Nowhere()).statistics.zero}
    problems = [f"{name} is not zero; --exclude {name!r} leaves it out knowingly" for name in found if name not in zero]
    PlanError.raise_for(f"the recipe {recipe.name!r} has no place for what changes the model", problems)


def proposed(catalog: Catalog, names: Iterable[str], source: Source, job: Job) -> tuple[Proposal, ...]:
    """Propose which tensors of a checkpoint are which of the model that the config names.

    Raises:
        PlanError: There is no config, or transformers does not know the model.
    """
    config = config_at_hand(job, source)
    if config is None:
        raise PlanError("--infer-recipe needs the model's config: name it (--config or --base)")
    shapes = {name: spec.shape for name, (_, spec) in _cleaned(catalog, names).items()}
    return propose(shapes, expected(json.loads(config.text)))


def defined_again(catalog: Catalog, names: Iterable[str], *, recipe: str, rules: str) -> tuple[Definition, ...]:
    """Define the targets once more from what a manifest keeps.

    Raises:
        PlanError: The recipe does not fit what the checkpoint holds today.
        ValidationError: What is kept is no recipe.
    """
    if not rules:
        return define(catalog, names, recipe_named(recipe))
    tensors = _cleaned(catalog, names)
    try:
        if not rules.startswith("{"):
            return _definitions(_unpacked(rules), catalog)
        kept = json.loads(rules)
        equations = read_recipe(kept["recipe"], where=recipe)
        sizes = Sizes(kept["config"], equations.sizes, kept["given"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValidationError(f"the recipe that the manifest keeps cannot be read: {error}") from error
    whole = replace(equations, inverted=kept["inverted"])
    return _definitions(compile_rules(whole, tensors, sizes), catalog)


def _cleaned(catalog: Catalog, names: Iterable[str]) -> dict[str, tuple[str, TensorSpec]]:
    clean = define(catalog, names, recipe_named(CLEAN))
    return {definition.fqn: (definition.source, definition.spec) for definition in clean}


def _definitions(made: Iterable[Compiled], catalog: Catalog) -> tuple[Definition, ...]:
    return tuple(_definition(target, catalog) for target in made)


def _definition(target: Compiled, catalog: Catalog) -> Definition:
    """Return a plain definition where a target is a source tensor as it is: no map of it is needed then."""
    sources = target.arrangement.sources
    plain = plain_source(target, catalog.tensors) if sources else None
    arrangements = () if plain else (target.arrangement,)
    spec = TensorSpec(target.dtype, target.arrangement.shape)
    return Definition(target.fqn, spec, plain or next(iter(sources), ""), target.operation, arrangements, target.rule)


def _public(name: str) -> str:
    """Return the name of an adapter without the folder that its file lies in.

    >>> _public("/home/me/convert.py:to_hf"), _public("pkg.convert:to_hf")
    ('convert.py:to_hf', 'pkg.convert:to_hf')
    """
    return name.rpartition("/")[2]


def _numbers(config: Mapping[str, object]) -> dict[str, object]:
    """Return what of a config recipes ask for: its whole numbers and flags."""
    return {
        key: _numbers(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if isinstance(value, bool | int | dict)
    }


def _packed(made: Iterable[Compiled]) -> str:
    raw = json.dumps([encode(target) for target in made], separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode()


def _unpacked(text: str) -> tuple[Compiled, ...]:
    return decode_as(tuple[Compiled, ...], json.loads(gzip.decompress(base64.b64decode(text, validate=True))))
