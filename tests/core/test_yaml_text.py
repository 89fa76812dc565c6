"""YAML is read as plain types; a name that stands there twice is an error, since one of two rules would be lost."""

import pytest

from hfdcp_core.yaml_text import read_yaml, write_yaml


def test_plain_types_come_back() -> None:
    value = {"b": [1, 2.5, None, True, "on: off"], "a": {"x": "é"}}
    assert read_yaml(write_yaml(value)) == value


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: 1\nb: 2\na: 3", "line 1: 'a' stands there twice"),
        ("- x: 1\n- {y: 1, y: 1}", "line 2: 'y' stands there twice"),
        ("a: [", "expected the node content"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("[" * 5000, "recursion"),
    ],
)
def test_anything_else_is_refused(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_yaml(text)
