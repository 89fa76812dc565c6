"""Which tensors are wanted, and what they are called: both must never lose or misname a weight without a word."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.catalog import Catalog, Skipped, TensorSpec
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.recipe import AUTO, Recipe, define, nesting_of, recipe_named, select

SPEC = TensorSpec("F32", (2,))
Path = tuple[str, ...]


def nested(*paths: Path, unsupported: Mapping[str, str] | None = None) -> Catalog:
    """A catalog whose writer stated the path of every tensor, as torch's planner does."""
    names = {".".join(path): path for path in paths}
    return Catalog("dcp", dict.fromkeys(names, SPEC), (), nesting=names, unsupported=unsupported or {})


def flat(*names: str, kind: str = "dcp") -> Catalog:
    """A catalog of bare names: Megatron's writer and torch's safetensors writer state no paths."""
    return Catalog(kind, dict.fromkeys(names, SPEC), ())


def cleaned(catalog: Catalog, recipe: str = "auto") -> dict[str, str]:
    """New name of every tensor by its saved name."""
    return {d.source: d.fqn for d in define(catalog, tuple(catalog.tensors), recipe_named(recipe))}


# ---- selection ------------------------------------------------------------------------------------------------------

SELECTIONS: dict[str, tuple[Catalog, set[str]]] = {
    "everything beside the model is training state": (
        nested(
            ("model", "a.w"),
            ("optimizer", "state", "a.w", "exp_avg"),
            ("lr_scheduler", "last"),
            ("dataloader", "cursor"),
            ("rng", "cuda"),
            ("scaler", "scale"),
            ("train_state", "step"),
        ),
        {"model.a.w"},
    ),
    "the same inside of an application": (
        nested(("app", "model", "a.w"), ("app", "optimizer", "state", "a.w"), ("app", "rng_state", "cpu")),
        {"app.model.a.w"},
    ),
    "state dict of a trainer, in a state dict of its own": (
        nested(("state_dict", "model", "a.w"), ("state_dict", "optimizer", "a.w")),
        {"state_dict.model.a.w"},
    ),
    "composer: state, then model, optimizers and rng": (
        nested(("state", "model", "a.w"), ("state", "optimizers", "Adam", "a.w"), ("state", "rng", "0", "cuda")),
        {"state.model.a.w"},
    ),
    "lightning: optimizers are numbered": (
        nested(("model", "a.w"), ("optimizer_0", "state", "a.w", "exp_avg")),
        {"model.a.w"},
    ),
    "a flat state dict whose names begin with model.": (
        nested(("model.a.w",), ("lm_head.weight",)),
        {"model.a.w", "lm_head.weight"},
    ),
    "torchtitan: the model is flat beside a nested optimizer": (
        nested(("tok_embeddings.weight",), ("layers.0.w",), ("optimizer", "state.layers.0.w.exp_avg"), ("rng", "x")),
        {"tok_embeddings.weight", "layers.0.w"},
    ),
    "megatron: nothing is nested": (
        flat("decoder.w", "optimizer.state.exp_avg.decoder.w", "rng_state"),
        {"decoder.w"},
    ),
    "a moving average beside the model": (nested(("model", "a.w"), ("ema", "a.w")), {"model.a.w"}),
    "several models, none of them called one": (
        nested(("generator", "a.w"), ("critic", "a.w")),
        {"generator.a.w", "critic.a.w"},
    ),
    "serialised extras of layers": (
        nested(("model", "a.w"), ("model", "a._extra_state")),
        {"model.a.w"},
    ),
    "serialised extras of layers, one for each shard": (
        flat("a.w", "a._extra_state/shard_0.0_1.1"),
        {"a.w"},
    ),
    "a flat model with layers named like states": (
        nested(("scaler.mean",), ("scheduler.w",), ("encoder.w",)),
        {"scaler.mean", "scheduler.w", "encoder.w"},
    ),
    "a nested model with layers named like states": (
        nested(("model", "scaler", "mean"), ("model", "encoder", "optimizer", "w")),
        {"model.scaler.mean", "model.encoder.optimizer.w"},
    ),
    "a folder of weights: nothing is left out": (
        flat("optimizer.w", "rng", "a._extra_state", kind="safetensors"),
        {"optimizer.w", "rng", "a._extra_state"},
    ),
    "torch's sharded safetensors: names alone tell": (
        flat("layers.0.w", "optimizer.state.layers.0.w", kind="dcp-safetensors"),
        {"layers.0.w"},
    ),
    "a tensor right under a model's key is its name": (nested(("model",), ("head",)), {"model", "head"}),
}


@pytest.mark.parametrize(("catalog", "wanted"), SELECTIONS.values(), ids=SELECTIONS)
def test_weights_are_chosen_and_everything_else_is_named_with_a_reason(catalog: Catalog, wanted: set[str]) -> None:
    selection = select(catalog)
    assert set(selection.names) == wanted
    assert {s.name for s in selection.skipped} == catalog.tensors.keys() - wanted
    assert all(s.reason for s in selection.skipped)


def test_each_kind_of_state_is_called_what_it_is() -> None:
    catalog, _ = SELECTIONS["everything beside the model is training state"]
    reasons = {s.name: s.reason for s in select(catalog).skipped}
    assert reasons == {
        "optimizer.state.a.w.exp_avg": "optimizer state",
        "lr_scheduler.last": "learning-rate scheduler state",
        "dataloader.cursor": "dataloader state",
        "rng.cuda": "random-generator state",
        "scaler.scale": "gradient scaler state",
        "train_state.step": "training progress",
    }


def test_the_order_of_the_checkpoint_is_kept_and_entries_without_tensors_come_last() -> None:
    catalog = Catalog("dcp", {"b": SPEC, "optim.b": SPEC, "a": SPEC}, (), skipped=(Skipped("step", "no tensor"),))
    selection = select(catalog)
    assert selection.names == ("b", "a")
    assert [s.name for s in selection.skipped] == ["optim.b", "step"]


def test_include_replaces_the_default_choice() -> None:
    catalog = nested(("model", "a.w"), ("model", "b.w"), ("optimizer", "a.w"))
    selection = select(catalog, include=["optimizer.*", "*.b.w"])
    assert set(selection.names) == {"optimizer.a.w", "model.b.w"}
    assert selection.skipped == (Skipped("model.a.w", "not asked for (--include)"),)


def test_exclude_takes_away_from_the_default_choice_and_from_include() -> None:
    catalog = nested(("model", "a.w"), ("model", "b.w"), ("optimizer", "a.w"))
    assert select(catalog, exclude=["*.b.w"]).names == ("model.a.w",)
    both = select(catalog, include=["*"], exclude=["model.*"])
    assert both.names == ("optimizer.a.w",)
    assert {s.reason for s in both.skipped} == {"excluded (--exclude)"}


def test_patterns_that_match_nothing_are_all_named() -> None:
    with pytest.raises(PlanError, match="patterns that match no tensor") as caught:
        select(flat("a"), include=["a", "x*"], exclude=["y*"])
    assert caught.value.problems == ("'x*'", "'y*'")


def test_patterns_tell_capitals_apart() -> None:
    with pytest.raises(PlanError, match="match no tensor"):
        select(flat("Layer.w"), include=["layer.*"])


@pytest.mark.parametrize(
    ("catalog", "message"),
    [
        (flat(), "holds no tensor"),
        (Catalog("dcp", {}, (), skipped=(Skipped("step", "no tensor"),)), "holds no tensor"),
        (nested(("optimizer", "a.w")), "all 1 are left out; --include"),
    ],
    ids=["empty", "no tensors", "optimizer only"],
)
def test_an_empty_choice_is_refused(catalog: Catalog, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        select(catalog)


def test_wanted_tensors_that_no_file_can_hold_are_refused_by_name_unless_excluded() -> None:
    catalog = nested(("a",), unsupported={"freqs": "complex128", "q": "quantised", "optimizer.z": "complex128"})
    with pytest.raises(PlanError, match="--exclude goes on without them") as caught:
        select(catalog)
    assert caught.value.problems == ("freqs: complex128", "q: quantised")
    assert select(catalog, exclude=["freqs", "q"]).names == ("a",)


def test_a_tensor_of_the_model_that_cannot_be_held_is_not_taken_for_something_beside_it() -> None:
    # no path is known of what cannot be carried: to call it `beside the model` would lose a weight without a word
    catalog = nested(("model", "a.w"), unsupported={"model.freqs": "complex128"})
    with pytest.raises(PlanError, match="cannot be carried over") as caught:
        select(catalog)
    assert caught.value.problems == ("model.freqs: complex128",)


SEGMENT = st.sampled_from(["model", "module", "optimizer", "rng", "app", "scaler", "a", "b", "_extra_state", ""])
PATHS = st.lists(st.lists(SEGMENT, min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


@given(PATHS, st.sampled_from(["dcp", "dcp-safetensors", "safetensors"]), st.booleans())
def test_a_selection_partitions_the_names(paths: list[Path], kind: str, stated: bool) -> None:
    catalog = nested(*paths)
    catalog = Catalog(kind, catalog.tensors, (), nesting=catalog.nesting if stated else {})
    try:
        selection = select(catalog)
    except PlanError:
        return
    names = [*selection.names, *(s.name for s in selection.skipped)]
    assert len(names) == len(set(names))
    assert set(names) == set(catalog.tensors)


# ---- names ----------------------------------------------------------------------------------------------------------

NAMES: dict[str, tuple[Catalog, dict[str, str]]] = {
    "outer key": (nested(("model", "model.a.w"), ("model", "lm_head.w")), {"model.model.a.w": "model.a.w"}),
    "no outer key, but a name that looks like one": (nested(("model.a.w",)), {"model.a.w": "model.a.w"}),
    "no path stated": (flat("model.a.w"), {"model.a.w": "model.a.w"}),
    "two outer keys": (nested(("app", "model", "a.w")), {"app.model.a.w": "a.w"}),
    "a model with a child called model": (
        nested(("model", "model", "a.w"), ("model", "lm_head", "w")),
        {"model.model.a.w": "model.a.w", "model.lm_head.w": "lm_head.w"},
    ),
    "wrapper in wrapper": (nested(("state_dict", "model", "a.w")), {"state_dict.model.a.w": "a.w"}),
    "keys that share nothing": (
        nested(("net", "a.w"), ("model", "b.w")),
        {"net.a.w": "a.w", "model.b.w": "b.w"},
    ),
    "key that wraps no model": (nested(("state", "a.w")), {"state.a.w": "state.a.w"}),
    "module before every name": (flat("module.a.w", "module.b"), {"module.a.w": "a.w", "module.b": "b"}),
    "module before some names": (flat("module.a.w", "b"), {"module.a.w": "a.w", "b": "b"}),
    "several wrappers, each name on its own": (
        flat(
            "module._orig_mod.model.layers.0._orig_mod.w",
            "model.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.w2",
            "decoder.embed.w",
        ),
        {
            "module._orig_mod.model.layers.0._orig_mod.w": "model.layers.0.w",
            "model.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.w2": "model.layers.0.w2",
            "decoder.embed.w": "decoder.embed.w",
        },
    ),
    "compiled parts": (flat("_orig_mod.a._orig_mod.w", "b"), {"_orig_mod.a._orig_mod.w": "a.w", "b": "b"}),
    "the last segment is the tensor's own name": (flat("a._orig_mod"), {"a._orig_mod": "a._orig_mod"}),
    "all wrappers": (
        flat("a._fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod.w"),
        {"a._fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod.w": "a.w"},
    ),
    "until nothing changes": (flat("module._orig_mod.module.x"), {"module._orig_mod.module.x": "x"}),
    "outer key, then wrappers": (nested(("model", "_orig_mod.module.x")), {"model._orig_mod.module.x": "x"}),
    "part of a segment is no segment": (flat("my_orig_mod.w"), {"my_orig_mod.w": "my_orig_mod.w"}),
    "the empty name": (flat(""), {"": ""}),
}


@pytest.mark.parametrize(("catalog", "expected"), NAMES.values(), ids=NAMES)
def test_names_lose_what_wrappers_put_there(catalog: Catalog, expected: dict[str, str]) -> None:
    assert expected.items() <= cleaned(catalog).items()


def test_a_path_that_does_not_spell_the_name_is_not_followed() -> None:
    catalog = Catalog("dcp", {"model.a": SPEC, "b": SPEC}, (), nesting={"model.a": ("model", "z"), "b": ()})
    assert [nesting_of(catalog, name) for name in ("model.a", "b", "c")] == [("model.a",), ("b",), ("c",)]
    assert cleaned(catalog) == {"model.a": "model.a", "b": "b"}


def test_a_definition_says_what_the_source_tensor_is() -> None:
    [definition] = define(nested(("model", "a.w")), ["model.a.w"], recipe_named("auto"))
    assert (definition.fqn, definition.spec, definition.source) == ("a.w", SPEC, "model.a.w")


def test_the_recipe_none_keeps_every_name() -> None:
    names = ["", "module.x", "model._orig_mod.y"]
    assert cleaned(nested(*((name,) for name in names), ("model", "z")), "none") == {
        name: name for name in [*names, "model.z"]
    }


def test_a_name_clash_names_both() -> None:
    with pytest.raises(PlanError, match="recipe 'auto' cannot be applied") as caught:
        cleaned(flat("a.w", "a._orig_mod.w", "c"))
    assert caught.value.problems == ("'a.w' and 'a._orig_mod.w' would both be called 'a.w'",)


@pytest.mark.parametrize("name", ["module.", "_orig_mod."])
def test_a_name_that_would_be_lost_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="cannot be applied") as caught:
        cleaned(flat(name))
    assert caught.value.problems == (f"{name!r} would lose its whole name",)


RULES: dict[str, tuple[str, Catalog, dict[str, str]]] = {
    "one rule": ("_orig_mod", flat("module._orig_mod.x"), {"module._orig_mod.x": "module.x"}),
    "prefix": ("strip:net", flat("net.x", "network.y"), {"net.x": "x", "network.y": "network.y"}),
    "prefix with its dot": ("strip:net.", flat("net.x"), {"net.x": "x"}),
    "longer prefix": ("strip:a.b", flat("a.b.x", "a.c"), {"a.b.x": "x", "a.c": "a.c"}),
    "prefix again and again": ("strip:a", flat("a.a.x"), {"a.a.x": "x"}),
    "prefix that is a whole name": ("strip:a", flat("a", "a.", "a.x"), {"a": "a", "a.": "a.", "a.x": "x"}),
    "rules that need each other": ("_orig_mod,module", flat("_orig_mod.module.x"), {"_orig_mod.module.x": "x"}),
    "outer keys are told by saved names, wherever the rule stands": (
        "_orig_mod,outer",
        nested(("model", "_orig_mod.x"), ("model", "y")),
        {"model._orig_mod.x": "x", "model.y": "y"},
    ),
}


@pytest.mark.parametrize(("recipe", "catalog", "expected"), RULES.values(), ids=RULES)
def test_rules_can_be_asked_for_by_name(recipe: str, catalog: Catalog, expected: dict[str, str]) -> None:
    assert cleaned(catalog, recipe) == expected


def test_rules_asked_for_by_name_that_match_nothing_are_an_error() -> None:
    with pytest.raises(PlanError, match="'strip:net,module' cannot be applied") as caught:
        cleaned(flat("a"), "strip:net,module")
    assert caught.value.problems == ("rule 'module' matches no tensor", "rule 'strip:net' matches no tensor")


@pytest.mark.parametrize("text", ["", "Auto", "auto,module", "strip:", "strip:.", "module,", "none,outer"])
def test_an_unknown_recipe_is_a_usage_error_that_lists_the_known(text: str) -> None:
    with pytest.raises(UsageError, match=r"unknown recipe .* auto, none, .* outer, module, .*strip:PREFIX"):
        recipe_named(text)


MARKS = ["model", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "a", "b", ""]
MARKED = st.lists(st.lists(st.sampled_from(MARKS), min_size=1, max_size=5).map(tuple), min_size=1, max_size=6)
RECIPES = st.sampled_from(["auto", "none", "strip:a", "module,_orig_mod", "outer,strip:module"]).map(
    lambda text: Recipe(text, recipe_named(text).rules, strict=False)
)


@given(MARKED, RECIPES)
def test_new_names_are_unique_or_an_error_and_cleaning_them_again_changes_nothing(
    paths: list[Path], recipe: Recipe
) -> None:
    catalog = nested(*paths)
    try:
        definitions = define(catalog, catalog.tensors, recipe)
    except PlanError:
        return
    names = [definition.fqn for definition in definitions]
    assert len(set(names)) == len(names) == len(catalog.tensors)
    assert [definition.source for definition in definitions] == list(catalog.tensors)
    again = define(flat(*names), names, recipe)
    assert [definition.fqn for definition in again] == names


@given(MARKED)
def test_a_new_name_has_the_segments_of_the_old_one_in_their_order(paths: list[Path]) -> None:
    catalog = nested(*paths)
    try:
        new = {d.source: d.fqn for d in define(catalog, catalog.tensors, Recipe("auto", AUTO, strict=False))}
    except PlanError:
        return
    for old, name in new.items():
        left = iter(old.split("."))
        assert all(segment in left for segment in name.split("."))
        assert name.split(".")[-1] == old.split(".")[-1]
