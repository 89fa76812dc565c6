"""The door to the Hugging Face Hub: one repository at one revision, through the real client.

Every foreign error is translated here: an answer by its status, a connection that failed into `HubUnavailable`. A
message of ours never holds a token. The client waits for ever by default; here it does not.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hfdcp_core import __version__
from hfdcp_core.errors import (
    Conflict,
    HubDenied,
    HubError,
    HubRejected,
    HubUnavailable,
    RateLimited,
    StorageError,
    ValidationError,
)
from hfdcp_core.manifest import FileRecord

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy
    from huggingface_hub.hf_api import RepoFile, RepoFolder

CONNECT_S, ANSWER_S = 10.0, 300.0
"""How long to wait for a connection, and for the next byte: a commit alone may take the Hub a minute."""
MOST_PATHS = 500
"""Paths in one question; the Hub refuses more than a thousand."""
_KINDS: Mapping[int, type[HubError]] = {
    401: HubDenied,
    403: HubDenied,
    408: HubUnavailable,
    409: Conflict,
    412: Conflict,
    429: RateLimited,
}
_ADVICE: Mapping[type[HubError], str] = {
    HubDenied: "check that the token (HF_TOKEN, or `hf auth login`) is valid and may do this",
    Conflict: "somebody pushed since; look at their commit, then push again to build upon it",
    HubUnavailable: "nothing is lost: push again later",
    RateLimited: "push again later",
}


@dataclass(frozen=True, slots=True)
class Head:
    """Where a revision stands."""

    commit: str
    """Id of the commit."""
    private: bool
    """Whether the repository is private."""


XET_PATIENCE: Mapping[str, str] = {
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "4",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "1000ms",
}
"""How often hf_xet asks a storage that does not answer; left alone, it goes on for minutes without a word (256 s at
each request). Whoever wants more patience sets these variables; a push that failed so may be tried again."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the Hub says of a file."""

    size: int
    """Bytes."""
    sha256: str | None
    """Digest of the content, where it is kept as LFS or Xet; None for a regular file."""
    blob: str
    """Git's name of the content of a regular file."""


class Repository:
    """A model repository at a revision. Files are uploaded first, in any number of calls, and committed at once."""

    def __init__(self, name: str, *, revision: str, endpoint: str) -> None:
        for variable, value in XET_PATIENCE.items():
            os.environ.setdefault(variable, value)  # read when hf_xet is imported, which is later
        from huggingface_hub import HfApi, get_token

        self.name = name
        """``namespace/name``."""
        self.revision = revision
        """The branch."""
        self._token: str | None = None
        with self._calling("cannot find out which token to use"):
            self._token = get_token()
        self._api = HfApi(endpoint=endpoint.rstrip("/") or None, library_name="hfdcp", library_version=__version__)
        self._staged: list[CommitOperationAdd] = []

    def url(self, commit: str) -> str:
        """Return where a person sees a commit."""
        return f"{self._api.endpoint}/{self.name}/commit/{commit}"

    def look(self) -> Head | None:
        """Return where the revision stands, or None where there is no such repository.

        Raises:
            HubRejected: The repository has no such revision.
            HubDenied: There is no token, so that a private repository cannot be told from none.
        """
        from huggingface_hub import get_session
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with self._calling(f"cannot look at {self._place}"):
            try:
                # Left alone, this one call of the client waits for ever whatever its own client says.
                info = self._api.repo_info(self.name, revision=self.revision, timeout=get_session().timeout.read)
            except RepositoryNotFoundError as fault:
                if self._token and fault.response.status_code == 404 and not isinstance(fault, GatedRepoError):
                    return None
                raise
        if not info.sha:
            raise HubRejected(f"{self._place} has no commit to build upon; make a first one, for example a README.md")
        return Head(info.sha, private=bool(info.private))

    def create(self) -> None:
        """Create the repository, private; nothing happens where it exists."""
        with self._calling(f"cannot create {self.name}"):
            self._api.create_repo(self.name, private=True, exist_ok=True)

    def root(self, commit: str) -> tuple[str, ...]:
        """Return the names of the files that lie in no folder."""
        with self._calling(f"cannot list {self._place}"):
            return tuple(self._described(self._api.list_repo_tree(self.name, revision=commit)))

    def files(self, paths: Sequence[str], commit: str) -> Mapping[str, RemoteFile]:
        """Return what the Hub says of those of the paths that are there."""
        found: dict[str, RemoteFile] = {}
        with self._calling(f"cannot ask for the files of {self._place}"):
            for start in range(0, len(paths), MOST_PATHS):
                some = list(paths[start : start + MOST_PATHS])
                found |= self._described(self._api.get_paths_info(self.name, some, revision=commit))
        return found

    @staticmethod
    def _described(items: Iterable[RepoFile | RepoFolder]) -> dict[str, RemoteFile]:
        from huggingface_hub.hf_api import RepoFile

        return {
            item.path: RemoteFile(item.size, item.lfs.sha256 if item.lfs else None, item.blob_id)
            for item in items
            if isinstance(item, RepoFile)
        }

    def read(self, path: str, commit: str) -> bytes:
        """Return the content of a small file."""
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils._headers import build_hf_headers

        url = hf_hub_url(self.name, path, revision=commit, endpoint=self._api.endpoint)
        with self._calling(f"cannot read {path} of {self._place}"):
            response = get_session().get(url, headers=build_hf_headers(), follow_redirects=True)
            hf_raise_for_status(response)
            return response.content

    def check_card(self, text: str) -> None:
        """Let the Hub look at a model card.

        Raises:
            HubRejected: It would refuse it.
        """
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.utils._headers import build_hf_headers

        url = f"{self._api.endpoint}/api/validate-yaml"
        with self._calling(f"the Hub refuses the README.md that {self._place} would get"):
            response = get_session().post(url, json={"repoType": "model", "content": text}, headers=build_hf_headers())
            hf_raise_for_status(response)

    def upload(self, files: Sequence[tuple[FileRecord, Path]]) -> None:
        """Send files from this machine's disk, to be committed later; regular ones are kept in memory until then.

        Raises:
            ValidationError: The bytes that were sent do not have the sha256 of their record.
        """
        from huggingface_hub.utils._runtime import is_xet_available

        xet = is_xet_available()
        operations = [self._addition(record, path, hashed=not xet) for record, path in files]
        way = "by Xet (HF_HUB_DISABLE_XET=1 takes LFS)" if xet else "by LFS"
        with self._calling(f"cannot upload to {self._place} {way}"), _no_bars():
            self._api.preupload_lfs_files(self.name, operations, revision=self.revision)
        problems = []
        for (record, path), operation in zip(files, operations, strict=True):
            digest = self._settle(operation, path)
            if digest != record.sha256:
                problems.append(f"{path} for {record.path}: sha256 is {digest}, expected {record.sha256}")
        ValidationError.raise_for("files are no longer what was written; consolidate them again", problems)
        self._staged += operations

    def _addition(self, record: FileRecord, path: Path, *, hashed: bool) -> CommitOperationAdd:
        from huggingface_hub import CommitOperationAdd

        with self._calling(f"cannot read {path}"):
            operation = CommitOperationAdd(record.path, path.absolute())
        if hashed:
            # By LFS the client would read the file once more, only to hash it; it is up to the storage to check.
            # By Xet nobody checks a digest that is stated: hf_xet has to compute it from the bytes that it sends.
            operation.upload_info.sha256 = bytes.fromhex(record.sha256)
        return operation

    def _settle(self, operation: CommitOperationAdd, path: Path) -> str:
        """Return the sha256 of what will be committed."""
        if operation._should_ignore:  # noqa: SLF001  # the client says it nowhere else, and would leave the file out
            raise HubRejected(f"the .gitignore of {self._place} excludes {operation.path_in_repo}; change it there")
        if operation.path_or_fileobj == b"":  # how the client marks what it has sent
            return operation.upload_info.sha256.hex()
        content = operation.path_or_fileobj = path.read_bytes()
        return hashlib.sha256(content).hexdigest()

    def commit(self, parent: str, *, delete: Iterable[str], message: str, description: str) -> str:
        """Commit what was uploaded, delete files in the same commit, and return the commit's id.

        Raises:
            Conflict: The revision no longer stands at ``parent``.
            HubUnavailable: There was no clear answer; the commit may have been made.
        """
        from huggingface_hub import CommitOperationDelete

        gone = (CommitOperationDelete(path, is_folder=False) for path in delete)
        operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [*self._staged, *gone]
        with self._calling(f"cannot commit to {self._place}"):
            info = self._api.create_commit(
                self.name,
                operations,
                commit_message=message,
                commit_description=description,
                revision=self.revision,
                parent_commit=parent,
            )
        return info.oid

    @property
    def _place(self) -> str:
        return f"{self.name}@{self.revision}"

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Translate the errors of a call, and see to it that the call ends."""
        import httpx2

        _end_waiting()
        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, RuntimeError, ValueError, KeyError, TypeError) as fault:
            error = _translate(fault, what, signed=bool(self._token))
            clean = self._token is None or self._token not in f"{fault!r}"
            raise type(error)(self._without_token(error.message)) from (fault if clean else None)

    def _without_token(self, text: str) -> str:
        text = text.replace(self._token, "(token)") if self._token else text
        return re.sub(r"Bearer \S+|\bhf_\w{20,}", "(token)", text)


def _translate(fault: Exception, what: str, *, signed: bool) -> HubError | StorageError:
    """Return our error for a foreign one: who is at fault, and would trying again help?"""
    import httpx2
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    foreign: Mapping[type[HubError], tuple[type[Exception], ...]] = {
        HubDenied: (PermissionError, LocalTokenNotFoundError),  # hf_xet's refusals have no errno
        HubRejected: (OfflineModeIsEnabled, FileNotFoundError, ValueError, KeyError, TypeError),
    }
    if isinstance(fault, RepositoryNotFoundError) and not signed:
        return HubDenied(f"{what}: there is no such public repository, and no token for a private one; set HF_TOKEN")
    if isinstance(fault, HfHubHTTPError | httpx2.HTTPStatusError):
        said = getattr(fault, "server_message", None) or fault.response.reason_phrase
        return _by_status(what, fault.response, said)
    if isinstance(fault, RuntimeError) and isinstance(fault.__cause__, Exception):
        return _translate(fault.__cause__, what, signed=signed)  # how the client reports one LFS upload of many
    if found := re.search(r"HTTP status \w+ error \((\d{3})", str(fault)):
        return _error(_kind(int(found[1])), what, fault)  # hf_xet says it in words only
    if isinstance(fault, OSError) and fault.errno is not None and not isinstance(fault, ConnectionError | TimeoutError):
        return StorageError(f"{what}: {fault}")
    return _error(
        next((kind for kind, kinds in foreign.items() if isinstance(fault, kinds)), HubUnavailable), what, fault
    )


def _by_status(what: str, response: httpx2.Response, said: str) -> HubError:
    status = response.status_code
    kind = _kind(status)
    wait = _seconds(response.headers) if kind is RateLimited else None
    answer = f"the Hub answered {status}: {' '.join(said.split())}"
    return _error(kind, what, f"{answer}; it asks to wait {wait} s" if wait else answer)


def _kind(status: int) -> type[HubError]:
    return _KINDS.get(status, HubUnavailable if status >= 500 else HubRejected)


def _error(kind: type[HubError], what: str, why: object) -> HubError:
    said = str(why) or type(why).__name__
    return kind("; ".join(part for part in (f"{what}: {said}", _ADVICE.get(kind)) if part))


def _seconds(headers: Mapping[str, str]) -> int | None:
    """Return how long the Hub asks to wait, as ``Retry-After: 30`` or ``RateLimit: "api";r=0;t=30``."""
    found = re.search(r"\bt=(\d+)", headers.get("ratelimit", "")) or re.match(r"(\d+)$", headers.get("retry-after", ""))
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class _Bounded:
    """The caller's own way to make a client, with an end to every wait where it sets none."""

    factory: Callable[[], httpx2.Client]

    def __call__(self) -> httpx2.Client:
        return _bounded(self.factory())


def _bounded(client: httpx2.Client) -> httpx2.Client:
    import httpx2

    if client.timeout == httpx2.Timeout(None):
        client.timeout = httpx2.Timeout(ANSWER_S, connect=CONNECT_S, pool=CONNECT_S)
    return client


def _end_waiting() -> None:
    """Give the client of huggingface_hub timeouts, for all that it does in this process.

    `set_client_factory` would close the client under other threads, and there is no way to ask which factory is set.
    """
    from huggingface_hub.utils import _http

    with _http._CLIENT_LOCK:  # noqa: SLF001  # see above
        factory = _http._GLOBAL_CLIENT_FACTORY  # noqa: SLF001
        if not isinstance(factory, _Bounded):
            _http._GLOBAL_CLIENT_FACTORY = _Bounded(factory)  # noqa: SLF001
    _bounded(_http.get_session())


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
