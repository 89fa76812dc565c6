"""Xet storage: tokens, and a content-addressed store (CAS) that is good enough for hf_xet.

It knows neither global deduplication nor xorb grants (hf_xet falls back on 404), and it does not recompute hashes.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hfdcp_core.testing.hub.http import Refused, Request, Response, answer, receive, send_file
from hfdcp_core.testing.hub.shards import Chunk, Term, xorb_chunks
from hfdcp_core.testing.hub.state import State

TOKEN_SECONDS = 900


def token(state: State, request: Request, name: str, kind: str, revision: str) -> Response:  # noqa: ARG001  # as routed
    """Hand out a token for the CAS; hf_xet reads the body, huggingface_hub the headers."""
    repo = state.find(name)
    state.authorize(request, read=repo)
    if kind == "write" and "create_pr" not in request.query:
        state.authorize(request, write=repo)
    if not state.settings.xet:
        raise Refused(404, "Xet is not enabled")
    value, until = f"xet_{uuid.uuid4().hex}", int(time.time()) + TOKEN_SECONDS
    headers = {
        "X-Xet-Cas-Url": request.base,
        "X-Xet-Access-Token": value,
        "X-Xet-Token-Expiration": str(until),
    }
    return answer({"accessToken": value, "exp": until, "casUrl": request.base}, headers=headers)


def put_xorb(state: State, request: Request, xorb: str) -> Response:
    """Take a xorb."""
    path, spool = state.xorb_path(xorb), state.spool()
    receive(request, spool)
    new = not path.exists()
    spool.replace(path)
    return answer({"was_inserted": new})


def get_xorb(state: State, request: Request, xorb: str) -> Response:
    """Send a range of a xorb."""
    if not state.xorb_path(xorb).exists():
        raise Refused(404, "no such xorb")
    return send_file(request, state.xorb_path(xorb), xorb)


def put_shard(state: State, request: Request, version: str) -> Response:
    """Take a shard: from now on its files exist."""
    state.put_shard(request.body())
    if version == "1":
        return answer({"result": 1})
    events = ({"type": "committing", "stage": "syncing"}, {"type": "result", "result": 1})
    lines = "".join(f"{json.dumps(event)}\n" for event in events)
    return Response(body=lines.encode(), content_type="application/x-ndjson")


def telemetry(_state: State, _request: Request) -> Response:
    """Take what hf_xet tells, and forget it."""
    return answer({})


@dataclass(frozen=True, slots=True)
class _Cut:
    """A term cut down to the chunks that touch a range of the file."""

    term: Term
    start: int
    """First chunk."""
    stop: int
    """Behind the last chunk."""
    size: int
    """Bytes, unpacked."""
    skipped: int
    """Bytes of its first chunk that lie before the range."""


def reconstruct(state: State, request: Request, version: str, file_hash: str) -> Response:
    """Say which chunks of which xorbs make a range of a file, and where to fetch them."""
    file = state.xet_files.get(file_hash)
    if file is None:
        raise Refused(404, "no such file")
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.header("Range"))
    start, stop = (int(asked[1]), min(int(asked[2]) + 1, file.size)) if asked else (0, file.size)
    if start >= file.size > 0:
        raise Refused(416, "the range begins behind the end of the file")
    layouts = {term.xorb: xorb_chunks(state.xorb_path(term.xorb)) for term in file.terms}
    cuts = list(_cuts(file.terms, layouts, start, stop))
    described = [
        {"hash": cut.term.xorb, "unpacked_length": cut.size, "range": {"start": cut.start, "end": cut.stop}}
        for cut in cuts
    ]
    fetches = {
        xorb: [_fetch(request, xorb, layouts[xorb], chunks, version=version) for chunks in ranges]
        for xorb, ranges in _merged(cuts).items()
    }
    key = "xorbs" if version == "2" else "fetch_info"
    return answer({"offset_into_first_range": cuts[0].skipped if cuts else 0, "terms": described, key: fetches})


def _cuts(terms: Iterable[Term], layouts: dict[str, list[Chunk]], start: int, stop: int) -> Iterable[_Cut]:
    """Cut each term to the chunks that touch the bytes ``[start, stop)`` of the file."""
    position = 0
    for term in terms:
        touched: list[int] = []
        first = position
        for number in range(term.start, term.stop):
            size = layouts[term.xorb][number].size
            if position < stop and position + size > start:
                first = position if not touched else first
                touched.append(number)
            position += size
        if touched:
            size = sum(layouts[term.xorb][number].size for number in touched)
            yield _Cut(term, touched[0], touched[-1] + 1, size, max(0, start - first))


def _merged(cuts: Iterable[_Cut]) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges of chunks that are needed of each xorb, joined where they meet."""
    needed: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for cut in sorted(cuts, key=lambda cut: cut.start):
        ranges = needed[cut.term.xorb]
        if ranges and cut.start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], cut.stop))
        else:
            ranges.append((cut.start, cut.stop))
    return needed


def _fetch(
    request: Request, xorb: str, layout: list[Chunk], chunks: tuple[int, int], *, version: str
) -> dict[str, object]:
    url = f"{request.base}/_xet/get/{xorb}"
    start, stop = chunks
    numbers = {"start": start, "end": stop}
    extent = {"start": layout[start].start, "end": layout[stop - 1].stop - 1}
    if version == "2":
        return {"url": url, "ranges": [{"chunks": numbers, "bytes": extent}]}
    return {"url": url, "range": numbers, "url_range": extent}


def materialize(state: State, sha256: str, base: str) -> None:
    """Put a Xet file together with hf_xet itself, through this Hub's own CAS, and keep it as an LFS object.

    Raises:
        Refused: The bytes do not have the digest that the client stated.
    """
    import hf_xet

    if state.lfs_path(sha256).exists():
        return
    file = state.xet_files[state.xet_by_sha256[sha256]]
    group = hf_xet.XetSession().new_download_stream_group(
        endpoint=base, token=uuid.uuid4().hex, token_expiry_unix_secs=int(time.time()) + TOKEN_SECONDS
    )
    digest, spool = hashlib.sha256(), state.spool()
    with spool.open("wb") as output:
        for block in group.download_stream(hf_xet.XetFileInfo(file.hash, file.size)):
            digest.update(block)
            output.write(block)
    if digest.hexdigest() != sha256:
        raise Refused(400, f"Xet file {file.hash} has sha256 {digest.hexdigest()}, its shard states {sha256}")
    spool.replace(state.lfs_path(sha256))
