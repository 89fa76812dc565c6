"""What lies in a store is told by what is found, and what metadata and headers can show to be wrong is refused."""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, TensorSpec
from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, UnknownFormat, UnsafePickle
from hfdcp_core.gather import gather
from hfdcp_core.safetensors_file import write_header, write_index
from hfdcp_core.store import Sink, open_store


def fresh() -> Sink:
    """Return an empty store in memory."""
    return open_store(f"memory://{uuid.uuid4().hex}")


def write(
    store: Sink,
    path: str,
    tensors: Mapping[str, np.ndarray],
    offsets: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Write a safetensors file, as a rank's shard where offsets are given."""
    metadata = {"format": "pt"}
    if offsets is not None:
        metadata["DCP_SHARDING_INFO"] = json.dumps({k: {"saved_offsets": list(v)} for k, v in offsets.items()})
    specs = {name: TensorSpec("F32", array.shape) for name, array in tensors.items()}
    header, _ = write_header(specs, metadata=metadata)
    store.put(path, header + b"".join(array.astype(np.float32).tobytes() for array in tensors.values()))


def rows(*numbers: int) -> np.ndarray:
    """Return a matrix of two columns whose rows hold their numbers."""
    return np.repeat(np.array(numbers, np.float32)[:, None], 2, axis=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Return the files of a small real checkpoint."""
    folder = tmp_path_factory.mktemp("dcp")
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(7)}, "optim": {"lr": 0.1}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stored(files: Mapping[str, bytes]) -> Sink:
    """Return a store with these files."""
    store = fresh()
    for path, raw in files.items():
        store.put(path, raw)
    return store


# ---- distributed checkpoints ----


def test_a_distributed_checkpoint_is_told_by_its_metadata(checkpoint: Mapping[str, bytes]) -> None:
    catalog = gather(stored(checkpoint))
    assert catalog.format == "dcp"
    assert dict(catalog.tensors) == {"model.w": TensorSpec("F32", (3, 4)), "model.step": TensorSpec("I64", ())}
    assert {shard.encoding for shard in catalog.shards} == {TORCH_SAVE}
    assert {stamp.path for stamp in catalog.files} == {".metadata", "__0_0.distcp"}
    assert catalog.nesting["model.w"] == ("model", "w")
    assert [entry.name for entry in catalog.skipped] == ["optim.lr"]
    assert catalog.unproved is None


def test_files_that_the_metadata_does_not_name_do_not_count(checkpoint: Mapping[str, bytes]) -> None:
    catalog = gather(stored({**checkpoint, "__7_0.distcp": b"of another save", "model.safetensors": b"x"}))
    assert {stamp.path for stamp in catalog.files} == {".metadata", "__0_0.distcp"}


def test_an_absent_shard_file_is_named(checkpoint: Mapping[str, bytes]) -> None:
    with pytest.raises(IncompleteCheckpoint) as caught:
        gather(stored({".metadata": checkpoint[".metadata"]}))
    assert caught.value.problems == ("rank 0: __0_0.distcp",)


def test_absent_metadata_beside_shard_files_is_an_unfinished_save(checkpoint: Mapping[str, bytes]) -> None:
    with pytest.raises(IncompleteCheckpoint, match=r"no \.metadata: the save did not finish"):
        gather(stored({"__0_0.distcp": checkpoint["__0_0.distcp"]}))


@pytest.mark.parametrize(
    ("change", "why"), [(-1, "cut short"), (1, "longer: of another save")], ids=["shorter", "longer"]
)
def test_a_shard_file_of_another_length_is_refused(checkpoint: Mapping[str, bytes], change: int, why: str) -> None:
    raw = checkpoint["__0_0.distcp"]
    changed = raw[:change] if change < 0 else raw + b"x"
    with pytest.raises(CorruptFile) as caught:
        gather(stored({**checkpoint, "__0_0.distcp": changed}))
    assert why in caught.value.problems[0]
    assert f"{len(changed)} bytes, expected {len(raw)}" in caught.value.problems[0]


def test_truncated_metadata_is_corrupt(checkpoint: Mapping[str, bytes]) -> None:
    with pytest.raises(CorruptFile, match=r"\.metadata"):
        gather(stored({**checkpoint, ".metadata": checkpoint[".metadata"][:-40]}))


def test_metadata_that_calls_something_is_refused_by_name(checkpoint: Mapping[str, bytes]) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("false",)

    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        gather(stored({**checkpoint, ".metadata": pickle.dumps(Attack())}))


# ---- plain safetensors ----


def test_one_file_without_an_index_is_a_plain_checkpoint() -> None:
    store = fresh()
    write(store, "model.safetensors", {"a": rows(1), "b": np.float32(3.5)[()] * np.ones(())})
    catalog = gather(store)
    assert (catalog.format, dict(catalog.tensors)) == (
        "safetensors",
        {"a": TensorSpec("F32", (1, 2)), "b": TensorSpec("F32", ())},
    )
    assert catalog.unproved is None


def test_the_index_decides_which_files_count() -> None:
    store = fresh()
    write(store, "model-00001-of-00002.safetensors", {"a": rows(1)})
    write(store, "model-00002-of-00002.safetensors", {"b": rows(2)})
    write(store, "consolidated.safetensors", {"a": rows(9), "b": rows(9)})
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    store.put("model.safetensors.index.json", write_index(names, total_size=16, total_parameters=4))
    catalog = gather(store)
    assert {shard.fqn: shard.span.path for shard in catalog.shards} == names
    assert [entry.name for entry in catalog.skipped] == ["consolidated.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "m.safetensors", "ghost": "m.safetensors"}, "ghost: the index places it in m.safetensors, which does"),
        ({}, "b: in m.safetensors, but the index does not say so"),
    ],
    ids=["a name that no file holds", "a tensor that the index does not name"],
)
def test_an_index_that_disagrees_with_the_headers_is_refused(weight_map: dict[str, str], problem: str) -> None:
    store = fresh()
    write(store, "m.safetensors", {"a": rows(1), "b": rows(2)})
    named = {"a": "m.safetensors", **weight_map}
    store.put("model.safetensors.index.json", write_index(named, total_size=16, total_parameters=4))
    with pytest.raises(CorruptFile) as caught:
        gather(store)
    assert any(line.startswith(problem) for line in caught.value.problems)


def test_an_index_that_names_absent_files_is_an_incomplete_checkpoint() -> None:
    store = fresh()
    write(store, "m-1.safetensors", {"a": rows(1)})
    named = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    store.put("model.safetensors.index.json", write_index(named, total_size=16, total_parameters=4))
    with pytest.raises(IncompleteCheckpoint) as caught:
        gather(store)
    assert caught.value.problems == ("m-2.safetensors",)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_lost_file_of_a_counted_series_is_named_though_no_index_speaks_of_it(lost: int) -> None:
    store = fresh()
    for number in {1, 2, 3} - {lost}:
        write(store, f"model-{number:05d}-of-00003.safetensors", {f"t{number}": rows(number)})
    with pytest.raises(IncompleteCheckpoint) as caught:
        gather(store)
    assert caught.value.problems == (f"model-{lost:05d}-of-00003.safetensors",)


def test_a_whole_series_without_an_index_is_a_checkpoint() -> None:
    store = fresh()
    for number in (1, 2):
        write(store, f"model-{number:05d}-of-00002.safetensors", {f"t{number}": rows(number)})
    assert set(gather(store).tensors) == {"t1", "t2"}


def test_an_index_that_leaves_out_a_file_of_its_own_series_is_refused() -> None:
    store = fresh()
    for number in (1, 2):
        write(store, f"model-{number:05d}-of-00002.safetensors", {f"t{number}": rows(number)})
    named = {"t1": "model-00001-of-00002.safetensors"}
    store.put("model.safetensors.index.json", write_index(named, total_size=8, total_parameters=2))
    with pytest.raises(CorruptFile) as caught:
        gather(store)
    assert "model-00002-of-00002.safetensors" in caught.value.problems[0]


def test_a_series_of_another_save_beside_the_indexed_files_does_not_count() -> None:
    store = fresh()
    write(store, "model-00001-of-00002.safetensors", {"old": rows(9)})
    write(store, "model-00001-of-00001.safetensors", {"t": rows(1)})
    named = {"t": "model-00001-of-00001.safetensors"}
    store.put("model.safetensors.index.json", write_index(named, total_size=8, total_parameters=2))
    catalog = gather(store)
    assert (set(catalog.tensors), [entry.name for entry in catalog.skipped]) == (
        {"t"},
        ["model-00001-of-00002.safetensors"],
    )


def test_two_series_without_an_index_are_two_saves() -> None:
    store = fresh()
    write(store, "model-00001-of-00001.safetensors", {"a": rows(1)})
    write(store, "model.safetensors", {"b": rows(2)})
    with pytest.raises(CorruptFile, match="of several saves"):
        gather(store)


def test_one_name_in_two_files_without_an_index_is_refused() -> None:
    store = fresh()
    write(store, "a.safetensors", {"w": rows(1)})
    write(store, "b.safetensors", {"w": rows(2)})
    with pytest.raises(CorruptFile, match="contradict each other") as caught:
        gather(store)
    assert caught.value.problems[0].startswith("w: in more than one file")


@pytest.mark.parametrize("size", [0, 7, 12])
def test_a_file_too_short_for_its_header_is_refused(size: int) -> None:
    store = fresh()
    write(store, "model.safetensors", {"w": rows(1)})
    store.put("model.safetensors", store.read("model.safetensors", 0, size))
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        gather(store)


# ---- shards of a distributed save ----


def sharded(ranks: int = 3) -> Sink:
    """Return what ranks leave that each hold one row."""
    store = fresh()
    for rank in range(ranks):
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        write(store, name, {"w": rows(rank)}, {"w": (rank, 0)})
    return store


def test_shards_are_told_by_their_headers_and_state_no_whole_shape() -> None:
    catalog = gather(sharded())
    assert (catalog.format, dict(catalog.tensors)) == ("dcp-safetensors", {"w": TensorSpec("F32", (3, 2))})
    assert {shard.box for shard in catalog.shards} == {Box((rank, 0), (1, 2)) for rank in range(3)}
    assert catalog.unproved is not None
    assert "--world-size" in catalog.unproved


def test_the_number_of_ranks_proves_that_no_shard_is_lost() -> None:
    assert gather(sharded(), world_size=3).unproved is None


@pytest.mark.parametrize(
    ("world_size", "problem"),
    [
        (4, "rank 3: shard-00004-model-00001-of-00001.safetensors is not there"),
        (2, "shard-00003-model-00001-of-00001.safetensors is of another save"),
    ],
)
def test_another_number_of_files_than_ranks_is_refused(world_size: int, problem: str) -> None:
    with pytest.raises(IncompleteCheckpoint) as caught:
        gather(sharded(), world_size=world_size)
    assert caught.value.problems == (problem,)


def test_files_that_no_rank_names_so_prove_nothing() -> None:
    store = fresh()
    write(store, "mine.safetensors", {"w": rows(1)}, {"w": (0, 0)})
    with pytest.raises(IncompleteCheckpoint, match="proves nothing"):
        gather(store, world_size=1)


def test_an_index_beside_the_shards_proves_by_its_total_size() -> None:
    store = sharded()
    named = {"w": "model-00001-of-00001.safetensors"}
    store.put("model.safetensors.index.json", write_index(named, total_size=24, total_parameters=6))
    assert gather(store).unproved is None


@pytest.mark.parametrize(
    ("names", "total", "problem"),
    [
        (["w"], 32, "32 bytes of tensors are stated, 24 are there"),
        (["w", "v"], 24, "v: in the index, but in no file"),
        (["v"], 24, "w: in a file, but not in the index"),
    ],
)
def test_an_index_that_speaks_of_more_than_the_shards_is_refused(names: list[str], total: int, problem: str) -> None:
    store = sharded()
    named = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    store.put("model.safetensors.index.json", write_index(named, total_size=total, total_parameters=6))
    with pytest.raises(IncompleteCheckpoint) as caught:
        gather(store)
    assert problem in caught.value.problems


def test_whole_tensors_with_equal_bytes_are_replicas() -> None:
    store = sharded(1)
    write(store, "shard-00002-model-00001-of-00001.safetensors", {"w": rows(0)}, {"w": (0, 0)})
    assert len(gather(store, world_size=2).shards) == 1


def test_shards_of_one_box_with_other_bytes_are_of_another_save() -> None:
    store = sharded(1)
    write(store, "shard-00002-model-00001-of-00001.safetensors", {"w": rows(5)}, {"w": (0, 0)})
    with pytest.raises(CorruptFile, match="left over from another save") as caught:
        gather(store)
    assert "shard-00001" in caught.value.problems[0]
    assert "shard-00002" in caught.value.problems[0]


def test_shards_of_different_rank_are_refused() -> None:
    store = sharded(1)
    write(store, "shard-00002-model-00001-of-00001.safetensors", {"w": np.ones(3)}, {"w": (1,)})
    with pytest.raises(CorruptFile, match="different kinds"):
        gather(store)


def test_a_whole_file_among_shards_is_refused() -> None:
    store = sharded(2)
    write(store, "model.safetensors", {"v": rows(0)})
    with pytest.raises(CorruptFile) as caught:
        gather(store)
    assert caught.value.problems == ("model.safetensors",)


# ---- what torch consolidated, with the shards beside ----


def consolidated(scalar: float) -> Sink:
    """Return what torch's writer leaves that saved a 0-d tensor of 3.5 and consolidated it."""
    store = fresh()
    write(store, "model-00001-of-00001.safetensors", {"w": rows(1), "s": np.array(scalar)})
    write(store, "sharded/shard-00001-model-00001-of-00001.safetensors", {"s": np.array(3.5)}, {"s": ()})
    return store


def test_a_scalar_that_torch_consolidated_to_zero_is_told_by_the_shards_beside_it() -> None:
    with pytest.raises(CorruptFile, match=r"torch writes 0\.0") as caught:
        gather(consolidated(0.0))
    assert caught.value.problems[0].startswith("s: in model-00001-of-00001.safetensors")


def test_scalars_that_are_what_the_shards_beside_them_hold_are_taken() -> None:
    assert gather(consolidated(3.5)).tensors["s"] == TensorSpec("F32", ())


# ---- nothing ----


def test_a_folder_without_a_checkpoint_says_what_was_found(checkpoint: Mapping[str, bytes]) -> None:
    files = {f"step-100/{name}": raw for name, raw in checkpoint.items()}
    with pytest.raises(UnknownFormat, match=r"no \*\.safetensors\); found notes\.txt, step-100/"):
        gather(stored({"notes.txt": b"hello", **files}))


def test_an_index_without_any_of_its_files_is_an_incomplete_checkpoint() -> None:
    store = fresh()
    store.put("model.safetensors.index.json", write_index({"a": "a.safetensors"}, total_size=4, total_parameters=1))
    with pytest.raises(IncompleteCheckpoint, match="none of the files that it names"):
        gather(store)


def test_an_empty_local_folder_is_no_checkpoint(tmp_path) -> None:
    with pytest.raises(UnknownFormat, match="found nothing"):
        gather(open_store(tmp_path))


def test_an_output_of_ours_that_was_not_finished_is_refused() -> None:
    """Its files may be of two runs, and nothing in them says so."""
    store = fresh()
    write(store, "model.safetensors", {"w": rows(0, 1)})
    store.put(".hfdcp/plan.json", b"{}")
    with pytest.raises(IncompleteCheckpoint, match="was not finished"):
        gather(store)
    store.put("hfdcp-manifest.json", b"{}")
    assert list(gather(store).tensors) == ["w"]
