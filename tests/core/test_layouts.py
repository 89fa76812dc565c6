"""Every layout that torch can save, through the real chain, equals the truth bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hfdcp_core import publish
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH
from hfdcp_core.publish import Job
from hfdcp_core.testing.checkpoints import CASES, Truth, compare_with_truth

SMALL = 40
"""Tensor bytes in one file at most, where there shall be several."""


def job_for(case: str, truth: Truth, sink: Path, **options: object) -> Job:
    """Ask for one case; torch's sharded safetensors state no global shapes, but we know how many ranks wrote them."""
    world_size = CASES[case].ranks if CASES[case].format == "dcp-safetensors" else None
    return Job(str(truth.folder), str(sink), world_size=world_size, **options)


def weight_files(sink: Path) -> list[str]:
    return sorted(path.name for path in sink.glob("*.safetensors"))


@pytest.mark.parametrize("case", CASES)
def test_one_file_equals_the_truth(case: str, checkpoints: Mapping[str, Truth], tmp_path: Path) -> None:
    manifest = publish.make(job_for(case, checkpoints[case], tmp_path))
    assert compare_with_truth(checkpoints[case], tmp_path) == ()
    assert weight_files(tmp_path) == ["model.safetensors"] == [record.path for record in manifest.records]
    assert not (tmp_path / INDEX_PATH).exists()
    assert manifest.source_format == CASES[case].format
    assert manifest.unproved is None


@pytest.mark.parametrize("case", CASES)
def test_several_files_equal_the_truth(case: str, checkpoints: Mapping[str, Truth], tmp_path: Path) -> None:
    truth = checkpoints[case]
    manifest = publish.make(job_for(case, truth, tmp_path, max_file_size=SMALL))
    assert compare_with_truth(truth, tmp_path) == ()
    assert weight_files(tmp_path) == sorted(record.path for record in manifest.records)
    if len(manifest.records) > 1:
        index = json.loads((tmp_path / INDEX_PATH).read_text())
        assert index["metadata"]["total_size"] == manifest.total_size
        assert index["weight_map"].keys() == truth.cleaned.keys()


def test_small_files_are_really_several_in_nearly_every_case(checkpoints: Mapping[str, Truth]) -> None:
    planned = {
        case: publish.plan_only(job_for(case, truth, Path(), max_file_size=SMALL))[1]
        for case, truth in checkpoints.items()
    }
    single = {case for case, plan in planned.items() if len(plan.files) == 1}
    assert single == {"overwritten", "blocks", "hf_unreadable"}


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].format == "dcp"])
def test_every_tensor_comes_out_under_its_saved_name_when_asked(
    case: str, checkpoints: Mapping[str, Truth], tmp_path: Path
) -> None:
    truth = checkpoints[case]
    publish.make(job_for(case, truth, tmp_path, recipe="none", include=("*",)))
    assert compare_with_truth(truth, tmp_path, names=truth.tensors) == ()


@pytest.mark.parametrize("memory_bytes", [97 << 20, 1 << 30])
@pytest.mark.parametrize("case", ["tall_columns", "views", "fsdp_tp"])
def test_the_budget_changes_no_byte(
    case: str, memory_bytes: int, checkpoints: Mapping[str, Truth], tmp_path: Path
) -> None:
    publish.make(job_for(case, checkpoints[case], tmp_path, memory_bytes=memory_bytes, workers=1))
    assert compare_with_truth(checkpoints[case], tmp_path) == ()


@pytest.mark.parametrize("case", ["train_state", "app_state"])
def test_what_is_no_weight_is_left_out_and_named(case: str, checkpoints: Mapping[str, Truth], tmp_path: Path) -> None:
    truth = checkpoints[case]
    manifest = publish.make(job_for(case, truth, tmp_path))
    left_out = truth.tensors.keys() - (truth.weights or {}).keys()
    assert left_out
    assert set(manifest.skipped) == left_out | set(truth.objects)


@pytest.mark.parametrize("case", ["fsdp2_uneven", "hf_uneven", "train_state"])
def test_the_output_is_a_source_again_and_comes_out_the_same(
    case: str, checkpoints: Mapping[str, Truth], tmp_path: Path
) -> None:
    first = publish.make(job_for(case, checkpoints[case], tmp_path / "first", max_file_size=SMALL))
    second = publish.make(Job(str(tmp_path / "first"), str(tmp_path / "second"), max_file_size=SMALL))
    assert second.source_format == "safetensors"
    assert [record.sha256 for record in second.records] == [record.sha256 for record in first.records]
    assert (tmp_path / "second" / MANIFEST_PATH).exists()
