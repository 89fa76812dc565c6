"""Accounts and repositories: who am I, create, delete, settings, what is in it; branches and tags."""

from __future__ import annotations

import hashlib
import re

import yaml

from hfdcp_core.testing.hub.http import Refused, Request, Response, answer
from hfdcp_core.testing.hub.state import State, now
from hfdcp_core.testing.hub.values import REFS_HEADS, REFS_PR, REFS_TAGS, HubFile, Repo, pointer

GITATTRIBUTES = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n"
    for pattern in ("*.bin", "*.safetensors", "*.pt", "*.gguf", "*.onnx", "*.parquet", "*.zip", "tokenizer.json")
)
"""What the Hub puts into a new repository."""


def whoami(state: State, request: Request) -> Response:
    """Say to whom the token belongs."""
    state.authorize(request)
    user = state.settings.user
    organizations = [{"type": "org", "name": name, "roleInOrg": "admin"} for name in state.settings.organizations]
    token = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
    return answer({"type": "user", "id": "0" * 24, "name": user, "orgs": organizations, "auth": token})


def create(state: State, request: Request) -> Response:
    """Create a repository with a first commit."""
    state.authorize(request)
    body = request.json()
    name = f"{body.text('organization', state.settings.user)}/{body.text('name')}"
    if body.text("type", "model") != "model":
        raise Refused(400, "this test Hub has models only")
    state.check_namespace(name)
    url = f"{request.base}/{name}"
    with state.lock:
        if name in state.repos:
            return answer({"error": "You already created this model repo", "url": url}, status=409)
        private = body.text("visibility", "public") == "private" or body.flag("private")
        repo = state.repos[name] = Repo(name, private=private, created=now())
        first = state.add_commit(
            repo, None, {".gitattributes": state.put_git(GITATTRIBUTES.encode())}, title="initial commit"
        )
        repo.refs[f"{REFS_HEADS}main"] = first.id
        state.save()
    return answer({"url": url, "name": name, "id": hashlib.md5(name.encode()).hexdigest()[:24]})


def delete(state: State, request: Request) -> Response:
    """Delete a repository."""
    state.authorize(request)
    body = request.json()
    with state.lock:
        repo = state.find(f"{body.text('organization', state.settings.user)}/{body.text('name')}")
        state.authorize(request, write=repo)
        del state.repos[repo.id]
        state.save()
    return answer({})


def validate_yaml(_state: State, request: Request) -> Response:
    """Check the front matter of a model card."""
    matter = re.match(r"^\s*---\s*\n(.*?)\n---\s*(\n|$)", request.json().text("content", ""), re.DOTALL)
    if matter is None:
        return answer({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    try:
        wrong = "" if isinstance(yaml.safe_load(matter[1]), dict) else "metadata must be a mapping"
    except yaml.YAMLError as fault:
        wrong = f"bad yaml: {fault}"
    errors = [{"message": wrong}] if wrong else []
    return answer({"errors": errors, "warnings": []}, status=400 if errors else 200)


def info(state: State, request: Request, name: str, revision: str = "main") -> Response:
    """Describe a repository at a revision."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    commit = state.resolve(repo, revision)
    siblings = [_sibling(path, file, "blobs" in request.query) for path, file in sorted(commit.tree.items())]
    return answer(
        {
            "_id": "0" * 24,
            "id": repo.id,
            "modelId": repo.id,
            "author": repo.id.split("/")[0],
            "sha": commit.id,
            "lastModified": commit.date,
            "createdAt": repo.created,
            "private": repo.private,
            "gated": repo.gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
            "usedStorage": sum(repo.objects.values()),
        }
    )


def _sibling(path: str, file: HubFile, blobs: bool) -> dict[str, object]:  # noqa: FBT001  # as the query has it
    if not blobs:
        return {"rfilename": path}
    kept = {"lfs": lfs_item(file.sha256, file.size, "sha256")} if file.sha256 else {}
    return {"rfilename": path, "size": file.size, "blobId": file.oid, **kept}


def lfs_item(sha256: str, size: int, key: str) -> dict[str, object]:
    """Describe an LFS object; the Hub names its digest differently from call to call."""
    return {key: sha256, "size": size, "pointerSize": len(pointer(sha256, size))}


def settings(state: State, request: Request, name: str) -> Response:
    """Change who may read a repository."""
    repo = state.find(name)
    state.authorize(request, write=repo)
    body = request.json()
    with state.lock:
        if "visibility" in body:
            repo.private = body.text("visibility") == "private"
        if "gated" in body:
            repo.gated = body.text("gated") if body.flag("gated") else False
        state.save()
    return answer({"private": repo.private, "gated": repo.gated})


def auth_check(state: State, request: Request, name: str, write: str | None = None) -> Response:
    """Say whether the token may read, or write."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    if write:
        state.authorize(request, write=repo)
    return answer({})


def refs(state: State, request: Request, name: str) -> Response:
    """List branches, tags and pull requests."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    listed = {
        "branches": _refs(repo, REFS_HEADS, REFS_HEADS),
        "converts": [],
        "tags": _refs(repo, REFS_TAGS, REFS_TAGS),
    }
    if "include_prs" in request.query:
        listed["pullRequests"] = _refs(repo, REFS_PR, "refs/")
    return answer(listed)


def _refs(repo: Repo, kind: str, cut: str) -> list[dict[str, str]]:
    return [
        {"name": ref.removeprefix(cut), "ref": ref, "targetCommit": commit}
        for ref, commit in repo.refs.items()
        if ref.startswith(kind)
    ]


def create_branch(state: State, request: Request, name: str, branch: str) -> Response:
    """Start a branch at a revision."""
    repo = state.find(name)
    state.authorize(request, write=repo)
    start = request.json().text("startingPoint", "main")
    return _new_ref(state, repo, REFS_HEADS + branch, start)


def create_tag(state: State, request: Request, name: str, revision: str) -> Response:
    """Name a revision."""
    repo = state.find(name)
    state.authorize(request, write=repo)
    return _new_ref(state, repo, REFS_TAGS + request.json().text("tag"), revision)


def _new_ref(state: State, repo: Repo, ref: str, revision: str) -> Response:
    with state.lock:
        if ref in repo.refs:
            raise Refused(409, "Reference already exists")
        repo.refs[ref] = state.resolve(repo, revision).id
        state.save()
    return answer({}, status=201)


def delete_branch(state: State, request: Request, name: str, branch: str) -> Response:
    """Delete a branch."""
    return _delete_ref(state, request, name, REFS_HEADS + branch)


def delete_tag(state: State, request: Request, name: str, tag: str) -> Response:
    """Delete a tag."""
    return _delete_ref(state, request, name, REFS_TAGS + tag)


def _delete_ref(state: State, request: Request, name: str, ref: str) -> Response:
    repo = state.find(name)
    state.authorize(request, write=repo)
    with state.lock:
        if repo.refs.pop(ref, None) is None:
            raise Refused(404, "Reference does not exist", code="RevisionNotFound")
        state.save()
    return answer({})
