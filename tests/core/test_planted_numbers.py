"""NaN, Inf and tensors that are all zero, planted into a checkpoint: the manifest names them, and ``fail_on`` refuses.

Whatever is refused is not published: its file does not appear, and no manifest is left that says it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hfdcp_core import publish
from hfdcp_core.errors import UsageError, ValidationError
from hfdcp_core.job import MEMORY_AT_START, SMALLEST_WINDOW, Job
from hfdcp_core.manifest import Manifest, Statistics
from hfdcp_core.plan import BUFFERS, SCRATCH
from hfdcp_core.statistics import FULL, merged, told

ROWS = 3 * SMALLEST_WINDOW // 64
"""Rows of 64 bytes: with the least memory a tensor lies in several windows."""


def planted() -> dict[str, torch.Tensor]:
    ill = torch.ones(ROWS, 32, dtype=torch.bfloat16)
    ill[0, 0], ill[ROWS // 2, 3], ill[-1, -1] = torch.nan, -torch.inf, torch.nan
    half = torch.zeros(ROWS, 16)
    half[-1, -1] = -2.5  # all zero but for its last part
    return {
        "dead": torch.full((ROWS, 32), -0.0, dtype=torch.float16),
        "half": half,
        "ill": ill,
        "none": torch.empty(0, 16),
        "whole": torch.zeros(64, dtype=torch.int64),
    }


FOUND = Statistics("basic", {"ill": 2}, {"ill": 1}, ("dead",))
LEAST = MEMORY_AT_START + 2 * (BUFFERS + SCRATCH) * SMALLEST_WINDOW


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that nobody changes."""
    folder = tmp_path_factory.mktemp("saved")
    dcp.save(planted(), checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def job(saved: Path, tmp_path: Path) -> Job:
    """Return a job that gives a file for each tensor, in small windows."""
    shutil.copytree(saved, tmp_path / "ckpt")
    sink = str(tmp_path / "out")
    job = Job(str(tmp_path / "ckpt"), sink, max_file_size=1, workers=2, memory_bytes=LEAST, include=("*",))
    assert job.window_bytes == SMALLEST_WINDOW
    return job


def written(job: Job) -> set[str]:
    return {path.name for path in Path(job.sink).iterdir()} - {".hfdcp"}


def file_of(manifest: Manifest, name: str) -> str:
    return next(record.path for record in manifest.records if name in record.tensors)


def without(job: Job, names: Iterable[str]) -> Job:
    return replace(job, exclude=tuple(names))


def test_the_manifest_names_what_was_planted_and_nothing_else(job: Job) -> None:
    assert merged(publish.make(job).records) == FOUND


def test_in_full_every_floating_tensor_has_a_magnitude(job: Job) -> None:
    found = merged(publish.make(replace(job, statistics="full")).records)
    assert found == replace(FOUND, level=FULL, absmax={"dead": 0.0, "half": 2.5, "ill": 1.0})


def test_without_statistics_nothing_is_said(job: Job) -> None:
    assert merged(publish.make(replace(job, statistics="none")).records) == Statistics("none")


@pytest.mark.parametrize("dim", [0, 1])
def test_of_tensors_that_are_cut_for_ranks_all_parts_count(job: Job, dim: int) -> None:
    manifest = publish.make(replace(job, ranks=3, shard_dim=dim, max_file_size=10**9, statistics="full"))
    assert any("half" in record.statistics.zero for record in manifest.records)
    assert merged(manifest.records) == replace(FOUND, level=FULL, absmax={"dead": 0.0, "half": 2.5, "ill": 1.0})


def test_what_a_cast_makes_infinite_is_counted_as_it_is_written(job: Job, tmp_path: Path) -> None:
    dcp.save({"wide": torch.tensor([1e38, 1.0, -1e38])}, checkpoint_id=tmp_path / "wide", no_dist=True)
    manifest = publish.make(replace(job, source=str(tmp_path / "wide"), dtype="float16", memory_bytes=0))
    assert merged(manifest.records).inf == {"wide": 2}


def test_a_file_that_nobody_hashed_is_counted_all_the_same(job: Job) -> None:
    manifest = publish.make(replace(job, hashing=False, ranks=2, max_file_size=10**9))
    assert merged(manifest.records) == FOUND


# ---- refusing -------------------------------------------------------------------------------------------------------

REFUSED = {"nan": ("ill", "2 NaN"), "inf": ("ill", "1 Inf"), "zero": ("dead", "all zero")}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("ranks", [0, 2])
def test_what_is_refused_leaves_no_manifest_and_no_index(job: Job, kind: str, ranks: int) -> None:
    name, what = REFUSED[kind]
    refusing = replace(job, fail_on=(kind,), ranks=ranks, max_file_size=10**9 if ranks else 1)
    with pytest.raises(ValidationError, match=f"--fail-on {kind} refuses these tensors, so nothing") as caught:
        publish.make(refusing)
    assert caught.value.problems
    assert all(problem.startswith(f"{name}: ") for problem in caught.value.problems)
    assert ranks or caught.value.problems == (f"{name}: {what}",)
    assert not {path for path in written(job) if path.endswith(".json")}


def test_a_file_with_what_is_refused_does_not_appear(job: Job) -> None:
    whole = publish.make(replace(job, sink=f"{job.sink}-whole"))
    with pytest.raises(ValidationError, match=file_of(whole, "ill")):
        publish.make(replace(job, fail_on=("nan",)))
    assert file_of(whole, "ill") not in written(job)


def test_what_does_not_hold_it_is_published(job: Job) -> None:
    manifest = publish.make(without(replace(job, fail_on=("nan", "inf", "zero")), ("ill", "dead")))
    assert told(merged(manifest.records)) == ()


def test_a_part_of_zeros_is_no_tensor_of_zeros(job: Job) -> None:
    cut = replace(job, fail_on=("zero",), ranks=3, max_file_size=10**9)
    assert publish.make(without(cut, ("dead",))).records


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("ranks", [0, 2])
def test_files_that_are_whole_already_are_refused_by_their_records(job: Job, kind: str, ranks: int) -> None:
    made = replace(job, ranks=ranks, max_file_size=10**9 if ranks else 1)
    first = publish.make(made)
    with pytest.raises(ValidationError, match=f"--fail-on {kind}"):
        publish.make(replace(made, fail_on=(kind,)))
    assert "hfdcp-manifest.json" not in written(job)
    assert publish.make(made) == first  # without fail_on it is complete again


def test_nothing_is_read_again_to_refuse_what_is_whole(job: Job) -> None:
    publish.make(job)
    stamps = {path: path.stat().st_mtime_ns for path in Path(job.sink).glob("*.safetensors")}
    with pytest.raises(ValidationError, match="--fail-on nan"):
        publish.make(replace(job, fail_on=("nan",)))
    assert {path: path.stat().st_mtime_ns for path in Path(job.sink).glob("*.safetensors")} == stamps


LEVELS = [("none", "basic", 0), ("basic", "full", 0), ("basic", "basic", 5), ("full", "basic", 5), ("full", "none", 5)]


@pytest.mark.parametrize(("first", "then", "done"), LEVELS)
def test_only_files_of_which_less_is_known_than_is_asked_are_made_again(
    job: Job, first: str, then: str, done: int
) -> None:
    publish.make(replace(job, statistics=first))
    asked = replace(job, statistics=then)
    assert sum(file.done for file in publish.plan_only(asked)[1].files) == done
    assert merged(publish.make(asked).records).level == (first if done else then)


def test_what_was_made_is_held_against_what_is_refused_before_a_push_and_when_it_is_validated(job: Job) -> None:
    publish.make(job)
    refusing = replace(job, fail_on=("inf",), source="", repo="me/it")
    with pytest.raises(ValidationError, match="--fail-on inf"):
        publish.push(refusing)
    with pytest.raises(ValidationError, match="--fail-on inf"):
        publish.validate_again(replace(refusing, repo=""))
    assert merged(publish.validate_again(replace(refusing, repo="", fail_on=())).records) == FOUND


def test_without_statistics_a_push_that_refuses_says_what_to_do(job: Job) -> None:
    publish.make(replace(job, statistics="none"))
    with pytest.raises(ValidationError, match="made with --stats none; make it again with --stats basic"):
        publish.push(replace(job, fail_on=("nan",), repo="me/it"))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"statistics": "some"}, "--stats 'some': it is one of none, basic, full"),
        ({"fail_on": ("nan", "big")}, "--fail-on 'big': it is any of nan,inf,zero"),
        ({"fail_on": ("nan",), "statistics": "none"}, "needs statistics: --stats basic or full"),
    ],
    ids=["level", "kind", "none"],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Job("a", "b", **options)
