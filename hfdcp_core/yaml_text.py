"""YAML's plain types, read and written; a module of its own, because only few runs need the library behind it."""

from __future__ import annotations

from typing import Any

import yaml


def read_yaml(text: str) -> object:
    """Read a document.

    >>> read_yaml("a: [1, b]")
    {'a': [1, 'b']}

    Raises:
        ValueError: It is none, or has one name twice in a mapping: the first of the two would be lost without a word.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe one
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def write_yaml(value: object) -> str:
    r"""Write a document, names in order.

    >>> write_yaml({"b": ["c"], "a": 1})
    'a: 1\nb:\n- c\n'
    """
    return yaml.safe_dump(value, sort_keys=True)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Refuse a name that is there twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
            raise ValueError(f"line {node.start_mark.line + 1}: {twice[0]!r} stands there twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found
