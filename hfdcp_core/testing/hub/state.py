"""The Hub's memory: settings, repositories, blobs on disk; and who may read or write."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hfdcp_core.testing.hub import shards
from hfdcp_core.testing.hub.http import Refused, Request
from hfdcp_core.testing.hub.values import REFS_HEADS, REFS_TAGS, Commit, Discussion, HubFile, Repo, git_blob


@dataclass(frozen=True, slots=True)
class Settings:
    """How the Hub behaves; small limits let a small test reach them."""

    user: str = "tester"
    """Name behind the token."""
    organizations: tuple[str, ...] = ("acme",)
    """Namespaces, besides the user's own, that the token may write to."""
    token: str = "hf_test"
    """The one token that is accepted. It protects nothing."""
    multipart_bytes: int = 20_000_000
    """LFS objects above this size are uploaded in parts."""
    part_bytes: int = 8_000_000
    """Size of such a part."""
    regular_bytes: int = 10 << 20
    """Files above this size are kept as LFS or Xet, whatever ``.gitattributes`` says."""
    payload_bytes: int = 1_000_000_000
    """Largest body of a commit."""
    page: int = 1000
    """Entries in one page of a listing."""
    xet: bool = True
    """Whether there is Xet storage."""
    verify_xet: bool = False
    """Whether a commit reads every Xet file back and hashes it. The Hub itself does not."""


def now() -> str:
    """Return the time as the Hub writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())


class State:
    """Everything the Hub knows. Blobs, shards and repositories lie under ``root`` and are found again there."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        """Held by whoever changes repositories."""
        self._root = root
        for folder in ("lfs", "git", "tmp", "xorb", "shard"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        self.repos: dict[str, Repo] = self._load_repos()
        self.xet_files: dict[str, shards.XetFile] = {}
        """Xet files by their hash."""
        self.xet_by_sha256: dict[str, str] = {}
        """Xet hash by the digest that the client stated."""
        for shard in (root / "shard").iterdir():
            self.learn(shards.parse_shard(shard.read_bytes()))

    def lfs_path(self, sha256: str) -> Path:
        """Where an LFS object lies."""
        return self._root / "lfs" / sha256

    def git_path(self, oid: str) -> Path:
        """Where a regular file's content lies."""
        return self._root / "git" / oid

    def xorb_path(self, xorb: str) -> Path:
        """Where a xorb lies."""
        return self._root / "xorb" / xorb

    def spool(self) -> Path:
        """A new name for a file that is still being received."""
        return self._root / "tmp" / uuid.uuid4().hex

    def put_git(self, data: bytes) -> HubFile:
        """Keep the content of a regular file."""
        self._replace(self.git_path(git_blob(data)), data)
        return HubFile(len(data), git_blob(data))

    def put_shard(self, raw: bytes) -> None:
        """Keep a shard, and the files that it describes."""
        files = shards.parse_shard(raw)
        missing = {term.xorb for file in files for term in file.terms if not self.xorb_path(term.xorb).exists()}
        if missing:
            raise Refused(400, f"the shard refers to xorbs that are not here: {sorted(missing)}")
        self._replace(self._root / "shard" / hashlib.sha256(raw).hexdigest(), raw)
        with self.lock:
            self.learn(files)

    def learn(self, files: Iterable[shards.XetFile]) -> None:
        """Make Xet files known."""
        for file in files:
            self.xet_files[file.hash] = file
            if file.sha256:
                self.xet_by_sha256[file.sha256] = file.hash

    def find(self, name: str) -> Repo:
        """Return a repository."""
        repo = self.repos.get(name)
        if repo is None:
            raise Refused(404, "Repository not found", code="RepoNotFound")
        return repo

    def resolve(self, repo: Repo, revision: str) -> Commit:
        """Return the commit that a branch, tag, ref or (abbreviated) commit id names."""
        for ref in (revision, REFS_HEADS + revision, REFS_TAGS + revision):
            if ref in repo.refs:
                return repo.commits[repo.refs[ref]]
        if re.fullmatch(r"[0-9a-f]{5,40}", revision):
            found = [commit for name, commit in repo.commits.items() if name.startswith(revision)]
            if len(found) == 1:
                return found[0]
        raise Refused(404, f"Invalid rev id: {revision}", code="RevisionNotFound")

    def add_commit(
        self,
        repo: Repo,
        parent: Commit | None,
        tree: Mapping[str, HubFile],
        *,
        title: str,
        message: str = "",
    ) -> Commit:
        """Keep a commit; no ref points to it yet."""
        before = parent.tree if parent else {}
        name = hashlib.sha1(uuid.uuid4().bytes).hexdigest()
        stamped = {
            path: file if before.get(path) == file else dataclasses.replace(file, commit=name)
            for path, file in tree.items()
        }
        parent_id = parent.id if parent else None
        commit = Commit(name, parent_id, stamped, title, message, now(), self.settings.user)
        repo.commits[name] = commit
        return commit

    def authorize(self, request: Request, *, read: Repo | None = None, write: Repo | None = None) -> None:
        """Refuse a wrong token always, and no token where one is needed; neither argument: a token is needed."""
        sent = request.header("authorization")
        if sent and sent != f"Bearer {self.settings.token}":
            raise Refused(401, "Invalid credentials in Authorization header")
        if write is not None:
            self.authorize(request)
            self.check_namespace(write.id)
        elif read is not None and read.private and not sent:
            raise Refused(401, "Repository not found", code="RepoNotFound")
        elif read is None and not sent:
            raise Refused(401, "Invalid username or password.")

    def check_namespace(self, name: str) -> None:
        """Refuse a repository in somebody else's namespace."""
        namespace = name.partition("/")[0]
        if namespace not in (self.settings.user, *self.settings.organizations):
            raise Refused(403, f'You don\'t have the rights to write under the namespace "{namespace}"')

    def save(self) -> None:
        """Write the repositories down, so that a Hub on the same folder finds them again."""
        with self.lock:
            rows = [{**dataclasses.asdict(repo), "pending": {}} for repo in self.repos.values()]
        self._replace(self._root / "repos.json", json.dumps(rows).encode())

    def _replace(self, path: Path, data: bytes) -> None:
        spool = self.spool()
        spool.write_bytes(data)
        spool.replace(path)

    def _load_repos(self) -> dict[str, Repo]:
        path = self._root / "repos.json"
        repos = (_repo(row) for row in json.loads(path.read_bytes())) if path.exists() else ()
        return {repo.id: repo for repo in repos}


def _repo(row: dict[str, dict[str, dict[str, object]]]) -> Repo:
    """Rebuild a repository from what `State.save` wrote."""
    values: dict[str, object] = dict(row)
    values["commits"] = {name: _commit(commit) for name, commit in row["commits"].items()}
    values["discussions"] = {int(number): Discussion(**item) for number, item in row["discussions"].items()}  # type: ignore[arg-type]  # as saved
    return Repo(**values)  # type: ignore[arg-type]  # as saved


def _commit(row: dict[str, object]) -> Commit:
    tree = row["tree"]
    assert isinstance(tree, dict)
    return Commit(**{**row, "tree": {path: HubFile(**file) for path, file in tree.items()}})  # type: ignore[arg-type]  # as saved
