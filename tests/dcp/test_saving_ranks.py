"""What two ranks save in odd ways is right, on both of them, and a rank that fails changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hfdcp_core.testing.dropin import run_ranks

CASES = [
    "a rank fails, whole",
    "a rank fails, sharded",
    "a narrower save after a wider one",
    "two boxes of one rank, whole",
    "two boxes of one rank, sharded",
    "two boxes of one rank, read by torch",
    "without collectives, whole",
    "without collectives, sharded",
    "tensors of every rank's own",
    "consolidated on every rank",
    "plans that a planner keeps, whole",
    "plans that a planner keeps, sharded",
    "one rank reads the metadata for all",
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    folder = tmp_path_factory.mktemp("saving")
    run_ranks(Path(__file__).with_name("saving_ranks.py"), 2, str(folder))
    found: dict[str, list[str]] = json.loads((Path(folder) / "seen.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_right_on_every_rank(case: str, seen: Mapping[str, list[str]]) -> None:
    assert seen[case] == ["right"]


def test_every_case_is_looked_at(seen: Mapping[str, list[str]]) -> None:
    assert sorted(seen) == sorted(CASES)


def test_ranks_that_end_right_after_a_save_end_well(tmp_path: Path) -> None:
    for turn in range(3):  # without our care two of three turns end with SIGABRT
        run_ranks(Path(__file__).with_name("leaving_ranks.py"), 2, str(tmp_path / str(turn)))
