"""The builders themselves: torch's own loading agrees with the truth, and each layout is the one it is called after."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

from hfdcp_core.testing import _layouts, _models, _odd_layouts, _whole_layouts
from hfdcp_core.testing._orders import Order, carry_out
from hfdcp_core.testing._values import describe, whole
from hfdcp_core.testing._world import BUILDERS
from hfdcp_core.testing.checkpoints import (
    CASES,
    RankFailed,
    Truth,
    TruthTensor,
    compare_with_truth,
    main,
    read_truth,
    write_checkpoint,
    write_model,
)
from hfdcp_core.testing.demo import write_demo_checkpoint

pytestmark = pytest.mark.filterwarnings(
    # torch says so whenever a checkpoint is loaded without a process group, which is what we want
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


def torch_reader(folder: Path) -> dcp.FileSystemReader:
    if (folder / ".metadata").exists():
        return dcp.FileSystemReader(folder)
    return dcp.HuggingFaceStorageReader(str(folder))


def loaded_by_torch(folder: Path) -> dict[str, TruthTensor]:
    entries = torch_reader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=torch_reader(folder))
    return {name: describe(tensor) for name, tensor in state.items()}


UNREADABLE = ("hf_unreadable",)
"""What torch 2.13 writes and cannot read; a later one may."""
NEVER_READ = ("safetensors_inside", "safetensors_inside_only", "metadata_by_rank")
"""What torch has no reader for: safetensors inside of .distcp, and more than one rank's metadata at a time."""


@pytest.mark.parametrize("case", [case for case in CASES if case not in (*UNREADABLE, *NEVER_READ)])
def test_torch_itself_loads_what_the_truth_says(case: str, checkpoints: Mapping[str, Truth]) -> None:
    truth = checkpoints[case]
    assert truth.tensors
    assert loaded_by_torch(truth.folder) == truth.tensors


@pytest.mark.parametrize("case", UNREADABLE)
def test_where_torch_cannot_read_it_names_the_dtype_and_else_agrees(
    case: str, checkpoints: Mapping[str, Truth]
) -> None:
    truth = checkpoints[case]
    try:
        found = loaded_by_torch(truth.folder)
    except KeyError as fault:
        found = str(fault).strip("'")
    assert found == truth.tensors or found in {tensor.dtype for tensor in truth.tensors.values()}


def test_every_case_has_a_builder_and_every_builder_a_case() -> None:
    modules = {builder.build.__module__ for builder in BUILDERS.values()}
    assert modules == {module.__name__ for module in (_layouts, _models, _odd_layouts, _whole_layouts)}
    assert CASES.keys() | {"model", "demo"} == BUILDERS.keys()


@pytest.mark.parametrize("case", CASES)
def test_the_truth_is_read_back_as_it_was_returned(case: str, checkpoints: Mapping[str, Truth]) -> None:
    assert read_truth(checkpoints[case].folder.parent) == checkpoints[case]


CHUNKS = {
    ("fsdp2_even", "layers.0.up.weight"): {((4 * i, 0), (4, 8)) for i in range(4)},
    ("fsdp2_uneven", "layers.0.up.weight"): {((0, 0), (4, 7)), ((4, 0), (4, 7)), ((8, 0), (4, 7)), ((12, 0), (1, 7))},
    ("fsdp2_mostly_empty", "few_rows"): {((0, 0), (1, 9)), ((1, 0), (0, 9))},
    ("fsdp2_columns", "layers.0.up.weight"): {((0, 2 * i), (12, 2)) for i in range(4)},
    ("tp_column", "layers.0.up.weight"): {((0, 0), (4, 7)), ((4, 0), (4, 7)), ((8, 0), (4, 7)), ((12, 0), (1, 7))},
    ("tp_row", "layers.0.up.weight"): {((0, 0), (13, 2)), ((0, 2), (13, 2)), ((0, 4), (13, 2)), ((0, 6), (13, 1))},
    ("hsdp", "layers.0.up.weight"): {((0, 0), (7, 7)), ((7, 0), (6, 7))},
    ("ddp", "module.layers.0.up.weight"): {((0, 0), (17, 9))},
    ("fsdp_tp", "layers.0.down.weight"): {((8 * i, 12 * j), (8, 12)) for i in range(2) for j in range(2)},
    ("mesh_orders", "columns.then.rows"): {((3 * i, 4 * j), (3 - i, 4 - j)) for i in range(2) for j in range(2)},
    ("mesh_orders", "scalar"): {((), ())},
    ("middle_dimension", "even"): {((0, 2 * i, 0), (3, 2, 5)) for i in range(4)},
    ("blocks", "table"): {((0, 0), (4, 4)), ((0, 4), (4, 4)), ((4, 0), (5, 3)), ((4, 3), (5, 5))},
    ("experts", "experts.3.w1"): {((0, 0), (6, 7))},
}
"""Which boxes torch's own metadata lists: offset and extents."""


@pytest.mark.parametrize(("case", "name"), CHUNKS, ids=str)
def test_a_layout_is_the_one_it_is_called_after(case: str, name: str, checkpoints: Mapping[str, Truth]) -> None:
    entry = torch_reader(checkpoints[case].folder).read_metadata().state_dict_metadata[name]
    assert isinstance(entry, dcp.TensorStorageMetadata)
    assert {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks} == CHUNKS[case, name]


def test_a_case_saved_over_another_leaves_the_files_of_the_older(checkpoints: Mapping[str, Truth]) -> None:
    folder = checkpoints["overwritten"].folder
    used = {info.relative_path for info in torch_reader(folder).read_metadata().storage_data.values()}
    assert used < {path.name for path in folder.glob("*.distcp")}


def test_a_training_state_tells_weights_from_the_rest(checkpoints: Mapping[str, Truth]) -> None:
    truth = checkpoints["train_state"]
    assert "layers.0.up.weight" in truth.cleaned
    assert not [name for name in truth.cleaned if name.startswith(("optim", "model"))]
    assert truth.cleaned["few_rows"] == truth.tensors["model.few_rows"]
    assert {"dataloader.dp_rank_0", "dataloader.dp_rank_1", "note"} <= set(truth.objects)
    assert [name for name in truth.tensors if name.endswith("exp_avg_sq")]


def test_values_follow_from_the_name_alone_and_never_change() -> None:
    first = describe(whole("a name", (1000, 300), torch.bfloat16))
    assert first.sha256 == "eaf531ff726a170d656b11f2144b4cc8831c37c29a69cda32d403eff8c4878c1"
    assert describe(whole("another name", (1000, 300), torch.bfloat16)).sha256 != first.sha256


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_floats_are_finite(dtype: torch.dtype) -> None:
    assert whole("floats", (4096,), dtype).to(torch.float64).isfinite().all()


# ---------------------------------------------------------------- the comparison with the truth

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array(7, np.int64),
    "c": np.zeros((0, 2), np.uint8),
}
SEVERAL = {"1.safetensors": {"a": ARRAYS["a"]}, "2.safetensors": {"b": ARRAYS["b"], "c": ARRAYS["c"]}}


def truth_of(arrays: Mapping[str, np.ndarray]) -> Truth:
    return Truth(Path("nowhere"), {name: describe(torch.from_numpy(array.copy())) for name, array in arrays.items()})


def write_several(folder: Path, files: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    for name, arrays in files.items():
        save_file(dict(arrays), folder / name)
    weight_map = {tensor: name for name, arrays in files.items() for tensor in arrays}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_right_output_has_no_problems_in_one_file_or_several(tmp_path: Path) -> None:
    truth = truth_of(ARRAYS)
    save_file(ARRAYS, tmp_path / "model.safetensors")
    assert compare_with_truth(truth, tmp_path) == ()
    assert compare_with_truth(truth, tmp_path / "model.safetensors") == ()
    several = tmp_path / "several"
    several.mkdir()
    write_several(several, {"1.safetensors": {"a": ARRAYS["a"]}, "2.safetensors": {"b": ARRAYS["b"], "c": ARRAYS["c"]}})
    assert compare_with_truth(truth, several) == ()


WRONG = {
    "one bit": ({**ARRAYS, "a": ARRAYS["a"] + np.float32(1e-6)}, "a: expected"),
    "another dtype": ({**ARRAYS, "b": ARRAYS["b"].astype(np.uint64)}, "b: expected"),
    "another shape": ({**ARRAYS, "a": ARRAYS["a"].reshape(4, 3)}, "a: expected"),
    "another empty shape": ({**ARRAYS, "c": np.zeros((2, 0), np.uint8)}, "c: expected"),
    "a missing tensor": ({"a": ARRAYS["a"], "c": ARRAYS["c"]}, "b: missing"),
    "a surplus tensor": ({**ARRAYS, "d": ARRAYS["a"]}, "d: not in the truth"),
}


@pytest.mark.parametrize(("arrays", "problem"), WRONG.values(), ids=WRONG)
def test_a_wrong_output_is_told(arrays: dict[str, np.ndarray], problem: str, tmp_path: Path) -> None:
    save_file(arrays, tmp_path / "model.safetensors")
    (found,) = compare_with_truth(truth_of(ARRAYS), tmp_path)
    assert found.startswith(problem)


def test_an_index_that_disagrees_with_its_files_is_told(tmp_path: Path) -> None:
    write_several(
        tmp_path, {"1.safetensors": {"a": ARRAYS["a"]}, "2.safetensors": {"b": ARRAYS["b"], "c": ARRAYS["c"]}}
    )
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"c": "2.safetensors"', '"c": "1.safetensors"'))
    (found,) = compare_with_truth(truth_of(ARRAYS), tmp_path)
    assert "index and header differ in ['c']" in found
    (tmp_path / "3.safetensors").touch()
    (found,) = compare_with_truth(truth_of(ARRAYS), tmp_path)
    assert "the folder holds ['1.safetensors', '2.safetensors', '3.safetensors']" in found


def test_an_output_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (found,) = compare_with_truth(truth_of(ARRAYS), tmp_path)
    assert "FileNotFoundError" in found
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 16)
    (found,) = compare_with_truth(truth_of(ARRAYS), tmp_path)
    assert "SafetensorError" in found


# ---------------------------------------------------------------- ranks


def test_a_folder_that_is_in_use_is_refused(checkpoints: Mapping[str, Truth]) -> None:
    with pytest.raises(FileExistsError, match="not empty"):
        write_checkpoint("tied", checkpoints["tied"].folder.parent)


def test_a_rank_that_raises_is_shown_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank \d of 2 ended with status 1:.*AttributeError.*no_such_dtype"):
        write_model(tmp_path, total_bytes=100_000, ranks=2, dtype="no_such_dtype")


def test_a_rank_that_hangs_is_ended_and_shown_where_it_hung(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "truth.json")  # nobody reads: opening it for writing waits for ever
    with pytest.raises(RankFailed, match=r"(?s)rank 0 of 1 ended with status 1:.*Timeout.*in rank_main"):
        carry_out([Order("plain", 1, str(tmp_path), "dcp")], timeout_s=3.0)


# ---------------------------------------------------------------- the model for benchmarks, the demo, the command


@pytest.mark.parametrize(
    ("layout", "columns"),
    [("row", set()), ("column", {"q_proj", "o_proj"}), ("mixed", {"o_proj"})],
)
def test_a_model_is_cut_as_its_layout_says(layout: str, columns: set[str]) -> None:
    kinds = ("q_proj", "o_proj")
    found = {kind for kind in kinds if _models.cut_dimension(f"model.layers.0.{kind}.weight", (8, 8), layout) == 1}
    assert found == columns
    assert _models.cut_dimension("model.norm.weight", (8,), layout) == 0


def test_a_model_has_the_size_and_the_layout_that_were_asked_for(tmp_path: Path) -> None:
    truth = write_model(tmp_path, total_bytes=3_000_000, ranks=2, layout="mixed", format="dcp-safetensors")
    assert loaded_by_torch(truth.folder) == truth.tensors
    size = 2 * sum(math.prod(tensor.shape) for tensor in truth.tensors.values())
    assert abs(size - 3_000_000) < 30_000
    entries = torch_reader(truth.folder).read_metadata().state_dict_metadata
    assert {chunk.offsets[1] > 0 for chunk in entries["model.layers.3.mlp.down_proj.weight"].chunks} == {False, True}
    assert {chunk.offsets[1] > 0 for chunk in entries["model.layers.3.mlp.up_proj.weight"].chunks} == {False}


DEMO_2D = "model.model.layers.1.mlp.down_proj.weight"


def test_the_demo_is_a_real_training_state(tmp_path: Path) -> None:
    truth = write_demo_checkpoint(tmp_path)
    assert loaded_by_torch(truth.folder) == truth.tensors
    dtypes = {name: tensor.dtype for name, tensor in truth.cleaned.items()}
    assert dtypes["model.inv_freq"] == "F32"
    assert dtypes["model.steps_trained"] == "I64"
    assert truth.cleaned["model.steps_trained"].shape == ()
    assert dtypes["model.layers.3.mlp.down_proj.weight"] == "BF16"
    assert 20e6 < sum(path.stat().st_size for path in truth.folder.iterdir()) < 80e6
    entry = (
        dcp.FileSystemReader(truth.folder)
        .read_metadata()
        .state_dict_metadata["model.model.layers.1.mlp.down_proj.weight"]
    )
    assert len({tuple(chunk.offsets) for chunk in entry.chunks}) == 4
    assert all(min(chunk.sizes) < min(entry.size) for chunk in entry.chunks)
    assert "step" in truth.objects


def test_the_command_writes_one_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tied", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'ckpt'}: 2 tensors, 0 other entries\n"
    assert loaded_by_torch(tmp_path / "ckpt") == read_truth(tmp_path).tensors


def test_the_command_names_the_cases_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["no_such_case", "somewhere"])
    assert "fsdp2_uneven" in capsys.readouterr().err
