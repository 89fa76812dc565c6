"""A member of a JSON document is changed, and every other byte stays as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.json_text import indented, inserted, removed, replaced

KEYS = st.sampled_from(["a", "b", "quantization_config", 'q"{'])
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=3)
OBJECTS = st.dictionaries(KEYS, LEAVES | st.dictionaries(KEYS, LEAVES, max_size=3), max_size=4)

NESTED = st.recursive(
    LEAVES | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@settings(deadline=None)
@given(value=NESTED, width=st.integers(0, 3), ascii_only=st.booleans())
def test_a_document_is_written_as_the_library_does(value: object, width: int, ascii_only: bool) -> None:
    assert indented(value, width, ascii_only=ascii_only) == json.dumps(value, indent=width, ensure_ascii=ascii_only)
    assert indented((value,), width, ascii_only=False) == json.dumps((value,), indent=width, ensure_ascii=False)


@settings(deadline=None)
@given(value=OBJECTS, indent=st.sampled_from([None, 0, 2, "\t"]), path=st.lists(KEYS, min_size=1, max_size=2))
def test_a_member_is_removed_and_nothing_else(
    value: dict[str, object], indent: int | str | None, path: list[str]
) -> None:
    text = json.dumps(value, indent=indent)
    expected = json.loads(text)
    holder = expected
    for key in path[:-1]:
        holder = holder.get(key) if isinstance(holder, dict) else None
    if isinstance(holder, dict):
        holder.pop(path[-1], None)
    after = removed(text, tuple(path))
    assert json.loads(after) == expected
    if indent is None:
        assert after == json.dumps(expected)


@settings(deadline=None)
@given(value=OBJECTS, indent=st.sampled_from([None, 2]), key=KEYS)
def test_a_member_is_written_first_or_in_its_place(value: dict[str, object], indent: int | None, key: str) -> None:
    text = json.dumps(value, indent=indent)
    after = replaced(text, (key,), "[1]") if key in value else inserted(text, key, "[1]")
    assert json.loads(after) == {**value, key: [1]}
    if key not in value:
        assert removed(after, (key,)) == (text if value else "{}")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ('{"b": {"a": 1}}', '{"b": {"a": 1}}'),
        ('{ "a" : 1 , "b": 2 }', '{ "b": 2 }'),
        ('{ "b": 2 , "a" : 1 }', '{ "b": 2 }'),
        ('{"a": 1, "a": {"a": 2}, "b": {"a": 1}}', '{"b": {"a": 1}}'),
        ("{}", "{}"),
    ],
    ids=["elsewhere", "first", "last", "twice", "absent"],
)
def test_one_comma_goes_with_a_member(text: str, after: str) -> None:
    assert removed(text, ("a",)) == after


def test_a_member_is_removed_where_its_path_leads() -> None:
    text = '{"a": {"x": 1, "y": 2}, "b": {"y": 3}}'
    assert removed(text, ("a", "y")) == '{"a": {"x": 1}, "b": {"y": 3}}'
    assert replaced(text, ("b", "y"), "4") == '{"a": {"x": 1, "y": 2}, "b": {"y": 4}}'
