"""The drop-in writer, on one process: whole, sharded, anywhere; what it refuses, and what a failure leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.job import Job
from hfdcp_core.publish import validate_again
from hfdcp_core.testing.dropin import blank, differences

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

INDEX, MANIFEST = "model.safetensors.index.json", "hfdcp-manifest.json"
ONE = "model-00001-of-00001.safetensors"
SHARD = "shard-00001-model-00001-of-00001.safetensors"
TENSORS = {
    "w": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "half": torch.arange(6).bfloat16(),
    "scalar": torch.tensor(2.5),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "fp8": torch.arange(8).float().to(torch.float8_e4m3fn),
    "none": torch.empty(0, 3),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "one-pass": {"save_distributed": True, "enable_consolidation": True},
    "sharded": {"save_distributed": True},
    "older-names": {"save_sharded": True, "token": "hf_none"},
}


def save(path: object, state: Mapping[str, Any], **options: Any) -> None:
    dcp.save({**state}, storage_writer=HuggingFaceStorageWriter(path, **options), no_dist=True)  # type: ignore[arg-type]


def loaded(path: object, like: Mapping[str, torch.Tensor] = TENSORS) -> dict[str, torch.Tensor]:
    state = blank(like)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)  # type: ignore[arg-type]
    return state


def names(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_every_kind_of_tensor_comes_back(tmp_path: Path, options: Mapping[str, Any]) -> None:
    save(tmp_path / "out", TENSORS, **options)
    assert differences(loaded(tmp_path / "out"), TENSORS) == []


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (WAYS["whole"], [MANIFEST, ONE, INDEX]),
        (WAYS["one-pass"], [MANIFEST, ONE, INDEX]),
        (WAYS["sharded"], [SHARD]),
        ({"fqn_to_index_mapping": {name: 1 + (name == "w") for name in TENSORS}}, None),
    ],
    ids=["whole", "one-pass", "sharded", "mapped"],
)
def test_files_have_torchs_names_and_nothing_else_lies_there(
    tmp_path: Path, options: Mapping[str, Any], files: list[str] | None
) -> None:
    save(tmp_path / "out", TENSORS, **options)
    mapped = [MANIFEST, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
    assert names(tmp_path / "out") == (files or mapped)


def test_headers_say_what_torchs_say_and_data_are_aligned(tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS, save_distributed=True)
    path = tmp_path / "out" / SHARD
    with safe_open(path, "pt") as file:
        said = file.metadata()
    assert (said["format"], said["DCP_VERSION"]) == ("pt", "1.0")
    assert json.loads(said["DCP_SHARDING_INFO"])["w"] == {"saved_offsets": [0, 0]}
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert (8 + size) % 8 == 0
    assert differences(load_file(path), TENSORS) == []


def test_the_manifest_is_true(tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS)
    manifest = validate_again(Job("", str(tmp_path / "out")))
    assert sorted(name for record in manifest.records for name in record.tensors) == sorted(TENSORS)


def test_large_tensors_fill_files_in_turn(tmp_path: Path) -> None:
    save(tmp_path / "out", {"a": torch.zeros(100), "b": torch.ones(100)}, max_file_size=400)
    weight_map = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert weight_map == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize("options", [WAYS["whole"], WAYS["sharded"]], ids=["whole", "sharded"])
def test_any_fsspec_storage_is_written(options: Mapping[str, Any]) -> None:
    memory = fsspec.filesystem("memory")
    try:
        save("memory://writer-test/out", TENSORS, **options)
        assert differences(loaded("memory://writer-test/out"), TENSORS) == []
        left = [path for path in memory.find("/writer-test") if "hfdcp-tmp" in path]
        assert left == []
    finally:
        memory.rm("/writer-test", recursive=True)


def test_the_folder_may_be_named_when_saving(tmp_path: Path) -> None:
    """torch loses the ``sharded/`` of its path then: shards in one place, whole tensors in another."""
    writer = HuggingFaceStorageWriter(tmp_path / "other", save_distributed=True, enable_consolidation=True)
    dcp.save({**TENSORS}, checkpoint_id=tmp_path / "out", storage_writer=writer, no_dist=True)
    assert (writer.consolidated_output_path, writer.path) == (str(tmp_path / "out"), f"{tmp_path / 'out'}/sharded")
    assert differences(loaded(tmp_path / "out"), TENSORS) == []
    assert not (tmp_path / "other").exists()


def test_a_writer_saves_again_to_where_it_saved(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "out", save_distributed=True, enable_consolidation=True)
    for step in (0, 1):
        dcp.save({"w": TENSORS["w"] + step}, storage_writer=writer, no_dist=True)
    assert torch.equal(loaded(tmp_path / "out", {"w": TENSORS["w"]})["w"], TENSORS["w"] + 1)


def test_whole_tensors_may_go_to_another_folder_as_in_older_torch(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(
        tmp_path / "shards", save_sharded=True, consolidated_output_path=tmp_path / "whole"
    )
    dcp.save({**TENSORS}, storage_writer=writer, no_dist=True)
    assert differences(loaded(tmp_path / "whole"), TENSORS) == []


def test_it_saves_in_the_background(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "out")
    dcp.async_save({**TENSORS}, storage_writer=writer, no_dist=True).result()
    assert differences(loaded(tmp_path / "out"), TENSORS) == []


def test_tied_and_strided_tensors_are_written(tmp_path: Path) -> None:
    """safetensors' own writer refuses both."""
    table = torch.arange(12.0).reshape(3, 4)
    state = {"embed": table, "head": table, "turned": table.t(), "part": table[:, 1:3], "every": table[:, ::2]}
    for options in (WAYS["whole"], WAYS["sharded"]):
        save(tmp_path / "out", state, **options)
        assert differences(loaded(tmp_path / "out", state), state) == []


def test_what_is_no_tensor_never_reaches_a_weights_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch writes its pickle in front of the header: nobody can read the file, and the save succeeds."""
    save(tmp_path / "out", {**TENSORS, "epoch": 3, "name": "first"})
    assert differences(load_file(tmp_path / "out" / ONE), TENSORS) == []
    assert "no tensors, so not in the weights: epoch, name" in caplog.text


def test_hashing_may_be_left_for_later(tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS, hash="later")
    assert differences(loaded(tmp_path / "out"), TENSORS) == []


# ---- what it refuses, and what a failure leaves ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ({"w": 1}, "half: in no file of the given index"),
        (dict.fromkeys([*TENSORS, "ghost"], 1), "ghost: in the given index, but no such tensor"),
    ],
    ids=["too little", "too much"],
)
def test_a_mapping_that_does_not_fit_is_refused(tmp_path: Path, mapping: dict[str, int], problem: str) -> None:
    with pytest.raises(CheckpointException, match=problem):
        save(tmp_path / "out", TENSORS, fqn_to_index_mapping=mapping)
    assert not (tmp_path / "out").exists()


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    state = {"a": torch.zeros(2, dtype=torch.complex128), "__metadata__": torch.zeros(2)}
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "out", state)
    [(fault, _)] = caught.value.failures.values()
    assert isinstance(fault, PlanError)
    assert sorted(problem.partition(":")[0] for problem in fault.problems) == ["__metadata__", "a"]


def test_nothing_never_takes_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(CheckpointException, match="no tensor is to be saved"):
        save(tmp_path / "out", {"step": 3})
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


class Keeping(DefaultSavePlanner):
    """A second kind of planner that keeps its plans."""


def test_plans_that_several_kinds_of_planners_keep_are_never_mistaken_for_one_another(tmp_path: Path) -> None:
    def keep(state: dict[str, Any], kind: type[DefaultSavePlanner]) -> None:
        writer = HuggingFaceStorageWriter(tmp_path / "out")
        dcp.save(state, storage_writer=writer, planner=kind(enable_plan_caching=True), no_dist=True)

    try:
        keep({"a": torch.zeros(2)}, DefaultSavePlanner)
        keep({"a": torch.ones(2)}, DefaultSavePlanner)
        keep({"b": torch.zeros(2)}, Keeping)
        with pytest.raises(CheckpointException, match=r"2 kinds of planners.*enable_plan_caching=False"):
            keep({"b": torch.ones(2)}, Keeping)
    finally:
        for kept in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
            getattr(SavePlanner, kept).clear()
    assert load_file(tmp_path / "out" / "model-00001-of-00001.safetensors").keys() == {"b"}


class Failing(DefaultSavePlanner):
    """Fails when the data of one tensor are asked for."""

    def lookup_object(self, index: Any) -> Any:
        if index.fqn == "w":
            raise OSError("the device is gone")
        return super().lookup_object(index)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_save_that_fails_leaves_the_older_one_as_it_was(tmp_path: Path, options: Mapping[str, Any]) -> None:
    save(tmp_path / "out", TENSORS, **options)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    newer = blank(TENSORS)
    writer = HuggingFaceStorageWriter(tmp_path / "out", **options)
    with pytest.raises(CheckpointException, match="the device is gone"):
        dcp.save({**newer}, storage_writer=writer, planner=Failing(), no_dist=True)
    writer.reset()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("options", [WAYS["whole"], WAYS["sharded"]], ids=["whole", "sharded"])
def test_nothing_of_an_older_and_larger_save_stays(tmp_path: Path, options: Mapping[str, Any]) -> None:
    mapping = {name: number for number, name in enumerate(TENSORS, 1)}
    save(tmp_path / "out", TENSORS, fqn_to_index_mapping=mapping, **options)
    save(tmp_path / "out", {"w": TENSORS["w"]}, **options)
    found = HuggingFaceStorageReader(tmp_path / "out").read_metadata()
    assert list(found.state_dict_metadata) == ["w"]
    assert len([name for name in names(tmp_path / "out") if name.endswith(".safetensors")]) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("",), "empty"),
        ((Path("gs://bucket/x"),), "gs:/"),
        (("nothing://x",), "nothing"),
        (("out", {"a": "1"}), "a: file '1'"),
        (("out", {"a": True}), "a: file True"),
    ],
    ids=["empty", "mangled", "unknown", "text", "bool"],
)
def test_arguments_that_cannot_be_are_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        HuggingFaceStorageWriter(*arguments)


def test_an_unknown_time_of_hashing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'now' or 'later'"):
        HuggingFaceStorageWriter(tmp_path, hash="never")  # type: ignore[arg-type]


def test_a_size_of_files_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_file_size=0"):
        HuggingFaceStorageWriter(tmp_path, max_file_size=0)


def test_it_stands_where_torchs_writer_stands(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path), {"w": 1}, 2, True, True, 3)
    assert isinstance(writer, FileSystemWriter)
    assert (writer.fqn_to_index_mapping, writer.thread_count, writer.thread_count_consolidation) == ({"w": 1}, 2, 3)
    assert (writer.save_distributed, writer.enable_consolidation, writer.metadata_path) == (True, True, INDEX)
    assert HuggingFaceStorageWriter.validate_checkpoint_id("memory://x")
    assert not HuggingFaceStorageWriter.validate_checkpoint_id("")
