"""Plain pages for a person who opens the Hub in a browser: what repositories there are, and what lies in them."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from hfdcp_core.testing.hub.http import Request, Response
from hfdcp_core.testing.hub.state import State
from hfdcp_core.testing.hub.values import HubFile


def home(state: State, _request: Request) -> Response:
    """List the repositories."""
    with state.lock:
        rows = [
            (f'<a href="/{escape(repo.id)}">{escape(repo.id)}</a>', "private" if repo.private else "public")
            for repo in state.repos.values()
        ]
    return _page("Hub on loopback", ("repository", "visibility"), rows)


def repository(state: State, _request: Request, name: str, revision: str = "main") -> Response:
    """List the files of a revision. No token is asked for: nobody but this machine gets here."""
    repo = state.find(name)
    commit = state.resolve(repo, revision)
    title = f"{name}@{commit.id[:12]}: {commit.title}"
    return _page(title, ("file", "bytes", "sha256", "kept as"), (_row(*item) for item in sorted(commit.tree.items())))


def _row(path: str, file: HubFile) -> tuple[str, ...]:
    kept = "Xet" if file.xet else "LFS" if file.sha256 else "regular"
    return escape(path), f"{file.size:,}", file.sha256 or "", kept


def _page(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Response:
    table = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in [head, *rows])
    text = f"<!doctype html><title>{escape(title)}</title><h1>{escape(title)}</h1><table cellpadding=6>{table}</table>"
    return Response(body=text.encode(), content_type="text/html; charset=utf-8")
