"""Where torch's reader and consolidation go wrong: each of them done right here, or refused, on one process."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hfdcp_core import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
    consolidate_safetensors_files,
)
from hfdcp_core.errors import CorruptFile, HfdcpError, IncompleteCheckpoint, PlanError, StorageNotFound, UnsafePickle
from hfdcp_core.job import Job
from hfdcp_core.publish import make
from hfdcp_core.testing.dropin import blank, differences
from hfdcp_core.testing.in_memory import Piece, weights_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SHARDED = {"save_distributed": True}
INDEX = "model.safetensors.index.json"


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}-model-00001-of-00001.safetensors"


def load(path: object, state: dict[str, Any], reader: Any = HuggingFaceStorageReader, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=reader(path, **options), no_dist=True)
    return state


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save({**state}, storage_writer=HuggingFaceStorageWriter(path, **options), no_dist=True)


def whole_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def cut(folder: Path, tensors: dict[str, np.ndarray[Any, Any]], ranks: int, dim: int = 0) -> Path:
    """Write what torch's writer leaves of ranks that cut every tensor along one dimension."""
    folder.mkdir()
    for rank in range(ranks):
        pieces = {}
        for name, array in tensors.items():
            width = array.shape[dim] // ranks
            at = [0] * array.ndim
            at[dim] = rank * width
            part = np.take(array, range(at[dim], at[dim] + width), axis=dim)
            pieces[name] = Piece.of(np.ascontiguousarray(part), at=at)
        (folder / shard_name(rank + 1)).write_bytes(weights_file(pieces))
    return folder


# ---- values ---------------------------------------------------------------------------------------------------------


EVERY_DTYPE = {
    **{
        str(dtype).removeprefix("torch."): torch.arange(64, dtype=torch.uint8).view(dtype)
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)
    },
    **{
        name: torch.arange(64, dtype=torch.uint8).view(getattr(torch, name))
        for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64")
    },
    "bool": torch.arange(8) % 2 == 0,
    **(
        {"float4_e2m1fn_x2": torch.arange(64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
        if hasattr(torch, "float4_e2m1fn_x2")  # from torch 2.8 on
        else {}
    ),
}


@pytest.mark.parametrize("name", EVERY_DTYPE)
def test_no_dtype_is_refused_or_changed_by_consolidation(name: str, tmp_path: Path) -> None:
    """torch refuses integers with a TypeError, misjudges the size of complex numbers, and lacks the rarer fp8."""
    few = EVERY_DTYPE[name][3:4] if "float4" in name else EVERY_DTYPE[name][3]  # two of F4 are torch's one
    state = {"t": EVERY_DTYPE[name], "few": few.clone()}
    save(tmp_path / "shards", state, **SHARDED)
    assert differences(load(tmp_path / "shards", blank(state)), state) == []
    consolidate_safetensors_files(tmp_path / "shards", tmp_path / "whole", {"t": 1, "few": 1})
    assert differences(whole_of(tmp_path / "whole"), state) == []


@pytest.mark.parametrize("lead", [(3,), (2, 2)], ids=["experts", "experts of layers"])
def test_stacked_experts_are_dequantised(lead: tuple[int, ...], tmp_path: Path) -> None:
    """torch's quantised reader raises for anything but matrices."""
    weight = torch.randn(*lead, 256, 128, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    scale = torch.rand(*lead, 2, 1, generator=torch.Generator().manual_seed(4)) + 0.5
    save_file({"e.weight": weight, "e.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    wanted = weight.float() * scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    state = load(tmp_path, {"e.weight": torch.zeros(wanted.shape)}, QuantizedHuggingFaceStorageReader)
    assert torch.equal(state["e.weight"], wanted)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_quantised_numbers_that_lie_in_several_shards_are_dequantised_without_an_index(
    dim: int, tmp_path: Path
) -> None:
    """torch's quantised reader raises for either; the cuts here go through blocks."""
    weight = torch.randn(192, 384, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(4)) + 0.5
    step = weight.shape[dim] // 4
    for rank in range(4):
        part = weight.narrow(dim, rank * step, step).contiguous()
        at = (0, rank * step) if dim else (rank * step, 0)
        raw = Piece("F8_E4M3", tuple(part.shape), part.view(torch.uint8).numpy().tobytes(), at)
        scales = {"a.weight_scale_inv": Piece.of(scale.numpy(), at=[0, 0])} if rank == 0 else {}
        (tmp_path / shard_name(rank + 1)).write_bytes(weights_file({"a.weight": raw, **scales}))
    wanted = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:192]
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [128, 128]}}')
    state = load(tmp_path, {"a.weight": torch.zeros(192, 384)}, QuantizedHuggingFaceStorageReader)
    assert torch.equal(state["a.weight"], wanted)


def test_a_transposed_tensor_of_dcps_own_format_is_read_by_its_strides(tmp_path: Path) -> None:
    """An item may be stored as a view; who copies its bytes as they lie gets another matrix."""
    turned = torch.arange(24.0).reshape(4, 6).t()
    dcp.save({"w": turned}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(load(tmp_path, {"w": torch.zeros(6, 4)})["w"], turned)


# ---- completeness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3], ids=["first", "middle", "last"])
def test_what_our_writer_saved_tells_the_loss_of_any_file_by_itself(rank: int, tmp_path: Path) -> None:
    """torch's files state neither the whole shape nor the number of ranks; ours do, in a key that torch passes over."""
    weight = np.arange(24, dtype=np.float32).reshape(12, 2)
    cut(tmp_path / "torch", {"w": weight}, 4)
    make(Job(str(tmp_path / "torch"), str(tmp_path / "ours"), world_size=4, ranks=4))
    assert torch.equal(load(tmp_path / "ours", {"w": torch.zeros(12, 2)})["w"], torch.from_numpy(weight))
    (tmp_path / "ours" / shard_name(rank)).unlink()
    (tmp_path / "ours" / "hfdcp-manifest.json").unlink()
    for attempt in (
        lambda: HuggingFaceStorageReader(tmp_path / "ours").read_metadata(),
        lambda: consolidate_safetensors_files(tmp_path / "ours", tmp_path / "whole"),
    ):
        with pytest.raises((IncompleteCheckpoint, PlanError)):
            attempt()


def test_a_stray_file_beside_shards_is_refused_where_no_index_says_what_counts(tmp_path: Path) -> None:
    """torch takes every file for a part; of two boxes at one place it keeps either."""
    folder = cut(tmp_path / "shards", {"w": np.ones((4, 2), np.float32)}, 2)
    save_file({"w": torch.zeros(4, 2)}, folder / "consolidated.safetensors")
    for attempt in (
        lambda: HuggingFaceStorageReader(folder).read_metadata(),
        lambda: consolidate_safetensors_files(folder, tmp_path / "whole"),
    ):
        with pytest.raises(HfdcpError):
            attempt()


def test_a_file_that_goes_while_it_is_read_is_named(tmp_path: Path) -> None:
    """torch's threads lose their errors: ``Not all files were processed: 0 out of 2``."""
    folder = cut(tmp_path / "shards", {"w": np.ones((4, 2), np.float32)}, 2)

    class Removing(HuggingFaceStorageReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            (folder / shard_name(2)).unlink()
            return super().read_data(plan, planner)

    with pytest.raises(CheckpointException, match=shard_name(2)) as caught:
        load(folder, {"w": torch.zeros(4, 2)}, Removing, thread_count=2)
    [(fault, _)] = caught.value.failures.values()
    assert isinstance(fault, StorageNotFound)


def test_errors_of_ours_are_caught_as_exceptions(tmp_path: Path) -> None:
    """torch's CheckpointException is none (it is a BaseException): it passes ``except Exception``, ours never do."""
    assert not issubclass(CheckpointException, Exception)
    with pytest.raises(Exception, match="no checkpoint here") as reading:
        HuggingFaceStorageReader(tmp_path).read_metadata()
    with pytest.raises(Exception, match="no checkpoint here") as consolidating:
        consolidate_safetensors_files(tmp_path, tmp_path / "whole")
    assert isinstance(reading.value, HfdcpError)
    assert isinstance(consolidating.value, HfdcpError)


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_a_pickle_that_calls_something_is_refused_and_not_called(tmp_path: Path) -> None:
    mark = tmp_path / "was called"

    class Attack:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return exec, (f"open({str(mark)!r}, 'w').close()",)

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    metadata.planner_data = {"w": Attack()}
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafePickle, match="exec"):
        HuggingFaceStorageReader(tmp_path / "dcp").read_metadata()
    assert not mark.exists()


def test_a_flipped_bit_in_an_item_of_dcps_own_format_is_told(tmp_path: Path) -> None:
    """The CRC-32 of every item lies in its file, and torch reads past it."""
    tensor = torch.arange(1000.0)
    dcp.save({"w": tensor}, checkpoint_id=tmp_path, no_dist=True)
    (path,) = tmp_path.glob("*.distcp")
    raw = bytearray(path.read_bytes())
    at = raw.index(tensor[500:510].numpy().tobytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointException, match="CRC-32") as caught:
        load(tmp_path, {"w": torch.zeros(1000)})
    [(fault, _)] = caught.value.failures.values()
    assert isinstance(fault, CorruptFile)


# ---- files, memory, work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", [{"a": 1, "b": 2, "c": 2}, None], ids=["mapped", "as they come"])
def test_whole_files_name_their_format_and_hold_aligned_tensors(mapping: dict[str, int] | None, tmp_path: Path) -> None:
    """torch leaves ``format`` out, and lets tensors of four bytes begin at odd places."""
    tensors = {"a": np.ones((2, 3), np.uint8), "b": np.ones((2, 5), np.int16), "c": np.ones((2, 3), np.float64)}
    consolidate_safetensors_files(cut(tmp_path / "shards", tensors, 2), tmp_path / "whole", mapping)
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) == (2 if mapping else 1)
    for path in (tmp_path / "whole").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
        raw = path.read_bytes()
        first = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:first])
        assert first % 8 == 0
        for name in header.keys() - {"__metadata__"}:
            assert (first + header[name]["data_offsets"][0]) % tensors[name].itemsize == 0


LIMITED = """
import resource, sys
from hfdcp_core import HuggingFaceStorageReader, consolidate_safetensors_files
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
consolidate_safetensors_files(sys.argv[1], sys.argv[2], {"w": 1, "v": 2}, 4)
assert len(HuggingFaceStorageReader(sys.argv[1]).read_metadata().storage_data) == 400
"""


def test_more_shards_than_a_process_may_open_files_are_consolidated(tmp_path: Path) -> None:
    """torch opens every input at once for every output."""
    tensors = {"w": np.arange(400, dtype=np.float32).reshape(200, 2), "v": np.arange(200, dtype=np.int64)}
    cut(tmp_path / "shards", tensors, 200)
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "shards"), str(tmp_path / "whole")]
    subprocess.run(command, check=True, timeout=300)
    assert differences(whole_of(tmp_path / "whole"), {n: torch.from_numpy(a) for n, a in tensors.items()}) == []


def calls_of(deed: Callable[..., object], *arguments: object) -> int:
    """Count the Python functions that are called while something is done, in all threads."""
    counted = [0]

    def count(frame: object, event: str, argument: object) -> None:
        counted[0] += event == "call"

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        deed(*arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counted[0]


def test_rows_of_a_tensor_that_is_cut_by_columns_are_not_put_into_place_one_by_one(tmp_path: Path) -> None:
    """torch copies each contiguous run in Python, one after the other."""
    work = {}
    for rows in (64, 64 * 64):
        array = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64)
        folder = cut(tmp_path / f"shards-{rows}", {"w": array}, 2, dim=1)
        whole = tmp_path / f"whole-{rows}"
        work[rows] = calls_of(consolidate_safetensors_files, folder, whole)
        assert torch.equal(whole_of(whole)["w"], torch.from_numpy(array))
    assert work[64 * 64] < work[64] + 64 * 64 / 4


def test_work_grows_with_the_shards_and_not_with_their_product(tmp_path: Path) -> None:
    """torch looks for every tensor in every input once for each output."""
    work = {}
    for size in (6, 24):  # as many inputs, outputs and tensors
        tensors = {f"t{number}": np.arange(size, dtype=np.float32) for number in range(size)}
        folder = cut(tmp_path / f"shards-{size}", tensors, size)
        mapping = {name: number for number, name in enumerate(tensors, 1)}
        whole = tmp_path / f"whole-{size}"
        work[size] = calls_of(consolidate_safetensors_files, folder, whole, mapping)
        assert len(list(whole.glob("*.safetensors"))) == size
    # 16 times as many shards; torch's way takes 64 times the work
    assert work[24] < 20 * work[6]
