"""The door to the Hugging Face Hub: one model repository, through the real client.

Each method is one question or one deed, made as often as `hfdcp_core.hub_calls` allows. What is unclear after a deed
that must not be done twice, a commit, is for the caller to find out.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from hfdcp_core import __version__
from hfdcp_core.errors import Conflict, HubRejected, HubUnavailable
from hfdcp_core.hub_calls import Calls, Patience
from hfdcp_core.hub_streams import STALL_S, LfsUpload, Parts, Sent, XetUpload
from hfdcp_core.state import Cancellation

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
    from huggingface_hub.hf_api import RepoFile, RepoFolder

__all__ = [
    "Calls",
    "Change",
    "Committed",
    "Copied",
    "Gone",
    "Head",
    "LfsUpload",
    "Patience",
    "RemoteFile",
    "Repository",
    "RevisionAbsent",
    "Sent",
    "Small",
    "Stored",
    "XetUpload",
    "git_name",
    "xet_is_used",
]

T = TypeVar("T")

MOST_PATHS = 500
"""Paths in one question; the Hub refuses more than a thousand."""
SAMPLE_BYTES = 512
"""As much of a file as the Hub wants to see to say how it keeps it."""
BLOCK_BYTES = 1 << 20
"""How much of a file that is read back comes at a time."""
XET_SETTINGS: Mapping[str, str] = {
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "4",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "1000ms",
    "HF_XET_DATA_SESSION_XORB_METADATA_FLUSH_INTERVAL": "5s",
}
"""How hf_xet is set, unless the user's environment says otherwise; it is read when it is imported, which is later.

Left alone it asks a storage that does not answer for minutes without a word (256 s at each request), and notes what it
has sent only every 20 s, so that after a crash more is sent again.
"""


@dataclass(frozen=True, slots=True)
class Head:
    """Where a revision stands."""

    commit: str
    """Id of the commit."""
    private: bool
    """Whether the repository is private."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the Hub says of a file."""

    size: int
    """Bytes."""
    sha256: str | None
    """Digest of the content, where it is kept as LFS or Xet; None for a regular file."""
    blob: str
    """Git's name of the content of a regular file."""
    xet: str = ""
    """Content address in the Xet storage, where it lies there."""

    def holds(self, data: bytes) -> bool:
        """Whether this is its content, as far as the Hub says."""
        if self.sha256 is not None:
            return (self.size, self.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        return self.blob == git_name(len(data), [data])


def git_name(size: int, blocks: Iterable[bytes | memoryview]) -> str:
    """Return git's name for a content.

    >>> git_name(0, [])
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of a commit whose bytes the storage has."""

    path: str
    """Its name."""
    size: int
    """Bytes."""
    sha256: str
    """Digest, by which the Hub finds the bytes."""


@dataclass(frozen=True, slots=True)
class Small:
    """A file of a commit that travels in it."""

    path: str
    """Its name."""
    data: bytes
    """Its content."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A file of a commit that the Hub takes from another revision."""

    path: str
    """Its name, there and here."""
    revision: str
    """The other revision."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A file that a commit deletes."""

    path: str
    """Its name."""


Change = Stored | Small | Copied | Gone
Answer = Mapping[str, list[Mapping[str, str]]]
"""What the Hub says of files, as far as it is looked at."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit that was made."""

    commit: str
    """Its id."""
    pull_request: str = ""
    """Where a person sees the pull request that it opened, if it did."""
    revision: str = ""
    """The revision of that pull request."""


class RevisionAbsent(HubRejected):
    """The repository is there, and has no such revision."""


class Repository:
    """A model repository, as the user's token sees it."""

    def __init__(
        self,
        name: str,
        *,
        endpoint: str = "",
        patience: Patience | None = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        for variable, value in XET_SETTINGS.items():
            os.environ.setdefault(variable, value)
        from huggingface_hub import HfApi, get_token

        self.name = name
        """``namespace/name``."""
        self._calls = Calls(patience or Patience(), cancellation or Cancellation())
        with self._calls.making("cannot find out which token to use"):
            self._calls.token = get_token()
        self._api = HfApi(endpoint=endpoint.rstrip("/") or None, library_name="hfdcp", library_version=__version__)

    @property
    def patience(self) -> Patience:
        """How long we go on with a Hub that does not do what it is asked."""
        return self._calls.patience

    def pause(self, seconds: float) -> None:
        """Wait, unless a stop is asked for."""
        self._calls.cancellation.wait(seconds)

    def url(self, commit: str) -> str:
        """Return where a person sees a commit."""
        return f"{self._api.endpoint}/{self.name}/commit/{commit}"

    # ---- what is there ----

    def look(self, revision: str | None = None) -> Head | None:
        """Return where a revision stands, by default the main one; None where there is no such repository.

        Raises:
            RevisionAbsent: The repository has no such revision.
            HubRejected: It has no commit.
            HubDenied: There is no token, so that a private repository cannot be told from none.
        """
        from huggingface_hub import get_session
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        where = self._at(revision or "main")

        def ask() -> Head | None:
            try:
                # Left alone, this one call of the client waits for ever whatever its own client says.
                info = self._api.repo_info(self.name, revision=revision, timeout=get_session().timeout.read)
            except RepositoryNotFoundError as fault:
                if self._calls.token and fault.response.status_code == 404 and not isinstance(fault, GatedRepoError):
                    return None
                raise
            except RevisionNotFoundError as fault:
                raise RevisionAbsent(f"{self.name} has no revision {revision}") from fault
            if not info.sha:
                raise HubRejected(f"{where} has no commit to build upon; make a first one, for example a README.md")
            return Head(info.sha, private=bool(info.private))

        return self._calls.ask(f"cannot look at {where}", ask)

    def branches(self) -> Mapping[str, str]:
        """Return the commit at which each branch stands."""
        refs = self._calls.ask(f"cannot list the branches of {self.name}", lambda: self._api.list_repo_refs(self.name))
        return {ref.name: ref.target_commit for ref in refs.branches}

    def tags(self) -> Mapping[str, str]:
        """Return the commit that each tag names."""
        refs = self._calls.ask(f"cannot list the tags of {self.name}", lambda: self._api.list_repo_refs(self.name))
        return {ref.name: ref.target_commit for ref in refs.tags}

    def pull_requests(self) -> Sequence[Committed]:
        """Return the pull requests that are open, without their commits, the newest first."""

        def ask() -> Sequence[Committed]:
            told = self._api.get_repo_discussions(self.name, discussion_type="pull_request")
            return [
                Committed("", one.url, one.git_reference or "")
                for one in sorted(told, key=lambda one: -one.num)
                if one.is_pull_request and one.status in {"open", "draft"}
            ]

        return self._calls.ask(f"cannot list the pull requests of {self.name}", ask)

    def root(self, revision: str) -> tuple[str, ...]:
        """Return the names of the files that lie in no folder."""
        return self._calls.ask(
            f"cannot list {self._at(revision)}",
            lambda: tuple(_described(self._api.list_repo_tree(self.name, revision=revision))),
        )

    def files(self, paths: Sequence[str], revision: str) -> Mapping[str, RemoteFile]:
        """Return what the Hub says of those of the paths that are there."""
        found: dict[str, RemoteFile] = {}
        for start in range(0, len(paths), MOST_PATHS):
            found |= self._some(list(paths[start : start + MOST_PATHS]), revision)
        return found

    def _some(self, paths: list[str], revision: str) -> Mapping[str, RemoteFile]:
        return self._calls.ask(
            f"cannot ask for the files of {self._at(revision)}",
            lambda: _described(self._api.get_paths_info(self.name, paths, revision=revision)),
        )

    def large(self, files: Mapping[str, tuple[int, bytes]], revision: str) -> frozenset[str]:
        """Return which files the Hub would keep in its storage for large ones, by their sizes and first bytes.

        An empty one never is: that storage holds no empty objects.

        Raises:
            HubRejected: The repository's ``.gitignore`` excludes one of them.
        """
        url = f"{self._api.endpoint}/api/models/{self.name}/preupload/{quote(revision, safe='')}"
        rows = [
            {"path": path, "size": size, "sample": base64.b64encode(sample[:SAMPLE_BYTES]).decode()}
            for path, (size, sample) in files.items()
        ]
        answers = [
            answer
            for start in range(0, len(rows), MOST_PATHS)
            for answer in self._posted(
                f"cannot ask how {self._at(revision)} keeps files", url, {"files": rows[start : start + MOST_PATHS]}
            )["files"]
        ]
        if ignored := [answer["path"] for answer in answers if answer["shouldIgnore"]]:
            what = f"the .gitignore of {self._at(revision)} excludes files that are pushed; change it there"
            raise HubRejected(what, ignored)
        return frozenset(one["path"] for one in answers if one["uploadMode"] == "lfs" and files[one["path"]][0])

    # ---- reading ----

    def read(self, path: str, revision: str) -> bytes:
        """Return the content of a small file."""
        return self._got(path, revision, {})

    def read_span(self, path: str, revision: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` of a file, as anybody else would read them."""
        if start == stop:
            return b""
        data = self._got(path, revision, {"Range": f"bytes={start}-{stop - 1}"})
        if len(data) != stop - start:
            raise HubRejected(f"{self._at(revision)} gives {len(data)} bytes of {path}[{start}:{stop}]")
        return data

    def _got(self, path: str, revision: str, headers: Mapping[str, str]) -> bytes:
        from huggingface_hub import get_session, hf_raise_for_status

        def ask() -> bytes:
            response = get_session().get(
                self._address(path, revision), headers={**self._headers(), **headers}, follow_redirects=True
            )
            hf_raise_for_status(response)
            return response.content

        return self._calls.ask(f"cannot read {path} of {self._at(revision)}", ask)

    def blocks(self, path: str, revision: str) -> Iterator[bytes]:
        """Give the bytes of a file as they come; where a connection breaks, another one goes on from there."""
        position, pause_s = 0, self.patience.pause_s
        for left in range(self.patience.tries - 1, -1, -1):
            try:
                for block in self._blocks_from(path, revision, position):
                    position += len(block)
                    yield block
            except HubUnavailable:
                if not left:
                    raise
            else:
                return
            self.pause(pause_s)
            pause_s *= 2

    def _blocks_from(self, path: str, revision: str, start: int) -> Iterator[bytes]:
        from huggingface_hub import get_session, hf_raise_for_status

        headers = {**self._headers(), **({"Range": f"bytes={start}-"} if start else {}), "Accept-Encoding": "identity"}
        address, what = self._address(path, revision), f"cannot read {path} of {self._at(revision)}"
        with (
            self._calls.making(what),
            get_session().stream("GET", address, headers=headers, follow_redirects=True) as response,
        ):
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            if start and response.status_code != 206:
                raise HubRejected(f"{what} from byte {start} on: the Hub gives no parts")
            yield from response.iter_bytes(BLOCK_BYTES)

    def _address(self, path: str, revision: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.name, path, revision=revision, endpoint=self._api.endpoint)

    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils._headers import build_hf_headers

        return build_hf_headers()

    # ---- before anything is sent ----

    def create(self, *, private: bool) -> None:
        """Create the repository; nothing happens where it exists."""
        self._calls.ask(
            f"cannot create {self.name}",
            lambda: self._api.create_repo(self.name, private=private, exist_ok=True),
        )

    def check_write(self) -> None:
        """See whether the token may write.

        Raises:
            HubDenied: It may not.
        """
        self._calls.ask(f"cannot write to {self.name}", lambda: self._api.auth_check(self.name, write=True))

    def check_card(self, text: str, revision: str) -> None:
        """Let the Hub look at a model card.

        Raises:
            HubRejected: It would refuse it.
        """
        what = f"the Hub refuses the README.md that {self._at(revision)} would get"
        self._posted(what, f"{self._api.endpoint}/api/validate-yaml", {"repoType": "model", "content": text})

    def _posted(self, what: str, url: str, body: Mapping[str, object]) -> Answer:
        from huggingface_hub import get_session, hf_raise_for_status

        def ask() -> Answer:
            response = get_session().post(url, json=body, headers=self._headers())
            hf_raise_for_status(response)
            answer: Answer = response.json()
            return answer

        return self._calls.ask(what, ask)

    # ---- bytes ----

    def xet_upload(self, path: str, revision: str, *, stall_s: float = STALL_S) -> XetUpload:
        """Begin a file by Xet.

        Raises:
            HubError: There is no Xet storage, or it does not answer.
        """
        from huggingface_hub.utils._xet import (
            XetTokenType,
            get_xet_session,
            xet_connection_info_refresh_url,
            xet_headers_without_auth,
        )

        what = f"cannot upload {path} to {self.name} by Xet (HF_HUB_DISABLE_XET=1 takes LFS)"
        with self._calls.making(what):
            headers = self._headers()
            group = get_xet_session().new_upload_commit(  # type: ignore[no-untyped-call]
                token_refresh_url=xet_connection_info_refresh_url(
                    token_type=XetTokenType.WRITE,
                    repo_id=self.name,
                    repo_type="model",
                    revision=quote(revision, safe=""),
                    endpoint=self._api.endpoint,
                ),
                token_refresh_headers=headers,
                custom_headers=xet_headers_without_auth(headers),
            )
        return XetUpload(group, path, self._calls, what, stall_s=stall_s)

    def lfs_upload(
        self, path: str, sha256: str, size: int, revision: str, *, stall_s: float = STALL_S
    ) -> LfsUpload | None:
        """Begin a file by LFS; None where the storage has these bytes.

        Raises:
            HubError: The Hub does not take it, or does not answer.
        """
        from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

        what = f"cannot upload {path} to {self.name} by LFS"

        def ask() -> Mapping[str, object]:
            info = UploadInfo(size=size, sample=b"", sha256=bytes.fromhex(sha256))
            actions, errors, _ = post_lfs_batch_info(
                [info], None, "model", self.name, revision=quote(revision, safe=""), endpoint=self._api.endpoint
            )
            if errors:
                raise HubRejected(f"{what}: {errors[0]['error']['message']}")
            found: Mapping[str, object] = actions[0].get("actions") or {}
            return found

        actions = self._calls.ask(what, ask)
        if not actions:
            return None
        upload, verify = actions["upload"], actions.get("verify")
        assert isinstance(upload, Mapping)  # the client has looked

        def complete(tags: Sequence[str]) -> None:
            if "chunk_size" in (upload.get("header") or {}):
                parts = [{"partNumber": number, "etag": tag} for number, tag in enumerate(tags, 1)]
                self._lfs_post(what, str(upload["href"]), {"oid": sha256, "parts": parts}, {})
            if isinstance(verify, Mapping):
                self._lfs_post(what, str(verify["href"]), {"oid": sha256, "size": size}, self._headers())

        return LfsUpload(
            Parts.of(upload, size, complete), sha256, size, self._calls, f"{what}: a part of it", stall_s=stall_s
        )

    def _lfs_post(self, what: str, url: str, body: Mapping[str, object], headers: Mapping[str, str]) -> None:
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.lfs import LFS_HEADERS

        self._calls.ask(
            what, lambda: hf_raise_for_status(get_session().post(url, json=body, headers={**LFS_HEADERS, **headers}))
        )

    # ---- deeds ----

    def create_branch(self, branch: str, start: str) -> None:
        """Create a branch at a commit; nothing happens where it exists."""
        self._calls.ask(
            f"cannot create the branch {branch} of {self.name}",
            lambda: self._api.create_branch(self.name, branch=branch, revision=start, exist_ok=True),
        )

    def delete_branch(self, branch: str) -> None:
        """Delete a branch; nothing happens where there is none."""
        from huggingface_hub.errors import HfHubHTTPError

        def ask() -> None:
            try:
                self._api.delete_branch(self.name, branch=branch)
            except HfHubHTTPError as fault:
                if fault.response.status_code != 404:
                    raise

        self._calls.ask(f"cannot delete the branch {branch} of {self.name}", ask)

    def tag(self, tag: str, commit: str, message: str) -> None:
        """Tag a commit; nothing happens where there is such a tag."""
        self._calls.ask(
            f"cannot tag {self.name} with {tag}",
            lambda: self._api.create_tag(self.name, tag=tag, revision=commit, tag_message=message, exist_ok=True),
        )

    def commit(
        self,
        revision: str,
        changes: Iterable[Change],
        *,
        message: str,
        description: str = "",
        parent: str | None = None,
        pull_request: bool = False,
    ) -> Committed:
        """Commit changes to a revision; nothing is committed where nothing changes.

        Raises:
            Conflict: The revision no longer stands at ``parent``.
            HubUnavailable: There was no clear answer; the commit may have been made.
        """
        operations = [_operation(change) for change in changes]

        def ask() -> Committed:
            info = self._api.create_commit(
                self.name,
                operations,
                commit_message=message,
                commit_description=description,
                revision=revision,
                parent_commit=parent,
                create_pr=pull_request,
            )
            return Committed(info.oid, info.pr_url or "", info.pr_revision or "")

        with _no_bars():
            return self._calls.make(f"cannot commit to {self._at(revision)}", ask)

    def settled(self, commit: Callable[[], T], made: Callable[[], T | None]) -> T:
        """Commit, and where that ends without a clear answer let ``made`` look for it before it is tried again.

        Raises:
            HubUnavailable: There was no clear answer, as often as patience allows.
            HubError: As `commit`.
        """
        pause_s = self.patience.pause_s
        for left in range(self.patience.tries - 1, -1, -1):
            try:
                return commit()
            except (HubUnavailable, Conflict) as fault:  # the Hub may heed a call long after its answer was lost
                if (found := made()) is not None:
                    return found
                if isinstance(fault, Conflict) or not left:
                    raise
            self.pause(pause_s)
            pause_s *= 2
        raise AssertionError("the last try returns or raises")

    def _at(self, revision: str) -> str:
        return f"{self.name}@{revision}"


def _described(items: Iterable[RepoFile | RepoFolder]) -> dict[str, RemoteFile]:
    from huggingface_hub.hf_api import RepoFile

    return {
        item.path: RemoteFile(item.size, item.lfs.sha256 if item.lfs else None, item.blob_id, item.xet_hash or "")
        for item in items
        if isinstance(item, RepoFile)
    }


def _operation(change: Change) -> CommitOperationAdd | CommitOperationCopy | CommitOperationDelete:
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
    from huggingface_hub.lfs import UploadInfo

    if isinstance(change, Gone):
        return CommitOperationDelete(change.path, is_folder=False)
    if isinstance(change, Copied):
        return CommitOperationCopy(change.path, change.path, src_revision=change.revision)
    operation = CommitOperationAdd(change.path, change.data if isinstance(change, Small) else b"")
    if isinstance(change, Stored):
        # The client offers no other way to commit what the storage has; `tests/core/test_hub.py` holds it to this one.
        operation.upload_info = UploadInfo(change.size, b"", bytes.fromhex(change.sha256))
        operation._upload_mode, operation._is_uploaded, operation._should_ignore = "lfs", True, False  # noqa: SLF001
    return operation


def xet_is_used() -> bool:
    """Whether large files go by Xet: the client's own choice, or the user's by ``HF_HUB_DISABLE_XET``."""
    from huggingface_hub.utils._runtime import is_xet_available

    return is_xet_available()


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep the client from drawing progress bars of its own, unless the user's environment says what it wants."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
