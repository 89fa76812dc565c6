"""What every kind of store shares: what a listing is, which paths are allowed, and whose fault a foreign error is.

Errors of the operating system and of storage libraries are translated here and nowhere else. A message names the
store, the path and what was being done; the foreign error stays its cause. Text of a foreign error may repeat what the
library was configured with, so it is scrubbed before it enters a message.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache

from hfdcp_core.catalog import FileStamp
from hfdcp_core.errors import HfdcpError, NoSpace, StorageDenied, StorageError, StorageNotFound, UsageError

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

_BY_CLASS: dict[type[StorageError], tuple[type[Exception], ...]] = {
    StorageNotFound: (FileNotFoundError, NotADirectoryError),
    StorageDenied: (PermissionError, FileExistsError, IsADirectoryError, NotImplementedError),
}

_ADVICE: dict[type[StorageError], str] = {
    StorageDenied: "; check permissions and credentials",
    NoSpace: "; free some space or choose another place",
}

_REMOTE = "gs|gcs|s3|s3a|hf|https?|abfss?|az|adl|ftp|sftp|ssh|hdfs|webhdfs"
_MANGLED = re.compile(rf"(?:{_REMOTE}|memory|file|local|faulty|zip|tar):(?!//|:)")
_NAMELESS = re.compile(rf"(?:^|::)({_REMOTE})://(?=/*(?:$|::))")
_ONE_NAME = re.compile(r"(?:^|::)(hf)://[^/:]+/?(?:$|::)")
_NO_ARCHIVE = re.compile(r"(zip|tar|libarchive)://(?!.*::)")
_PLACES = {
    "hf": "hf://owner/name, or hf://owner/name@revision",
    "http": "http://host/path",
    "https": "https://host/path",
}
_USER_INFO = re.compile(r"://[^/@\s]*@")
_QUERY = re.compile(r"\?[^\s'\"<>)]*")
_BEARER = re.compile(r"(?i)\b(bearer|basic|token)(\s+|=|:\s*)[^\s,;'\"]+")
_SHOWN_CHARACTERS = 300

_BY_STATUS: dict[int, type[StorageError]] = {
    401: StorageDenied,
    403: StorageDenied,
    404: StorageNotFound,
    412: StorageDenied,
    413: NoSpace,
    507: NoSpace,
}
_BY_CLASS_NAME: dict[str, type[StorageError]] = {
    "DefaultCredentialsError": StorageDenied,  # google.auth
    "RefreshError": StorageDenied,
    "NoCredentialsError": StorageDenied,  # botocore
    "PartialCredentialsError": StorageDenied,
    "CredentialRetrievalError": StorageDenied,
    "TokenRetrievalError": StorageDenied,
}
_UNREACHABLE = frozenset(
    {"ClientConnectorError", "ConnectError", "ConnectTimeout", "EndpointConnectionError", "ConnectionRefusedError"}
)
"""What aiohttp, httpx, botocore and the system call it if nobody answers."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies directly in one folder of a store."""

    files: tuple[FileStamp, ...]
    """Files, by name relative to the store, sorted."""
    folders: tuple[str, ...]
    """Sub-folders, by name relative to the store, sorted."""


def stamps_one_by_one(stat: Callable[[str], FileStamp], paths: Iterable[str]) -> dict[str, FileStamp]:
    """Return the stamps of those files that are there, by a look at each."""
    found = {}
    for path in paths:
        with suppress(StorageNotFound):
            found[path] = stat(path)
    return found


@lru_cache(maxsize=4096)  # asked at each read, of the same few paths
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
    """Refuse a URL that lost a slash on its way through a path object, as ``Path("gs://b/k")`` does, or never had two.

    Raises:
        UsageError: It begins with a scheme, a colon, and anything but two slashes.
    """
    if found := _MANGLED.match(url):
        scheme = found.group().removesuffix(":")
        advice = f"write {scheme}:// with two slashes, and never put a URL into a Path, which takes one away"
        raise UsageError(f"{url!r} is neither a path nor a URL: {advice} (a local folder of that name: ./{url})")


def refuse_nameless_url(url: str) -> None:
    """Refuse a URL that says of which kind a place is, and not where.

    Raises:
        UsageError: No bucket, host or repository is named, or no archive.
    """
    shown = without_secrets(url)
    if found := _NAMELESS.search(url) or _ONE_NAME.search(url):
        scheme = found[1]
        what = {"hf": "repository", "http": "host", "https": "host"}.get(scheme, "bucket or host")
        raise UsageError(f"{shown} names no {what}: write {_PLACES.get(scheme, f'{scheme}://bucket/folder')}")
    if found := _NO_ARCHIVE.match(url):
        raise UsageError(f"{shown} names no archive: write {found[1]}://folder/in/it::/path/of/the/archive")


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


def os_fault(error: OSError, doing: str) -> StorageError:
    """Translate one error of the operating system that happened while ``doing`` something."""
    return storage_fault(kind_of_os_error(error), doing, error.strerror or str(error) or type(error).__name__)


@contextmanager
def os_faults(doing: str) -> Iterator[None]:
    """Translate errors of the operating system that happen while ``doing`` something.

    Raises:
        StorageError: Or one of its kinds, with the foreign error as its cause.
    """
    try:
        yield
    except OSError as error:
        raise os_fault(error, doing) from error


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status that a foreign error carries, by the attributes that clients commonly give it."""
    reply = getattr(error, "response", None)
    if isinstance(reply, dict):  # botocore's
        return _as_status(reply.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    places = ((error, "status"), (error, "status_code"), (reply, "status_code"), (error, "code"))
    # One after the other: aiohttp's ``code`` warns when it is looked at.
    return next((status for owner, name in places if (status := _as_status(getattr(owner, name, None)))), None)


def _as_status(value: object) -> int | None:
    try:
        status = int(value) if isinstance(value, (int, str)) else 0
    except ValueError:
        return None
    return status if 400 <= status < 600 else None


def kind_of_foreign_error(error: Exception) -> type[StorageError]:
    """Tell whose fault an error of a storage library is; what nothing is known about may pass, hence is retried.

    >>> kind_of_foreign_error(PermissionError("no")).__name__, kind_of_foreign_error(TimeoutError()).__name__
    ('StorageDenied', 'StorageError')
    """
    if status := http_status(error):
        return _BY_STATUS.get(status, StorageError)
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return kind_of_os_error(error)
    for kind, classes in _BY_CLASS.items():
        if isinstance(error, classes):
            return kind
    if str(error).startswith("Forbidden"):  # gcsfs' 403, an OSError without a number
        return StorageDenied
    named = (_BY_CLASS_NAME.get(each.__name__) for each in type(error).__mro__)
    return next((kind for kind in named if kind), StorageError)


def foreign_reason(error: Exception, secrets: Collection[str]) -> str:
    """Say in one line what a storage library complains about, without secrets."""
    text = without_secrets(" ".join(str(error).split()), secrets)
    if isinstance(error, NotImplementedError):
        text = f"{text}{': ' if text else ''}this kind of storage cannot do that, choose another one"
    if isinstance(error, OSError) and error.errno and error.strerror is None:
        text = text or os.strerror(error.errno)
    status = http_status(error)
    answer = f"HTTP {status}, " if status else ""
    unreachable = not status and any(each.__name__ in _UNREACHABLE for each in type(error).__mro__)
    advice = "; check the address and the network" if unreachable else ""
    return f"{answer}{type(error).__name__}{': ' if text else ''}{text}{advice}"


@contextmanager
def foreign_faults(doing: str, secrets: Collection[str]) -> Iterator[None]:
    """Translate whatever a storage library raises while ``doing`` something; nothing of ours may run inside.

    Raises:
        StorageError: Or one of its kinds, with the foreign error as its cause.
    """
    try:
        yield
    except HfdcpError:
        raise
    except Exception as error:  # storage libraries share no base class, and gcsfs raises ValueError for a 400
        raise storage_fault(kind_of_foreign_error(error), doing, foreign_reason(error, secrets)) from error
