"""Where torch's own consolidation is silently wrong, and where a checkpoint is damaged: the right bytes, or an error.

An error names the tensor and the box or file that is missing or damaged, and leaves nothing under a final name.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from hfdcp_core import publish
from hfdcp_core.errors import (
    CorruptFile,
    HfdcpError,
    IncompleteCheckpoint,
    PlanError,
    SourceError,
    UnknownFormat,
    UnsafePickle,
)
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH
from hfdcp_core.publish import Job
from hfdcp_core.testing.checkpoints import Truth, compare_with_truth

Checkpoints = Mapping[str, Truth]
UP = "layers.0.up.weight"
"""A tensor of 13 x 7 that four ranks hold by rows: [0:4], [4:8], [8:12], [12:13]."""


@pytest.fixture
def copy_of(checkpoints: Checkpoints, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies one checkpoint, to be damaged."""
    return lambda case: Path(shutil.copytree(checkpoints[case].folder, tmp_path / f"damaged-{case}"))


def refused(job: Job) -> HfdcpError:
    """Run the whole chain, which must fail, and leave nothing that could be taken for an output."""
    with pytest.raises(HfdcpError) as caught:
        publish.make(job)
    assert visible(Path(job.sink)) == []
    return caught.value


def visible(sink: Path) -> list[str]:
    """List what a loader or a person would take for an output."""
    found = [*sink.glob("*.safetensors"), sink / INDEX_PATH, sink / MANIFEST_PATH]
    return sorted(path.name for path in found if path.exists())


def shard_file(rank: int) -> str:
    """Name the file that torch's Hugging Face writer writes on one rank, counted from 1."""
    return f"shard-{rank:05d}-model-00001-of-00001.safetensors"


# ---------------------------------------------------------------- rows 1 and 2: scalars and integers


@pytest.mark.parametrize(
    ("case", "world_size", "names"),
    [
        ("scalars_and_empties", None, ["scalar.F32", "scalar.BF16", "scalar.I64", "scalar.BOOL"]),
        ("hf_dtypes", 2, ["scalar.F32", "scalar.I64", "scalar.BOOL"]),
        ("dtypes", None, ["I64", "U8", "BOOL", "C64", "F8_E8M0", "F4"]),
        ("hf_dtypes", 2, ["I64", "U8", "BOOL", "C64"]),
        ("hf_unreadable", 2, ["F8_E8M0", "F4"]),
    ],
)
def test_scalars_and_integers_keep_their_values(
    case: str, world_size: int | None, names: list[str], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    truth = checkpoints[case]
    assert set(names) <= truth.tensors.keys()
    publish.make(Job(str(truth.folder), str(tmp_path), world_size=world_size))
    assert compare_with_truth(truth, tmp_path) == ()


# ---------------------------------------------------------------- row 3: lost shards


@pytest.mark.parametrize("rank", [0, 1, 3], ids=["first", "middle", "last"])
def test_a_lost_file_of_a_distributed_checkpoint_is_named(
    rank: int, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("fsdp2_uneven")
    (source / f"__{rank}_0.distcp").unlink()
    fault = refused(Job(str(source), str(tmp_path / "out")))
    assert isinstance(fault, IncompleteCheckpoint)
    assert fault.problems == (f"rank {rank}: __{rank}_0.distcp",)


def drop_chunk(source: Path, name: str, offset: tuple[int, ...]) -> None:
    """Let ``.metadata`` forget one shard, as a merge that went wrong would."""
    metadata: Metadata = FileSystemReader(source).read_metadata()
    entry = metadata.state_dict_metadata[name]
    entry.chunks = [chunk for chunk in entry.chunks if tuple(chunk.offsets) != offset]
    (index,) = [i for i in metadata.storage_data if i.fqn == name and tuple(i.offset) == offset]
    del metadata.storage_data[index]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("start", "box"), [(0, "[0:4, 0:7]"), (4, "[4:8, 0:7]"), (12, "[12:13, 0:7]")], ids=["first", "middle", "last"]
)
def test_a_shard_that_the_metadata_lacks_is_named_by_tensor_and_box(
    start: int, box: str, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("fsdp2_uneven")
    drop_chunk(source, UP, (start, 0))
    fault = refused(Job(str(source), str(tmp_path / "out")))
    assert isinstance(fault, PlanError | IncompleteCheckpoint)
    (problem,) = fault.problems
    assert UP in problem
    assert box in problem


def test_without_a_number_of_ranks_torchs_sharded_safetensors_are_not_taken_for_complete(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    fault = refused(Job(str(checkpoints["hf_uneven"].folder), str(tmp_path)))
    assert isinstance(fault, IncompleteCheckpoint)
    assert "--world-size" in str(fault)
    assert "--accept-unproved" in str(fault)


@pytest.mark.parametrize("rank", [1, 2, 4], ids=["first", "middle", "last"])
def test_with_a_number_of_ranks_a_lost_file_of_sharded_safetensors_is_named(
    rank: int, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("hf_uneven")
    (source / shard_file(rank)).unlink()
    fault = refused(Job(str(source), str(tmp_path / "out"), world_size=4))
    assert isinstance(fault, IncompleteCheckpoint)
    assert any(shard_file(rank) in problem for problem in fault.problems)


@pytest.mark.parametrize(("rank", "box"), [(1, "[0:4, 0:7]"), (2, "[4:8, 0:7]")], ids=["first", "middle"])
def test_a_hole_in_sharded_safetensors_is_named_even_where_no_proof_is_asked_for(
    rank: int, box: str, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("hf_uneven")
    (source / shard_file(rank)).unlink()
    fault = refused(Job(str(source), str(tmp_path / "out"), accept_unproved=True))
    assert isinstance(fault, PlanError | IncompleteCheckpoint)
    assert [problem for problem in fault.problems if UP in problem and box in problem]


def test_a_lost_last_shard_that_was_accepted_unproved_is_confessed_in_the_manifest(
    copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("hf_uneven")
    (source / shard_file(4)).unlink()
    manifest = publish.make(Job(str(source), str(tmp_path / "out"), accept_unproved=True))
    assert manifest.unproved
    written = json.loads((tmp_path / "out" / MANIFEST_PATH).read_text())
    assert manifest.unproved in json.dumps(written, ensure_ascii=False)


def test_shards_of_a_wider_older_save_are_refused(
    checkpoints: Checkpoints, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("hf_pair")
    for rank in (3, 4):
        shutil.copy(checkpoints["hf_uneven"].folder / shard_file(rank), source)
    fault = refused(Job(str(source), str(tmp_path / "out"), world_size=2))
    assert isinstance(fault, SourceError)
    assert [problem for problem in fault.problems if shard_file(3) in problem]


# ---------------------------------------------------------------- rows 4 and 5: mappings


CASES_OF_BOTH_FORMATS = pytest.mark.parametrize(("case", "world_size"), [("fsdp2_uneven", None), ("hf_uneven", 4)])


@CASES_OF_BOTH_FORMATS
def test_a_tensor_without_a_file_in_the_mapping_is_named(
    case: str, world_size: int | None, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    truth = checkpoints[case]
    mapping = {name: 1 for name in truth.tensors if name != UP}
    fault = refused(Job(str(truth.folder), str(tmp_path), world_size=world_size, file_index=mapping))
    assert isinstance(fault, PlanError)
    assert UP in str(fault)


@CASES_OF_BOTH_FORMATS
def test_a_mapped_tensor_without_a_shard_is_named(
    case: str, world_size: int | None, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    truth = checkpoints[case]
    mapping = {**dict.fromkeys(truth.tensors, 1), "layers.7.ghost": 2}
    fault = refused(Job(str(truth.folder), str(tmp_path), world_size=world_size, file_index=mapping))
    assert isinstance(fault, PlanError)
    assert "layers.7.ghost" in str(fault)


@CASES_OF_BOTH_FORMATS
def test_a_right_mapping_decides_the_files(
    case: str, world_size: int | None, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    truth = checkpoints[case]
    mapping = {name: 1 + number % 3 for number, name in enumerate(truth.tensors)}
    publish.make(Job(str(truth.folder), str(tmp_path), world_size=world_size, file_index=mapping))
    assert compare_with_truth(truth, tmp_path) == ()
    weight_map = json.loads((tmp_path / INDEX_PATH).read_text())["weight_map"]
    assert weight_map == {name: f"model-{number:05d}-of-00003.safetensors" for name, number in mapping.items()}


@pytest.mark.parametrize("edit", ["lacks", "adds"])
def test_an_index_beside_the_shards_that_names_other_tensors_is_refused(
    edit: str, checkpoints: Checkpoints, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("hf_uneven")
    names = dict.fromkeys(checkpoints["hf_uneven"].tensors, "model-00001-of-00001.safetensors")
    wrong = "layers.7.ghost" if edit == "adds" else UP
    if edit == "adds":
        names[wrong] = "model-00001-of-00001.safetensors"
    else:
        del names[wrong]
    (source / INDEX_PATH).write_text(json.dumps({"metadata": {"total_size": 1000}, "weight_map": names}))
    fault = refused(Job(str(source), str(tmp_path / "out")))
    assert isinstance(fault, IncompleteCheckpoint)
    assert [problem for problem in fault.problems if wrong in problem]


# ---------------------------------------------------------------- `.metadata`


def test_a_folder_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("nothing here")
    fault = refused(Job(str(tmp_path / "in"), str(tmp_path / "out")))
    assert isinstance(fault, UnknownFormat)
    assert "notes.txt" in str(fault)


def test_absent_metadata_is_told(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy_of("fsdp2_uneven")
    (source / ".metadata").unlink()
    fault = refused(Job(str(source), str(tmp_path / "out")))
    assert isinstance(fault, IncompleteCheckpoint)
    assert ".metadata" in str(fault)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_truncated_metadata_is_told(keep: float, copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy_of("fsdp2_uneven")
    raw = (source / ".metadata").read_bytes()
    (source / ".metadata").write_bytes(raw[: int(len(raw) * keep)])
    fault = refused(Job(str(source), str(tmp_path / "out")))
    assert isinstance(fault, CorruptFile)
    assert ".metadata" in str(fault)


class Payload:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("whole", [True, False], ids=["the whole pickle", "an entry of a right one"])
def test_a_pickle_that_calls_something_is_refused_and_not_called(
    whole: bool, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source, mark = copy_of("fsdp2_uneven"), tmp_path / "was called"
    attack = Payload(exec, f"open({str(mark)!r}, 'w').close()")
    metadata = FileSystemReader(source).read_metadata()
    metadata.planner_data = {UP: attack}
    (source / ".metadata").write_bytes(pickle.dumps(attack if whole else metadata))
    fault = refused(Job(str(source), str(tmp_path / "out")))
    assert isinstance(fault, UnsafePickle)
    assert "exec" in str(fault)
    assert ".metadata" in str(fault)
    assert not mark.exists()


def test_any_flipped_bit_of_the_metadata_ends_in_an_error_of_ours_or_in_a_complete_output(
    copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("tied")
    raw = (source / ".metadata").read_bytes()
    for position in range(0, len(raw), 19):
        flip(source / ".metadata", position, bit=position % 8)
        sink = tmp_path / f"out-{position}"
        try:
            publish.make(Job(str(source), str(sink)))
        except HfdcpError:
            assert visible(sink) == []
        else:
            assert visible(sink) == [MANIFEST_PATH, "model.safetensors"]
        (source / ".metadata").write_bytes(raw)


# ---------------------------------------------------------------- `.distcp`


def flip(path: Path, position: int, *, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@dataclass(frozen=True)
class Item:
    """One stored shard of a distributed checkpoint, looked at with the standard library's own zip reader."""

    path: Path
    start: int
    archive: bytes

    @classmethod
    def of(cls, source: Path, name: str, offset: tuple[int, ...]) -> Item:
        info = FileSystemReader(source).read_metadata().storage_data[MetadataIndex(name, torch.Size(offset))]
        path = source / info.relative_path
        return cls(path, info.offset, path.read_bytes()[info.offset : info.offset + info.length])

    @property
    def directory(self) -> int:
        """Where the zip's central directory starts, in the file."""
        return self.start + int.from_bytes(self.archive[-6:-2], "little")

    def record(self, ending: str) -> int:
        """Return where the bytes of one record start, in the file."""
        with zipfile.ZipFile(io.BytesIO(self.archive)) as archive:
            (info,) = [info for info in archive.infolist() if info.filename.endswith(ending)]
        local = self.archive[info.header_offset : info.header_offset + 30]
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        return self.start + info.header_offset + 30 + lengths

    def entry(self, ending: str) -> int:
        """Return where the central directory's entry of one record starts, in the file."""
        return self.start + self.archive.rindex(b"PK\x01\x02", 0, self.archive.rindex(ending.encode()))


PLACES: dict[str, Callable[[Item], int]] = {
    "the first byte of the payload": lambda item: item.record("data/0"),
    "the middle of the payload": lambda item: item.record("data/0") + 50,
    "data.pkl": lambda item: item.record("data.pkl") + 30,
    "the directory's signature": lambda item: item.directory,
    "the directory's end": lambda item: item.start + len(item.archive) - 22,
    "the payload's stored checksum": lambda item: item.entry("data/0") + 16,
    "the payload's stored size": lambda item: item.entry("data/0") + 20,
    "the payload's stored place": lambda item: item.entry("data/0") + 42,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("case", "name", "offset"),
    [("fsdp2_uneven", UP, (4, 0)), ("tp_row", UP, (0, 2)), ("transposed_shards", "transposed", (4, 0))],
    ids=["rows", "columns", "transposed"],
)
def test_one_flipped_bit_is_told_with_its_tensor_and_file(
    case: str, name: str, offset: tuple[int, ...], place: str, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of(case)
    item = Item.of(source, name, offset)
    flip(item.path, PLACES[place](item), bit=1)
    fault = refused(Job(str(source), str(tmp_path / "out")))
    assert isinstance(fault, CorruptFile)
    assert item.path.name in str(fault)
    assert name in str(fault)


def test_a_flipped_bit_anywhere_gives_the_right_bytes_or_an_error(
    checkpoints: Checkpoints, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("tied")
    file = source / "__0_0.distcp"
    raw = file.read_bytes()
    outcomes = set()
    for position in range(0, len(raw), 61):
        flip(file, position, bit=position % 8)
        sink = tmp_path / f"out-{position}"
        try:
            publish.make(Job(str(source), str(sink)))
        except SourceError:
            assert visible(sink) == []
            outcomes.add("error")
        else:
            assert compare_with_truth(checkpoints["tied"], sink) == (), f"bit {position % 8} of byte {position}"
            outcomes.add("right")
        file.write_bytes(raw)
    assert "error" in outcomes


def test_damage_that_one_of_several_files_meets_leaves_neither_index_nor_manifest_nor_a_wrong_file(
    checkpoints: Checkpoints, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source, sink = copy_of("fsdp2_uneven"), tmp_path / "out"
    item = Item.of(source, UP, (4, 0))
    flip(item.path, item.record("data/0"))
    with pytest.raises(CorruptFile, match=UP):
        publish.make(Job(str(source), str(sink), max_file_size=64))
    assert not (sink / INDEX_PATH).exists()
    assert not (sink / MANIFEST_PATH).exists()
    for path in sink.glob("*.safetensors"):  # finished before the damage was met, and right
        assert all(problem.endswith(": missing") for problem in compare_with_truth(checkpoints["fsdp2_uneven"], path))


@pytest.mark.parametrize("cut", [1, 100, None], ids=["by a byte", "by a hundred", "to nothing"])
def test_a_short_file_is_told(cut: int | None, copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy_of("fsdp2_uneven")
    file = source / "__1_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) - cut] if cut else b"")
    fault = refused(Job(str(source), str(tmp_path / "out")))
    assert isinstance(fault, CorruptFile)
    assert file.name in str(fault)
    assert str(len(raw)) in str(fault)


@pytest.mark.parametrize("cut", [1, 300, None], ids=["by a byte", "by more than the data", "to nothing"])
def test_a_short_file_of_sharded_safetensors_is_told(
    cut: int | None, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("hf_uneven")
    file = source / shard_file(2)
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) - cut] if cut else b"")
    fault = refused(Job(str(source), str(tmp_path / "out"), world_size=4))
    assert isinstance(fault, CorruptFile)
    assert file.name in str(fault)
