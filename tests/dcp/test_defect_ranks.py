"""What torch's classes get wrong between ranks is right on every one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hfdcp_core.testing.dropin import run_ranks

CASES = [
    "experts in four bits into parts",
    "strided rows, whole",
    "strided rows, sharded",
    "strided columns, whole",
    "strided over two dimensions of a mesh",
    "mistakes with strided tensors",
    "the end of a save moves no tensors",
    "a rank that is slower than a group's patience",
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    folder = tmp_path_factory.mktemp("defects")
    run_ranks(Path(__file__).with_name("defect_ranks.py"), 2, str(folder))
    found: dict[str, list[str]] = json.loads((Path(folder) / "seen.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_right_on_every_rank(case: str, seen: Mapping[str, list[str]]) -> None:
    assert seen[case] == ["right"]


def test_every_case_is_looked_at(seen: Mapping[str, list[str]]) -> None:
    assert sorted(seen) == sorted(CASES)
