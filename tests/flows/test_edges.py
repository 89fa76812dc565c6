"""The edges of the command line: streams that cannot take an answer, and names that would steer a terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

NAMES = ("w\x1b[2J", "caf\u00e9", "\u202eright-to-left", "n" * 500)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose names are odd."""
    folder = tmp_path_factory.mktemp("odd")
    dcp.save({name: torch.ones(2) for name in NAMES}, checkpoint_id=folder, no_dist=True)
    return folder


def inspect(folder: Path, *options: str, redirect: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``hfdcp inspect`` as a shell would."""
    command = f'exec "{sys.executable}" -m hfdcp_flows.start inspect "{folder}" {" ".join(options)} {redirect}'
    return subprocess.run(["sh", "-c", command], capture_output=True, env={**os.environ, **environment}, check=False)


def test_names_from_a_checkpoint_do_not_steer_the_terminal(odd: Path) -> None:
    said = inspect(odd, PYTHONUTF8="1").stdout
    assert b"\x1b" not in said
    assert rb"w\x1b[2J" in said
    assert rb"\u202eright" in said
    assert max(map(len, said.split(b"\n"))) < 600


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_any_encoding_of_the_terminal_takes_the_answer(odd: Path, options: tuple[str, ...]) -> None:
    ran = inspect(odd, *options, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (ran.returncode, ran.stderr.count(b"Traceback")) == (0, 0)
    assert rb"caf\xe9" in ran.stdout or rb"caf\u00e9" in ran.stdout


def test_an_answer_that_cannot_be_written_is_a_storage_fault_and_no_traceback(odd: Path) -> None:
    ran = inspect(odd, redirect=">/dev/full")
    assert ran.returncode == 5
    assert b"its answer cannot be written" in ran.stderr
    assert b"Traceback" not in ran.stderr


def test_closed_streams_are_no_fault(odd: Path) -> None:
    assert inspect(odd, redirect="2>&- >/dev/null").returncode == 0
