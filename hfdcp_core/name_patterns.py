"""Patterns over names of tensors: which names fit, and what a name becomes.

| in a pattern | fits |
|---|---|
| ``{i}`` (one letter) | a number: a layer, an expert |
| ``{name}`` (longer) | one segment between dots |
| ``**`` | any number of segments, with the dots between them |
| ``*`` | anything within a segment |
| ``regex:…`` | a whole name, as Python's ``re`` reads it; its named groups are the variables |

What ``{i}`` and the others stood for can be used in the name that comes out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfdcp_core.errors import UsageError

REGEX = "regex:"
"""What a pattern begins with that is a regular expression."""
ANY_PATH = "path"
"""The variable that ``**`` stands for."""
_TOKEN = re.compile(r"\{([A-Za-z_]\w*)\}|(\*\*)|(\*)")
_NUMBER = r"0|[1-9][0-9]*"
Bindings = Mapping[str, int | str]
"""What variables stand for: numbers for those of one letter, text for others."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern over names."""

    text: str
    """As it was written."""

    def __post_init__(self) -> None:
        """Refuse what is no pattern."""
        if not self.text or self.text == REGEX:
            raise UsageError("an empty text is no pattern")
        assert _compiled(self.text)

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables in it, in order."""
        return tuple(_compiled(self.text).groupindex)

    @property
    def is_name(self) -> bool:
        """Whether names can be made of it: nothing in it is left open."""
        return not self.text.startswith(REGEX) and not any(star for _, _, star in _TOKEN.findall(self.text))

    def match(self, name: str) -> Bindings | None:
        """Return what the variables stand for in a name, or None where it does not fit.

        >>> Pattern("layers.{i}.{part}.weight").match("layers.7.wq.weight")
        {'i': 7, 'part': 'wq'}
        """
        found = _compiled(self.text).fullmatch(name)
        if found is None:
            return None
        return {
            key: int(value) if is_number(key) and value.isdecimal() else value
            for key, value in found.groupdict().items()
            if value is not None
        }

    def render(self, bindings: Bindings) -> str:
        """Return the name that it is with some values.

        >>> Pattern("model.layers.{i}.norm").render({"i": 3})
        'model.layers.3.norm'
        """
        return _TOKEN.sub(lambda token: str(bindings[token[1] or ANY_PATH]), self.text)


def is_number(variable: str) -> bool:
    """Whether a variable stands for a number: those of one letter do."""
    return len(variable) == 1


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> re.Pattern[str]:
    expression = text.removeprefix(REGEX) if text.startswith(REGEX) else _expression(text)
    try:
        return re.compile(expression)
    except re.error as error:
        raise UsageError(f"{text!r} is no pattern: {error}") from error


def _expression(text: str) -> str:
    parts: list[str] = []
    end = 0
    seen: set[str] = set()
    for token in _TOKEN.finditer(text):
        parts += [re.escape(text[end : token.start()]), _group(token, seen)]
        end = token.end()
    rest = text[end:]
    if stray := re.search(r"[{}]", "".join(text[a:b] for a, b in _between(text))):
        raise UsageError(f"{text!r}: a stray {stray[0]!r}; variables are written {{i}} or {{name}}")
    return "".join([*parts, re.escape(rest)])


def _between(text: str) -> Iterable[tuple[int, int]]:
    """Yield where a pattern is plain text."""
    end = 0
    for token in _TOKEN.finditer(text):
        yield end, token.start()
        end = token.end()
    yield end, len(text)


def _group(token: re.Match[str], seen: set[str]) -> str:
    if token[3]:
        return r"[^.]*"
    name = token[1] or ANY_PATH
    if name in seen:
        return f"(?P={name})"
    seen.add(name)
    if token[2]:
        return rf"(?P<{name}>.+)"
    return f"(?P<{name}>{_NUMBER if is_number(name) else '[^.]+'})"


def skeleton(name: str) -> str:
    """Return a name with its numbers left open, so that what differs in the layer only is one.

    >>> skeleton("model.layers.12.mlp.experts.3.w1")
    'model.layers.{}.mlp.experts.{}.w1'
    """
    return ".".join("{}" if part.isascii() and part.isdigit() else part for part in name.split("."))


def collapsed(names: Iterable[str]) -> tuple[str, ...]:
    """Name tensors for a person: those that differ in numbers only are one line.

    >>> collapsed(["layers.0.w", "layers.1.w", "norm"])
    ('layers.0.w and 1 more like it', 'norm')
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(skeleton(name), []).append(name)
    return tuple(alike[0] + (f" and {len(alike) - 1} more like it" if alike[1:] else "") for alike in kinds.values())
