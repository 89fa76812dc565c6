"""A recipe says each target tensor in terms of source tensors; here: which are wanted, and under what name.

Two decisions, both made from names alone and both said aloud:

1. **Selection.** A training state holds more than weights. By default the optimizer, schedulers, loaders and what lies
   beside the model are left out, each with its reason; ``include``/``exclude`` patterns choose otherwise.
2. **Names.** Wrappers leave marks in names: outer keys of the saved dict, ``module.``, ``_orig_mod.`` and their kin.
   The recipe ``auto`` removes them until nothing changes; ``none`` keeps every name as saved.

Whether ``model.`` in front of a name is an outer key or the name's own beginning is told by the path tuples that the
writer left (`Catalog.nesting`), never guessed from the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hfdcp_core.arrangement import Arrangement
from hfdcp_core.catalog import Catalog, Skipped, TensorSpec
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.operation import Operand, Operation

MODEL_KEYS = frozenset({"model", "module", "state_dict", "model_state_dict", "model_state", "net", "network"})
"""Outer keys under which training code saves a model's state dict."""
WRAPPER_KEYS = MODEL_KEYS | {"app", "app_state", "state", "checkpoint", "train"}
"""Outer keys that may stand before one of them."""
NON_WEIGHTS: Mapping[str, str] = {
    **dict.fromkeys(("optimizer", "optimizers", "optim", "optimizer_state", "optimizer_states"), "optimizer state"),
    **dict.fromkeys(("optimizer_state_dict", "optim_state_dict", "optim_state"), "optimizer state"),
    **dict.fromkeys(("lr_scheduler", "lr_schedulers", "scheduler", "schedulers"), "learning-rate scheduler state"),
    **dict.fromkeys(("dataloader", "dataloaders", "data_loader", "train_dataloader"), "dataloader state"),
    **dict.fromkeys(("rng", "rng_state", "rng_states", "random_state", "random_states"), "random-generator state"),
    **dict.fromkeys(("scaler", "grad_scaler", "loss_scaler"), "gradient scaler state"),
    **dict.fromkeys(("train_state", "trainer", "trainer_state", "loops", "callbacks"), "training progress"),
}
"""Keys that mark what is not a weight, and what to call it."""
MAYBE_LAYERS = frozenset({"scaler", "scheduler", "schedulers", "trainer", "loops", "callbacks"})
"""Those that a model may call a layer of its own, so that inside a model, or in a flat name, they mark nothing."""
EXTRA_STATE = "_extra_state"
"""Segment of the serialised extras that some layers (Transformer Engine) keep beside their weights."""
WRAPPER_SEGMENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Segments that torch.compile, FSDP and activation checkpointing put into names, anywhere in them."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One target tensor: what it is called, what it is, and which source tensor it is made of."""

    fqn: str
    """Its name in the output."""
    spec: TensorSpec
    """Its dtype and shape."""
    source: str
    """Name of the source tensor whose elements it has, or the first of those that it is made from."""
    operation: Operation | None = None
    """How it is made, where its numbers are not those of its source."""
    arrangements: tuple[Arrangement | None, ...] = ()
    """How its elements, or those of each operand, are put together; None, or nothing at all, for a source as it is."""
    rule: str = ""
    """The rule of a recipe that it comes from; empty where names are only cleaned."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What it is made from: tensors of the source, or arrangements of them."""
        return self.operation.operands if self.operation else (Operand(self.source, self.spec),)

    @property
    def parts(self) -> tuple[tuple[Operand, Arrangement | None], ...]:
        """What it is made from, and how each is put together."""
        operands = self.operands
        return tuple(zip(operands, self.arrangements or (None,) * len(operands), strict=True))

    @property
    def arrangement(self) -> Arrangement | None:
        """How its elements, or the numbers that it is made from, are put together."""
        return self.arrangements[0] if self.arrangements else None


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors of a checkpoint are wanted, and what is left out and why."""

    names: tuple[str, ...]
    """Wanted tensors, as saved, in the checkpoint's order."""
    skipped: tuple[Skipped, ...]
    """Everything else."""


Names = Mapping[str, str]
"""From the name as saved to the name so far."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to clean names: all names go in, the changed ones come out."""

    name: str
    """How it is asked for."""
    apply: Callable[[Names, Catalog], Names]
    """Maps every name as saved to its next form."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A list of rules for names, applied in turn until nothing changes."""

    name: str
    """How it was asked for; the manifest keeps it."""
    rules: tuple[Rule, ...]
    """The rules, in order."""
    strict: bool
    """Whether a rule that matches nothing is an error: it is when rules were asked for by name."""


def nesting_of(catalog: Catalog, fqn: str) -> tuple[str, ...]:
    """Return the outer keys that lead to a tensor and its own name, or just its name where nothing fits it."""
    path = catalog.nesting.get(fqn, ())
    return path if ".".join(path) == fqn and path else (fqn,)


def select(catalog: Catalog, *, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> Selection:
    """Choose the tensors that are wanted.

    Args:
        catalog: What is there.
        include: Shell patterns over names as saved; where given they replace the default choice.
        exclude: Shell patterns that are left out of whatever was chosen.

    Raises:
        PlanError: A pattern matches nothing, nothing is left, or a wanted tensor cannot be carried.
    """
    include, exclude = tuple(include), tuple(exclude)
    names = (*catalog.tensors, *catalog.unsupported)
    if not names:
        raise PlanError(
            "the checkpoint holds no tensor", [f"{entry.name}: {entry.reason}" for entry in catalog.skipped]
        )
    _refuse_idle_patterns(names, (*include, *exclude))
    reasons = {} if include else _reasons_to_skip(names, catalog)
    for name in names:
        if include and not any(fnmatchcase(name, pattern) for pattern in include):
            reasons[name] = "not asked for (--include)"
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            reasons[name] = "excluded (--exclude)"
    wanted = tuple(name for name in names if name not in reasons)
    PlanError.raise_for(
        "tensors that cannot be carried over (--exclude goes on without them)",
        [f"{name}: {catalog.unsupported[name]}" for name in wanted if name in catalog.unsupported],
    )
    skipped = (*(Skipped(name, reasons[name]) for name in names if name in reasons), *catalog.skipped)
    if not wanted:
        raise PlanError(f"no tensor is wanted: all {len(skipped)} are left out; --include '*' takes every tensor")
    return Selection(wanted, skipped)


def _refuse_idle_patterns(names: tuple[str, ...], patterns: tuple[str, ...]) -> None:
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    PlanError.raise_for("patterns that match no tensor", [repr(pattern) for pattern in idle])


def _reasons_to_skip(names: tuple[str, ...], catalog: Catalog) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if catalog.format == "safetensors":
        return reasons  # a folder of weight files: a model may have a child called `scheduler`
    for name in names:
        if reason := why_no_weight(nesting_of(catalog, name)):
            reasons[name] = reason
    roots = {name: _root(nesting_of(catalog, name)) for name in names if name not in reasons}
    if any(MODEL_KEYS.intersection(root) for root in roots.values()):
        for name, root in roots.items():
            beside = root or name in catalog.tensors or name in catalog.nesting  # else its place is unknown
            if beside and not MODEL_KEYS.intersection(root):
                reasons[name] = "beside the model, not in it"
    return reasons


def why_no_weight(path: tuple[str, ...]) -> str | None:
    """Say why a path is no weight: by its outer keys, or, where the writer stated none, by its first segment."""
    outer = path[:-1] or path[0].split(".")[:1]
    in_model = len(path) == 1
    for key in outer:
        if key in NON_WEIGHTS and not (in_model and key in MAYBE_LAYERS):
            return NON_WEIGHTS[key]
        if key not in WRAPPER_KEYS:
            break  # deeper keys belong to a model's own tree
        in_model = in_model or key in MODEL_KEYS
    extra = EXTRA_STATE in path[-1] and any(part.startswith(EXTRA_STATE) for part in path[-1].split("."))
    return "extra state of a layer, not a weight" if extra else None


def _root(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the leading outer keys that only wrap a state dict."""
    length = 0
    while length < len(path) - 1 and path[length] in WRAPPER_KEYS:
        length += 1
    return path[:length]


def _common(roots: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    first, *rest = sorted(set(roots))
    last = rest[-1] if rest else first
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def _strip_outer(names: Names, catalog: Catalog) -> Names:
    """Remove the outer keys that wrap the model; where two wrappers share no key, each loses its own."""
    roots = {saved: _root(nesting_of(catalog, saved)) for saved, name in names.items() if saved == name}
    models = {saved: root for saved, root in roots.items() if MODEL_KEYS.intersection(root)}
    shared = _common(models.values()) if models else ()
    cut = {saved: len(shared) or len(root) for saved, root in models.items()}
    return {s: ".".join(nesting_of(catalog, s)[cut[s] :]) if s in cut else name for s, name in names.items()}


def _strip_module(names: Names, _catalog: Catalog) -> Names:
    """Remove ``module.`` from the names that begin with it, and leave the others as they are."""
    return {saved: name.removeprefix("module.") for saved, name in names.items()}


def _strip_segment(segment: str) -> Rule:
    def apply(names: Names, _catalog: Catalog) -> Names:
        return {saved: _without(name, segment) for saved, name in names.items()}

    return Rule(segment, apply)


def _without(name: str, segment: str) -> str:
    """Remove a segment anywhere but at the end, where it would be the name of the tensor itself."""
    if segment not in name:
        return name
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part != segment), last])


def _strip_prefix(prefix: str) -> Rule:
    head = prefix.rstrip(".") + "."

    def apply(names: Names, _catalog: Catalog) -> Names:
        return {s: n[len(head) :] if n.startswith(head) and n != head else n for s, n in names.items()}

    return Rule(f"strip:{prefix}", apply)


AUTO = (Rule("outer", _strip_outer), Rule("module", _strip_module), *map(_strip_segment, WRAPPER_SEGMENTS))
"""The rules of the recipe ``auto``."""


def recipe_named(text: str) -> Recipe:
    """Return a recipe by name: ``auto``, ``none``, or rules joined by commas.

    Rules are ``outer`` (applied first wherever it stands), ``module``, ``_orig_mod``, ``_fsdp_wrapped_module``,
    ``_checkpoint_wrapped_module`` and ``strip:PREFIX``.

    Raises:
        UsageError: There is no such recipe or rule.

    >>> [rule.name for rule in recipe_named("module,strip:net").rules]
    ['module', 'strip:net']
    """
    if text == "none":
        return Recipe(text, (), strict=False)
    if text == "auto":
        return Recipe(text, AUTO, strict=False)
    known = {rule.name: rule for rule in AUTO}
    rules = []
    for name in text.split(","):
        if name.startswith("strip:") and name.strip(".") != "strip:":
            rules.append(_strip_prefix(name.removeprefix("strip:")))
        elif name in known:
            rules.append(known[name])
        else:
            known_rules = f"{', '.join(known)}, strip:PREFIX"
            raise UsageError(f"unknown recipe {name!r}: it is auto, none, or rules joined by commas: {known_rules}")
    rules.sort(key=lambda rule: rule.name != "outer")  # outer keys are told by names as saved
    return Recipe(text, tuple(rules), strict=True)


def define(catalog: Catalog, names: Iterable[str], recipe: Recipe) -> tuple[Definition, ...]:
    """Say what each wanted tensor is called in the output and what it is made of.

    Args:
        catalog: What is there.
        names: Wanted tensors, as saved.
        recipe: The rules for names.

    Raises:
        PlanError: Two tensors would get one name, a name would be empty or unwritable, or a rule that was asked for
            by name changes nothing.
    """
    renamed, idle = _until_stable({name: name for name in names}, catalog, recipe)
    problems = [f"rule {rule!r} matches no tensor" for rule in idle if recipe.strict]
    problems += _clashes(renamed)
    problems += [f"{saved!r} would lose its whole name" for saved, new in renamed.items() if saved and not new]
    PlanError.raise_for(f"the recipe {recipe.name!r} cannot be applied", problems)
    return tuple(Definition(new, catalog.tensors[saved], saved) for saved, new in renamed.items())


def _until_stable(names: Names, catalog: Catalog, recipe: Recipe) -> tuple[Names, list[str]]:
    idle = {rule.name for rule in recipe.rules}
    before: Names | None = None
    while names != before:
        before = names
        for rule in recipe.rules:
            after = rule.apply(names, catalog)
            if after != names:
                idle.discard(rule.name)
            names = after
    return names, sorted(idle)


def _clashes(renamed: Names) -> list[str]:
    if len(set(renamed.values())) == len(renamed):
        return []
    sources: dict[str, list[str]] = {}
    for saved, new in renamed.items():
        sources.setdefault(new, []).append(saved)
    return [
        f"{' and '.join(map(repr, olds))} would both be called {new!r}"
        for new, olds in sources.items()
        if len(olds) > 1
    ]
