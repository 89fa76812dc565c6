"""Patterns over names: what fits, what variables stand for, what is no pattern."""

from __future__ import annotations

import pytest

from hfdcp_core.errors import UsageError
from hfdcp_core.name_patterns import Pattern, collapsed


@pytest.mark.parametrize(
    ("pattern", "name", "bindings"),
    [
        ("layers.{i}.w", "layers.12.w", {"i": 12}),
        ("layers.{i}.w", "layers.012.w", None),
        ("layers.{i}.w", "layers.x.w", None),
        ("layers.{i}.w", "my.layers.1.w", None),
        ("layers.{i}.{kind}", "layers.1.w", {"i": 1, "kind": "w"}),
        ("layers.{i}.{kind}", "layers.1.a.w", None),
        ("{i}.to.{i}", "3.to.3", {"i": 3}),
        ("{i}.to.{i}", "3.to.4", None),
        ("**.weight", "a.b.weight", {"path": "a.b"}),
        ("**.weight", "weight", None),
        ("**", "weight", {"path": "weight"}),
        ("a.*.w", "a.b1.w", {}),
        ("a.*.w", "a.b.c.w", None),
        ("a.w*", "a.w13", {}),
        ("a+b", "a+b", {}),
        (r"regex:module\.(?P<rest>.*)", "module.x.y", {"rest": "x.y"}),
        (r"regex:(?P<a>x)?y", "y", {}),
        (r"regex:(?P<a>x)?y", "xy", {"a": "x"}),
        ("regex:x", "xy", None),
    ],
)
def test_a_name_fits_or_not(pattern: str, name: str, bindings: dict[str, object] | None) -> None:
    assert Pattern(pattern).match(name) == bindings


@pytest.mark.parametrize("text", ["", "regex:", "regex:(", "layers.{i.w", "layers.i}", "a.{0}"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"pattern|stray"):
        Pattern(text)


def test_names_are_made_of_what_variables_stand_for() -> None:
    pattern = Pattern("m.{i}.{kind}.**")
    assert pattern.variables == ("i", "kind", "path")
    assert pattern.render({"i": 3, "kind": "w", "path": "a.b"}) == "m.3.w.a.b"
    assert pattern.is_name
    assert not Pattern("m.*").is_name
    assert not Pattern("regex:m").is_name


def test_names_that_differ_in_numbers_are_one_line() -> None:
    assert collapsed(["a.1.w", "b", "a.2.w", "a.3.w"]) == ("a.1.w and 2 more like it", "b")
