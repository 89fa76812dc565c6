"""The drop-in classes on object storages: what torch's would put into a local folder named after the protocol."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter, consolidate_safetensors_files
from hfdcp_core.testing.dropin import blank, differences
from hfdcp_core.testing.gcs_server import BUCKET, GcsServer
from hfdcp_core.testing.servers import Server

STATE = {
    "w": torch.arange(5000.0).reshape(50, 100),
    "half": torch.arange(7).bfloat16(),
    "scalar": torch.tensor(2.5),
    "count": torch.arange(3),
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "one-pass": {"save_distributed": True, "enable_consolidation": True},
    "sharded": {"save_distributed": True},
}


@pytest.fixture(params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket's URL; the current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    server: GcsServer | Server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    return f"{request.param}://{server.bucket if isinstance(server, Server) else BUCKET}"


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_what_is_saved_to_a_bucket_is_there_and_nowhere_else(
    bucket: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    url = f"{bucket}/dropin/{len(options)}"
    for step in (0, 1):  # and again over the older one
        state = {**STATE, "w": STATE["w"] + step}
        dcp.save({**state}, storage_writer=HuggingFaceStorageWriter(url, **options), no_dist=True)
        found = blank(state)
        dcp.load(found, storage_reader=HuggingFaceStorageReader(url), no_dist=True)
        assert differences(found, state) == []
    assert list(tmp_path.iterdir()) == []


def test_shards_in_a_bucket_become_whole_there(bucket: str, tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(f"{bucket}/shards", save_distributed=True)
    dcp.save({**STATE}, storage_writer=writer, no_dist=True)
    consolidate_safetensors_files(f"{bucket}/shards", f"{bucket}/become-whole", {**dict.fromkeys(STATE, 1), "w": 2}, 2)
    found = blank(STATE)
    dcp.load(found, storage_reader=HuggingFaceStorageReader(f"{bucket}/become-whole"), no_dist=True)
    assert differences(found, STATE) == []
    assert list(tmp_path.iterdir()) == []
