"""How a file is written through fsspec so that nothing shows until it is whole; part of the door to fsspec.

Where the filesystem's files can be committed and discarded (gcsfs, s3fs) they go straight to their final name;
elsewhere they are written under a temporary one and moved. A file object is never closed after a failure, nor left to
the collector: on most filesystems that publishes what has been written so far.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from hfdcp_core.errors import StorageError, ValidationError
from hfdcp_core.store_base import TEMPORARY, foreign_faults

_WRITE_BYTES = 8 << 20
_BLOCK_BYTES = 16 << 20
_BLOCK_UNIT = 256 << 10  # GCS takes multiples of this
_MOST_PARTS = 9_000  # S3 takes 10,000
_TRANSACTION_LOCK = threading.Lock()
_ALIVE: set[str] = set()  # temporary files that somebody in this process is writing


def block_bytes(size: int) -> int:
    """Return how large the parts of a file of ``size`` bytes are, so that no storage finds them too many.

    >>> block_bytes(5_000_000_000) >> 20, block_bytes(5 << 40) // (256 << 10) * 9_000 * (256 << 10) >= 5 << 40
    (16, True)
    """
    return max(_BLOCK_BYTES, -(-size // (_MOST_PARTS * _BLOCK_UNIT)) * _BLOCK_UNIT)


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """What an upload is to become."""

    fs: AbstractFileSystem
    """Where."""
    full: str
    """The path within it."""
    size: int
    """Bytes that are announced."""
    shown: str
    """The path as messages show it."""
    secrets: Collection[str]
    """Texts that no message may repeat."""

    def faults(self, verb: str) -> AbstractContextManager[None]:
        """Translate what the filesystem raises."""
        return foreign_faults(f"{verb} {self.shown}", self.secrets)


def require_whole(target: UploadTarget, written: int) -> None:
    """Refuse to publish a file of another size than was announced."""
    if written != target.size:
        raise ValidationError(f"{target.shown}: {target.size} bytes were announced, {written} were written")


def require_kept(target: UploadTarget) -> None:
    """Hold the size of what can now be seen against the announced one.

    Raises:
        StorageError: The storage kept another number of bytes; they are removed.
    """
    with target.faults("look at"):
        target.fs.invalidate_cache()
        kept = target.fs.info(target.full)["size"]
    if kept not in (target.size, None):  # plain HTTP servers may not say
        with suppress(StorageError), target.faults("remove"):
            target.fs.rm_file(target.full)
        raise StorageError(
            f"cannot write {target.shown}: sent {target.size} bytes, kept were {kept}; they were removed; run again"
        )


class _Upload:
    """What both ways of writing share: feeding the file and counting the bytes."""

    def __init__(self, target: UploadTarget, file: Any) -> None:
        self._target, self._file = target, file
        self._written = 0

    def write(self, buffer: memoryview) -> None:
        """Append bytes, in pieces: the file would copy all of a larger one first."""
        whole = buffer.cast("B")
        with self._target.faults("write"):
            for start in range(0, len(whole), _WRITE_BYTES):
                self._file.write(whole[start : start + _WRITE_BYTES])
        self._written += len(whole)


class CommittedUpload(_Upload):
    """Goes straight to its final name, which shows nothing before the filesystem's own commit."""

    def __init__(self, target: UploadTarget) -> None:
        """Open the file; most storages hear nothing of it yet."""
        with target.faults("write"):
            super().__init__(target, _open_deferred(target.fs, target.full, block_bytes(target.size)))

    def commit(self) -> None:
        """Send the last part and publish."""
        require_whole(self._target, self._written)
        with self._target.faults("write"):
            self._file.close()
            self._file.commit()
            self._file = None
        require_kept(self._target)

    def abort(self) -> None:
        """Discard the parts that were sent."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                with suppress(StorageError), self._target.faults("discard"):
                    file.discard()
            finally:
                file.closed = True  # or the collector would close it, which publishes


class MovedUpload(_Upload):
    """Goes to a temporary name beside the final one and is moved when it is whole."""

    def __init__(self, target: UploadTarget) -> None:
        """Open the temporary file, which no sweep of this process takes for dead."""
        self._temporary = temporary_name(target.full)
        with target.faults("write"):
            super().__init__(target, target.fs.open(self._temporary, "wb", block_size=block_bytes(target.size)))
        _ALIVE.add(self._temporary)

    def commit(self) -> None:
        """Close the file and move it to its name."""
        require_whole(self._target, self._written)
        with self._target.faults("write"):
            self._file.close()
            try:
                _move(self._target.fs, self._temporary, self._target.full)
            except Exception:
                if not self._has_moved():
                    raise
            self._file = None
        _ALIVE.discard(self._temporary)
        require_kept(self._target)

    def _has_moved(self) -> bool:
        """Tell whether a move that failed was carried out: the reply was lost, and a second try found nothing left."""
        self._target.fs.invalidate_cache()
        return self._target.fs.exists(self._target.full) and not self._target.fs.exists(self._temporary)

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            file, self._file = self._file, None
            _close_unpublished(file)
            with suppress(StorageError), self._target.faults("remove"):  # a later sweep finds what stays
                self._target.fs.rm_file(self._temporary)
            _ALIVE.discard(self._temporary)


def temporary_name(full: str) -> str:
    """Return a name for the time of writing, beside the final one."""
    folder, _, name = full.rpartition("/")
    return f"{folder}/.{name[:60]}{TEMPORARY}{secrets.token_hex(8)}"


def is_left_behind(name: str) -> bool:
    """Tell whether a file is a temporary one that nobody in this process is writing."""
    return TEMPORARY in name.rpartition("/")[2] and name not in _ALIVE


def can_commit(fs: AbstractFileSystem, unused: str) -> bool:
    """Tell whether the filesystem's files can truly be committed and discarded, by a file that is never written."""
    file = _open_deferred(fs, unused, _BLOCK_BYTES)
    base = AbstractBufferedFile
    can = isinstance(file, base) and type(file).commit is not base.commit and type(file).discard is not base.discard
    _close_unpublished(file)
    if not can:
        with suppress(FileNotFoundError):
            fs.rm_file(unused)
    return can


def _open_deferred(fs: AbstractFileSystem, full: str, block: int) -> Any:
    """Open a file for writing that is not published when it is closed."""
    file = fs.open(full, "wb", block_size=block, autocommit=False)
    with _TRANSACTION_LOCK:  # fsspec remembers such files for a transaction that we never finish: they would pile up
        transaction = fs.transaction
        transaction.files = deque(each for each in transaction.files if each is not file)
    return file


def _close_unpublished(file: Any) -> None:
    """Give up a file that is being written, without publishing it where closing would."""
    if isinstance(file, AbstractBufferedFile):
        file.closed = True
        return
    with suppress(OSError):
        file.close()
    if temporary := getattr(file, "temp", ""):  # fsspec's local files put theirs into the system's temporary folder
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108


def _move(fs: AbstractFileSystem, old: str, new: str) -> None:
    """Move one file; never by the calls that take ``[`` and ``*`` in a name for a pattern."""
    if hasattr(fs, "mv_file"):
        fs.mv_file(old, new)
    elif type(fs).mv is not AbstractFileSystem.mv:
        fs.mv(old, new)
    else:
        fs.cp_file(old, new)
        fs.rm_file(old)
