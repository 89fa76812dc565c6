"""What `inspect` says of a checkpoint, from its metadata alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import StorageNotFound, UnknownFormat, UsageError
from hfdcp_core.inspection import Inspection, Wanted, inspect
from hfdcp_core.job import Job


def look(folder: Path, **choice: object) -> Inspection:
    return inspect(Job(source=str(folder), sink="", **choice))


def write_shard(folder: Path, rank: int, offset: int, rows: int) -> None:
    """One rank's file as torch's sharded writer leaves it: rows of one matrix, and where they begin."""
    sharding = json.dumps({"w": {"saved_offsets": [offset, 0]}})
    save_file(
        {"w": np.ones((rows, 3), np.float32)},
        folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors",
        metadata={"DCP_SHARDING_INFO": sharding, "DCP_VERSION": "1.0", "format": "pt"},
    )


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    tensors = {"module.a": np.zeros((2, 3), np.float32), "module.b": np.zeros((), np.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_every_tensor_is_named_as_saved_and_as_it_would_be_called(plain: Path) -> None:
    found = look(plain)
    assert set(found.wanted) == {
        Wanted("a", "module.a", TensorSpec("F32", (2, 3)), 1),
        Wanted("b", "module.b", TensorSpec("I64", ()), 1),
    }
    assert (found.format, found.files, found.nbytes, found.problems) == ("safetensors", 1, 32, ())
    assert found.source_bytes == (plain / "model.safetensors").stat().st_size


def test_what_is_not_asked_for_is_left_out_with_its_reason(plain: Path) -> None:
    found = look(plain, exclude=("*.b",))
    assert [tensor.fqn for tensor in found.wanted] == ["a"]
    assert [(entry.name, entry.reason) for entry in found.skipped] == [("module.b", "excluded (--exclude)")]


def test_a_pattern_that_matches_nothing_is_a_problem(plain: Path) -> None:
    assert look(plain, exclude=("nothing",)).problems == ("'nothing'",)


def test_names_that_clash_are_a_problem_and_no_output_is_promised(tmp_path: Path) -> None:
    save_file({"_orig_mod.a": np.zeros(2), "a": np.zeros(2)}, tmp_path / "model.safetensors")
    found = look(tmp_path)
    assert found.wanted == ()
    (problem,) = found.problems
    assert "'_orig_mod.a'" in problem
    assert "would both be called 'a'" in problem


def test_a_hole_is_a_problem_that_names_the_missing_box(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, 0, 2)
    write_shard(tmp_path, 2, 4, 2)
    found = look(tmp_path)
    (problem,) = found.problems
    assert problem.startswith("w: no shard holds [2:4, 0:3]")
    assert found.unproved
    assert [(tensor.fqn, tensor.shards) for tensor in found.wanted] == [("w", 2)]


def test_what_is_whole_but_not_proved_is_said_and_is_no_problem(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, 0, 2)
    write_shard(tmp_path, 2, 2, 2)
    assert look(tmp_path).problems == ()
    assert look(tmp_path).unproved
    assert look(tmp_path, world_size=2).unproved is None


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormat, match="no checkpoint"):
        look(tmp_path)
    with pytest.raises(StorageNotFound, match="nowhere"):
        look(tmp_path / "nowhere")


def test_an_unknown_recipe_is_wrong_usage(plain: Path) -> None:
    with pytest.raises(UsageError, match="unknown recipe 'magic'"):
        look(plain, recipe="magic")
