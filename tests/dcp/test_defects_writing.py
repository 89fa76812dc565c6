"""Where torch's writer goes wrong: done right here, on one process, and what a death in the midst of it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter
from hfdcp_core.testing.dropin import blank, differences

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WAYS = {
    "whole": {},
    "one-pass": {"save_distributed": True, "enable_consolidation": True},
    "sharded": {"save_distributed": True},
}
EXTRA_MIB = 96
"""What saving may take beside the tensors; torch takes as much as the tensors once more, here 256 MiB."""

SAVING = """
import os, resource, sys, warnings
import torch, torch.distributed.checkpoint as dcp
from hfdcp_core import HuggingFaceStorageWriter
warnings.simplefilter("ignore")
options = {name: True for name in sys.argv[2:]}
def save(folder, state):
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, **options), no_dist=True)
save(sys.argv[1] + "-first", {"t": torch.zeros(4)})
state = {f"t{n}": torch.full((4096, 4096), float(n)) for n in range(4)}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
save(sys.argv[1], state)
print((peak() - before) >> 10)
"""


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_save_holds_no_second_copy_of_its_tensors(options: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVING, str(tmp_path / "out"), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert int(done.stdout) < EXTRA_MIB


@pytest.mark.parametrize("url", ["memory://no-sync/out", None], ids=["any storage", "a disk"])
def test_no_save_makes_the_whole_machine_write_its_caches(
    url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls ``os.sync`` once for each file where a stream has no descriptor."""
    called: list[None] = []
    monkeypatch.setattr(os, "sync", lambda: called.append(None))
    state = {"t": torch.arange(6.0)}
    target = url or str(tmp_path / "out")
    try:
        dcp.save({**state}, storage_writer=HuggingFaceStorageWriter(target, save_distributed=True), no_dist=True)
        found = blank(state)
        dcp.load(found, storage_reader=HuggingFaceStorageReader(target), no_dist=True)
    finally:
        if url:
            fsspec.filesystem("memory").rm("/no-sync", recursive=True)
    assert differences(found, state) == []
    assert called == []


# ---- what a death leaves --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    folder = tmp_path_factory.mktemp("dying")
    script = Path(__file__).with_name("dying_saves.py")
    subprocess.run([sys.executable, str(script), str(folder)], check=True, timeout=300)
    found: list[list[Any]] = json.loads((Path(folder) / "seen.json").read_text())
    return found


@pytest.mark.parametrize("way", ["consolidating", "whole", "one pass", "sharded"])
def test_a_death_at_any_change_of_a_name_leaves_one_save_whole_or_what_is_refused(
    way: str, deaths: list[list[Any]]
) -> None:
    """torch writes headers first, under final names: what a death leaves looks like a checkpoint, of zeros."""
    mine = [row[1:] for row in deaths if row[0] == way]
    assert [alive for _, alive, *_ in mine] == [False] * (len(mine) - 1) + [True]
    assert len(mine) > 3
    for survives, alive, before, step, found in mine:
        assert before == 1, f"what the death before {survives} left was in the way"
        assert found in ({step} if alive else {before, step, "refused"}), survives
    assert mine[0][-1] == 1, "the first change of a name comes when all is written, and harms nothing"
