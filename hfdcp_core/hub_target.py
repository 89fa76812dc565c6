"""Where a push goes: repository and branch as they are found, and what is refused before a byte is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from hfdcp_core import wire
from hfdcp_core.errors import Conflict, HubRejected, ValidationError
from hfdcp_core.hub_client import Head, Patience, Repository, RevisionAbsent
from hfdcp_core.job import FAIL, METADATA, Job
from hfdcp_core.manifest import EXTRA_PATH, MANIFEST_PATH, Manifest
from hfdcp_core.run import Target
from hfdcp_core.signing import SIGNATURE_PATH
from hfdcp_core.state import Cancellation

WEIGHTS = (".safetensors", ".safetensors.index.json")
"""Endings of the files from which a loader takes tensors, whether an index names them or not."""
LARGEST_FILE, LONGEST_HEADER = 200_000_000_000, 25_000_000
"""What the Hub advises as the largest file, and the longest header that its client reads."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a push is made."""

    revision: str = "main"
    """The branch; one that is not there begins where the main one stands."""
    endpoint: str = ""
    """Address of the Hub; empty for huggingface_hub's own default."""
    message: str = ""
    """First line of the commit's message; empty for one that counts tensors and files."""
    public: bool = False
    """Whether a repository that everybody can read is accepted, and made where it is new."""
    replace: bool = False
    """Whether weight files of somebody else may be deleted."""
    tag: str = ""
    """Name of a tag for the commit; empty for none."""
    pull_request: bool = False
    """Whether the commit opens a pull request instead of moving the branch."""
    verify: str = METADATA
    """How closely what arrived is looked at, of `hfdcp_core.job.VERIFY_LEVELS`."""
    on_conflict: str = FAIL
    """What to do where somebody else commits in the meantime, of `hfdcp_core.job.ON_CONFLICT`."""
    sign: str = ""
    """Path of the private key that the output is signed with; empty for not at all."""
    patience: Patience = field(default_factory=Patience)
    """How long we go on with a Hub that does not do what it is asked."""

    @classmethod
    def of(cls, job: Job) -> Terms:
        """Return what a job says of it."""
        return cls(**{field.name: getattr(job, field.name) for field in fields(cls) if field.name != "patience"})


def repository_of(repo: str, terms: Terms, cancellation: Cancellation | None = None) -> Repository:
    """Return a repository as the terms have it; nothing is asked of the Hub yet."""
    return Repository(repo, endpoint=terms.endpoint, patience=terms.patience, cancellation=cancellation)


def open_target(repository: Repository, terms: Terms) -> Target:
    """Find the repository and the branch, or create the repository, and see whether the token may write there.

    Raises:
        HubRejected: The repository is public and should not be, or has no commit.
        HubDenied: The token is absent, wrong, or may not write.
    """
    head, new = look_at(repository, terms.revision)
    created = head is None
    if head is None:
        repository.create(private=not terms.public)
        head, new = look_at(repository, terms.revision)
    if head is None:
        raise HubRejected(f"{repository.name} was created and cannot be seen; may the token read it?")
    if not head.private and not terms.public:
        hint = "make it private in its settings, or say --public"
        raise HubRejected(f"{repository.name} is public, everybody could read what is pushed; {hint}")
    repository.check_write()
    return Target(repository.name, terms.endpoint, terms.revision, head.commit, new, created)


def look_at(repository: Repository, revision: str) -> tuple[Head | None, bool]:
    """Return where the branch stands, or the main one where it is not there; and whether it is not."""
    try:
        return repository.look(revision), False
    except RevisionAbsent:
        return repository.look(), True


def refuse_large(sizes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse files that the Hub or its client could not handle, by their sizes and the lengths of their headers.

    Raises:
        HubRejected: There are some.
    """
    problems = []
    for path, (size, header) in sizes.items():
        if size > LARGEST_FILE:
            problems.append(f"{path}: {size} bytes, the Hub takes {LARGEST_FILE}; --max-file-size makes smaller files")
        if header > LONGEST_HEADER:
            problems.append(
                f"{path}: a header of {header} bytes, the Hub reads {LONGEST_HEADER}; --max-file-size makes more files"
            )
    HubRejected.raise_for("the Hub does not take files like these", problems)


def stale_files(repository: Repository, target: Target, ours: Iterable[str], terms: Terms) -> tuple[str, ...]:
    """Return what to delete: weight files, which a loader would mix with ours, and values of an earlier push.

    Raises:
        Conflict: There are weight files of somebody else, and the terms do not allow to replace them.
    """
    root, ours = repository.root(target.commit), set(ours)
    former = published_manifest(repository, target.commit, root)
    known = {record.path for record in former.files} | {SIGNATURE_PATH} if former else set()
    there = weights_of(root)
    if not terms.replace:
        hint = "push to another repository or --revision, or say --replace to put ours in their place"
        foreign = [path for path in there if path not in known]
        Conflict.raise_for(f"{repository.name} holds weight files that hfdcp did not write; {hint}", foreign)
    left = (EXTRA_PATH, SIGNATURE_PATH)
    return tuple(
        path for path in (*there, *left) if path in root and path not in ours and (path in known or path in there)
    )


def weights_of(names: Sequence[str]) -> list[str]:
    """Return the names of weight files and their index, of the files of a folder."""
    return sorted(name for name in names if name.endswith(WEIGHTS))


def published_manifest(repository: Repository, commit: str, root: Sequence[str] | None = None) -> Manifest | None:
    """Return the manifest of an earlier push, or None where there is none that can be read."""
    if MANIFEST_PATH not in (repository.root(commit) if root is None else root):
        return None
    try:
        return wire.load_manifest(repository.read(MANIFEST_PATH, commit))
    except ValidationError:
        return None
