"""The demo: from four real ranks to a repository and back, by the flow, as a person sees it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hfdcp_core import wire
from hfdcp_core.errors import PlanError
from hfdcp_core.testing.checkpoints import compare_with_truth, read_truth
from hfdcp_flows.demo import MARK, empty_folder

DEMO = [sys.executable, "-m", "hfdcp_flows.start", "demo"]


def test_the_demo_publishes_by_the_flow_and_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = subprocess.run(
        [*DEMO, "--folder", folder, "--json"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["flow_run"] == "publish-acme/sharded-llama"
    assert document["receipt"]["created"] is True
    assert compare_with_truth(read_truth(folder), Path(document["downloaded"])) == ()
    here, there = (
        wire.load_manifest(path.read_bytes())
        for path in (Path(document["manifest"]), Path(document["downloaded"]) / "hfdcp-manifest.json")
    )
    assert there.says_the_same(here)


def test_the_demo_can_leave_its_hub_running_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [*DEMO, "--folder", str(tmp_path), "--direct", "--keep"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    lines = iter(process.stdout.readline, "")
    told = next((line for line in lines if line.startswith("The Hub serves until Ctrl-C: export ")), None)
    assert told, process.communicate()
    where = dict(word.split("=", 1) for word in told.split()[-2:])
    script = "from huggingface_hub import HfApi; print(HfApi().list_repo_files('acme/sharded-llama'))"
    seen = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **where}, capture_output=True, text=True, check=True
    )
    assert "hfdcp-manifest.json" in seen.stdout
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_folder_that_is_not_the_demos_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PlanError, match="is not empty and no earlier demo made it"):
        empty_folder(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_of_an_earlier_demo_is_emptied(tmp_path: Path) -> None:
    (empty_folder(tmp_path / "demo") / "output").mkdir()
    again = empty_folder(tmp_path / "demo")
    assert [path.name for path in again.iterdir()] == [MARK]
