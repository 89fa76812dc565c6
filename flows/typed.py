"""What is typed as text, as a value: sizes, numbers, JSON."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

from hfdcp_core.statistics import REFUSABLE

UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{infix}B": base ** (power + 1)
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("KMGT")
}
"""Bytes in one unit: KB, MB, GB and TB are decimal, KiB, MiB, GiB and TiB are binary."""
_UNITS_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}


def size(text: str) -> int:
    """Return a number of bytes that was written with or without a unit.

    >>> size("5GB"), size("256MiB"), size("1.5 kb"), size("1000")
    (5000000000, 268435456, 1500, 1000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS_BY_LOWER.get(found[2]) if found else None
    if found is None or unit is None or (nbytes := round(float(found[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 5GB, 500MB or 256MiB")
    return nbytes


def count(text: str) -> int:
    """Return a whole number of at least one.

    >>> count("4")
    4
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def filled(text: str) -> str:
    """Return a text as it is; an empty one is what a shell makes of a variable that is not set.

    >>> filled("runs/7b")
    'runs/7b'
    """
    if not text:
        raise argparse.ArgumentTypeError("an empty text is given; is a variable of the shell not set?")
    return text


def block(text: str) -> tuple[int, ...]:
    """Return rows and columns; a single number stands for both.

    >>> block("128x64"), block("128")
    ((128, 64), (128, 128))
    """
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of blocks; write for example 128 or 128x64")
    return int(found[1]), int(found[2] or found[1])


def refusable(text: str) -> tuple[str, ...]:
    """Return what a run is to end on: any of nan, inf and zero, with commas between.

    >>> refusable("nan,inf")
    ('nan', 'inf')
    """
    kinds = tuple(kind.strip() for kind in text.lower().split(","))
    if unknown := [kind for kind in kinds if kind not in REFUSABLE]:
        raise argparse.ArgumentTypeError(f"{','.join(unknown)!r} is none of {', '.join(REFUSABLE)}")
    return kinds


def named_size(text: str) -> tuple[str, int]:
    """Return the name and the number of a size.

    >>> named_size("num_attention_heads=32")
    ('num_attention_heads', 32)
    """
    found = re.fullmatch(r"([A-Za-z_]\w*)=([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size with a name; write for example num_attention_heads=32")
    return found[1], int(found[2])


def tolerance(text: str) -> float:
    """Return a number that is not negative.

    >>> tolerance("1e-5")
    1e-05
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance; write for example 1e-5")
    return value


def json_object(text: str) -> Mapping[str, object]:
    """Return a JSON object, given as such or as ``@file``.

    >>> json_object('{"anon": true}')
    {'anon': True}
    """
    try:
        value = json.loads(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        # What stands in the options may be a secret, so the message does not repeat it.
        raise argparse.ArgumentTypeError(f"not a JSON object, nor @file with one ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object, but something else in JSON")
    return value


def file_index(text: str) -> Mapping[str, int]:
    """Return the tensors' file numbers from a JSON file: ``{"model.norm.weight": 1, …}``."""
    try:
        value = json_object(f"@{text}")
    except argparse.ArgumentTypeError:
        wanted = '{"model.norm.weight": 1, …}'
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON file with the file of every tensor: {wanted}") from None
    wrong = [fqn for fqn, number in value.items() if type(number) is not int or number < 1]
    if wrong:
        raise argparse.ArgumentTypeError(f"{text}: a file number is 1, 2, …; it is not for {', '.join(wrong[:5])}")
    return {fqn: number for fqn, number in value.items() if isinstance(number, int)}
