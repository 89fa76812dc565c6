"""Writing to a repository: which way a file has to go, and the commit itself."""

from __future__ import annotations

import base64
import binascii
import fnmatch

from hfdcp_core.testing.hub import xet
from hfdcp_core.testing.hub.http import Body, Refused, Request, Response, answer, parse_json
from hfdcp_core.testing.hub.state import State, now
from hfdcp_core.testing.hub.values import (
    REFS_HEADS,
    REFS_PR,
    Commit,
    Discussion,
    HubFile,
    Repo,
    git_blob,
    pointer,
)

MOST_FILES = 256


def preupload(state: State, request: Request, name: str, revision: str) -> Response:
    """Say for each file whether its content goes into the commit or to large storage, and what is there now."""
    repo = state.find(name)
    _authorize(state, request, repo)
    body = request.json()
    files = body.parts("files")
    if len(files) > MOST_FILES:
        raise Refused(400, "too many files")
    commit = state.resolve(repo, revision)
    ignored = body.text("gitIgnore", _text(state, commit, ".gitignore")).splitlines()
    attributes = _text(state, commit, ".gitattributes")
    items = [_preupload(state, commit, file, attributes=attributes, ignored=ignored) for file in files]
    return answer({"files": items, "commitOid": commit.id})


def _preupload(state: State, commit: Commit, file: Body, *, attributes: str, ignored: list[str]) -> dict[str, object]:
    path = file.text("path")
    large = file.number("size") > state.settings.regular_bytes or is_lfs(attributes, path)
    item: dict[str, object] = {
        "path": path,
        "uploadMode": "lfs" if large else "regular",
        "shouldIgnore": any(fnmatch.fnmatch(path, pattern.strip()) for pattern in ignored if pattern.strip()),
    }
    if there := commit.tree.get(path):
        item["oid"] = there.sha256 or there.oid
    return item


def is_lfs(attributes: str, path: str) -> bool:
    """Whether ``.gitattributes`` sends a path to LFS; the last line that matches decides.

    >>> is_lfs("*.bin filter=lfs", "a/b.bin"), is_lfs("*.bin filter=lfs", "b.txt")
    (True, False)
    """
    lfs = False
    for pattern, *words in (line.split() for line in attributes.splitlines() if line.split()):
        if fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path.rsplit("/", 1)[-1], pattern):
            lfs = "filter=lfs" in words or (lfs and not {"-filter", "!filter"} & set(words))
    return lfs


def _text(state: State, commit: Commit, path: str) -> str:
    file = commit.tree.get(path)
    return state.git_path(file.oid).read_text() if file else ""


def _authorize(state: State, request: Request, repo: Repo) -> None:
    """Whoever has a token may open a pull request; to write one needs the namespace."""
    if "create_pr" in request.query:
        state.authorize(request)
    else:
        state.authorize(request, write=repo)


def commit(state: State, request: Request, name: str, revision: str) -> Response:
    """Apply the lines of a commit: all of them, or none."""
    repo = state.find(name)
    _authorize(state, request, repo)
    header, lines = _lines(state, request)
    with state.lock:
        base = _base(state, request, repo, revision=revision, parent=header.text("parentCommit", ""))
        tree = dict(base.tree)
        for key, value in lines:
            _apply(state, repo, tree, key=key, value=value)
        made = state.add_commit(repo, base, tree, title=header.text("summary"), message=header.text("description", ""))
        repo.objects |= {file.sha256: file.size for file in tree.values() if file.sha256}
        address = f"{request.base}/{name}"
        pull = _point(repo, request, made, revision=revision)
        state.save()
    result = {"success": True, "commitOid": made.id, "commitUrl": f"{address}/commit/{made.id}", "hookOutput": ""}
    return answer(result | ({"pullRequestUrl": f"{address}/discussions/{pull}"} if pull else {}))


def _lines(state: State, request: Request) -> tuple[Body, list[tuple[str, Body]]]:
    raw = request.body()
    if len(raw) > state.settings.payload_bytes:
        raise Refused(413, "payload too large")
    lines = [parse_json(line) for line in raw.splitlines() if line.strip()]
    if not lines or lines[0].text("key") != "header" or not lines[0].part("value").text("summary", ""):
        raise Refused(400, "the first line must be the header, with a summary")
    changes = [(line.text("key"), line.part("value")) for line in lines[1:]]
    if state.settings.verify_xet:
        for key, value in changes:
            if key == "lfsFile" and value.text("oid") in state.xet_by_sha256:
                xet.materialize(state, value.text("oid"), request.base)
    return lines[0].part("value"), changes


def _base(state: State, request: Request, repo: Repo, *, revision: str, parent: str) -> Commit:
    """Return the commit to build upon; refuse if it is not the one that the client knows."""
    base = state.resolve(repo, revision)
    if "create_pr" in request.query:
        return state.resolve(repo, parent) if parent else base
    if _ref(revision) not in repo.refs:
        raise Refused(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
    if parent and not base.id.startswith(parent):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    return base


def _ref(revision: str) -> str:
    return revision if revision.startswith(REFS_PR) else REFS_HEADS + revision


def _point(repo: Repo, request: Request, made: Commit, *, revision: str) -> int:
    """Let the branch point to the new commit, or open a pull request and return its number."""
    if "create_pr" not in request.query:
        repo.refs[_ref(revision)] = made.id
        return 0
    number = len(repo.discussions) + 1
    repo.discussions[number] = Discussion(made.title, "open", pull_request=True, base=revision, created=now())
    repo.refs[f"{REFS_PR}{number}"] = made.id
    return number


def _apply(state: State, repo: Repo, tree: dict[str, HubFile], *, key: str, value: Body) -> None:
    path = value.text("path")
    if path.startswith("/") or {"..", ".git"} & set(path.split("/")):
        raise Refused(400, f"invalid path {path}")
    if key == "file":
        tree[path] = _regular(state, path, value)
    elif key == "lfsFile":
        tree[path] = _large(state, repo, path, value)
    elif key in ("deletedFile", "deletedFolder"):
        gone = [path] if key == "deletedFile" else [name for name in tree if name.startswith(f"{path.rstrip('/')}/")]
        if not gone or gone[0] not in tree:
            raise Refused(404, "A file with this name doesn't exist", code="EntryNotFound")
        for name in gone:
            del tree[name]
    else:
        raise Refused(400, f"unknown key {key}")


def _regular(state: State, path: str, value: Body) -> HubFile:
    content = value.text("content")
    try:
        data = base64.b64decode(content) if value.text("encoding", "") == "base64" else content.encode()
    except binascii.Error as fault:
        raise Refused(400, f"{path}: invalid base64") from fault
    if len(data) > state.settings.regular_bytes:
        raise Refused(400, f"Your push was rejected because it contains files larger than 10 MiB: {path}")
    return state.put_git(data)


def _large(state: State, repo: Repo, path: str, value: Body) -> HubFile:
    """Return a file that is already stored; the commit names it by sha256 only, Xet's hash is joined here."""
    sha256 = value.text("oid")
    xet_hash = state.xet_by_sha256.get(sha256)
    size = repo.objects.get(sha256) or repo.pending.get(sha256)
    if size is None and xet_hash:
        size = state.xet_files[xet_hash].size
    if size is None:
        raise Refused(400, f"LFS pointer pointed to a file that does not exist: {path} {sha256}")
    if "size" in value and value.number("size") != size:
        raise Refused(400, f"the size of {path} is {size}, not {value.number('size')}")
    return HubFile(size, git_blob(pointer(sha256, size)), sha256, xet_hash)


def squash(state: State, request: Request, name: str, branch: str) -> Response:
    """Replace the history of a branch by one commit."""
    repo = state.find(name)
    state.authorize(request, write=repo)
    message = request.json().text("message", "squash")
    with state.lock:
        head = state.resolve(repo, REFS_HEADS + branch)
        repo.refs[REFS_HEADS + branch] = state.add_commit(repo, None, head.tree, title=message).id
        state.save()
    return answer({})
