"""Push: the files of a manifest become one commit on the Hub, and what arrived is compared by size and sha256.

The Hub keeps the sha256 of weight files, so that nothing is read back. The order of the steps is the whole safety of
it: look at the head, upload what differs, commit everything at once upon that very head, compare at the commit.
Everything can be done again: what is there already is not sent again.
"""

from __future__ import annotations

import errno
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hfdcp_core import wire
from hfdcp_core.errors import (
    Conflict,
    HubRejected,
    HubUnavailable,
    NoSpace,
    StorageError,
    StorageNotFound,
    ValidationError,
)
from hfdcp_core.hub_client import Head, RemoteFile, Repository
from hfdcp_core.manifest import EXTRA_PATH, MANIFEST_PATH, FileRecord, Manifest
from hfdcp_core.state import SILENT, Progress
from hfdcp_core.store import Sink

CARD_PATH = "README.md"
"""The model card, which the Hub shows first."""
WEIGHTS = (".safetensors", ".safetensors.index.json")
"""Endings of the files from which a loader takes tensors, whether an index names them or not."""
FILES_AT_ONCE = 4
"""Local files in one upload; by LFS each is one sequential stream. From another store it is one, which is spooled."""
BLOCK_BYTES = 8 << 20
Same = Callable[[FileRecord, RemoteFile], bool]
"""Whether a regular file on the Hub, of which it keeps no sha256, has the content of a record."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a push has done."""

    repo: str
    """The repository, as ``namespace/name``."""
    revision: str
    """The branch."""
    commit: str
    """Id of the commit at which everything was found right."""
    url: str
    """Where a person sees that commit."""
    files: tuple[str, ...]
    """Every file of the output, the manifest with them."""
    uploaded_bytes: int
    """Bytes of the files that were not there already."""
    created: bool
    """Whether the repository is new."""
    unchanged: bool
    """Whether everything was there already, so that nothing was committed."""


def push(
    manifest: Manifest,
    store: Sink,
    repo: str,
    *,
    revision: str = "main",
    endpoint: str = "",
    message: str = "",
    allow_public: bool = False,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Receipt:
    """Make what a manifest names one commit on the Hub.

    The repository is created private. Files other than weights that lie there (README, config, tokenizer) are left
    alone. Weight files of an earlier push are deleted in the same commit; those of somebody else are, with
    ``overwrite``. The token is found as huggingface_hub finds it. From a store that is not a local disk, one file at a
    time is spooled to a temporary file.

    Args:
        manifest: What was written; the store has it at `MANIFEST_PATH`.
        store: Where the files lie.
        repo: The repository, as ``namespace/name``.
        revision: The branch; it must exist, except in a new repository for ``main``.
        endpoint: Address of the Hub; empty for huggingface_hub's own default.
        message: First line of the commit's message; empty for one that counts tensors and files.
        allow_public: Whether a repository that everybody can read is accepted.
        overwrite: Whether weight files of somebody else may be deleted.
        progress: Who wants to know.

    Raises:
        ValidationError: The files in the store are not what the manifest says, or what the Hub then holds is not.
        HubRejected: The repository is public, or the Hub does not take something.
        Conflict: There are weight files of somebody else, or somebody pushed in the meantime.
        HubDenied: The token is absent, wrong, or may not write there.
        HubUnavailable: The Hub is down, or does not answer; push again.
        RateLimited: The Hub asks to wait.
    """
    records = _records(manifest, store)
    repository = Repository(repo, revision=revision, endpoint=endpoint)
    created, head = _open(repository, allow_public=allow_public)
    stale = _stale(repository, head, {record.path for record in records}, overwrite=overwrite)
    same = _same_blob(store)
    there = repository.files([record.path for record in records], head.commit)
    missing = [record for record in records if _difference(record, there.get(record.path), same)]
    commit = head.commit
    progress.begin("push", sum(record.size for record in missing))
    if missing or stale:
        _refuse_wrong_card(repository, missing, store)
        _upload(repository, store, missing, progress)
        title, description = message or _message(manifest), f"{MANIFEST_PATH} has sha256 {records[-1].sha256}"
        try:
            commit = repository.commit(head.commit, delete=stale, message=title, description=description)
        except HubUnavailable as lost:
            commit = _after_lost_answer(repository, head, records[-1], same, lost)
        _verify(repository, commit, records, stale, same)
    progress.say(f"{repo}: {len(missing)} of {len(records)} files sent, everything found right at {commit[:12]}")
    return Receipt(
        repo=repo,
        revision=revision,
        commit=commit,
        url=repository.url(commit),
        files=tuple(record.path for record in records),
        uploaded_bytes=sum(record.size for record in missing),
        created=created,
        unchanged=not (missing or stale),
    )


def read_card(repo: str, *, revision: str = "main", endpoint: str = "") -> str:
    """Return the model card that a repository has, or nothing where there is none.

    Raises:
        HubDenied, HubUnavailable, RateLimited: As for `push`.
    """
    repository = Repository(repo, revision=revision, endpoint=endpoint)
    head = repository.look()
    if head is None or CARD_PATH not in repository.root(head.commit):
        return ""
    return repository.read(CARD_PATH, head.commit).decode(errors="replace")


def _refuse_wrong_card(repository: Repository, records: Sequence[FileRecord], store: Sink) -> None:
    """Let the Hub look at the card before anything is sent."""
    for record in records:
        if record.path == CARD_PATH:
            repository.check_card(store.read(CARD_PATH, 0, record.size).decode(errors="replace"))


def compare(manifest: Manifest, repo: str, *, revision: str = "main", endpoint: str = "") -> tuple[str, ...]:
    """Return where a repository is not what a manifest says: sizes and digests as the Hub has them.

    Weight files are not read; regular files are, since the Hub has no sha256 of them.

    Raises:
        HubRejected: There is no such repository or revision.
        HubDenied, HubUnavailable, RateLimited: As for `push`.
    """
    repository = Repository(repo, revision=revision, endpoint=endpoint)
    head = repository.look()
    if head is None:
        raise HubRejected(f"there is no repository {repo}, or the token may not see it")
    there = repository.files([record.path for record in manifest.files], head.commit)

    def same(record: FileRecord, _: RemoteFile) -> bool:
        return hashlib.sha256(repository.read(record.path, head.commit)).hexdigest() == record.sha256

    problems = [_difference(record, there.get(record.path), same) for record in manifest.files]
    root = repository.root(head.commit)
    if _published(repository, head, root) != manifest:
        problems.append(f"{MANIFEST_PATH}: not there, or not this manifest")
    ours = {record.path for record in manifest.files}
    problems += [
        f"{path}: a weight file that the manifest does not name" for path in _weights(root) if path not in ours
    ]
    return tuple(problem for problem in problems if problem)


def _records(manifest: Manifest, store: Sink) -> tuple[FileRecord, ...]:
    """Return every file to push, the manifest last; refuse a store that does not hold them."""
    raw = store.read(MANIFEST_PATH, 0, store.stat(MANIFEST_PATH).size)
    if wire.load_manifest(raw) != manifest:
        raise ValidationError(f"{store.url}: its {MANIFEST_PATH} is not the manifest to push; validate it first")
    problems = [_wrong_size(store, record) for record in manifest.files]
    ValidationError.raise_for(
        f"{store.url} does not hold what its manifest says; consolidate again",
        (problem for problem in problems if problem),
    )
    return (*manifest.files, FileRecord(MANIFEST_PATH, len(raw), hashlib.sha256(raw).hexdigest()))


def _wrong_size(store: Sink, record: FileRecord) -> str | None:
    try:
        size = store.stat(record.path).size
    except StorageNotFound:
        return f"{record.path}: not there"
    return None if size == record.size else f"{record.path}: {size} bytes, expected {record.size}"


def _open(repository: Repository, *, allow_public: bool) -> tuple[bool, Head]:
    """Return whether the repository had to be created, and its head."""
    head = repository.look()
    created = head is None
    if head is None:
        repository.create()
        head = repository.look()
    if head is None:
        raise HubRejected(f"{repository.name} was created and cannot be seen; may the token read it?")
    if not head.private and not allow_public:
        hint = "make it private in its settings, or say --allow-public"
        raise HubRejected(f"{repository.name} is public, everybody could read what is pushed; {hint}")
    return created, head


def _weights(names: Sequence[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(WEIGHTS))


def _stale(repository: Repository, head: Head, ours: set[str], *, overwrite: bool) -> tuple[str, ...]:
    """Return what to delete: weight files, which a loader would mix with ours, and values of an earlier push."""
    root = repository.root(head.commit)
    others = [path for path in _weights(root) if path not in ours]
    values = [EXTRA_PATH] if EXTRA_PATH in root and EXTRA_PATH not in ours else []
    former = _published(repository, head, root) if others or values else None
    known = {record.path for record in former.files} if former else set()
    foreign = [path for path in others if path not in known]
    if not overwrite:
        hint = "push to another repository, or say --overwrite to delete them"
        Conflict.raise_for(f"{repository.name} holds weight files that are not ours; {hint}", foreign)
    return (*others, *(path for path in values if path in known))


def _published(repository: Repository, head: Head, root: Sequence[str]) -> Manifest | None:
    """Return the manifest of an earlier push, or None where there is none that can be read."""
    if MANIFEST_PATH not in root:
        return None
    raw = repository.read(MANIFEST_PATH, head.commit)
    try:
        return wire.load_manifest(raw)
    except ValidationError:
        return None


def _difference(record: FileRecord, remote: RemoteFile | None, same: Same) -> str | None:
    """Say how a file on the Hub differs from its record; ``same`` decides where the Hub keeps no sha256."""
    if remote is None:
        return f"{record.path}: not there"
    if remote.size != record.size:
        return f"{record.path}: {remote.size} bytes, expected {record.size}"
    if remote.sha256 is None:
        return None if same(record, remote) else f"{record.path}: another content of the same size"
    if remote.sha256 != record.sha256:
        return f"{record.path}: sha256 is {remote.sha256}, expected {record.sha256}"
    return None


def _same_blob(store: Sink) -> Same:
    """Compare a regular file by git's name for its content, computed from the store."""

    def same(record: FileRecord, remote: RemoteFile) -> bool:
        digest = hashlib.sha1(b"blob %d\0" % record.size, usedforsecurity=False)
        for block in _blocks(store, record):
            digest.update(block)
        return digest.hexdigest() == remote.blob

    return same


def _blocks(store: Sink, record: FileRecord) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(BLOCK_BYTES, record.size)))
    for start in range(0, record.size, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, record.size - start)]
        store.read_into(record.path, start, block)
        yield block


def _upload(repository: Repository, store: Sink, records: Sequence[FileRecord], progress: Progress) -> None:
    local = all(store.local_path(record.path) for record in records)
    at_once = FILES_AT_ONCE if local else 1
    for start in range(0, len(records), at_once):
        some = records[start : start + at_once]
        with ExitStack() as stack:
            repository.upload([(record, stack.enter_context(_on_disk(store, record))) for record in some])
        progress.advance(sum(record.size for record in some))


@contextmanager
def _on_disk(store: Sink, record: FileRecord) -> Iterator[Path]:
    """Give a path to the file: where it lies, or a temporary copy."""
    if local := store.local_path(record.path):
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="hfdcp-push-") as folder:
        path = Path(folder) / Path(record.path).name
        _spool(store, record, path)
        yield path


def _spool(store: Sink, record: FileRecord, path: Path) -> None:
    digest = hashlib.sha256()
    try:
        with path.open("wb") as file:
            for block in _blocks(store, record):
                digest.update(block)
                file.write(block)
    except OSError as fault:
        kind = NoSpace if fault.errno == errno.ENOSPC else StorageError
        raise kind(
            f"cannot spool {record.path} ({record.size} bytes) to {path.parent}; TMPDIR can point elsewhere"
        ) from fault
    if digest.hexdigest() != record.sha256:
        found = f"{record.path}: sha256 is {digest.hexdigest()}, expected {record.sha256}"
        raise ValidationError(f"{store.url} is no longer what was written; consolidate again", [found])


def _message(manifest: Manifest) -> str:
    tensors = sum(len(record.tensors) for record in manifest.records)
    return f"Publish {tensors} tensors, {len(manifest.records)} files (hfdcp)"


def _after_lost_answer(
    repository: Repository, head: Head, manifest: FileRecord, same: Same, lost: HubUnavailable
) -> str:
    """Look whether the commit was made although its answer was lost; return it, or raise."""
    now = repository.look()
    if now is None or now.commit == head.commit:
        raise lost
    if _difference(manifest, repository.files([manifest.path], now.commit).get(manifest.path), same):
        raise lost.within("the answer was lost, and another commit is there") from lost
    return now.commit


def _verify(
    repository: Repository,
    commit: str,
    records: Sequence[FileRecord],
    stale: Sequence[str],
    same: Same,
) -> None:
    """Hold the commit against our records."""
    there: Mapping[str, RemoteFile] = repository.files([*(record.path for record in records), *stale], commit)
    problems = [_difference(record, there.get(record.path), same) for record in records]
    problems += [f"{path}: still there" for path in stale if path in there]
    ValidationError.raise_for(
        f"{repository.url(commit)} is visible, but is not what was written; push again, or revert it",
        (problem for problem in problems if problem),
    )
