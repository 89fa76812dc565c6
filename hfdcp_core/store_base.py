"""What every kind of store shares: what a listing is, which paths are allowed, and whose fault a foreign error is.

Errors of the operating system and of storage libraries are translated here and nowhere else. A message names the
store, the path and what was being done; the foreign error stays its cause. Text of a foreign error may repeat what the
library was configured with, so it is scrubbed before it enters a message.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hfdcp_core.catalog import FileStamp
from hfdcp_core.errors import NoSpace, StorageDenied, StorageError, StorageNotFound, UsageError

TEMPORARY = ".hfdcp-tmp-"
"""Marks the names of files that are being written, after a dot and before a random part."""

STATE_FOLDER = ".hfdcp"
"""Where our own files lie in a sink."""

_BY_ERRNO: dict[int, type[StorageError]] = {
    errno.ENOENT: StorageNotFound,
    errno.ENOTDIR: StorageNotFound,
    errno.ELOOP: StorageNotFound,
    errno.EACCES: StorageDenied,
    errno.EPERM: StorageDenied,
    errno.EROFS: StorageDenied,
    errno.EISDIR: StorageDenied,
    errno.EEXIST: StorageDenied,
    errno.ENOTEMPTY: StorageDenied,
    errno.ENAMETOOLONG: StorageDenied,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EFBIG: NoSpace,
}

_ADVICE: dict[type[StorageError], str] = {
    StorageDenied: "; check permissions and credentials",
    NoSpace: "; free some space or choose another place",
}

_MANGLED = re.compile(
    r"(?:gs|gcs|s3|s3a|hf|memory|https?|abfss?|az|adl|ftp|sftp|ssh|hdfs|webhdfs|file|local|faulty):/(?!/)"
)
_USER_INFO = re.compile(r"://[^/@\s]*@")
_QUERY = re.compile(r"\?[^\s'\"<>)]*")
_BEARER = re.compile(r"(?i)\b(bearer|basic|token)(\s+|=|:\s*)[^\s,;'\"]+")
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies directly in one folder of a store."""

    files: tuple[FileStamp, ...]
    """Files, by name relative to the store, sorted."""
    folders: tuple[str, ...]
    """Sub-folders, by name relative to the store, sorted."""


def checked_path(path: str, url: str) -> str:
    """Return ``path`` if it names something inside the store at ``url``.

    >>> checked_path("a/b.safetensors", "/data")
    'a/b.safetensors'

    Raises:
        StorageDenied: It is empty, absolute, or has a part that leads elsewhere.
    """
    if "\0" in path or any(part in {"", ".", ".."} for part in path.split("/")):
        raise StorageDenied(f"{url}: {path!r} is refused: a path must be relative, and stay inside the store")
    return path


def checked_folder(folder: str, url: str) -> str:
    """Return ``folder`` if it is the store's own root (the empty string) or lies inside it."""
    return checked_path(folder, url) if folder else folder


def refuse_mangled_url(url: str) -> None:
    """Refuse a URL that lost a slash on its way through a path object, as ``Path("gs://b/k")`` does.

    Raises:
        UsageError: It begins with a scheme and a single slash.
    """
    if found := _MANGLED.match(url):
        scheme = found.group().removesuffix(":/")
        advice = f"write {scheme}:// with two slashes, and never put a URL into a Path, which takes one away"
        raise UsageError(f"{url!r} is neither a path nor a URL: {advice}")


def without_secrets(text: str, secrets: Collection[str] = ()) -> str:
    """Return ``text`` without passwords in URLs, query strings, tokens and any of ``secrets``.

    >>> without_secrets("GET https://me:pw@host/a?sig=1 failed with Bearer abc", ["host"])
    'GET https://***@***/a failed with Bearer ***'
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    text = _QUERY.sub("", _USER_INFO.sub("://***@", text))
    return _BEARER.sub(r"\1\2***", text)


def storage_fault(kind: type[StorageError], doing: str, reason: str) -> StorageError:
    """Build the error of one ``kind``: what failed, why, and what to do."""
    shown = reason if len(reason) <= _SHOWN_CHARACTERS else reason[:_SHOWN_CHARACTERS] + "…"
    return kind(f"cannot {doing}: {shown}{_ADVICE.get(kind, '')}")


def kind_of_os_error(error: OSError) -> type[StorageError]:
    """Tell whose fault an error of the operating system is."""
    return _BY_ERRNO.get(error.errno or 0, StorageError)


@contextmanager
def os_faults(doing: str) -> Iterator[None]:
    """Translate errors of the operating system that happen while ``doing`` something.

    Raises:
        StorageError: Or one of its kinds, with the foreign error as its cause.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise storage_fault(kind_of_os_error(error), doing, reason) from error
