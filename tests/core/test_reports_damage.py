"""Reports of checkpoints that were damaged, half written or of another version: the right bytes, or a helpful error.

Each test stands for a kind of report that users of such checkpoints made somewhere; the reference is to one of them.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata

from hfdcp_core import publish
from hfdcp_core.errors import CorruptFile, HfdcpError, IncompleteCheckpoint, StorageError, StorageNotFound
from hfdcp_core.job import Job
from hfdcp_core.testing.in_memory import Files, Piece, publish_files, rank_files, refusal_of, stored, weights_file

W = torch.arange(1.0, 2049.0).reshape(64, 32)
V = torch.arange(1.0, 513.0)
RIGHT: Mapping[str, Piece] = {"w": Piece.of(W.numpy()), "v": Piece.of(V.numpy())}


def saved(state: Mapping[str, object], folder: Path, **way: object) -> Files:
    """Save with torch's own writer, in this process alone, and return the files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nothing is distributed
        dcp.save(dict(state), no_dist=True, **(way or {"checkpoint_id": folder}))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A small distributed checkpoint."""
    return saved({"w": W, "v": V}, tmp_path_factory.mktemp("checkpoint"))


# ---- shard files that did not arrive whole ----

DATA = "__0_0.distcp"
FOR_W = W.numpy().tobytes()


def without_end(raw: bytes) -> bytes:
    """As long as it should be, but the end was never transferred: it reads as zeros."""
    return raw[: len(raw) * 3 // 4].ljust(len(raw), b"\0")


def with_a_block_of_zeros(raw: bytes) -> bytes:
    """As long as it should be, but one block of the file system was lost."""
    start = raw.index(FOR_W) + 1024
    return raw[:start] + bytes(512) + raw[start + 512 :]


def with_two_blocks_exchanged(raw: bytes) -> bytes:
    """As long as it should be, its bytes all there, but not in order."""
    a = raw.index(FOR_W)
    return raw[:a] + raw[a + 512 : a + 1024] + raw[a : a + 512] + raw[a + 1024 :]


def with_a_block_twice(raw: bytes) -> bytes:
    """As long as it should be, but a part was sent again over the one behind it."""
    a = raw.index(FOR_W)
    return raw[: a + 512] + raw[a : a + 512] + raw[a + 1024 :]


LOSSES = [without_end, with_a_block_of_zeros, with_two_blocks_exchanged, with_a_block_twice]


@pytest.mark.parametrize("lose", LOSSES, ids=lambda function: function.__name__)
def test_a_file_of_the_right_length_that_did_not_arrive_whole_is_told_by_file_and_tensor(
    lose: Callable[[bytes], bytes], checkpoint: Files
) -> None:
    """A file that was not fully saved or transferred, which torch met as a fault of its zip reader (pytorch#170244)."""
    fault = refusal_of({**checkpoint, DATA: lose(checkpoint[DATA])})
    assert isinstance(fault, CorruptFile)
    assert DATA in str(fault)
    assert any(f"{name}[" in str(fault) or f"{name}: " in str(fault) for name in ("w", "v"))


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.999], ids=lambda part: f"{part:.1%} of it")
def test_a_file_that_was_cut_short_says_how_long_it_should_be(part: float, checkpoint: Files) -> None:
    whole = checkpoint[DATA]
    fault = refusal_of({**checkpoint, DATA: whole[: int(len(whole) * part)]})
    assert isinstance(fault, CorruptFile)
    assert DATA in str(fault)
    assert f"expected {len(whole)}" in str(fault)


def test_files_of_a_save_that_is_under_way_are_told_from_those_of_the_metadata_beside_them(
    checkpoint: Files, tmp_path: Path
) -> None:
    """A second save into the same folder: its shards are there, ``.metadata`` is still the old one (VeOmni#1176)."""
    newer = saved({"w": W, "v": torch.cat([V, V])}, tmp_path)
    fault = refusal_of({**checkpoint, DATA: newer[DATA]})
    assert isinstance(fault, CorruptFile)
    assert "of another save" in str(fault)


# ---- weight files ----


@pytest.mark.parametrize("sharded", [True, False], ids=["shards of ranks", "whole tensors"])
@pytest.mark.parametrize(
    "change", [lambda raw: raw[:-1], lambda raw: raw[:-100], lambda raw: raw + b"\n"], ids=["-1", "-100", "+1"]
)
def test_a_weight_file_ends_exactly_where_its_header_says(change: Callable[[bytes], bytes], sharded: bool) -> None:
    """Pages behind the end were read as zeros (vmlx-swift#217); one byte too many is damage too (ComfyUI#15602)."""
    piece = Piece.of(W.numpy(), at=(0, 0) if sharded else None)
    files = rank_files({"w": piece}) if sharded else {"model.safetensors": weights_file({"w": piece})}
    ((name, raw),) = files.items()
    fault = refusal_of({name: change(raw)}, **({"world_size": 1} if sharded else {}))
    assert isinstance(fault, CorruptFile)
    assert name in str(fault)


def test_a_file_that_begins_with_pickled_objects_is_refused_with_the_reason(tmp_path: Path) -> None:
    """torch's Hugging Face writer puts entries that are no tensors before the header (torchtitan#1351)."""
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    files = saved({"w": W, "l._extra_state": io.BytesIO(b"abc"), "step": 5}, tmp_path, storage_writer=writer)
    fault = refusal_of(files, world_size=1)
    assert isinstance(fault, CorruptFile)
    assert "shard-00001-model-00001-of-00001.safetensors" in str(fault)
    assert "save without them" in str(fault)


def test_headers_without_metadata_are_read_and_get_what_loaders_insist_on() -> None:
    """Files without ``format``, which loaders refuse (accelerate#1151)."""
    files = {"model.safetensors": weights_file({"w": RIGHT["w"]}, metadata={})}
    made = publish_files(files)
    assert made.tensors == {"w": RIGHT["w"]}
    assert b'{"format":"pt"}' in made.files["model.safetensors"][:200]


# ---- `.metadata` of other versions and writers ----


def edited(files: Files, edit: Callable[[Metadata], None]) -> Files:
    """Change what ``.metadata`` says, and how."""
    metadata: Metadata = pickle.loads(files[".metadata"])
    edit(metadata)
    return {**files, ".metadata": pickle.dumps(metadata)}


def forget(value: object, *names: str) -> None:
    """Take fields away, as a version of torch that did not have them would have pickled."""
    for name in names:
        value.__dict__.pop(name, None)


def as_before_storage_meta(metadata: Metadata) -> None:
    forget(metadata, "storage_meta", "version")


def without_storage_meta(metadata: Metadata) -> None:
    metadata.storage_meta = None


def without_table_of_paths(metadata: Metadata) -> None:
    metadata.planner_data = None


def with_the_properties_of_older_torch(metadata: Metadata) -> None:
    for entry in metadata.state_dict_metadata.values():
        entry.properties = replace(entry.properties, requires_grad=True, pin_memory=True)


VERSIONS = [
    as_before_storage_meta,
    without_storage_meta,
    without_table_of_paths,
    with_the_properties_of_older_torch,
]


@pytest.mark.parametrize("edit", VERSIONS, ids=lambda function: function.__name__)
def test_metadata_of_other_versions_are_read(edit: Callable[[Metadata], None], checkpoint: Files) -> None:
    """Fields that came and went between versions of torch (composer#3252, pytorch#177887)."""
    other = edited(checkpoint, edit)
    assert other[".metadata"] != pickle.dumps(pickle.loads(checkpoint[".metadata"]))
    assert publish_files(other).tensors == RIGHT


# ---- before the work begins ----


def test_shard_files_without_metadata_say_what_may_have_happened(checkpoint: Files) -> None:
    """A node that is not the first one's (accelerate#3010), or a save that did not end (torchtitan#315)."""
    fault = refusal_of({DATA: checkpoint[DATA]})
    assert isinstance(fault, IncompleteCheckpoint)
    assert "the save did not finish" in str(fault)
    assert "rank 0 writes last" in str(fault)


def test_folders_of_the_output_are_made_and_a_file_in_their_place_is_told_before_anything_is_read(
    checkpoint: Files, tmp_path: Path
) -> None:
    """A long merge that ended with: no such folder (accelerate#2854)."""
    source = stored({**checkpoint, DATA: b"would be refused if it was looked at"})
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HfdcpError) as caught:
        publish.make(Job(source.url, str(tmp_path / "file" / "out")))
    assert isinstance(caught.value, StorageError)
    assert "file" in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
    manifest = publish.make(Job(stored(checkpoint).url, str(tmp_path / "not" / "there" / "yet")))
    assert (tmp_path / "not" / "there" / "yet" / manifest.records[0].path).stat().st_size == manifest.records[0].size


def test_a_source_that_is_not_there_is_told_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(StorageNotFound, match="nowhere"):
        publish.make(Job(str(tmp_path / "nowhere"), str(tmp_path / "out")))


def test_what_is_reported_as_made_is_there(checkpoint: Files) -> None:
    """A converter that reported success and wrote nothing (torchtitan#307)."""
    made = publish_files(checkpoint)
    assert {record.path: record.size for record in made.manifest.files} == {
        path: len(raw) for path, raw in made.files.items() if path != "hfdcp-manifest.json"
    }
