"""The text of JSON documents: change a member and leave every other byte as it is, and write large ones fast.

A model's config is somebody's own file: its order, its spacing and its numbers stay as they wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

Path = tuple[str, ...]
"""Keys that lead to a value."""


def indented(value: object, width: int, *, ascii_only: bool) -> str:
    """Write a document as ``json.dumps(value, indent=width)`` does, which takes six times as long: it is not in C then.

    >>> print(indented({"a": [1, "b"], "c": {}}, 1, ascii_only=True))
    {
     "a": [
      1,
      "b"
     ],
     "c": {}
    }
    """
    return _indented(value, "\n", " " * width, json.JSONEncoder(ensure_ascii=ascii_only).encode)


def _indented(value: object, line: str, indent: str, encode: Callable[[object], str]) -> str:
    if not value or not isinstance(value, dict | list | tuple):
        return encode(value)
    inner = line + indent
    if isinstance(value, dict):
        members = [f"{encode(key)}: {_indented(each, inner, indent, encode)}" for key, each in value.items()]
        return f"{{{inner}{f',{inner}'.join(members)}{line}}}"
    return f"[{inner}{f',{inner}'.join([_indented(each, inner, indent, encode) for each in value])}{line}]"


def top_of(text: str) -> int:
    """Return where the object of a document begins."""
    return text.index("{")


def edited(text: str, edits: Iterable[tuple[tuple[int, int], str]]) -> str:
    """Put new texts in the place of spans that do not overlap.

    >>> edited("abcd", [((1, 2), "X"), ((3, 3), "Y")])
    'aXcYd'
    """
    for (first, last), new in sorted(edits, reverse=True):
        text = text[:first] + new + text[last:]
    return text


def replaced(text: str, path: Path, value: str) -> str:
    """Write a value in the place of those that a path leads to; nothing changes where there is none.

    >>> replaced('{"a": {"b" : 1}, "b": 2}', ("a", "b"), "[3]")
    '{"a": {"b" : [3]}, "b": 2}'
    """
    return edited(text, ((span, value) for span in values(text, top_of(text), path)))


def inserted(text: str, key: str, value: str) -> str:
    """Write a member in front of those at the top, with their own white space.

    >>> inserted('{ "a": 1}', "b", "2"), inserted("{}", "b", "2")
    ('{ "b": 2, "a": 1}', '{"b": 2}')
    """
    start = top_of(text)
    first = skip_space(text, start + 1)
    space = text[start + 1 : first]
    comma = "" if text[first] == "}" else ","
    return edited(text, [((start + 1, start + 1), f"{space}{json.dumps(key)}: {value}{comma}")])


def removed(text: str, path: Path) -> str:
    """Take members out, and one comma with each.

    >>> removed('{"a": 1, "b": 2, "c": 3}', ("b",)), removed('{"a": 1, "b": 2}', ("b",)), removed('{"a": 1}', ("a",))
    ('{"a": 1, "c": 3}', '{"a": 1}', '{}')
    """
    while spans := list(_member_spans(text, top_of(text), path)):
        text = edited(text, spans[:1])
    return text


def _member_spans(text: str, start: int, path: Path) -> Iterator[tuple[tuple[int, int], str]]:
    end = start + 1  # of what is before the member: the brace, or the member before it
    for key, first, last in members(text, start):
        if key == path[0] and len(path) == 1:
            behind = skip_space(text, last)
            if end == start + 1 and text[behind] == ",":
                yield (skip_space(text, end), skip_space(text, behind + 1)), ""
            else:
                yield (end, last), ""
        elif key == path[0] and text[first] == "{":
            yield from _member_spans(text, first, path[1:])
        end = last


def values(text: str, start: int, path: Path) -> Iterator[tuple[int, int]]:
    """Yield where the values lie that a path of keys leads to, in the object that begins at ``start``."""
    for key, first, last in members(text, start):
        if key == path[0] and len(path) == 1:
            yield first, last
        elif key == path[0] and text[first] == "{":
            yield from values(text, first, path[1:])


def members(text: str, start: int) -> Iterator[tuple[object, int, int]]:
    """Yield the members of a valid object: key, and where its value begins and ends."""
    decoder = json.JSONDecoder()
    position = start
    while text[position] != "}":
        first = skip_space(text, position + 1)
        if text[first] == "}":
            return
        key, colon = decoder.raw_decode(text, first)
        value = skip_space(text, skip_space(text, colon) + 1)
        _, end = decoder.raw_decode(text, value)
        yield key, value, end
        position = skip_space(text, end)


def skip_space(text: str, position: int) -> int:
    """Return where the next text that is no white space begins."""
    while text[position] in " \t\r\n":
        position += 1
    return position
