"""The drop-in reader: what torch's own gets wrong or cannot do, on one process."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from hfdcp_core import HuggingFaceStorageReader, HuggingFaceStorageWriter
from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, PlanError, UnknownFormat, UsageError
from hfdcp_core.testing.dropin import blank, differences
from hfdcp_core.testing.gcs_server import BUCKET, GcsServer
from hfdcp_core.testing.in_memory import Piece, weights_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TENSORS = {
    "w": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "half": torch.arange(6).bfloat16(),
    "scalar": torch.tensor(2.5),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "fp8": torch.arange(8).float().to(torch.float8_e4m3fn),
    "none": torch.empty(0, 3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain folder of two files with an index."""
    path = tmp_path / "plain"
    path.mkdir()
    names = sorted(TENSORS)
    files = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for name, held in files.items():
        save_file({key: TENSORS[key] for key in held}, path / name, {"format": "pt"})
    weight_map = {key: name for name, held in files.items() for key in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def load(path: object, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path, **options), no_dist=True)  # type: ignore[arg-type]
    return state


def test_every_kind_of_tensor_comes_back(folder: Path) -> None:
    assert differences(load(folder, blank(TENSORS)), TENSORS) == []


def test_it_stands_where_torchs_reader_stands(folder: Path) -> None:
    reader = HuggingFaceStorageReader(str(folder), 2)
    assert isinstance(reader, FileSystemReader)
    assert (reader.path, reader.checkpoint_id, reader.thread_count) == (str(folder), str(folder), 2)


def test_an_empty_state_dict_is_filled_with_all_there_is(folder: Path) -> None:
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=HuggingFaceStorageReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert differences(state, TENSORS) == []


@pytest.mark.parametrize("part", [1, 3])
def test_files_that_the_index_does_not_name_are_no_part_of_it(folder: Path, part: int) -> None:
    save_file({"w": torch.zeros(4, 6), "adapter": torch.ones(part)}, folder / "adapter_model.safetensors")
    assert differences(load(folder, blank(TENSORS)), TENSORS) == []


def test_any_fsspec_storage_is_read(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/reader-test/plain", recursive=True)
    try:
        assert differences(load("memory://reader-test/plain", blank(TENSORS)), TENSORS) == []
    finally:
        memory.rm("/reader-test", recursive=True)


def test_another_checkpoint_can_be_named_when_loading(folder: Path, tmp_path: Path) -> None:
    state = blank(TENSORS)
    reader = HuggingFaceStorageReader(tmp_path / "not there")
    dcp.load(state, checkpoint_id=folder, storage_reader=reader, no_dist=True)
    assert differences(state, TENSORS) == []
    assert reader.checkpoint_id == folder


def test_dcps_own_format_is_read_too(tmp_path: Path) -> None:
    dcp.save({**TENSORS}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert differences(load(tmp_path / "dcp", blank(TENSORS)), TENSORS) == []


def test_a_reader_can_be_sent_to_another_process(folder: Path) -> None:
    reader = pickle.loads(pickle.dumps(HuggingFaceStorageReader(folder)))
    assert reader.read_metadata().state_dict_metadata.keys() == TENSORS.keys()


class Doubling(HuggingFaceStorageReader):
    """A subclass as torch's quantised reader is one: it overrides the hook, and asks for slices by name."""

    def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
        where = tuple(slice(a, a + n) for a, n in zip(req.storage_offsets, req.lengths, strict=True))
        target = planner.resolve_tensor(req).detach()
        target.copy_(f.get_slice(req.storage_index.fqn)[where] * 2)
        planner.commit_tensor(req, target)


def test_the_hook_that_subclasses_override_is_kept(folder: Path) -> None:
    state = {"w": torch.zeros(4, 6)}
    dcp.load(state, storage_reader=Doubling(folder), no_dist=True)
    assert torch.equal(state["w"], TENSORS["w"] * 2)


# ---- what it refuses ------------------------------------------------------------------------------------------------


def two_ranks(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write what torch's writer leaves of two ranks that cut along the first dimension."""
    path.mkdir()
    for rank in (0, 1):
        pieces = {}
        for name, tensor in tensors.items():
            half = tensor.shape[0] // 2
            pieces[name] = Piece.of(tensor[rank * half : (rank + 1) * half].numpy(), at=[rank * half, 0])
        (path / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors").write_bytes(weights_file(pieces))
    return path


def test_a_lost_shard_is_an_error_and_not_left_as_it_was(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "shards", {"w": TENSORS["w"]})
    (path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(PlanError, match=r"w: no shard holds \[0:2, 0:6\]"):
        HuggingFaceStorageReader(path).read_metadata()


def test_the_loss_of_the_last_shard_is_an_error_where_the_number_of_ranks_is_known(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "shards", {"w": TENSORS["w"]})
    (path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteCheckpoint, match="rank 1"):
        HuggingFaceStorageReader(path, world_size=2).read_metadata()


def test_what_is_missing_stays_as_it_was_where_that_was_asked_for(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "shards", {"w": TENSORS["w"]})
    (path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    state = load(path, {"w": torch.full((4, 6), -1.0)}, strict=False)
    assert torch.equal(state["w"][:2], torch.full((2, 6), -1.0))
    assert torch.equal(state["w"][2:], TENSORS["w"][2:])


def test_shards_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "shards", {"w": TENSORS["w"]})
    other = two_ranks(tmp_path / "other", {"w": TENSORS["w"] + 1})
    shutil.copy(
        other / "shard-00001-model-00001-of-00001.safetensors", path / "shard-00003-model-00001-of-00001.safetensors"
    )
    with pytest.raises(CorruptFile, match="different values"):
        HuggingFaceStorageReader(path).read_metadata()


def test_whole_files_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    """A save that dies while its files get their names leaves some of the older ones, and no index."""
    for name, step in (("old", 0), ("new", 1)):
        writer = HuggingFaceStorageWriter(tmp_path / name, {"w": 1, "v": 2})
        dcp.save({"w": TENSORS["w"] + step, "v": TENSORS["w"] + step}, storage_writer=writer, no_dist=True)
    shutil.copy(tmp_path / "old" / "model-00002-of-00002.safetensors", tmp_path / "new")
    for path in (tmp_path / "new" / "model.safetensors.index.json", tmp_path / "new" / "hfdcp-manifest.json"):
        with pytest.raises(CorruptFile, match="of save"):
            HuggingFaceStorageReader(tmp_path / "new").read_metadata()
        path.unlink()
    with pytest.raises(CorruptFile, match="of save"):
        HuggingFaceStorageReader(tmp_path / "new").read_metadata()


@pytest.mark.parametrize("cast", ["exact", "never"])
def test_values_are_not_changed_on_the_way_unasked(folder: Path, cast: str) -> None:
    state = {"w": torch.zeros(4, 6, dtype=torch.float16)}
    with pytest.raises(CheckpointException, match=r"stored as torch.float32, to be read into torch.float16"):
        load(folder, state, cast=cast)


def test_a_wider_dtype_holds_the_same_values(folder: Path) -> None:
    state = load(folder, {"half": torch.zeros(6), "w": torch.zeros(4, 6, dtype=torch.float64)})
    assert torch.equal(state["half"], TENSORS["half"].float())
    assert torch.equal(state["w"], TENSORS["w"].double())
    with pytest.raises(CheckpointException, match=r"half: stored as torch.bfloat16"):
        load(folder, {"half": torch.zeros(6)}, cast="never")


def test_any_change_of_dtype_is_made_where_it_was_asked_for(folder: Path) -> None:
    state = load(folder, {"w": torch.zeros(4, 6, dtype=torch.float16)}, cast="any")
    assert torch.equal(state["w"], TENSORS["w"].half())


def test_scaled_values_are_not_read_without_their_scale(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointException, match=r"scaled by a.weight_scale_inv"):
        load(tmp_path, {"a.weight": torch.zeros(4, 4)}, cast="any")


def test_how_an_error_surfaces(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="no checkpoint here"):
        load(tmp_path, {"w": torch.zeros(4, 6)})
    with pytest.raises(UnknownFormat, match="no checkpoint here"):
        HuggingFaceStorageReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointException) as caught:
        load(folder, {"w": torch.zeros(4, 6, dtype=torch.float16)})
    [(fault, _)] = caught.value.failures.values()
    assert isinstance(fault, PlanError)


def test_a_tensor_of_another_shape_is_refused(folder: Path) -> None:
    with pytest.raises((ValueError, CheckpointException), match="ize"):
        load(folder, {"w": torch.zeros(6, 4)})


def test_a_path_that_lost_a_slash_is_refused() -> None:
    with pytest.raises(UsageError, match="gs:/"):
        HuggingFaceStorageReader(Path("gs://bucket/run"))
    assert not HuggingFaceStorageReader.validate_checkpoint_id("gs:/bucket/run")
    assert HuggingFaceStorageReader.validate_checkpoint_id("memory://run")


def test_an_unknown_way_of_casting_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="'exact', 'any' or 'never'"):
        HuggingFaceStorageReader(folder, cast="some")  # type: ignore[arg-type]


def test_a_writer_and_a_reader_of_ours_meet_on_any_storage() -> None:
    memory = fsspec.filesystem("memory")
    try:
        dcp.save({**TENSORS}, storage_writer=HuggingFaceStorageWriter("memory://meet/x"), no_dist=True)
        assert differences(load("memory://meet/x", blank(TENSORS)), TENSORS) == []
    finally:
        memory.rm("/meet", recursive=True)


# ---- many small tensors on a remote storage -------------------------------------------------------------------------


@pytest.fixture
def norms() -> Iterator[tuple[HuggingFaceStorageReader, dict[str, torch.Tensor]]]:
    """A model of 300 small tensors and a large one, where each request is a round trip."""
    tensors = {f"layers.{number}.norm": torch.full((100 + number,), float(number)) for number in range(300)}
    tensors["layers.7.weight"] = torch.arange(400_000.0).reshape(800, 500)
    with GcsServer() as server:
        server.put("norms/model.safetensors", save(tensors))
        yield HuggingFaceStorageReader(f"gs://{BUCKET}/norms", storage_options=server.options), tensors


def test_small_neighbours_are_one_range(norms: tuple[HuggingFaceStorageReader, dict[str, torch.Tensor]]) -> None:
    reader, tensors = norms
    state = blank(tensors)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert differences(state, tensors) == []
    assert reader.report is not None
    assert reader.report.ranges <= 3
    assert reader.report.read_bytes == reader.report.tensor_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_small_neighbours_of_another_dtype_need_little_room(
    norms: tuple[HuggingFaceStorageReader, dict[str, torch.Tensor]],
) -> None:
    reader, tensors = norms
    tight = HuggingFaceStorageReader(reader.path, storage_options=reader._options, memory_bytes=1)
    state = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in tensors.items()}
    dcp.load(state, storage_reader=tight, no_dist=True)
    assert differences(state, {name: tensor.double() for name, tensor in tensors.items()}) == []


def test_what_lies_between_small_tensors_is_read_only_where_it_is_little(
    norms: tuple[HuggingFaceStorageReader, dict[str, torch.Tensor]],
) -> None:
    reader, tensors = norms
    wanted = {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number % 2 == 0}
    state = blank(wanted)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert differences(state, wanted) == []
    assert reader.report is not None
    assert reader.report.read_bytes <= 1.05 * reader.report.tensor_bytes
    assert reader.report.ranges < len(wanted)
    assert str(reader.report).startswith(f"{reader.report.read_bytes} bytes in {reader.report.ranges} ranges")
