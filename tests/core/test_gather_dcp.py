"""A distributed checkpoint as it is in the wild: metadata by rank, other contents of .distcp, items of another kind."""

from __future__ import annotations

import io
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hfdcp_core import publish
from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, TORCH_SAVE, TORCH_SAVE_ZSTD, Catalog, TensorSpec
from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, PlanError
from hfdcp_core.gather import gather
from hfdcp_core.publish import Job
from hfdcp_core.store import open_store
from hfdcp_core.testing.checkpoints import Truth

Edit = Callable[[Any], None]


class Quantised(torch.Tensor):
    """A tensor subclass, as those of torchao are."""


def look(folder: Path, **options: Any) -> Catalog:
    return gather(open_store(folder), **options)


def edited(path: Path, edit: Edit) -> None:
    """Change the metadata that lies in a file, with torch's own classes."""
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.fixture
def copy(checkpoints: Mapping[str, Truth], tmp_path: Path) -> Callable[[str], Path]:
    """Return a way to have a checkpoint that may be damaged."""
    return lambda case: Path(shutil.copytree(checkpoints[case].folder, tmp_path / case))


# ---- metadata by rank ----


def test_metadata_by_rank_are_joined(checkpoints: Mapping[str, Truth]) -> None:
    catalog = look(checkpoints["metadata_by_rank"].folder)
    assert catalog.format == "dcp"
    assert {stamp.path for stamp in catalog.files} == {
        *("__0.metadata", "__1.metadata"),
        *("__0_0.distcp", "__1_0.distcp"),
    }
    boxes = {fqn: [str(shard.box) for shard in catalog.shards if shard.fqn == fqn] for fqn in catalog.tensors}
    assert boxes == {
        "w": ["[0:3, 0:4]", "[3:5, 0:4]"],
        "columns": ["[0:3, 0:4]", "[0:3, 4:7]"],
        "replica": ["[0:3]", "[0:3]"],
    }
    assert [entry.name for entry in catalog.skipped] == ["step"]
    assert [(entry.name, entry.span.path) for entry in catalog.objects] == [
        ("step", f"__{rank}_0.distcp") for rank in range(2)
    ]
    assert catalog.unproved is None


def test_the_metadata_for_all_go_before_those_of_ranks(copy: Callable[[str], Path]) -> None:
    folder = copy("fsdp2_pair")
    (folder / "__0.metadata").write_bytes(b"of another save")
    assert "__0.metadata" not in {stamp.path for stamp in look(folder).files}


def test_a_gap_in_the_numbers_names_the_lost_metadata(copy: Callable[[str], Path]) -> None:
    folder = copy("metadata_by_rank")
    (folder / "__0.metadata").unlink()
    with pytest.raises(IncompleteCheckpoint) as caught:
        look(folder)
    assert caught.value.problems == ("__0.metadata is not there",)


def test_boxes_that_nobody_lists_name_the_metadata_that_may_be_lost(copy: Callable[[str], Path]) -> None:
    folder = copy("metadata_by_rank")
    (folder / "__1.metadata").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"__1\.metadata and later ones may be lost") as caught:
        look(folder)
    assert caught.value.problems == (
        "w: no shard holds [3:5, 0:4] of F32[5, 4]",
        "columns: no shard holds [0:3, 4:7] of BF16[3, 7]",
    )


@pytest.mark.parametrize(
    ("world_size", "problem"),
    [(3, "__2.metadata is not there"), (1, "__1.metadata: of another save, of more than 1 ranks")],
)
def test_the_number_of_ranks_is_held_against_their_metadata(
    world_size: int, problem: str, checkpoints: Mapping[str, Truth]
) -> None:
    folder = checkpoints["metadata_by_rank"].folder
    assert look(folder, world_size=2).tensors
    with pytest.raises(IncompleteCheckpoint) as caught:
        look(folder, world_size=world_size)
    assert caught.value.problems == (problem,)


def _shape(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([6, 4])


def _dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def _length(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "__0_0.distcp"
        info.offset += 1


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_shape, r"__1\.metadata: w is F32\[6, 4\], elsewhere F32\[5, 4\]"),
        (_dtype, r"__1\.metadata: w is I32\[5, 4\], elsewhere F32\[5, 4\]"),
        (_length, r"__1\.metadata: __0_0\.distcp is \d+ bytes long, elsewhere \d+"),
    ],
    ids=["shape", "dtype", "length of a file"],
)
def test_ranks_that_contradict_each_other_are_of_two_saves(
    edit: Edit, problem: str, copy: Callable[[str], Path]
) -> None:
    folder = copy("metadata_by_rank")
    edited(folder / "__1.metadata", edit)
    with pytest.raises(CorruptFile, match=problem):
        look(folder)


# ---- compressed items ----


def test_compressed_items_are_told_by_their_encoding(checkpoints: Mapping[str, Truth]) -> None:
    catalog = look(checkpoints["zstd"].folder, deep=True)
    assert {shard.encoding for shard in catalog.shards} == {TORCH_SAVE_ZSTD}
    assert catalog.unsupported == {}


def test_damage_in_a_compressed_item_names_tensor_box_and_file(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("zstd")
    shard = next(shard for shard in look(folder).shards if shard.fqn == "wide")
    with (folder / shard.span.path).open("r+b") as file:
        file.seek(shard.span.start + shard.span.length // 2)
        file.write(bytes(64))
    with pytest.raises(CorruptFile, match=r"wide\[0:400, .*\] in __\d_0\.distcp"):
        publish.make(Job(str(folder), str(tmp_path / "out")))
    assert list((tmp_path / "out").glob("*.safetensors")) == []


# ---- safetensors inside of .distcp ----


def test_safetensors_inside_are_raw_spans(checkpoints: Mapping[str, Truth]) -> None:
    catalog = look(checkpoints["safetensors_inside"].folder)
    assert catalog.format == "dcp"
    assert {shard.encoding for shard in catalog.shards} == {RAW}
    assert [entry.name for entry in catalog.skipped] == ["step", "note"]


@pytest.mark.parametrize("case", ["safetensors_inside", "safetensors_inside_only"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], "its header describes"),
        (lambda raw: raw + b"\0", "its header describes"),
        (lambda raw: raw.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'), "data_offsets"),
        (lambda raw: raw[:20], "cut short|not as long"),
    ],
    ids=["cut short", "longer", "header lies", "nearly nothing"],
)
def test_damage_to_safetensors_inside_is_found_when_gathering(
    damage: Callable[[bytes], bytes], message: str, case: str, copy: Callable[[str], Path]
) -> None:
    path = copy(case) / "__0_0.distcp"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptFile, match=message):
        look(path.parent)


def test_a_file_of_another_rank_in_its_place_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("safetensors_inside_only")
    shutil.copy(folder / "__1_0.distcp", folder / "__0_0.distcp")
    with pytest.raises(CorruptFile, match=r"its header and \.metadata contradict each other"):
        look(folder)


def save_alone(folder: Path, state: dict[str, object], **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(str(folder), **options), no_dist=True)
    return folder


def test_a_stream_transform_beside_leaves_empty_frames_before_the_safetensors(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.int16), "n": 1}
    options = {"serialization_format": SerializationFormat.SAFETENSORS, "_extensions": [ZStandard()]}
    folder = save_alone(tmp_path / "in", state, **options)
    publish.make(Job(str(folder), str(tmp_path / "out")))
    assert {shard.encoding for shard in look(folder).shards} == {RAW}


def two_boxes_in_one_file(folder: Path) -> Path:
    """Make what torch leaves of two boxes of one tensor: both listed, one of them kept."""
    half = torch.arange(6.0).reshape(2, 3)
    save_alone(folder, {"w": half, "whole": torch.ones(2)}, serialization_format=SerializationFormat.SAFETENSORS)

    def edit(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([4, 3])
        entry.chunks.append(type(entry.chunks[0])(torch.Size([2, 0]), torch.Size([2, 3])))
        [(index, info)] = [pair for pair in metadata.storage_data.items() if pair[0].fqn == "w"]
        metadata.storage_data[type(index)("w", torch.Size([2, 0]))] = info

    edited(folder / ".metadata", edit)
    return folder


def test_a_box_that_torch_overwrote_is_told_before_anything_is_written(tmp_path: Path) -> None:
    folder = two_boxes_in_one_file(tmp_path / "in")
    catalog = look(folder)
    assert "its box [2:4, 0:3] was lost when it was saved: __0_0.distcp" in catalog.unsupported["w"]
    with pytest.raises(PlanError, match="w: its box"):
        publish.make(Job(str(folder), str(tmp_path / "out")))
    publish.make(Job(str(folder), str(tmp_path / "out"), exclude=("w",)))


# ---- items that are not what .metadata says ----


def test_a_tensor_of_another_kind_than_its_metadata_says_is_listed_with_the_reason(
    tmp_path: Path, copy: Callable[[str], Path]
) -> None:
    """As with torchao's subclasses, which ``.metadata`` calls plain float32."""
    folder = copy("plain")
    stream = io.BytesIO()
    torch.save(torch.ones(100, 100, dtype=torch.int8).as_subclass(Quantised), stream)
    replace_item(folder, "layers.0.up.weight", stream.getvalue())
    reason = look(folder).unsupported["layers.0.up.weight"]
    assert reason.startswith("its item holds something else than a plain tensor: ")
    assert "torch._tensor._rebuild_from_type_v2" in reason
    with pytest.raises(PlanError, match="_rebuild_from_type_v2"):
        publish.make(Job(str(folder), str(tmp_path / "out")))
    assert list((tmp_path / "out").glob("*.safetensors")) == []
    manifest = publish.make(Job(str(folder), str(tmp_path / "out"), exclude=("layers.0.up.weight",)))
    assert manifest.records


def replace_item(folder: Path, fqn: str, raw: bytes) -> None:
    """Let an item of a checkpoint in one file be other bytes, in a file of their own."""
    (folder / "replaced.distcp").write_bytes(raw)

    def edit(metadata: Any) -> None:
        [info] = [info for index, info in metadata.storage_data.items() if index.fqn == fqn]
        info.relative_path, info.offset, info.length = "replaced.distcp", 0, len(raw)

    edited(folder / ".metadata", edit)


@pytest.mark.parametrize("deep", [False, True])
def test_an_item_of_another_dtype_or_shape_is_damage(deep: bool, copy: Callable[[str], Path]) -> None:
    folder = copy("plain")
    stream = io.BytesIO()
    spec = look(folder).tensors["layers.0.up.weight"]
    torch.save(torch.zeros(spec.shape, dtype=torch.float64 if not deep else torch.int32), stream)
    replace_item(folder, "layers.0.up.weight", stream.getvalue())
    with pytest.raises(CorruptFile, match=r"the item holds (F64|I32)\[.*\], expected F32") as caught:
        look(folder, deep=deep)
    assert len(caught.value.problems) == 1


def test_every_damaged_item_is_named_at_once(copy: Callable[[str], Path]) -> None:
    folder = copy("fsdp2_pair")
    shards = [shard for shard in look(folder).shards if shard.fqn.startswith("layers")]
    for shard in shards:
        with (folder / shard.span.path).open("r+b") as file:
            file.seek(shard.span.stop - 22)
            file.write(b"????")
    with pytest.raises(CorruptFile) as caught:
        look(folder, deep=True)
    assert len(caught.value.problems) == len(shards)
    assert look(folder).tensors


def test_a_catalog_of_plain_items_is_the_same_however_deep_it_looks(checkpoints: Mapping[str, Truth]) -> None:
    for case in ("dtypes", "views", "fsdp2_uneven", "scalars_and_empties", "zstd"):
        assert look(checkpoints[case].folder) == look(checkpoints[case].folder, deep=True)


def test_boxes_of_three_dimensions_are_ordinary_boxes(checkpoints: Mapping[str, Truth]) -> None:
    catalog = look(checkpoints["mesh_of_three"].folder)
    shards = [shard for shard in catalog.shards if shard.fqn == "all.dimensions"]
    assert catalog.tensors["all.dimensions"] == TensorSpec("F32", (5, 3, 9))
    assert len(shards) == 8
    assert Box((3, 2, 5), (2, 1, 4)) in {shard.box for shard in shards}
    assert {shard.encoding for shard in shards} == {TORCH_SAVE}


def test_everything_that_safetensors_cannot_hold_is_refused_in_one_list_and_nothing_is_written(tmp_path: Path) -> None:
    state = {
        "c": torch.ones(2, dtype=torch.complex128),
        "__metadata__": torch.ones(1),
        "w": torch.ones(3),
    }
    folder = save_alone(tmp_path / "in", state)
    with pytest.raises(PlanError) as caught:
        publish.make(Job(str(folder), str(tmp_path / "out")))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["c", "__metadata__"]
    assert list((tmp_path / "out").glob("*.safetensors")) == []
    manifest = publish.make(Job(str(folder), str(tmp_path / "out"), exclude=("c", "__metadata__")))
    assert [list(record.tensors) for record in manifest.records] == [["w"]]


FEW_HANDLES = """
import resource, sys
from hfdcp_core import publish
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
manifest = publish.make(publish.Job(sys.argv[1], sys.argv[2]))
print(manifest.records[0].source.verified)
"""


def test_two_thousand_files_are_joined_with_few_of_them_open(tmp_path: Path) -> None:
    count, full = 2000, torch.arange(4000, dtype=torch.int32).reshape(2000, 2)
    chunks, stored = [], {}
    (tmp_path / "in").mkdir()
    for row in range(count):
        stream = io.BytesIO()
        torch.save(full[row : row + 1].clone(), stream)
        (tmp_path / "in" / f"__{row}_0.distcp").write_bytes(stream.getvalue())
        chunks.append(ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 2])))
        index = MetadataIndex("w", torch.Size([row, 0]))
        stored[index] = _StorageInfo(f"__{row}_0.distcp", 0, len(stream.getvalue()))
    entry = TensorStorageMetadata(TensorProperties(torch.int32), full.size(), chunks)
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(Metadata({"w": entry}, {}, stored)))
    command = [sys.executable, "-c", FEW_HANDLES, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(count)
    assert (tmp_path / "out" / "model.safetensors").read_bytes().endswith(full.numpy().tobytes())
