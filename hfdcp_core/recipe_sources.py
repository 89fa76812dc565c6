"""Recipes by name: shipped ones, files, transformers' registry, and a user's own adapters.

| what is typed | is |
|---|---|
| ``auto``, ``none``, rules joined by commas | how names are cleaned (`hfdcp_core.recipe`) |
| ``torchtitan-llama3`` and others | a recipe in ``hfdcp_core/recipes`` |
| ``mine.yaml``, ``gs://bucket/mine.json`` | a recipe file |
| ``transformers`` | transformers' own conversion registry, reversed, for the model of the config |
| ``package.module:adapter``, ``convert.py:to_hf`` | a function of a state dict, or an object with ``to_hf``: traced |
| ``inverse:NAME`` | a structured recipe, read from right to left |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hfdcp_core.arrangement import Arrangement
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.child import ask
from hfdcp_core.equations import Compiled, Equations
from hfdcp_core.errors import PlanError, StorageNotFound, UsageError
from hfdcp_core.recipe import Recipe, recipe_named
from hfdcp_core.recipe_text import read_recipe
from hfdcp_core.store import open_store
from hfdcp_core.wire import decode_as

INVERSE = "inverse:"
"""What stands before the name of a recipe that is read from right to left."""
TRANSFORMERS = "transformers"
"""The name of transformers' own registry."""
_SHIPPED = Path(__file__).with_name("recipes")
_ENDINGS = (".yaml", ".yml", ".json")
_MOST_BYTES = 4 << 20
"""A larger file is no recipe."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Code that says what becomes of tensors: it is run once, on tensors without data."""

    name: str
    """``module:name`` or ``file.py:name``, or `TRANSFORMERS`."""


Source = Recipe | Equations | Adapter
"""What a name may stand for."""


def resolve(text: str) -> Source:
    """Return the recipe that a name stands for.

    Raises:
        UsageError: There is none, or it is not one.
    """
    if text.startswith(INVERSE):
        found = resolve(text.removeprefix(INVERSE))
        if not isinstance(found, Equations):
            raise UsageError(f"{text!r}: only a recipe of rules can be read from right to left")
        return found.inverse()
    if text.endswith(_ENDINGS):
        return _from_file(text)
    if text in shipped():
        return _parsed((_SHIPPED / f"{text}.yaml").read_text(), text)
    if text == TRANSFORMERS or (":" in text and not text.startswith("strip:") and "," not in text):
        return Adapter(text)
    try:
        return recipe_named(text)
    except UsageError as error:
        raise UsageError(
            f"{error}; or a file (.yaml), module:function, {TRANSFORMERS}, or one of {', '.join(shipped())}"
        ) from error


def shipped() -> tuple[str, ...]:
    """Return the names of the recipes that come with hfdcp."""
    return tuple(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))


def _from_file(url: str) -> Equations:
    folder, slash, path = url.rpartition("/")
    store = open_store(folder or slash or ".")
    try:
        size = store.stat(path).size
        raw = store.read(path, 0, min(size, _MOST_BYTES))
    except StorageNotFound as error:
        raise UsageError(f"there is no recipe {url}") from error
    if size > _MOST_BYTES:
        raise UsageError(f"{url}: {size} bytes are no recipe")
    try:
        return _parsed(raw.decode(), path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{url} is no text: {error}") from error


def _parsed(text: str, where: str) -> Equations:
    try:
        data = json.loads(text) if where.endswith(".json") else _read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be read: {error}") from error
    return read_recipe(data, where=where)


def _read_yaml(text: str) -> object:
    from hfdcp_core.yaml_text import read_yaml

    return read_yaml(text)


def traced(
    adapter: Adapter, tensors: Mapping[str, tuple[str, TensorSpec]], config: Mapping[str, object]
) -> tuple[Compiled, ...] | Equations:
    """Run an adapter on tensors without data, in a process of its own, and return what comes out.

    What is named may turn out to be a recipe of rules, written in Python: then it is returned.

    Args:
        adapter: The code.
        tensors: By the name that it sees: the name as saved, and what it is.
        config: The model's config, for transformers' registry.

    Raises:
        PlanError: It does what cannot be traced, or fails.
    """
    own = adapter.name != TRANSFORMERS
    if not own and not config:
        raise PlanError("the recipe transformers needs the model's config: name it (--config or --base)")
    request = {
        "adapter": adapter.name if own else "",
        "config": config,
        "tensors": [[name, saved, spec.dtype, list(spec.shape)] for name, (saved, spec) in tensors.items()],
    }
    answer = ask("hfdcp_core.tracing", request, what=f"the adapter {adapter.name}" if own else "transformers' registry")
    if "recipe" in answer:
        return replace(read_recipe(answer["recipe"], where=adapter.name), inverted=answer["inverted"])
    made = tuple(
        Compiled(name, decode_as(Arrangement, target["arrangement"]), target["dtype"], adapter.name)
        for name, target in answer["targets"].items()
    )
    PlanError.raise_for(f"the recipe {adapter.name} leaves something out without a word", unused(made, tensors))
    return made


def expected(config: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that a model's files have, as transformers writes them.

    Raises:
        PlanError: transformers does not know the model.
    """
    request = {"expected": True, "config": config, "adapter": "", "tensors": []}
    answer = ask("hfdcp_core.tracing", request, what="what the model's files hold")
    return {name: tuple(shape) for name, shape in answer["expected"].items()}


def unused(made: tuple[Compiled, ...], tensors: Mapping[str, tuple[str, TensorSpec]]) -> list[str]:
    """Say what of the sources is in no target, and what is in two.

    Args:
        made: The targets.
        tensors: The sources, as an adapter sees them.
    """
    taken: dict[str, int] = {}
    for target in made:
        for patch in target.arrangement.patches:
            taken[patch.source] = taken.get(patch.source, 0) + patch.box.volume
    problems = []
    for name, (saved, spec) in tensors.items():
        whole, found = _volume(spec), taken.get(saved, 0)
        if found < whole:
            what = "it is in nothing that comes out" if not found else f"only {found} of its {whole} elements come out"
            problems.append(f"{name}: {what}; --exclude {saved!r} leaves it out knowingly")
        elif found > whole:
            problems.append(
                f"{name}: its elements come out more than once; tied tensors are left out instead (--exclude)"
            )
    return problems


def _volume(spec: TensorSpec) -> int:
    count = 1
    for extent in spec.shape:
        count *= extent
    return count
