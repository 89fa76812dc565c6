"""Four ranks save to an object storage: each file is made by one rank, of what the others hand over, in one pass."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hfdcp_core.testing.dropin import run_ranks
from hfdcp_core.testing.gcs_server import GcsFault, GcsServer

BY_SHARDS = {"a rank behind a wall": "wall", "without collectives": "alone"}
"""Cases in which nothing can be handed over, and their folders."""
CASES = [
    "every kind",
    "every kind, in many files",
    "every byte is written once",
    "not distributed",
    "again and again",
    "the first rank fails",
    "the last rank fails",
    "the storage fails",
    *BY_SHARDS,
]


@dataclass(frozen=True)
class Seen:
    """What the ranks and the storage saw."""

    verdicts: Mapping[str, list[str]]
    names: tuple[str, ...]
    paths: tuple[str, ...]
    unfinished: int


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("handing")
    with GcsServer() as gcs:
        gcs.fault(GcsFault("POST", "name=refused.*00002-of", "status", 403, times=1000))
        run_ranks(Path(__file__).with_name("handing_ranks.py"), 4, str(folder), json.dumps({**gcs.options}))
        verdicts = json.loads((folder / "seen.json").read_text())
        yield Seen(verdicts, tuple(gcs.names()), tuple(asked.path for asked in gcs.journal), gcs.unfinished)


@pytest.mark.parametrize("case", CASES)
def test_it_is_right_on_every_rank(case: str, seen: Seen) -> None:
    assert seen.verdicts[case] == ["right"]


def test_every_case_is_looked_at(seen: Seen) -> None:
    assert sorted(seen.verdicts) == sorted(CASES)


def test_no_shard_was_ever_written_where_ranks_reach_one_another(seen: Seen) -> None:
    shards = [path for path in seen.paths if "shard-" in path]
    assert shards, "the cases that go by shards show that shards would be seen here"
    assert [path for path in shards if not any(folder in path for folder in BY_SHARDS.values())] == []


def test_nothing_is_left_behind(seen: Seen) -> None:
    """Neither shards, nor temporary files, nor uploads, nor anything of the save that the storage refused."""
    odd = [name for name in seen.names if "shard" in name or "tmp" in name or name.startswith("refused/")]
    assert (odd, seen.unfinished) == ([], 0)
