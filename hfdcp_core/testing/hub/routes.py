"""Which address does what: the one table of the Hub's addresses."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

from hfdcp_core.testing.hub import commits, discussions, files, lfs, pages, repos, xet
from hfdcp_core.testing.hub.http import Refused, Request, Response
from hfdcp_core.testing.hub.state import State

Do = Callable[..., Response]
_PLACES = {
    "{repo}": r"([^/]+/[^/]+?)",
    "{one}": r"([^/]+)",
    "{path}": r"(.+)",
    "{hash}": r"([0-9a-f]{64})",
    "{number}": r"(\d+)",
}


@dataclass(frozen=True, slots=True)
class Route:
    """Requests that one function answers; it is given the parts of the address, unquoted."""

    method: str
    """HTTP method; HEAD goes where GET goes."""
    pattern: re.Pattern[str]
    """The whole path."""
    do: Do
    """What answers."""


def _route(method: str, template: str, do: Do) -> Route:
    for place, expression in _PLACES.items():
        template = template.replace(place, expression)
    return Route(method, re.compile(template), do)


class Router:
    """Answers a request by the table."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._routes = _table(lfs.Lfs(state))

    def __call__(self, request: Request) -> Response:
        """Find who answers, and let it."""
        method = "GET" if request.method == "HEAD" else request.method
        for route in self._routes:
            if route.method == method and (found := route.pattern.fullmatch(request.path)):
                parts = [urllib.parse.unquote(part) for part in found.groups() if part is not None]
                return route.do(self._state, request, *parts)
        raise Refused(404, f"no such route: {request.method} {request.path}")


def _table(large: lfs.Lfs) -> tuple[Route, ...]:
    repo = "/api/models/{repo}"
    return (
        _route("GET", "/api/whoami-v2", repos.whoami),
        _route("POST", "/api/repos/create", repos.create),
        _route("DELETE", "/api/repos/delete", repos.delete),
        _route("POST", "/api/validate-yaml", repos.validate_yaml),
        _route("GET", repo, repos.info),
        _route("GET", f"{repo}/revision/{{one}}", repos.info),
        _route("PUT", f"{repo}/settings", repos.settings),
        _route("GET", f"{repo}/auth-check(?:/(write))?", repos.auth_check),
        _route("GET", f"{repo}/refs", repos.refs),
        _route("POST", f"{repo}/branch/{{one}}", repos.create_branch),
        _route("DELETE", f"{repo}/branch/{{one}}", repos.delete_branch),
        _route("POST", f"{repo}/tag/{{one}}", repos.create_tag),
        _route("DELETE", f"{repo}/tag/{{one}}", repos.delete_tag),
        _route("GET", f"{repo}/tree/{{one}}(?:/(.+))?", files.tree),
        _route("POST", f"{repo}/paths-info/{{one}}", files.paths_info),
        _route("GET", f"{repo}/commits/{{one}}", files.commits),
        _route("POST", f"{repo}/preupload/{{one}}", commits.preupload),
        _route("POST", f"{repo}/commit/{{one}}", commits.commit),
        _route("POST", f"{repo}/super-squash/{{one}}", commits.squash),
        _route("GET", f"{repo}/discussions", discussions.index),
        _route("POST", f"{repo}/discussions", discussions.create),
        _route("GET", f"{repo}/discussions/{{number}}", discussions.show),
        _route("POST", f"{repo}/discussions/{{number}}/status", discussions.change_status),
        _route("POST", f"{repo}/discussions/{{number}}/merge", discussions.merge),
        _route("GET", f"{repo}/xet-(read|write)-token/{{path}}", xet.token),
        _route("POST", "/{repo}.git/info/lfs/objects/batch", large.batch),
        _route("POST", "/{repo}.git/info/lfs/verify", large.verify),
        _route("PUT", "/_lfs/put/{repo}/{hash}/{number}", large.put),
        _route("PUT", "/_lfs/part/{one}/{number}", large.part),
        _route("POST", "/_lfs/complete/{one}", large.complete),
        _route("GET", "/{repo}/resolve/{one}/{path}", files.resolve),
        _route("GET", "/_cdn/{hash}", files.cdn),
        _route("POST", "/v1/xorbs/default/{hash}", xet.put_xorb),
        _route("GET", "/v1/xorbs/default/{hash}", xet.get_xorb),
        _route("GET", "/_xet/get/{hash}", xet.get_xorb),
        _route("POST", "/v([12])/shards", xet.put_shard),
        _route("GET", "/v([12])/reconstructions/{hash}", xet.reconstruct),
        _route("POST", "/v1/telemetry", xet.telemetry),
        _route("GET", "/", pages.home),
        _route("GET", "/{repo}", pages.repository),
        _route("GET", "/{repo}/(?:commit|tree)/{one}", pages.repository),
    )
