"""The two values of this package: a folder as it was listed, and what it was taken for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["checkpoint", "unfinished", "foreign", "around"]
"""Whether a folder holds a checkpoint that we read, one that was not saved to its end, weights that we do not read, or
is only what lies around the folder of the weights."""


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder: what lies directly in it."""

    name: str
    """Its own name, without those of the folders around it."""
    files: Mapping[str, int]
    """Sizes of its files, by their names."""
    folders: tuple[str, ...] = ()
    """Names of the folders in it."""
    texts: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of those small files that `hfdcp_core.homes.questions` asked for, and that are there."""

    def has(self, *names: str) -> bool:
        """Tell whether all of these files are there."""
        return all(name in self.files for name in names)


@dataclass(frozen=True, slots=True)
class Home:
    """What a folder was taken for."""

    kind: str
    """What to call it, for a person."""
    verdict: Verdict
    """What can be done with it."""
    advice: str = ""
    """Why it cannot be read, and the way out; empty where it can."""
    inside: tuple[str, ...] = ()
    """Of a folder around: those folders in it, relative to it, that may hold the weights."""
