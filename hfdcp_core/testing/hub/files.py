"""Reading a repository: trees, facts about paths, commits, and the files themselves."""

from __future__ import annotations

import hashlib
import urllib.parse
from collections.abc import Mapping

from hfdcp_core.testing.hub import xet
from hfdcp_core.testing.hub.http import Refused, Request, Response, answer, send_file
from hfdcp_core.testing.hub.repos import lfs_item
from hfdcp_core.testing.hub.state import State
from hfdcp_core.testing.hub.values import Commit, HubFile, Repo

MOST_PATHS = 1000


def tree(state: State, request: Request, name: str, revision: str, folder: str = "") -> Response:
    """List a folder, page by page."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    commit = state.resolve(repo, revision)
    prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
    items = _items(repo, commit, prefix, request)
    if prefix and not items:
        raise Refused(404, f'{folder} does not exist on "{revision}"', code="EntryNotFound")
    start = int(request.param("cursor", "0"))
    stop = start + min(int(request.param("limit", str(state.settings.page))), state.settings.page)
    headers = {"X-Repo-Commit": commit.id}
    if stop < len(items):
        query = {key: values[0] for key, values in request.query.items()} | {"cursor": str(stop)}
        headers["Link"] = f'<{request.base}{request.path}?{urllib.parse.urlencode(query)}>; rel="next"'
    return answer(items[start:stop], headers=headers)


def _items(repo: Repo, commit: Commit, prefix: str, request: Request) -> list[dict[str, object]]:
    recursive, expand = request.switch("recursive"), request.switch("expand")
    found: dict[str, dict[str, object]] = {}
    for path, file in commit.tree.items():
        inner = path[len(prefix) :].split("/")
        if not path.startswith(prefix):
            continue
        parents = [prefix + "/".join(inner[:depth]) for depth in range(1, len(inner))]
        for parent in parents if recursive else parents[:1]:
            found[parent] = _folder(parent)
        if recursive or not parents:
            found[path] = _file(repo, path, file, expand=expand)
    return [found[path] for path in sorted(found)]


def _folder(path: str) -> dict[str, object]:
    return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}


def _file(repo: Repo, path: str, file: HubFile, *, expand: bool) -> dict[str, object]:
    item: dict[str, object] = {"type": "file", "oid": file.oid, "size": file.size, "path": path}
    if file.sha256:
        item["lfs"] = lfs_item(file.sha256, file.size, "oid")
    if file.xet:
        item["xetHash"] = file.xet
    if expand:
        commit = repo.commits[file.commit]
        item["lastCommit"] = {"id": commit.id, "title": commit.title, "date": commit.date}
        item["securityFileStatus"] = {"status": "unscanned", "avScan": None, "pickleImportScan": None}
    return item


def paths_info(state: State, request: Request, name: str, revision: str) -> Response:
    """Describe the paths that are there; the others are left out."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    paths, expand = request.form()
    if len(paths) > MOST_PATHS:
        raise Refused(413, "too many parameters")
    there = state.resolve(repo, revision).tree
    known = [path for path in (path.strip("/") for path in paths) if _exists(there, path)]
    return answer([_file(repo, path, there[path], expand=expand) if path in there else _folder(path) for path in known])


def _exists(there: Mapping[str, HubFile], path: str) -> bool:
    return path in there or any(other.startswith(f"{path}/") for other in there)


def commits(state: State, request: Request, name: str, revision: str) -> Response:
    """List the commits, newest first."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    listed, commit = [], repo.commits.get(state.resolve(repo, revision).id)
    while commit:
        authors = [{"user": commit.author}]
        row = {"id": commit.id, "title": commit.title, "message": commit.message, "date": commit.date}
        listed.append({**row, "authors": authors})
        commit = repo.commits.get(commit.parent or "")
    return answer(listed)


def resolve(state: State, request: Request, name: str, revision: str, path: str) -> Response:
    """Send a regular file; send the client to another origin for any other."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    commit = state.resolve(repo, revision)
    headers = {"X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
    file = commit.tree.get(path)
    if file is None:
        raise Refused(404, "Entry not found", code="EntryNotFound", headers=headers)
    if file.sha256 is None:
        return send_file(request, state.git_path(file.oid), file.oid, headers)
    etag = f'"{file.sha256}"'
    headers |= {"ETag": etag, "X-Linked-ETag": etag, "X-Linked-Size": str(file.size)}
    if file.xet:
        route = f"{request.base}/api/models/{name}/xet-read-token/{commit.id}"
        headers |= {"X-Xet-Hash": file.xet, "X-Xet-Refresh-Route": route, "Link": f'<{route}>; rel="xet-auth"'}
    return Response(302, headers=headers | {"Location": f"{request.away}/_cdn/{file.sha256}?signature=x"})


def cdn(state: State, request: Request, sha256: str) -> Response:
    """Send an LFS object, or a Xet file put together again. Whoever has the address may read it."""
    path = state.lfs_path(sha256)
    if not path.exists():
        if sha256 not in state.xet_by_sha256:
            raise Refused(404, "NoSuchKey")
        xet.materialize(state, sha256, request.base)
    return send_file(request, path, sha256)
