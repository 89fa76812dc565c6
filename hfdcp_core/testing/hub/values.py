"""What a Hub keeps: repositories, their commits, and the files in a commit's tree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

REFS_HEADS = "refs/heads/"
REFS_TAGS = "refs/tags/"
REFS_PR = "refs/pr/"


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file in the tree of a commit."""

    size: int
    """Bytes."""
    oid: str
    """Git's name of the blob: of the content, or of the pointer where the content is kept as LFS or Xet."""
    sha256: str | None = None
    """Digest of the content, where it is kept as LFS or Xet; None for a regular file."""
    xet: str | None = None
    """Name of the content in Xet storage."""
    commit: str = ""
    """The commit that last changed the file."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One state of a repository."""

    id: str
    """40 hex digits; unique, but not computed as git does."""
    parent: str | None
    """The commit before it."""
    tree: Mapping[str, HubFile]
    """Files by path."""
    title: str
    """First line of the message."""
    message: str
    """The rest of the message."""
    date: str
    """When, in UTC."""
    author: str
    """Who."""


@dataclass(slots=True)
class Discussion:
    """A discussion, or a pull request where it asks for a merge."""

    title: str
    """Its title."""
    status: str
    """``draft``, ``open``, ``closed`` or ``merged``."""
    pull_request: bool
    """Whether a ref ``refs/pr/N`` belongs to it."""
    base: str
    """The branch into which it would be merged."""
    created: str
    """When, in UTC."""
    merged: str | None = None
    """The commit of the merge."""


@dataclass(slots=True)
class Repo:
    """A model repository."""

    id: str
    """``namespace/name``."""
    private: bool
    """Whether one needs a token to read it."""
    created: str
    """When, in UTC."""
    gated: bool | str = False
    """Whether access has to be asked for: False, ``auto`` or ``manual``."""
    refs: dict[str, str] = field(default_factory=dict)
    """Commit of each branch, tag and pull request, by the ref's full name."""
    commits: dict[str, Commit] = field(default_factory=dict)
    """All commits, by id."""
    objects: dict[str, int] = field(default_factory=dict)
    """Size of each LFS object that a commit refers to, by sha256."""
    discussions: dict[int, Discussion] = field(default_factory=dict)
    """Discussions by number."""
    pending: dict[str, int] = field(default_factory=dict)
    """Size of each LFS object that was stored and not committed yet, by sha256."""


def git_blob(data: bytes) -> str:
    """Return git's name of a blob.

    >>> git_blob(b"")
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """Return the text that git keeps in place of an LFS object."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
