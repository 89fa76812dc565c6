"""Tied tensors: kept by default; left out where the config says so and the bytes are equal; never guessed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from hfdcp_core import publish
from hfdcp_core.errors import CorruptFile, PlanError, SinkOccupied, SourceError, ValidationError
from hfdcp_core.inspection import inspect
from hfdcp_core.job import Job
from hfdcp_core.manifest import CONFIG_PATH, INDEX_PATH
from hfdcp_core.planning import draw
from hfdcp_core.store import open_store
from hfdcp_core.testing.checkpoints import Truth

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHT = torch.arange(32.0).reshape(8, 4)
SHARED: dict[str, torch.Tensor] = {EMBED: WEIGHT, HEAD: WEIGHT, "model.norm.weight": torch.ones(4)}
EQUAL = SHARED | {HEAD: WEIGHT.t().contiguous().t()}
APART = SHARED | {HEAD: WEIGHT + 1}
HEAD_ALONE = {HEAD: WEIGHT, "model.norm.weight": torch.ones(4)}
TIED = b'{\n  "tie_word_embeddings": true,\n  "vocab_size": 8\n}\n'


def ask(folder: Path, state: dict[str, torch.Tensor], config: bytes | None = TIED, **options: object) -> Job:
    """Save a checkpoint with a config beside it, and ask for it."""
    dcp.save(state, checkpoint_id=folder / "ckpt", no_dist=True)
    if config is not None:
        (folder / "ckpt" / CONFIG_PATH).write_bytes(config)
    return Job(str(folder / "ckpt"), str(folder / "out"), **options)


def written(job: Job) -> set[str]:
    names: set[str] = set()
    for path in Path(job.sink).glob("*.safetensors"):
        with safe_open(path, framework="pt") as reader:
            names |= set(reader.keys())
    return names


# ---- what is written ----


@pytest.mark.parametrize("state", [SHARED, EQUAL], ids=["one-storage", "equal-bytes"])
def test_a_tied_head_of_equal_bytes_is_left_out_and_recorded(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    job = ask(tmp_path, state)
    manifest = publish.make(job)
    assert manifest.tied == {HEAD: EMBED}
    assert written(job) == {EMBED, "model.norm.weight"}
    assert publish.plan_only(job)[1].tied == {HEAD: EMBED}
    assert publish.plan_only(job)[1].tensors == 2


SAYS_BOTH = b'{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}'


@pytest.mark.parametrize(
    "config",
    [None, b"{}", b'{"tie_word_embeddings": false}', SAYS_BOTH],
    ids=["no-config", "unsaid", "false", "both"],
)
def test_both_are_kept_where_no_config_ties_them_beyond_doubt(config: bytes | None, tmp_path: Path) -> None:
    job = ask(tmp_path, SHARED, config)
    assert publish.make(job).tied == {}
    assert written(job) == SHARED.keys()


def test_different_bytes_under_a_tying_config_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    job = ask(tmp_path, APART)
    with pytest.raises(PlanError, match=r"tie_word_embeddings: true.*--untie writes every tensor") as caught:
        publish.make(job)
    assert caught.value.problems == (f"{HEAD} and {EMBED} hold different values",)
    assert written(job) == set()


def test_one_flipped_bit_makes_two_tensors_different(tmp_path: Path) -> None:
    head = WEIGHT.clone()
    head.view(torch.int32)[7, 3] ^= 1
    with pytest.raises(PlanError, match="different values"):
        publish.plan_only(ask(tmp_path, SHARED | {HEAD: head}))


@pytest.mark.parametrize("head", [WEIGHT[:7], WEIGHT.double()], ids=["shape", "dtype"])
def test_tensors_of_another_kind_are_not_the_same(head: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        publish.plan_only(ask(tmp_path, SHARED | {HEAD: head}))
    assert [problem.partition(",")[0].startswith(f"{HEAD} is ") for problem in caught.value.problems] == [True]


def test_a_head_without_its_embedding_is_refused_because_a_loader_would_tie_it_to_noise(tmp_path: Path) -> None:
    job = ask(tmp_path, HEAD_ALONE)
    with pytest.raises(PlanError) as caught:
        publish.plan_only(job)
    assert caught.value.problems == (f"{HEAD}: no embedding that it could be tied to",)
    publish.make(replace(job, untie=True))
    assert written(job) == HEAD_ALONE.keys()


def test_an_embedding_that_only_a_given_index_names_is_absent(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        publish.plan_only(ask(tmp_path, HEAD_ALONE, file_index={EMBED: 1, HEAD: 1, "model.norm.weight": 1}))
    assert caught.value.problems == (f"{HEAD}: tied to {EMBED}, which is not there",)


def test_an_excluded_embedding_counts_as_absent(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="tie_word_embeddings"):
        publish.plan_only(ask(tmp_path, SHARED, exclude=(EMBED,)))


def test_an_embedding_alone_is_what_a_tied_model_needs(tmp_path: Path) -> None:
    job = ask(tmp_path, {name: tensor for name, tensor in SHARED.items() if name != HEAD})
    assert publish.make(job).tied == {}
    assert written(job) == {EMBED, "model.norm.weight"}


def test_ties_are_found_under_the_names_that_are_written(tmp_path: Path) -> None:
    job = ask(tmp_path, {f"_orig_mod.{name}": tensor for name, tensor in SHARED.items()})
    assert publish.make(job).tied == {HEAD: EMBED}


def test_sharded_tied_tensors_are_compared_whole(checkpoints: Mapping[str, Truth], tmp_path: Path) -> None:
    truth = checkpoints["tied_fsdp2"]
    (tmp_path / CONFIG_PATH).write_bytes(TIED)
    job = Job(str(truth.folder), str(tmp_path / "out"), config=str(tmp_path))
    assert publish.make(job).tied == {HEAD: "embed_tokens.weight"}
    assert publish.make(replace(job, sink=str(tmp_path / "both"), config="")).tied == {}


def test_damage_of_a_tied_tensor_is_damage_and_no_difference(tmp_path: Path) -> None:
    job = ask(tmp_path, SHARED)
    [path] = Path(job.source).glob("*.distcp")
    raw = bytearray(path.read_bytes())
    raw[raw.index(WEIGHT.numpy().tobytes()) + 40] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptFile, match="CRC-32"):
        publish.plan_only(job)


def test_a_hole_in_a_tied_tensor_is_told_with_all_others(tmp_path: Path) -> None:
    job = ask(tmp_path, SHARED)
    found = publish.locate(job)
    catalog = replace(found.catalog, shards=())
    with pytest.raises(PlanError) as caught:
        draw(catalog, found.source, job)
    assert {problem.partition(":")[0] for problem in caught.value.problems} == SHARED.keys()


# ---- files ----


def test_the_index_does_not_name_what_is_left_out(tmp_path: Path) -> None:
    job = ask(tmp_path, SHARED, max_file_size=128)
    publish.make(job)
    index = json.loads((Path(job.sink) / INDEX_PATH).read_text())
    assert index["weight_map"].keys() == {EMBED, "model.norm.weight"}
    assert index["metadata"]["total_size"] == WEIGHT.nbytes + 16


@pytest.mark.parametrize("state", [SHARED, {EMBED: WEIGHT}], ids=["left-out", "never-saved"])
def test_a_given_file_number_of_a_tied_head_leaves_no_ghost(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    numbers = {name: 2 if name == "model.norm.weight" else 1 for name in state if name != HEAD} | {HEAD: 3}
    job = ask(tmp_path, state, file_index=numbers)
    publish.make(job)
    assert written(job) == state.keys() - {HEAD}


def test_a_file_that_held_only_the_head_goes_and_the_next_moves_up(tmp_path: Path) -> None:
    job = ask(tmp_path, SHARED, file_index={EMBED: 1, HEAD: 2, "model.norm.weight": 3})
    assert [set(record.tensors) for record in publish.make(job).records] == [{EMBED}, {"model.norm.weight"}]


def test_without_a_tying_config_a_ghost_in_the_given_index_is_an_error(tmp_path: Path) -> None:
    job = ask(tmp_path, {EMBED: WEIGHT}, None, file_index={EMBED: 1, HEAD: 2})
    with pytest.raises(PlanError) as caught:
        publish.make(job)
    assert f"{HEAD}: in the given index, but no such tensor is wanted" in caught.value.problems


# ---- the config ----


@pytest.mark.parametrize("given", ["file", "folder", "bucket"])
def test_a_config_may_be_named(given: str, tmp_path: Path) -> None:
    job = ask(tmp_path, SHARED, None)
    (tmp_path / "model.json").write_bytes(TIED)
    (tmp_path / CONFIG_PATH).write_bytes(TIED)
    open_store("memory://tying/m").put(CONFIG_PATH, TIED)
    url = {"file": tmp_path / "model.json", "folder": tmp_path, "bucket": "memory://tying/m/config.json"}[given]
    assert publish.plan_only(replace(job, config=str(url)))[1].tied == {HEAD: EMBED}


def test_a_named_config_counts_and_not_the_one_beside_the_checkpoint(tmp_path: Path) -> None:
    job = ask(tmp_path, APART)
    (tmp_path / CONFIG_PATH).write_bytes(b"{}")
    assert publish.plan_only(replace(job, config=str(tmp_path)))[1].tied == {}


@pytest.mark.parametrize(
    ("config", "message"), [(b"{", "not JSON"), (b" " * (17 << 20), "are no config")], ids=["broken", "huge"]
)
def test_a_config_that_cannot_be_read_is_an_error_with_its_place(config: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"ckpt/config\.json: .*{message}"):
        publish.plan_only(ask(tmp_path, SHARED, config))


def test_a_named_config_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"there is no config\.json"):
        publish.plan_only(replace(ask(tmp_path, {"w": WEIGHT}, None), config=str(tmp_path)))


def test_a_config_is_not_read_where_nothing_could_be_tied(tmp_path: Path) -> None:
    assert publish.plan_only(ask(tmp_path, {"w": WEIGHT}, b"{"))[1].tensors == 1


# ---- untie ----


@pytest.mark.parametrize("state", [SHARED, APART], ids=["equal", "different"])
def test_untying_writes_both_and_a_config_that_says_so(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    job = ask(tmp_path, state, untie=True)
    manifest = publish.make(job)
    assert (manifest.tied, written(job)) == ({}, state.keys())
    assert [record.path for record in manifest.extra_files] == [CONFIG_PATH]
    assert (Path(job.sink) / CONFIG_PATH).read_bytes() == TIED.replace(b"true", b"false")
    publish.validate_again(Job(job.source, job.sink))


def test_untying_a_config_that_says_false_changes_nothing(tmp_path: Path) -> None:
    job = ask(tmp_path, APART, b'{"tie_word_embeddings": false}', untie=True)
    assert publish.make(job).extra_files == ()


def test_untying_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--config"):
        publish.plan_only(ask(tmp_path, SHARED, None, untie=True))


def test_a_config_that_somebody_put_into_the_sink_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    job = ask(tmp_path, APART, untie=True)
    Path(job.sink).mkdir()
    (Path(job.sink) / CONFIG_PATH).write_text("mine")
    with pytest.raises(SinkOccupied, match=r"holds another config\.json"):
        publish.make(job)
    assert (Path(job.sink) / CONFIG_PATH).read_text() == "mine"
    publish.make(replace(job, overwrite=True))
    publish.make(job)
    assert (Path(job.sink) / CONFIG_PATH).read_bytes() == TIED.replace(b"true", b"false")


def test_another_answer_on_a_rerun_leaves_no_config_of_the_first(tmp_path: Path) -> None:
    job = ask(tmp_path, SHARED, untie=True)
    publish.make(job)
    with pytest.raises(SinkOccupied, match="another output"):
        publish.make(replace(job, untie=False))
    manifest = publish.make(replace(job, untie=False, overwrite=True))
    assert manifest.tied == {HEAD: EMBED}
    assert not (Path(job.sink) / CONFIG_PATH).exists()


# ---- at a later day, and before ----


def test_validation_makes_the_choice_of_the_manifest_again(tmp_path: Path) -> None:
    job = ask(tmp_path, SHARED)
    publish.make(job)
    (Path(job.source) / CONFIG_PATH).unlink()
    publish.validate_again(Job(job.source, job.sink))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (APART, f"{HEAD} was left out as equal to {EMBED}, and no longer is"),
        ({EMBED: WEIGHT, "model.norm.weight": torch.ones(4)}, f"{HEAD}: the source no longer holds it"),
    ],
    ids=["differs", "gone"],
)
def test_validation_sees_that_what_was_left_out_has_changed(
    state: dict[str, torch.Tensor], problem: str, tmp_path: Path
) -> None:
    job = ask(tmp_path, SHARED)
    publish.make(job)
    shutil.rmtree(job.source)
    dcp.save(state, checkpoint_id=job.source, no_dist=True)
    with pytest.raises(ValidationError) as caught:
        publish.validate_again(Job(job.source, job.sink))
    assert problem in caught.value.problems


def test_inspecting_says_what_is_tied_and_reads_no_tensor(tmp_path: Path) -> None:
    job = ask(tmp_path, APART)
    found = inspect(job)
    assert found.problems == ()
    assert [line.partition(" by ")[0] for line in found.said] == [f"{HEAD} is tied to {EMBED}"]
    assert inspect(replace(job, untie=True)).said == ()


def test_inspecting_sees_a_head_without_its_embedding(tmp_path: Path) -> None:
    assert inspect(ask(tmp_path, HEAD_ALONE)).problems == (f"{HEAD}: no embedding that it could be tied to",)
