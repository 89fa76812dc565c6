"""Discussions and pull requests, as far as a push needs them."""

from __future__ import annotations

from hfdcp_core.testing.hub.http import Refused, Request, Response, answer
from hfdcp_core.testing.hub.state import State, now
from hfdcp_core.testing.hub.values import REFS_HEADS, REFS_PR, Discussion, Repo


def show(state: State, request: Request, name: str, number: str) -> Response:
    """Describe one discussion."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    return answer(_item(state, repo, int(number)))


def index(state: State, request: Request, name: str) -> Response:
    """List the discussions."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    items = [_item(state, repo, number) for number in repo.discussions]
    return answer({"discussions": items, "count": len(items), "start": 0})


def _get(repo: Repo, number: int) -> Discussion:
    if number not in repo.discussions:
        raise Refused(404, "Discussion not found", code="EntryNotFound")
    return repo.discussions[number]


def _item(state: State, repo: Repo, number: int) -> dict[str, object]:
    discussion = _get(repo, number)
    return {
        "num": number,
        "title": discussion.title,
        "status": discussion.status,
        "author": {"name": state.settings.user},
        "createdAt": discussion.created,
        "repo": {"name": repo.id, "type": "model"},
        "isPullRequest": discussion.pull_request,
        "changes": {"base": REFS_HEADS + discussion.base, "mergeCommitId": discussion.merged},
        "filesWithConflicts": [],
        "events": [],
        "diff": "",
    }


def create(state: State, request: Request, name: str) -> Response:
    """Open a discussion, or a draft of a pull request on main."""
    repo = state.find(name)
    state.authorize(request)
    body = request.json()
    pull = body.flag("pullRequest")
    with state.lock:
        number = len(repo.discussions) + 1
        status = "draft" if pull else "open"
        repo.discussions[number] = Discussion(body.text("title"), status, pull_request=pull, base="main", created=now())
        if pull:
            repo.refs[f"{REFS_PR}{number}"] = repo.refs[f"{REFS_HEADS}main"]
        state.save()
    return answer({"num": number, "url": f"{request.base}/{name}/discussions/{number}"})


def change_status(state: State, request: Request, name: str, number: str) -> Response:
    """Open or close."""
    repo = state.find(name)
    state.authorize(request, write=repo)
    status = request.json().text("status")
    with state.lock:
        _get(repo, int(number)).status = status
        state.save()
    event = {"id": "0" * 12, "type": "status-change", "createdAt": now(), "author": {"name": state.settings.user}}
    return answer({"newStatus": {**event, "data": {"status": status}}})


def merge(state: State, request: Request, name: str, number: str) -> Response:
    """Put the tree of a pull request over that of its base. Conflicts are not looked for."""
    repo = state.find(name)
    state.authorize(request, write=repo)
    with state.lock:
        discussion = _get(repo, int(number))
        branch = REFS_HEADS + discussion.base
        base, proposed = state.resolve(repo, branch), state.resolve(repo, f"{REFS_PR}{number}")
        made = state.add_commit(repo, base, {**base.tree, **proposed.tree}, title=discussion.title)
        repo.refs[branch] = discussion.merged = made.id
        discussion.status = "merged"
        state.save()
    return answer({"ok": True})
