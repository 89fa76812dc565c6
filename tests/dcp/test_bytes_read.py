"""What ranks read from a Google Cloud Storage and from a Hub, both on loopback: their own bytes and hardly more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi

from hfdcp_core import HuggingFaceStorageReader
from hfdcp_core.testing.dropin import run_ranks
from hfdcp_core.testing.gcs_server import BUCKET, GcsServer
from hfdcp_core.testing.hub import Hub
from hfdcp_core.testing.in_memory import Piece, weights_file

# huggingface_hub 2.4 still sends LFS parts by an argument that httpx2 deprecates; it is theirs to change.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

WORLD, SHARE = 4, 1024 * 512 * 4 // 4
"""Bytes of a tensor that each rank holds: those of `measured_ranks`."""
CASES = 4

Seen = Mapping[str, list[dict[str, Any]]]
Storage = tuple[Seen, int]
"""What the ranks report, and how many bytes of files the server sent beside heads of files."""


def files() -> dict[str, bytes]:
    """Return both checkpoints by path: one of four ranks, cut by rows and by columns, and a whole one."""
    values = np.arange(1024 * 512, dtype=np.float32).reshape(1024, 512)
    found = {}
    for rank in range(WORLD):
        rows, columns = slice(rank * 256, (rank + 1) * 256), slice(rank * 128, (rank + 1) * 128)
        pieces = {
            "rows": Piece.of(values[rows], at=[rows.start, 0]),
            "columns": Piece.of(np.ascontiguousarray(values[:, columns]) + 1, at=[0, columns.start]),
        }
        found[f"sharded/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"] = weights_file(pieces)
    found["whole/model.safetensors"] = weights_file({"rows": Piece.of(values), "columns": Piece.of(values + 1)})
    return found


def measured(url: str, options: Mapping[str, object], folder: Path, sent: Callable[[], int]) -> Storage:
    """Let ranks read, and take off what the heads of the files cost, which a reader is asked for alone."""
    before = sent()
    for part in ("sharded", "whole"):
        HuggingFaceStorageReader(f"{url}/{part}", storage_options=options).read_metadata()
    heads = sent() - before
    script = Path(__file__).with_name("measured_ranks.py")
    run_ranks(script, WORLD, url, json.dumps(dict(options)), str(folder / "report.json"))
    seen: Seen = json.loads((folder / "report.json").read_text())
    return seen, sent() - before - heads - WORLD * CASES // 2 * heads


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    with GcsServer() as server:
        for path, data in files().items():
            server.put(f"run/{path}", data)
        folder = tmp_path_factory.mktemp("gcs")

        def sent() -> int:
            return sum(each.sent for each in server.asked("GET", "alt=media"))

        yield measured(f"gs://{BUCKET}/run", server.options, folder, sent)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    folder = tmp_path_factory.mktemp("hub")
    with Hub(folder / "hub") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        api = HfApi(endpoint=server.url, token=server.token)
        api.create_repo("acme/model", private=True)
        for path, data in files().items():
            api.upload_file(repo_id="acme/model", path_in_repo=path, path_or_fileobj=data)
        revision = api.model_info("acme/model").sha

        def sent() -> int:
            return sum(call.sent_bytes for call in server.calls("/_cdn/", "GET"))

        options = {"endpoint": server.url, "token": server.token, "skip_instance_cache": True}
        yield measured(f"hf://acme/model@{revision}", options, folder, sent)


@pytest.fixture(params=["gcs", "hub"])
def storage(request: pytest.FixtureRequest) -> Storage:
    found: Storage = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("case", ["rows as stored", "columns as stored", "rows of a whole file"])
def test_a_rank_reads_hardly_more_than_its_share(case: str, storage: Storage) -> None:
    seen, _ = storage
    for report in seen[case]:
        assert report["right"]
        assert report["tensor_bytes"] == SHARE
        assert report["read_bytes"] <= 1.05 * SHARE
        assert report["ranges"] == 1


def test_columns_of_a_whole_file_are_few_requests_with_what_lies_between(storage: Storage) -> None:
    """Every row of the file holds 512 bytes of a rank: a request for each would be a thousand round trips."""
    seen, _ = storage
    for report in seen["columns of a whole file"]:
        assert report["right"]
        assert report["ranges"] <= 2
        assert report["read_bytes"] <= WORLD * SHARE


def test_what_is_reported_is_what_the_server_sent(storage: Storage) -> None:
    seen, sent = storage
    assert sum(report["read_bytes"] for reports in seen.values() for report in reports) == sent
