"""The chain: each step finds what the one before it left, a rerun finishes it, and nothing unverified is seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp

from hfdcp_core import publish
from hfdcp_core.errors import (
    Cancelled,
    CorruptFile,
    IncompleteCheckpoint,
    NoSpace,
    PlanError,
    SinkOccupied,
    SourceChanged,
    UsageError,
    ValidationError,
)
from hfdcp_core.locate import locate
from hfdcp_core.publish import Job
from hfdcp_core.run import Run
from hfdcp_core.state import Cancellation
from hfdcp_core.store import open_store

STATE = {
    "model": {
        "embed.weight": torch.arange(640.0).reshape(40, 16),
        "layers.0.weight": torch.arange(96, dtype=torch.int32).reshape(8, 12).t(),
        "layers.1.weight": torch.full((24, 8), 0.5, dtype=torch.bfloat16),
        "step": torch.tensor(11),
    },
    "optim": {"state": {"embed.weight": {"exp_avg": torch.zeros(40, 16)}}, "lr": 0.1},
}
WEIGHTS = STATE["model"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small real checkpoint that nobody changes."""
    folder = tmp_path_factory.mktemp("saved")
    dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def job(saved: Path, tmp_path: Path) -> Job:
    """Return a job upon a copy of the checkpoint that gives three files."""
    shutil.copytree(saved, tmp_path / "ckpt")
    return Job(source=str(tmp_path / "ckpt"), sink=str(tmp_path / "out"), max_file_size=700, workers=2)


def output(job: Job) -> dict[str, np.ndarray]:
    """Return every tensor of the output as safetensors' own reader gives it, bf16 as its bits."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(Path(job.sink).glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as reader:
            found |= {name: bits(reader.get_tensor(name)) for name in reader.keys()}  # noqa: SIM118
    return found


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's elements as an array, bf16 as its bits."""
    whole = tensor.contiguous()
    return (whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy()


def assert_right(job: Job) -> None:
    """Hold the output against what was saved."""
    found = output(job)
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert found[name].shape == tuple(tensor.shape)
        assert np.array_equal(found[name], bits(tensor))


def final_names(job: Job) -> set[str]:
    """Return what a loader could see in the sink."""
    sink = Path(job.sink)
    return {path.name for path in sink.iterdir() if path.name != ".hfdcp"} if sink.exists() else set()


# ---- a run ----


def test_the_chain_makes_files_index_and_manifest_of_the_weights_alone(job: Job) -> None:
    manifest = publish.make(job)
    assert_right(job)
    names = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [record.path for record in manifest.records] == names
    assert final_names(job) == {*names, "model.safetensors.index.json", "hfdcp-manifest.json"}
    index = json.loads((Path(job.sink) / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == WEIGHTS.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in WEIGHTS.values()) == manifest.total_size
    assert manifest.skipped == ("optim.state.embed.weight.exp_avg", "optim.lr")
    assert sum(record.source.verified for record in manifest.records) == len(WEIGHTS)


def test_one_file_is_named_model_and_has_no_index(job: Job) -> None:
    publish.make(replace(job, max_file_size=10**9))
    assert final_names(job) == {"model.safetensors", "hfdcp-manifest.json"}
    assert_right(job)


def test_the_manifest_tells_nothing_of_where_it_was_made(job: Job, tmp_path: Path) -> None:
    publish.make(job)
    assert str(tmp_path).encode() not in (Path(job.sink) / "hfdcp-manifest.json").read_bytes()


def test_the_same_source_and_settings_give_the_same_bytes(job: Job, tmp_path: Path) -> None:
    first = publish.make(job)
    second = publish.make(replace(job, sink=str(tmp_path / "again"), memory_bytes=110 << 20, workers=1))
    assert first == second


def test_a_remote_sink_and_a_remote_source_give_the_same_files(job: Job, saved: Path) -> None:
    remote = open_store("memory://publish-remote/ckpt")
    for path in saved.iterdir():
        remote.put(path.name, path.read_bytes())
    there = publish.make(replace(job, source="memory://publish-remote/ckpt", sink="memory://publish-remote/out"))
    here = publish.make(job)
    assert [(r.path, r.sha256, r.tensors) for r in there.records] == [
        (r.path, r.sha256, r.tensors) for r in here.records
    ]


def test_a_job_goes_through_json(job: Job) -> None:
    odd = replace(job, include=("a*", "b"), file_index={"a": 1}, world_size=4)
    assert Job.from_json(odd.to_json()) == odd


@pytest.mark.parametrize(
    "change",
    [{"max_file_size": 0}, {"workers": -1}, {"world_size": 0}],
    ids=lambda change: next(iter(change)),
)
def test_numbers_that_mean_nothing_are_refused(job: Job, change: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="positive"):
        replace(job, **change)


def test_too_little_memory_is_refused_before_anything_is_written(job: Job) -> None:
    with pytest.raises(UsageError, match=r"too little: at least \d+"):
        publish.make(replace(job, memory_bytes=64 << 20))
    assert final_names(job) == set()


def test_a_plan_alone_writes_nothing(job: Job) -> None:
    gathered, planned = publish.plan_only(job)
    assert not Path(job.sink).exists()
    assert (gathered.tensors, planned.tensors, len(planned.files)) == (4, 4, 3)
    assert planned.digest == publish.make(job).plan_digest
    assert all(file.done for file in publish.plan_only(job)[1].files)


def test_given_file_numbers_are_followed(job: Job) -> None:
    numbers = {"step": 1, "embed.weight": 2, "layers.0.weight": 1, "layers.1.weight": 2}
    manifest = publish.make(replace(job, file_index=numbers))
    assert [set(record.tensors) for record in manifest.records] == [
        {"step", "layers.0.weight"},
        {"embed.weight", "layers.1.weight"},
    ]


def test_include_and_exclude_choose_by_saved_names(job: Job) -> None:
    publish.make(replace(job, include=("*",), exclude=("*step",), recipe="none"))
    assert set(output(job)) == {
        "model.embed.weight",
        "model.layers.0.weight",
        "model.layers.1.weight",
        "optim.state.embed.weight.exp_avg",
    }


def test_completeness_that_cannot_be_proved_must_be_accepted(job: Job, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    info = json.dumps({"w": {"saved_offsets": [0]}})
    safetensors.numpy.save_file({"w": np.ones(4)}, shards / "x.safetensors", {"DCP_SHARDING_INFO": info})
    unproved = replace(job, source=str(shards), recipe="none")
    with pytest.raises(IncompleteCheckpoint, match="--accept-unproved"):
        publish.make(unproved)
    assert final_names(job) == set()
    assert publish.make(replace(unproved, accept_unproved=True)).unproved is not None


# ---- taken up again ----


def test_a_rerun_makes_only_what_is_not_whole(job: Job) -> None:
    publish.make(job)
    sink = Path(job.sink)
    before = {path.name: path.stat().st_mtime_ns for path in sink.glob("*.safetensors")}
    (sink / "model-00002-of-00003.safetensors").unlink()
    (sink / "hfdcp-manifest.json").unlink()
    publish.make(job)
    after = {path.name: path.stat().st_mtime_ns for path in sink.glob("*.safetensors")}
    assert [name for name in before if before[name] != after[name]] == ["model-00002-of-00003.safetensors"]
    assert_right(job)


def test_a_file_whose_record_was_lost_is_made_again_and_not_taken_for_anothers(job: Job) -> None:
    publish.make(job)
    sink = Path(job.sink)
    shutil.rmtree(sink / ".hfdcp" / "records")
    (sink / "hfdcp-manifest.json").unlink()
    (sink / "model-00001-of-00003.safetensors").write_bytes(b"half of it")
    publish.make(job)
    assert_right(job)


def test_an_output_that_was_not_hashed_is_right_but_neither_pushed_nor_taken_for_a_hashed_one(job: Job) -> None:
    fast = replace(job, hashing=False, repo="me/it")
    publish.make(fast)
    assert_right(job)
    with pytest.raises(PlanError, match="made without hashing"):
        publish.push(fast)
    with pytest.raises(PlanError, match="made without hashing"):
        publish.validate_again(job)
    assert publish.make(job).hashed
    assert publish.validate_again(job).hashed


def test_a_stopped_run_goes_on_where_it_was(job: Job) -> None:
    wish = Cancellation()
    wish.cancel()
    with pytest.raises(Cancelled):
        publish.make(job, cancellation=wish)
    assert final_names(job) == set()
    publish.make(job)
    assert_right(job)


def test_what_a_killed_run_left_half_written_is_removed_before_room_is_looked_for(job: Job) -> None:
    sink = Path(job.sink)
    sink.mkdir()
    (sink / ".model-00001-of-00003.safetensors.hfdcp-tmp-0123abcd").write_bytes(b"half of it")
    publish.make(job)
    assert not list(sink.glob(".model*"))


def test_records_and_plans_that_cannot_be_read_are_made_again(job: Job) -> None:
    publish.make(job)
    state = Path(job.sink) / ".hfdcp"
    for path in (*state.glob("records/*"), state / "plan.json", state / "catalog.json.gz"):
        path.write_bytes(b"\0")
    publish.make(job)
    assert_right(job)


def test_no_later_step_takes_another_checkpoint_for_the_latest(saved: Path, job: Job) -> None:
    """A run that goes on saving while its latest step is being published."""
    runs = Path(job.source).parent / "runs"
    shutil.copytree(saved, runs / "step-9")
    asked = replace(job, source=str(runs), latest=True)
    gathered = publish.gather(asked)
    assert (gathered.folder, gathered.said) == (
        "step-9",
        ("latest complete step: step-9: torch distributed checkpoint",),
    )
    dcp.save({"model": {"another": torch.zeros(3)}}, checkpoint_id=runs / "step-10", no_dist=True)
    publish.reshard(asked)
    publish.consolidate_all(asked)
    publish.validate(asked)
    assert_right(asked)
    publish.validate_again(asked)
    with pytest.raises(PlanError):
        publish.plan_only(replace(asked, include=("model.embed.weight",)))


def test_a_newer_step_is_never_taken_into_the_sink_of_an_older_one_and_the_message_says_what_to_do(
    saved: Path, job: Job
) -> None:
    runs = Path(job.source).parent / "runs"
    shutil.copytree(saved, runs / "step-9")
    asked = replace(job, source=str(runs), latest=True, max_file_size=100_000)
    made = publish.make(asked)
    (Path(job.sink) / "hfdcp-manifest.json").unlink()  # as if the run had been interrupted
    assert publish.make(asked) == made
    shutil.copytree(saved, runs / "step-10")
    for _ in range(2):
        with pytest.raises(SinkOccupied) as caught:
            publish.make(asked)
        assert f"{job.sink} holds what was made of step-9" in str(caught.value)
        assert "the newest complete step is step-10 now" in str(caught.value)
    named = replace(asked, source=f"{runs}/step-9", latest=False)
    assert f"name {named.source} without --latest" in str(caught.value)
    assert publish.make(named) == made
    assert publish.make(replace(asked, sink=f"{job.sink}-10")).plan_digest != made.plan_digest
    publish.make(replace(asked, overwrite=True))
    assert Run(open_store(job.sink)).source().folder == "step-10"


def test_files_in_two_places_give_what_one_place_gives(job: Job) -> None:
    publish.make(job)
    source, other = Path(job.source), Path(job.source).parent / "other"
    other.mkdir()
    (source / "__0_0.distcp").rename(other / "__0_0.distcp")
    asked = replace(job, sink=f"{job.sink}2", also=(str(other),))
    publish.make(asked)
    assert_right(asked)
    publish.validate_again(asked)
    assert (Path(asked.sink) / "model.safetensors.index.json").read_bytes() == (
        Path(job.sink) / "model.safetensors.index.json"
    ).read_bytes()


def test_a_file_that_changes_in_a_further_place_is_noticed(job: Job) -> None:
    other = Path(job.source).parent / "other"
    other.mkdir()
    (Path(job.source) / "__0_0.distcp").rename(other / "__0_0.distcp")
    asked = replace(job, also=(str(other),))
    publish.gather(asked)
    publish.reshard(asked)
    shutil.copy(other / "__0_0.distcp", other / "new")
    (other / "new").replace(other / "__0_0.distcp")
    with pytest.raises(SourceChanged, match="other"):
        publish.consolidate_all(asked)


def test_the_output_is_never_written_into_a_checkpoint_that_was_found_below(saved: Path, job: Job) -> None:
    runs = Path(job.source).parent / "runs"
    shutil.copytree(saved, runs / "step-9")
    for asked in (
        replace(job, source=str(runs), sink=str(runs / "step-9")),
        replace(job, also=(str(runs / "step-9"),), sink=str(runs / "step-9")),
    ):
        with pytest.raises(SinkOccupied, match="the checkpoint itself"):
            publish.gather(asked)


def test_an_output_beside_the_steps_is_not_taken_for_one(saved: Path, job: Job) -> None:
    runs = Path(job.source).parent / "runs"
    shutil.copytree(saved, runs / "step-9")
    asked = replace(job, source=str(runs), sink=str(runs / "out"))
    publish.make(asked)
    publish.make(asked)
    assert_right(asked)


def test_steps_say_which_one_is_missing_before_them(job: Job) -> None:
    with pytest.raises(PlanError, match="the step 'gather' was not done"):
        publish.reshard(job)
    publish.gather(job)
    with pytest.raises(PlanError, match="the step 'reshard' was not done"):
        publish.consolidate(job, 0)
    publish.reshard(job)
    with pytest.raises(PlanError, match=r"no \.hfdcp/plan/00004"):
        publish.consolidate(job, 3)
    with pytest.raises(ValidationError, match="not what was planned") as caught:
        publish.validate(job)
    assert len(caught.value.problems) == 3
    with pytest.raises(PlanError, match="no manifest"):
        publish.push(replace(job, repo="a/b"))
    with pytest.raises(UsageError, match="no repository"):
        publish.push(job)


# ---- whose sink it is ----


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "hfdcp-manifest.json", "x.safetensors"]
)
def test_a_sink_that_holds_something_else_is_refused_untouched(job: Job, name: str) -> None:
    sink = Path(job.sink)
    sink.mkdir()
    (sink / name).write_bytes(b"somebody's")
    with pytest.raises(SinkOccupied, match="--overwrite") as caught:
        publish.make(job)
    assert caught.value.problems == (name,)
    assert final_names(job) == {name}
    assert (sink / name).read_bytes() == b"somebody's"


@pytest.mark.parametrize("way", ["{}", "{}/", "{}/../ckpt", "file://{}"])
def test_the_checkpoint_itself_is_no_sink_even_when_asked_to_overwrite(job: Job, way: str) -> None:
    with pytest.raises(SinkOccupied, match="is the checkpoint itself"):
        publish.make(replace(job, sink=way.format(job.source), overwrite=True))
    assert {".metadata", "__0_0.distcp"} <= {path.name for path in Path(job.source).iterdir()}


def test_another_output_is_replaced_when_that_is_asked_for(job: Job) -> None:
    publish.make(replace(job, max_file_size=10**9))
    with pytest.raises(SinkOccupied):
        publish.make(job)
    publish.make(replace(job, overwrite=True))
    assert "model.safetensors" not in final_names(job)
    assert_right(job)


def test_other_files_in_the_sink_are_left_alone(job: Job) -> None:
    Path(job.sink).mkdir()
    (Path(job.sink) / "README.md").write_text("mine")
    publish.make(replace(job, overwrite=True))
    assert (Path(job.sink) / "README.md").read_text() == "mine"


def test_a_second_writer_of_one_sink_is_refused(job: Job) -> None:
    with publish.hold(job), pytest.raises(SinkOccupied, match=r"lock is held by process \d+"):
        publish.make(job)
    publish.make(job)


def test_a_sink_without_room_is_refused_before_a_byte_moves(job: Job) -> None:
    publish.gather(job)
    catalog = Path(job.sink) / ".hfdcp" / "catalog.json.gz"
    from hfdcp_core import wire  # the catalog is made to speak of more than any disk holds
    from hfdcp_core.box import Box
    from hfdcp_core.catalog import Catalog, Shard, Span, TensorSpec

    shape = (1 << 58,)
    shard = Shard("w", "U8", Box.whole(shape), Span("x", 0, 1 << 58))
    catalog.write_bytes(wire.dump_catalog(Catalog("safetensors", {"w": TensorSpec("U8", shape)}, (shard,))))
    with pytest.raises(NoSpace, match="are free"):
        publish.reshard(job)
    assert final_names(job) == set()


# ---- damage ----


def flip(path: Path, marker: bytes) -> None:
    """Flip one bit of a file, inside some bytes of it."""
    raw = bytearray(path.read_bytes())
    raw[raw.index(marker) + len(marker) // 2] ^= 4
    path.write_bytes(raw)


def test_a_flipped_bit_names_the_tensor_and_leaves_nothing_to_load(job: Job) -> None:
    flip(Path(job.source) / "__0_0.distcp", bits(WEIGHTS["layers.1.weight"]).tobytes())
    with pytest.raises(CorruptFile, match=r"model\.layers\.1\.weight\[0:24, 0:8\] in __0_0\.distcp"):
        publish.make(job)
    assert not final_names(job) & {"model.safetensors.index.json", "hfdcp-manifest.json"}
    assert "layers.1.weight" not in output(job)


def test_a_source_that_changes_between_gathering_and_the_end_is_refused(job: Job) -> None:
    with publish.hold(job):
        publish.gather(job)
        publish.reshard(job)
        publish.consolidate_all(job)
        shutil.copy(Path(job.source) / "__0_0.distcp", Path(job.source) / "new")
        (Path(job.source) / "new").rename(Path(job.source) / "__0_0.distcp")
        with pytest.raises(SourceChanged, match="__0_0"):
            publish.validate(job)
    assert not final_names(job) & {"model.safetensors.index.json", "hfdcp-manifest.json"}


def test_a_written_file_that_is_touched_before_the_manifest_is_refused(job: Job) -> None:
    with publish.hold(job):
        publish.gather(job)
        publish.reshard(job)
        publish.consolidate_all(job)
        (Path(job.sink) / "model-00001-of-00003.safetensors").write_bytes(b"x")
        with pytest.raises(ValidationError) as caught:
            publish.validate(job)
    assert caught.value.problems[0].startswith("model-00001-of-00003.safetensors: not whole")
    assert not final_names(job) & {"model.safetensors.index.json", "hfdcp-manifest.json"}


# ---- at a later day ----


@pytest.fixture
def made(job: Job) -> Job:
    """Return a job whose output is complete."""
    publish.make(job)
    return job


def test_a_complete_output_passes_a_second_look_with_and_without_its_source(made: Job) -> None:
    manifest = publish.validate_again(replace(made, source=""))
    assert publish.validate_again(made) == manifest


@pytest.mark.parametrize(
    "damage", ["a flipped bit", "cut short", "gone", "a stray weight file", "another index", "another header"]
)
def test_every_later_change_is_found(made: Job, damage: str) -> None:
    path = Path(made.sink) / "model-00002-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        raw[-1] ^= 1
    elif damage == "cut short":
        del raw[-1]
    elif damage == "another header":
        raw[9] ^= 1
    path.write_bytes(raw)
    if damage == "gone":
        path.unlink()
    elif damage == "a stray weight file":
        (path.parent / "extra.safetensors").write_bytes(raw)
    elif damage == "another index":
        path = path.parent / "model.safetensors.index.json"
        path.write_text(path.read_text().replace("00001-of", "00002-of"))
    with pytest.raises(ValidationError) as caught:
        publish.validate_again(replace(made, source=""))
    named = "extra.safetensors" if damage == "a stray weight file" else path.name
    assert any(named in problem for problem in caught.value.problems)


def test_a_source_with_other_values_is_told_from_the_one_that_was_published(made: Job) -> None:
    other = {"model": {**WEIGHTS, "step": torch.tensor(12)}, "optim": STATE["optim"]}
    shutil.rmtree(made.source)
    dcp.save(other, checkpoint_id=made.source, no_dist=True)
    with pytest.raises(ValidationError) as caught:
        publish.validate_again(made)
    assert [problem.partition(": ")[2] for problem in caught.value.problems] == ["step is not what the source holds"]


def test_an_output_without_a_manifest_is_not_complete(job: Job) -> None:
    with pytest.raises(PlanError, match="no manifest"):
        publish.validate_again(job)


# ---- for ranks ----


def torch_load(folder: str) -> dict[str, torch.Tensor]:
    """Return what torch's own reader makes of shards of a distributed save."""
    loaded = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in WEIGHTS.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path=folder), no_dist=True)
    return loaded


@pytest.mark.parametrize("ranks", [1, 3, 50])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_files_for_ranks_are_read_by_torch_and_by_us(job: Job, tmp_path: Path, ranks: int, dim: int) -> None:
    sharded = replace(job, ranks=ranks, shard_dim=dim)
    manifest = publish.make(sharded)
    assert [record.path for record in manifest.records] == [
        f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, ranks + 1)
    ]
    loaded = torch_load(job.sink)
    for name, tensor in WEIGHTS.items():
        assert np.array_equal(bits(loaded[name]), bits(tensor))
    again = Job(source=job.sink, sink=str(tmp_path / "again"), workers=1)
    assert publish.make(again).unproved is None
    assert_right(again)
    assert publish.validate_again(sharded) == manifest


def test_a_lost_file_of_a_rank_is_named(job: Job, tmp_path: Path) -> None:
    publish.make(replace(job, ranks=3))
    (Path(job.sink) / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteCheckpoint) as caught:
        publish.make(Job(source=job.sink, sink=str(tmp_path / "again")))
    assert caught.value.problems == ("rank 3: shard-00003-model-00001-of-00001.safetensors is not there",)


def test_a_flipped_bit_is_found_though_each_rank_reads_only_its_part(job: Job) -> None:
    flip(Path(job.source) / "__0_0.distcp", bits(WEIGHTS["embed.weight"]).tobytes())
    for dim in (0, 1):
        with pytest.raises(CorruptFile, match=r"embed\.weight|__0_0\.distcp"):
            publish.make(replace(job, ranks=2, shard_dim=dim))
        assert "hfdcp-manifest.json" not in final_names(job)
        shutil.rmtree(job.sink)


def test_files_for_ranks_are_no_repository(job: Job) -> None:
    publish.make(replace(job, ranks=2))
    with pytest.raises(PlanError, match="consolidate it first"):
        publish.push(replace(job, repo="a/b"))
    with pytest.raises(UsageError, match="no model repository"):
        replace(job, repo="a/b", ranks=2)


def test_a_plan_says_how_many_tensors_have_too_few_dimensions_to_be_cut(job: Job) -> None:
    specs = locate(job).catalog.tensors.values()
    flat = sum(len(spec.shape) < 2 for spec in specs)
    assert 0 < flat < len(specs)
    assert publish.plan_only(replace(job, ranks=2, shard_dim=1, include=("*",)))[1].uncut == flat
    assert publish.plan_only(replace(job, include=("*",)))[1].uncut == 0


def test_a_plan_alone_refuses_a_sink_that_could_never_take_the_output(job: Job, tmp_path: Path) -> None:
    with pytest.raises(SinkOccupied, match="is the checkpoint itself"):
        publish.plan_only(replace(job, sink=job.source))
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(SinkOccupied, match="is a file; the output needs a folder"):
        publish.plan_only(replace(job, sink=str(tmp_path / "file")))


@pytest.mark.parametrize("again", [publish.push, publish.validate_again])
def test_where_no_output_lies_the_command_that_makes_one_is_named(job: Job, again: Callable[[Job], object]) -> None:
    with pytest.raises(PlanError, match=r"no manifest: .*`hfdcp consolidate SOURCE SINK`"):
        again(replace(job, sink=job.source, repo="me/x"))
