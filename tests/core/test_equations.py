"""Recipes of rules, held against the tensors that are there: what comes out, and everything that is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.equations import Compiled, Equations, compile_rules, nearest, plain_source
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.recipe_text import read_recipe, write_recipe
from hfdcp_core.sizes import Sizes

SIZES = Sizes({"heads": 2, "experts": 2, "hidden": 4, "tie_word_embeddings": True})


def recipe(*rules: Mapping[str, Any], **top: Any) -> Equations:
    return read_recipe({"name": "r", "rules": list(rules), **top}, where="r")


def specs(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name.replace("__", "."): TensorSpec("F32", shape) for name, shape in shapes.items()}


def compiled(made: Equations, tensors: Mapping[str, TensorSpec], sizes: Sizes = SIZES) -> dict[str, Compiled]:
    seen = {name: (f"saved.{name}", spec) for name, spec in tensors.items()}
    return {target.fqn: target for target in compile_rules(made, seen, sizes)}


def problems(made: Equations, tensors: Mapping[str, TensorSpec], sizes: Sizes = SIZES) -> list[str]:
    with pytest.raises(PlanError, match="does not fit the checkpoint") as caught:
        compiled(made, tensors, sizes)
    return list(caught.value.problems)


# ---- what comes out -------------------------------------------------------------------------------------------------


def test_names_change_and_what_is_a_source_as_it_is_stays_plain() -> None:
    made = compiled(
        recipe({"rename": {"a.{i}.w": "layers.{i}.w", "n": "norm"}}), specs(a__0__w=(4,), a__1__w=(4,), n=(2,))
    )
    assert list(made) == ["layers.0.w", "layers.1.w", "norm"]
    tensors = {"saved.a.0.w": TensorSpec("F32", (4,)), "saved.n": TensorSpec("F32", (2,))}
    assert plain_source(made["layers.0.w"], tensors) == "saved.a.0.w"
    assert made["norm"].operation is None
    assert made["norm"].rule == "n -> norm"


def test_experts_are_taken_apart_and_gate_and_up_too() -> None:
    rule = {
        "from": "l.{i}.w13",
        "to": {"gate": "m.{i}.{e}.gate", "up": "m.{i}.{e}.up"},
        "ops": [{"unbind": {"dim": 0, "as": "e"}}, {"split": {"dim": 0}}],
        "shape": ["hidden", "_"],
    }
    made = compiled(recipe(rule), specs(l__0__w13=(2, 8, 3)))
    assert sorted(made) == ["m.0.0.gate", "m.0.0.up", "m.0.1.gate", "m.0.1.up"]
    [patch] = made["m.0.1.up"].arrangement.patches
    assert patch.start == (1, 4, 0)
    assert plain_source(made["m.0.1.up"], {"saved.l.0.w13": TensorSpec("F32", (2, 8, 3))}) is None


def test_experts_come_together_in_the_order_of_their_numbers() -> None:
    rule = {"from": "m.{i}.{e}.w", "to": "l.{i}.w", "ops": [{"stack": {"over": "e", "size": "experts"}}]}
    made = compiled(recipe(rule), specs(m__0__1__w=(3,), m__0__0__w=(3,)))
    assert made["l.0.w"].arrangement.sources == ("saved.m.0.0.w", "saved.m.0.1.w")
    assert plain_source(made["l.0.w"], {}) is None


def test_targets_are_in_the_order_of_their_first_source() -> None:
    rules = recipe({"rename": {"b": "x"}}, {"from": ["c", "a"], "to": "y", "ops": [{"cat": {"dim": 0}}]})
    assert list(compiled(rules, specs(a=(1,), b=(1,), c=(1,)))) == ["y", "x"]


def test_numbers_are_cast_by_the_first_pattern_that_fits() -> None:
    rules = recipe({"rename": {"**": "**"}}, {"cast": {"**.A_log": "float32", "**": "bfloat16"}})
    tensors = {**specs(m__A_log=(2,), m__w=(2,)), "m.count": TensorSpec("I64", (2,))}
    made = compiled(rules, tensors)
    assert {name: target.dtype for name, target in made.items()} == {"m.A_log": "F32", "m.w": "BF16", "m.count": "I64"}
    assert made["m.A_log"].operation is None
    operation = made["m.w"].operation
    assert operation is not None
    assert operation.target == TensorSpec("BF16", (2,))


def test_a_regular_expression_gives_names_to_its_groups() -> None:
    rule = {"from": r"regex:h_(?P<n>\d+)_(?P<rest>.*)", "to": "layers.{n}.{rest}"}
    assert list(compiled(recipe(rule), {"h_3_w": TensorSpec("F32", (1,))})) == ["layers.3.w"]


def test_what_is_dropped_by_name_is_gone() -> None:
    rules = recipe({"rename": {"w": "w"}}, {"drop": ["**.inv_freq", "x"]}, {"drop": "y", "when": "zero"})
    assert list(compiled(rules, specs(w=(1,), a__inv_freq=(2,), x=(1,)))) == ["w"]
    assert rules.drops[-1].zero


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_tensor_without_a_rule_is_named_with_what_is_like_it() -> None:
    rules = recipe({"rename": {"layers.{i}.attention.wq.weight": "q.{i}", "norm": "norm"}})
    tensors = specs(
        layers__0__attention__wq__weight=(1,),
        layers__0__attn__wq__weight=(1,),
        layers__1__attn__wq__weight=(1,),
        norm=(1,),
    )
    [line] = problems(rules, tensors)
    assert line.startswith("layers.0.attn.wq.weight and 1 more like it: no rule says what becomes of it")
    assert "rules are for layers.0.attention.wq.weight" in line


def test_a_rule_without_a_tensor_is_named_with_what_is_like_it() -> None:
    lines = problems(recipe({"rename": {"tok_embedings": "e", "norm": "norm"}}), specs(tok_embeddings=(1,), norm=(1,)))
    assert lines[0].startswith("tok_embeddings: no rule says")
    assert lines[1] == "no tensor is called tok_embedings (rule tok_embedings -> e); there is tok_embeddings"
    assert problems(recipe({"rename": {"a": "a", "zz": "z"}}), specs(a=(1,))) == [
        "no tensor is called zz (rule zz -> z)"
    ]


def test_a_drop_may_have_to_find_something() -> None:
    rules = recipe({"rename": {"w": "w"}}, {"drop": "x", "optional": False})
    assert problems(rules, specs(w=(1,))) == ["no tensor is called x, which would be dropped"]


def test_no_tensor_is_taken_twice() -> None:
    rules = recipe({"rename": {"a.{name}": "b.{name}", "a.w": "c"}}, {"drop": "a.*"})
    [line] = problems(rules, specs(a__w=(1,)))
    assert line == "a.w: two rules take it: a.{name} -> b.{name}; a.w -> c; drop a.*"


def test_no_name_comes_out_twice() -> None:
    rules = recipe({"rename": {"a": "x", "b": "x"}})
    assert problems(rules, specs(a=(1,), b=(1,))) == ["x: comes out twice (rule a -> x and b -> x)"]


def test_a_part_that_is_lacking_is_named() -> None:
    rule = {"from": {"gate": "l.{i}.gate", "up": "l.{i}.up"}, "to": "m.{i}", "ops": [{"cat": {"dim": 0}}]}
    lines = problems(recipe(rule), specs(l__0__gate=(1,), l__0__up=(1,), l__1__gate=(1,)))
    assert any(line.startswith("l.1.gate is there, and l.1.up is not") for line in lines)


def test_a_shape_that_the_config_does_not_say_is_refused() -> None:
    rule = {"from": "e", "to": "embed", "shape": ["vocab", "hidden"]}
    sizes = Sizes({"vocab": 8, "hidden": 4})
    assert "embed" in compiled(recipe(rule), specs(e=(8, 4)), sizes)
    [line] = problems(recipe(rule), specs(e=(9, 4)), sizes)
    assert line == "e: comes out as [9, 4], and [vocab = 8, hidden = 4] is expected (rule e -> embed)"
    [other] = problems(recipe(rule | {"shape": [8, "_", 1]}), specs(e=(8, 4)), sizes)
    assert "[8, _, 1] is expected" in other


def test_what_a_step_cannot_do_is_said_once_for_all_layers() -> None:
    rule = {"from": "l.{i}.q", "to": "m.{i}.q", "ops": [{"rope": {"heads": "heads", "to": "half"}}]}
    [line] = problems(recipe(rule), specs(l__0__q=(5, 2), l__1__q=(5, 2)))
    assert line.startswith("l.0.q: dimension 0 of F32[5, 2] is not 2 heads of 2 rows")
    assert line.endswith("[and 1 more like this]")


def test_tensors_for_which_there_is_no_name_are_refused() -> None:
    rule = {"from": {"a": "a", "b": "b"}, "to": "c"}
    [line] = problems(recipe(rule), specs(a=(1,), b=(1,)))
    assert line.startswith("a and 1 more: 2 tensors come out, for the names c")


def test_numbers_that_may_have_scales_are_not_cast() -> None:
    rules = recipe({"rename": {"w": "w"}}, {"cast": {"w": "float32"}})
    with pytest.raises(PlanError, match="may have scales"):
        compiled(rules, {"w": TensorSpec("F8_E4M3", (2,))})


def test_nearest_names_are_few_and_the_best_first() -> None:
    assert nearest("a.b.c", ["a.b.d", "a.b.c1", "zzz", "a.b.c1"]) == ["a.b.c1", "a.b.d"]


# ---- back -----------------------------------------------------------------------------------------------------------


def test_the_inverse_reads_the_same_rules_from_right_to_left() -> None:
    rules = recipe(
        {"rename": {"e": "embed"}},
        {"rename": {"old_e": "embed"}, "alternative": True},
        {"from": "out", "to": "head", "optional": True, "ops": [{"trim": {"dim": 0, "size": 3, "from": 4}}]},
        {"from": "l.{i}.w", "to": "m.{i}.{e}.w", "ops": [{"unbind": {"dim": 0, "as": "e"}}]},
        {"drop": "freqs"},
        {"tie": {"head": "embed"}},
        {"cast": {"**": "bfloat16"}},
    )
    back = rules.inverse()
    assert back.name == "inverse:r"
    assert (back.drops, back.casts, back.ties) == ((), {}, {"out": "e"})
    made = compiled(back, specs(embed=(3, 2), m__0__0__w=(2,), m__0__1__w=(2,)))
    assert sorted(made) == ["e", "l.0.w", "out"]
    assert made["out"].arrangement.sources == ("saved.embed",)
    assert "out" not in compiled(back, specs(embed=(3, 2), m__0__0__w=(2,)), Sizes())
    given = compiled(back, specs(embed=(3, 2), head=(3, 2), m__0__0__w=(2,)))
    assert given["out"].arrangement.shape == (4, 2)
    assert back.inverse().inverted is False


def test_a_tie_of_names_that_no_rule_has_is_not_turned_around() -> None:
    rules = recipe({"rename": {"e": "embed"}}, {"tie": {"head": "embed"}})
    assert rules.inverse().ties == {}


def test_a_recipe_is_data_and_data_a_recipe() -> None:
    rules = recipe(
        {
            "from": {"a": "a.{i}", "b": "b.{i}"},
            "to": ["c.{i}", "d.{i}"],
            "shape": [1, "_"],
            "optional": True,
            "ops": [{"transpose": {"dims": [0, 1], "only": ["a"]}}, {"cat": {"dim": 0}}, "split"],
        },
        {"rename": {"x": "y"}, "alternative": True},
        {"drop": "z", "optional": False, "when": "zero"},
        {"tie": {"p": "q"}},
        {"cast": {"**": "F16"}},
        sizes={"n": "m + 1"},
        about="words",
    )
    assert read_recipe(write_recipe(rules), where="r") == rules
    assert read_recipe(write_recipe(recipe({"rename": {"x": "y"}})), where="r") == recipe({"rename": {"x": "y"}})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "expected names and what they stand for"),
        ({"rules": {}}, "expected a list"),
        ({"rules": []}, "a recipe without a rule"),
        ({"rules": [{"drop": "x"}]}, "a recipe without a rule"),
        ({"rule": [], "rules": []}, "unknown rule; known are about, name"),
        ({"rules": [{"to": "x"}]}, r"rule 1: it has one of from, .*, not to"),
        ({"rules": [{}]}, "not nothing"),
        ({"rules": [{"from": "x", "drop": "x"}]}, "it has one of"),
        ({"rules": [{"from": "x"}]}, "`from` without `to`"),
        ({"rules": [{"from": "x", "to": "y", "shapes": []}]}, "unknown shapes"),
        ({"rules": [{"from": 3, "to": "y"}]}, "expected names and what they stand for, found 3"),
        ({"rules": [{"from": [3], "to": "y"}]}, "expected a text, found 3"),
        ({"rules": [{"from": "x", "to": "y", "optional": "yes"}]}, "optional is true or false"),
        ({"rules": [{"from": "x", "to": "y", "ops": [{"transpose": {}, "split": {}}]}]}, "each of `ops` is one step"),
        ({"rules": [{"from": "x", "to": "y", "ops": ["twist"]}]}, "rule 1: there is no step 'twist'"),
        ({"rules": [{"from": "x", "to": "y", "ops": [{"trim": {"size": True}}]}]}, "True is no size"),
        ({"rules": [{"from": "x", "to": "y", "shape": [1.5]}]}, "1.5 is no size"),
        ({"rules": [{"from": "x{", "to": "y"}]}, "rule 1: .* a stray '{'"),
        ({"rules": [{"from": "x", "to": "y.*"}]}, "is a pattern, not a name"),
        ({"rules": [{"from": "x", "to": "y.{i}"}]}, r"nothing says what \{i\} in 'y.\{i\}' is"),
        ({"rules": [{"from": "x.{i}", "to": "y"}]}, r"\{i\} is in no name that comes out"),
        ({"rules": [{"rename": {"x": "y"}}, {"drop": "z", "when": "nan"}]}, "when is `zero`"),
        ({"rules": [{"rename": {"x": "y"}}, {"cast": {"**": "int8"}}]}, "'int8' is no dtype"),
        ({"rules": [{"rename": {"x": "y"}}], "sizes": {"n": [1]}}, "size n"),
        ({"rules": [{"rename": {"x": "y"}}], "name": 3}, "expected a text"),
    ],
)
def test_what_is_no_recipe_is_refused_by_the_rule(data: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_recipe(data, where="mine.yaml")
