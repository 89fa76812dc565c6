"""What `inspect` says of a checkpoint: all that is there and all that is wrong, by metadata or by reading it."""

import io
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.distcp_file import read_item
from hfdcp_core.errors import IncompleteCheckpoint, StorageNotFound, UnknownFormat, UsageError
from hfdcp_core.gather import gather
from hfdcp_core.inspection import NEAR_NAMES, Inspection, Wanted, inspect
from hfdcp_core.job import Job
from hfdcp_core.store import open_store
from hfdcp_core.testing.checkpoints import Truth


def look(folder: Path, *, tensor: str = "", deep: bool = False, **choice: Any) -> Inspection:
    return inspect(Job(source=str(folder), sink="", **choice), tensor=tensor, deep=deep)


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
    found = look(plain, exclude=("nothing",))
    assert (found.problems, found.exit_status) == (("patterns that match no tensor: 'nothing'",), 4)


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


# ---- all that is wrong ----------------------------------------------------------------------------------------------


@pytest.fixture
def copy(checkpoints: Mapping[str, Truth], tmp_path: Path) -> Callable[[str], Path]:
    """Return a way to have a checkpoint that may be damaged."""
    return lambda case: Path(shutil.copytree(checkpoints[case].folder, tmp_path / case))


def edited(folder: Path, edit: Callable[[Any], None]) -> None:
    """Change the metadata of a checkpoint with torch's own classes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def move_last_boxes(metadata: Any) -> None:
    """Move the last box of every cut tensor one row towards the first: an overlap and a hole in each."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if len(getattr(entry, "chunks", ())) > 1:
            chunk = entry.chunks[-1]
            before = chunk.offsets
            chunk.offsets = torch.Size([before[0] - 1, *before[1:]])
            for index in [i for i in metadata.storage_data if i.fqn == fqn and i.offset == before]:
                info = metadata.storage_data.pop(index)
                metadata.storage_data[type(index)(fqn, chunk.offsets, index.index)] = info


def test_holes_and_overlaps_of_all_tensors_are_told(copy: Callable[[str], Path]) -> None:
    folder = copy("fsdp2_even")
    whole = look(folder)
    assert (whole.problems, whole.exit_status) == ((), 0)
    cut = {tensor.source for tensor in whole.wanted if tensor.shards > 1}
    edited(folder, move_last_boxes)
    found = look(folder)
    assert len(cut) > 1
    holes = {problem.partition(":")[0] for problem in found.problems if "no shard holds" in problem}
    overlaps = {problem.partition(":")[0] for problem in found.problems if "overlap and are not the same" in problem}
    assert holes == cut
    assert overlaps == cut - {"few_rows"}  # boxes of one row, moved by one, are replicas of others
    assert (found.exit_status, found.damaged) == (4, 0)
    assert [tensor.fqn for tensor in found.wanted] == [tensor.fqn for tensor in whole.wanted]


def test_a_hole_is_told_beside_a_clash_of_names(tmp_path: Path) -> None:
    for rank, offset in ((1, 0), (2, 4)):
        sharding = json.dumps({name: {"saved_offsets": [offset]} for name in ("_orig_mod.w", "w")})
        save_file(
            {"_orig_mod.w": np.ones(2), "w": np.ones(2)},
            tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": sharding, "DCP_VERSION": "1.0", "format": "pt"},
        )
    found = look(tmp_path)
    assert found.wanted == ()
    assert len(found.problems) == 3
    assert "would both be called 'w'" in found.problems[0]
    assert {problem.partition(":")[0] for problem in found.problems[1:]} == {"_orig_mod.w", "w"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_no_safetensors_file_can_hold_is_told_and_the_rest_looked_at(tmp_path: Path) -> None:
    state = {"z": torch.zeros(2, dtype=torch.complex128), "y": torch.zeros(3, dtype=torch.complex128)}
    dcp.save({**state, "w": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    found = look(tmp_path)
    assert [tensor.fqn for tensor in found.wanted] == ["w"]
    assert len(found.problems) == 2
    assert all("--exclude goes on without them" in problem for problem in found.problems)
    assert found.exit_status == 4
    assert look(tmp_path, exclude=("y", "z")).problems == ()
    assert look(tmp_path, include=("z",)).wanted == ()
    with pytest.raises(UsageError, match="z: there is nothing to show of it: "):
        look(tmp_path, tensor="z")


def test_absent_files_are_all_told(copy: Callable[[str], Path]) -> None:
    folder = copy("fsdp2_even")
    for rank in (1, 2):
        (folder / f"__{rank}_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpoint) as caught:
        look(folder)
    assert caught.value.problems == ("rank 1: __1_0.distcp", "rank 2: __2_0.distcp")


# ---- reading everything ---------------------------------------------------------------------------------------------


class Heard:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.total_bytes = self.bytes = 0

    def begin(self, step: str, total_bytes: int) -> None:
        assert step == "gather"
        self.total_bytes = total_bytes

    def advance(self, nbytes: int) -> None:
        self.bytes += nbytes

    def say(self, line: str) -> None:
        raise AssertionError(line)


def flip(folder: Path, fqn: str) -> None:
    """Change the first byte of the elements in every item of a tensor."""
    for shard in gather(open_store(folder)).shards:
        if shard.fqn == fqn and shard.box.volume:
            raw = bytearray((folder / shard.span.path).read_bytes())
            item = bytes(raw[shard.span.start : shard.span.stop])
            payload = read_item(lambda start, stop, item=item: item[start:stop], len(item), where=fqn).start
            raw[shard.span.start + payload] ^= 1
            (folder / shard.span.path).write_bytes(raw)


def test_a_sound_checkpoint_is_read_to_the_last_byte_and_nothing_is_wrong(checkpoints: Mapping[str, Truth]) -> None:
    folder, heard = checkpoints["train_state"].folder, Heard()
    found = inspect(Job(source=str(folder), sink=""), deep=True, progress=heard)
    assert (found.problems, found.damaged, found.exit_status) == ((), 0, 0)
    assert found.examined == len(gather(open_store(folder)).shards)
    assert heard.bytes == heard.total_bytes > found.nbytes


def test_only_reading_shows_flipped_bytes_and_it_shows_them_all(copy: Callable[[str], Path]) -> None:
    folder = copy("fsdp2_pair")
    names = [tensor.source for tensor in look(folder).wanted if tensor.spec.nbytes and tensor.shards > 1][:2]
    shards = sum(tensor.shards for tensor in look(folder).wanted if tensor.source in names)
    for name in names:
        flip(folder, name)
    assert look(folder).exit_status == 0
    found = look(folder, deep=True)
    assert (found.damaged, found.exit_status) == (shards, 3)
    assert len(names) == 2
    assert all(any(f"{name}[" in problem for problem in found.problems) for name in names)
    assert all("CRC-32" in problem and ".distcp" in problem for problem in found.problems)


def test_damage_of_items_and_holes_are_told_together(copy: Callable[[str], Path]) -> None:
    folder = copy("fsdp2_even")
    name = max(look(folder).wanted, key=lambda tensor: tensor.spec.nbytes).source
    flip(folder, name)
    edited(folder, move_last_boxes)
    found = look(folder, deep=True)
    assert found.damaged > 0
    assert len(found.problems) > found.damaged
    assert found.exit_status == 3


class Quantised(torch.Tensor):
    """A tensor subclass, as those of torchao are."""


def test_a_tensor_of_another_kind_in_an_item_of_the_usual_length_is_found_by_opening_it(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("plain")
    shape = look(folder).wanted[0].spec.shape
    fqn = next(tensor.source for tensor in look(folder).wanted if tensor.spec == TensorSpec("F32", shape))
    stream = io.BytesIO()
    torch.save(torch.ones(shape).as_subclass(Quantised), stream)
    (folder / "replaced.distcp").write_bytes(stream.getvalue())

    def edit(metadata: Any) -> None:
        [info] = [info for index, info in metadata.storage_data.items() if index.fqn == fqn]
        info.relative_path, info.offset, info.length = "replaced.distcp", 0, len(stream.getvalue())

    edited(folder, edit)
    assert look(folder).problems == ()
    found = look(folder, deep=True)
    [problem] = found.problems
    assert f"{fqn}: its item holds something else than a plain tensor" in problem
    assert (found.damaged, found.exit_status) == (0, 4)
    assert fqn not in {tensor.source for tensor in found.wanted}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_object_is_damage_too(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4), "rng": list(range(100))}, checkpoint_id=tmp_path, no_dist=True)
    [item] = gather(open_store(tmp_path)).objects
    raw = bytearray((tmp_path / item.span.path).read_bytes())
    raw[item.span.start + 200] ^= 0xFF
    (tmp_path / item.span.path).write_bytes(raw)
    assert look(tmp_path).problems == ()
    found = look(tmp_path, deep=True)
    assert (found.damaged, found.exit_status) == (1, 3)
    assert "rng" in found.problems[0]


# ---- one tensor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "module.a"])
def test_a_tensor_is_found_by_its_saved_name_and_by_its_clean_one(plain: Path, name: str) -> None:
    tensor = look(plain, tensor=name).tensor
    assert tensor is not None
    assert (tensor.fqn, tensor.source, tensor.spec) == ("a", "module.a", TensorSpec("F32", (2, 3)))
    assert [shard.box for shard in tensor.shards] == [Box.whole((2, 3))]


def test_a_tensor_that_is_left_out_can_be_looked_at_too(plain: Path) -> None:
    tensor = look(plain, tensor="module.b", exclude=("*.b",)).tensor
    assert tensor is not None
    assert tensor.fqn == "module.b"


def test_shards_are_in_the_order_of_their_boxes_with_replicas_beside_each_other(
    checkpoints: Mapping[str, Truth],
) -> None:
    folder = checkpoints["fsdp_tp"].folder
    name = max(look(folder).wanted, key=lambda tensor: tensor.shards).fqn
    tensor = look(folder, tensor=name).tensor
    assert tensor is not None
    offsets = [shard.box.offset for shard in tensor.shards]
    assert len(offsets) > 2
    assert offsets == sorted(offsets)


NAMES = {
    "part-of-a-name": ("odule.", ("module.a", "module.b")),
    "spelt-alike": ("modul.b", ("module.b", "module.a")),
    "like-nothing": ("xyz", ()),
}


@pytest.mark.parametrize(("name", "near"), NAMES.values(), ids=NAMES)
def test_an_unknown_name_is_wrong_usage_with_names_that_may_be_meant(
    plain: Path, name: str, near: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match=f"{name}: no such tensor here") as caught:
        look(plain, tensor=name)
    assert caught.value.problems == near


def test_of_many_near_names_a_few_are_given(tmp_path: Path) -> None:
    save_file({f"layers.{n}.w": np.zeros(1) for n in range(20)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as caught:
        look(tmp_path, tensor="layers")
    assert len(caught.value.problems) == NEAR_NAMES


def test_a_damaged_copy_is_told_by_its_place_and_is_no_fault_where_a_whole_one_is(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(64, 32)}, checkpoint_id=tmp_path / "good", no_dist=True)
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    file = tmp_path / "bad" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    job = Job(source=str(tmp_path / "bad"), also=(str(tmp_path / "good"),), sink="")
    [unread] = inspect(job).said
    assert "in several places" in unread
    found = inspect(job, deep=True)
    assert (found.exit_status, found.problems, found.spoilt_copies) == (0, (), 1)
    [line] = found.said
    assert line.startswith(f"{tmp_path / 'bad'}: w[0:64, 0:32]")
    assert line.endswith(f"; whole in {tmp_path / 'good'}")
    alone = look(tmp_path / "bad", deep=True)
    assert (alone.exit_status, alone.damaged) == (3, 1)
