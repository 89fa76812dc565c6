"""Entries that are no tensors: never in a weights file, said for what they are, saved apart when that is asked for."""

from __future__ import annotations

import collections
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hfdcp_core import extras, publish
from hfdcp_core.catalog import Catalog, ObjectItem, Skipped
from hfdcp_core.errors import CorruptFile, PlanError, ValidationError
from hfdcp_core.extras import LAYER_STATE, LOOKED_INTO, SAVED
from hfdcp_core.inspection import inspect
from hfdcp_core.job import Job
from hfdcp_core.manifest import EXTRA_PATH, INDEX_PATH
from hfdcp_core.store import open_store
from hfdcp_core.testing.checkpoints import Truth


class Mine:
    """A class of the user's."""


STATE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3),
    "k._extra_state": torch.zeros(2322, dtype=torch.uint8),
    "l._extra_state": io.BytesIO(b"abc"),
    "step": 5,
    "loss": float("nan"),
    "notes": collections.OrderedDict(ключ="ü", none=None, betas=(0.9, 0.95)),
    "raw": b"\x00\xff",
    "by_rank": {0: [1, 2], 1: 2**70},
    "mine": Mine(),
    "pair": (torch.ones(2), 3),
}
TENSORS = extras.TENSORS
OBJECT = "not a tensor: a pickled Python object"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(STATE, tmp_path_factory.mktemp("extras"))


def save(state: dict[str, object], folder: Path, **options: object) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


@pytest.fixture
def job(saved: Path, tmp_path: Path) -> Job:
    shutil.copytree(saved, tmp_path / "ckpt")
    return Job(str(tmp_path / "ckpt"), str(tmp_path / "out"))


def reasons(job: Job) -> dict[str, str]:
    return {entry.name: entry.reason for entry in publish.plan_only(job)[0].skipped}


def extra(job: Job) -> object:
    document = json.loads((Path(job.sink) / EXTRA_PATH).read_bytes())
    assert (document["hfdcp"], document["version"]) == ("extra", 1)
    return document["value"]


def names(job: Job) -> set[str]:
    return {path.name for path in Path(job.sink).iterdir() if path.name != ".hfdcp"}


# ---- what is said ----


def test_entries_that_are_no_tensors_are_left_out_and_named(job: Job) -> None:
    manifest = publish.make(job)
    with safe_open(Path(job.sink) / "model.safetensors", framework="pt") as reader:
        assert set(reader.keys()) == {"w", "b"}
    assert names(job) == {"model.safetensors", "hfdcp-manifest.json"}
    assert set(manifest.skipped) == set(reasons(job))


def test_tensors_that_hide_in_objects_and_extra_state_of_layers_are_told_apart(job: Job) -> None:
    found = reasons(job)
    assert found["pair"] == TENSORS
    assert found["k._extra_state"] == found["l._extra_state"] == LAYER_STATE
    assert found["step"] == found["mine"] == OBJECT
    assert {entry.name: entry.reason for entry in inspect(job).skipped} == found


def test_when_they_are_kept_it_is_said_which_are_and_what_the_others_hold(job: Job) -> None:
    found = reasons(replace(job, keep_extra=True))
    assert {name for name, reason in found.items() if reason == SAVED} == {
        *("step", "loss", "raw", "by_rank.0", "by_rank.1", "notes.ключ", "notes.none", "notes.betas")
    }
    assert found["mine"] == f"not a tensor: holds Mine of {__name__}, not saved"
    assert found["pair"] == TENSORS
    assert found["l._extra_state"] == LAYER_STATE


def test_a_whole_model_that_was_saved_as_one_object_is_refused_with_the_reason(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "b": torch.ones(3)}, "step": 3}
    save(state, tmp_path / "ckpt", planner=DefaultSavePlanner(flatten_state_dict=False))
    with pytest.raises(PlanError, match="holds no tensor") as caught:
        publish.plan_only(Job(str(tmp_path / "ckpt"), ""))
    assert f"model: {TENSORS}" in caught.value.problems


def test_optimizer_state_is_not_looked_into_and_of_many_objects_only_the_largest(tmp_path: Path) -> None:
    state: dict[str, object] = {f"note.{number:03}": (torch.ones(1),) for number in range(LOOKED_INTO)}
    state |= {"large": (torch.ones(9999),), "optim.state.x": (torch.ones(99999),), "w": torch.ones(1)}
    found = reasons(Job(str(save(state, tmp_path / "ckpt")), ""))
    assert found["large"] == TENSORS
    assert found["optim.state.x"] == OBJECT
    assert collections.Counter(found.values())[TENSORS] == LOOKED_INTO


# ---- what is kept ----


def test_plain_values_are_saved_as_json_and_hashed_in_the_manifest(job: Job) -> None:
    manifest = publish.make(replace(job, keep_extra=True))
    assert [record.path for record in manifest.extra_files] == [EXTRA_PATH]
    found = extra(job)
    assert isinstance(found, dict)
    assert found["step"] == 5
    assert found["loss"] == {"$float": "NaN"}
    assert found["raw"] == {"$bytes": "AP8="}
    assert not {"mine", "pair", "l._extra_state", "w"} & found.keys()
    assert "ключ" in (Path(job.sink) / EXTRA_PATH).read_text("utf-8")


@pytest.mark.parametrize("files", [1, 2])
def test_it_is_beside_the_index_and_never_in_it(files: int, job: Job) -> None:
    manifest = publish.make(replace(job, keep_extra=True, max_file_size=24 if files == 2 else 10**9))
    assert len(manifest.records) == files
    assert [record.path for record in manifest.extra_files] == [INDEX_PATH, EXTRA_PATH][-files:]
    if files == 2:
        assert json.loads((Path(job.sink) / INDEX_PATH).read_text())["weight_map"].keys() == {"w", "b"}


def test_the_same_checkpoint_gives_the_same_bytes_also_in_a_bucket(job: Job, tmp_path: Path) -> None:
    kept = replace(job, keep_extra=True)
    first = publish.make(kept)
    again = publish.make(replace(kept, sink=str(tmp_path / "again")))
    there = publish.make(replace(kept, sink="memory://extras/out"))
    assert first.extra_files == again.extra_files == there.extra_files


def test_asking_later_adds_the_file_and_asking_no_more_removes_it(job: Job) -> None:
    plain = publish.make(job)
    kept = publish.make(replace(job, keep_extra=True))
    assert kept.plan_digest == plain.plan_digest
    assert kept.records == plain.records
    assert names(job) == {"model.safetensors", "hfdcp-manifest.json", EXTRA_PATH}
    assert publish.make(job) == plain
    assert names(job) == {"model.safetensors", "hfdcp-manifest.json"}


def test_a_file_of_that_name_that_somebody_changed_is_not_removed(job: Job) -> None:
    publish.make(replace(job, keep_extra=True))
    (Path(job.sink) / EXTRA_PATH).write_text("mine now")
    assert publish.make(job).extra_files == ()
    assert (Path(job.sink) / EXTRA_PATH).read_text() == "mine now"


def test_where_there_is_nothing_to_keep_there_is_no_file(tmp_path: Path) -> None:
    job = Job(str(save({"w": torch.ones(2)}, tmp_path / "ckpt")), str(tmp_path / "out"), keep_extra=True)
    assert publish.make(job).extra_files == ()


def test_a_damaged_object_stops_the_run_only_where_it_is_asked_for(job: Job) -> None:
    [item] = [item for item in catalog_of(job).objects if item.name == "step"]
    path = Path(job.source) / item.span.path
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"K\x05.", item.span.start) + 1] ^= 1
    path.write_bytes(raw)
    assert reasons(job)["step"] == OBJECT
    with pytest.raises(CorruptFile, match=r"step in __0_0\.distcp.*CRC-32"):
        publish.make(replace(job, keep_extra=True))


def test_an_object_whose_archive_is_damaged_keeps_its_reason_unless_asked_for(job: Job) -> None:
    [item] = [item for item in catalog_of(job).objects if item.name == "mine"]
    path = Path(job.source) / item.span.path
    raw = bytearray(path.read_bytes())
    raw[item.span.stop - 22 : item.span.stop] = bytes(22)
    path.write_bytes(raw)
    assert reasons(job)["mine"] == OBJECT
    with pytest.raises(CorruptFile, match="mine in __0_0"):
        publish.plan_only(replace(job, keep_extra=True))


def catalog_of(job: Job) -> Catalog:
    return publish.locate(job).catalog


def test_values_that_differ_among_ranks_are_not_saved(job: Job) -> None:
    catalog, source = catalog_of(job), open_store(job.source)
    items = {item.name: item for item in catalog.objects}
    same, other = items["step"], ObjectItem("step", items["loss"].span)
    assert b'"step": 5' in (extras.document(replace(catalog, objects=(same, same)), source) or b"")
    assert extras.document(replace(catalog, objects=(same, other)), source) is None


def test_names_of_entries_without_an_item_keep_their_reason() -> None:
    catalog = Catalog("dcp", {}, (), skipped=(Skipped("step", "because"),))
    assert extras.look_into(catalog, open_store("memory://nothing"), every=True) == catalog


# ---- at a later day ----


def test_the_file_is_validated_against_the_manifest_and_the_source(job: Job, tmp_path: Path) -> None:
    kept = replace(job, keep_extra=True)
    publish.make(kept)
    publish.validate_again(Job(job.source, job.sink))
    other = save(STATE | {"step": 6}, tmp_path / "other")
    with pytest.raises(ValidationError) as caught:
        publish.validate_again(Job(str(other), job.sink))
    assert f"{EXTRA_PATH}: the source holds other values" in caught.value.problems
    (Path(job.sink) / EXTRA_PATH).write_bytes(b"{}")
    with pytest.raises(ValidationError, match=EXTRA_PATH):
        publish.validate_again(Job("", job.sink))


REAL = {"zstd": {"step": 3}, "metadata_by_rank": {"step": 1}, "threads": {"step": 1}, "app_state": {"step": 3}}
"""Cases and some of what they hold beside tensors."""


@pytest.mark.parametrize("case", REAL)
def test_values_are_kept_however_the_checkpoint_was_written(
    case: str, checkpoints: Mapping[str, Truth], tmp_path: Path
) -> None:
    truth = checkpoints[case]
    publish.make(job := Job(str(truth.folder), str(tmp_path), keep_extra=True))
    found = extra(job)
    assert isinstance(found, dict)
    assert found.keys() == set(truth.objects)
    assert found.items() >= REAL[case].items()


def test_a_real_training_state_is_kept_whole(checkpoints: Mapping[str, Truth], tmp_path: Path) -> None:
    truth = checkpoints["train_state"]
    publish.make(job := Job(str(truth.folder), str(tmp_path), keep_extra=True))
    found = extra(job)
    assert isinstance(found, dict)
    assert set(found) == set(truth.objects)
    assert found["lr_scheduler.last_epoch"] == 3
    assert found["note"] == "any object at all"
    assert found["dataloader.dp_rank_0"].keys() == {"$bytes"}
