"""Reports of tensors that were lost, misplaced or misnamed: index, files and names say the same, and all of it.

Each test stands for a kind of report that users of such checkpoints made somewhere; the reference is to one of them.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, PlanError
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH
from hfdcp_core.safetensors_file import file_names, write_index
from hfdcp_core.testing.in_memory import Files, Output, Piece, publish_files, rank_files, refusal_of, weights_file


def row(number: float, length: int = 2) -> Piece:
    """Return a short tensor of one number."""
    return Piece.of(np.full(length, number, np.float32))


def repository(*files: Mapping[str, Piece], **others: str) -> Files:
    """Return a repository: files with an index that tells of them, and of ``others`` what it is told."""
    names = file_names(len(files))
    named = {fqn: name for name, held in zip(names, files, strict=True) for fqn in held}
    index = write_index({**named, **others}, total_size=8 * len(named), total_parameters=2 * len(named))
    return {INDEX_PATH: index, **{name: weights_file(held) for name, held in zip(names, files, strict=True)}}


def saved(state: Mapping[str, object], folder: Path, **way: object) -> Files:
    """Save with torch's own writer, in this process alone, and return the files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nothing is distributed
        dcp.save(dict(state), no_dist=True, **(way or {"checkpoint_id": folder}))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weight_map(made: Output) -> Mapping[str, str]:
    """Return where the output's index says that tensors lie."""
    return json.loads(made.files[INDEX_PATH])["weight_map"]


# ---- the index is made from the files ----


@given(
    sizes=st.dictionaries(st.text("abcdef.", min_size=1, max_size=5), st.integers(0, 9), min_size=1, max_size=8),
    max_file_size=st.integers(1, 80),
)
@settings(max_examples=30, deadline=None)
def test_index_headers_and_manifest_name_exactly_the_tensors_that_each_file_holds(
    sizes: dict[str, int], max_file_size: int
) -> None:
    """Names claimed but not written, written but not named, or named elsewhere (Megatron-Bridge#4083, Relax#148)."""
    tensors = {name: row(number, size) for number, (name, size) in enumerate(sizes.items())}
    made = publish_files({"model.safetensors": weights_file(tensors)}, max_file_size=max_file_size, recipe="none")
    assert made.tensors == tensors
    where = {name: made.file_of(name) for name in tensors}
    records = {record.path: set(record.tensors) for record in made.manifest.records}
    assert records == {path: {name for name in where if where[name] == path} for path in {*where.values()}}
    assert tuple(sorted(records)) == file_names(len(records))
    if len(records) > 1:
        assert weight_map(made) == where
    else:
        assert INDEX_PATH not in made.files


def test_an_index_is_written_whatever_the_source_had() -> None:
    """Exports of several files that had none, because the source had (torchtitan#2137)."""
    tensors = {"a": row(1), "b": row(2)}
    plain = {f"{name}.safetensors": weights_file({name: piece}) for name, piece in tensors.items()}
    ranks = rank_files(*({name: Piece(p.dtype, p.shape, p.data, (0,))} for name, p in tensors.items()))
    for files in (plain, repository(*({name: piece} for name, piece in tensors.items())), ranks):
        made = publish_files(files, max_file_size=8, accept_unproved=True)
        assert weight_map(made) == {name: made.file_of(name) for name in tensors}
        assert len(made.manifest.records) == 2


# ---- a part of what a file was meant to hold ----


@pytest.mark.parametrize("absent", ["a", "b", "c"])
def test_a_file_of_which_one_tensor_is_left_out_still_holds_the_others(absent: str) -> None:
    """Whole files were dropped because one of their tensors never came (Megatron-Bridge#4188, AReaL#1403)."""
    source = repository({"a": row(1), "b": row(2)}, {"c": row(3), "d": row(4)})
    kept = {name: row(n) for n, name in enumerate("abcd", 1) if name != absent}
    for asked in ({"max_file_size": 16}, {"file_index": {name: 1 + (name > "b") for name in kept}}):
        made = publish_files(source, exclude=(absent,), **asked)
        assert made.tensors == kept
        assert weight_map(made) == {name: made.file_of(name) for name in kept}
        assert made.manifest.skipped == (absent,)


def test_a_tensor_that_the_given_files_expect_and_that_is_not_written_is_named() -> None:
    """A tied head that the given index still named became an entry without dtype (torchtitan#3764)."""
    source = {"model.safetensors": weights_file({"embed": row(1), "norm": row(2)})}
    fault = refusal_of(source, file_index={"embed": 1, "norm": 1, "lm_head.weight": 2}, exclude=("norm",))
    assert isinstance(fault, PlanError)
    assert {problem.partition(":")[0] for problem in fault.problems} >= {"lm_head.weight", "norm"}


@pytest.mark.parametrize("name", ["mtp.0.w", "layers.0.mlp.experts.0.bias", "blocks.0.attn.w"])
def test_a_tensor_that_nobody_expected_is_written_or_named_and_never_dropped(name: str) -> None:
    """Keys outside of the given index that vanished while the export was called strict (Megatron-Bridge#4513)."""
    source = {"model.safetensors": weights_file({"a": row(1), name: row(2)})}
    assert publish_files(source).tensors.keys() == {"a", name}
    fault = refusal_of(source, file_index={"a": 1})
    assert isinstance(fault, PlanError)
    assert fault.problems == (f"{name}: in no file of the given index",)


# ---- files that contradict the index, and files that nobody asked for ----


def test_a_file_that_also_holds_what_the_index_places_elsewhere_is_refused() -> None:
    """Loaders read all of a file: an old copy went over the right tensor (vllm#54230)."""
    right, stale = {"a": row(1), "w": row(2)}, {"b": row(3), "w": row(9)}
    (first, second) = file_names(2)
    index = write_index({"a": first, "w": first, "b": second}, total_size=24, total_parameters=6)
    fault = refusal_of({INDEX_PATH: index, first: weights_file(right), second: weights_file(stale)})
    assert isinstance(fault, CorruptFile)
    assert fault.problems == (f"w: in {second}, but the index does not say so",)


STRAYS: dict[str, Files] = {
    "the same weights in one file": {"model.safetensors": weights_file({"a": row(9), "b": row(9)})},
    "another writer's whole copy": {"consolidated.safetensors": weights_file({"a": row(9)})},
    "a damaged file": {"model.safetensors": b"not a weight file at all"},
    "files of an older, larger set": {"model-00003-of-00003.safetensors": weights_file({"a": row(9)})},
    "shards in a folder below": {f"sharded/{name}": raw for name, raw in rank_files({"a": row(9)}).items()},
    "another format in a folder below": {"original/consolidated.00.pth": b"PK", "original/params.json": b"{}"},
}


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
def test_only_what_the_index_names_is_read_whatever_lies_beside_it(stray: Files) -> None:
    """Everything that matched a pattern was taken, stale or broken (mlx-vlm#1464, accelerate#2698, vllm#40765)."""
    tensors = {"a": row(1), "b": row(2)}
    made = publish_files({**repository({"a": row(1)}, {"b": row(2)}), **stray})
    assert made.tensors == tensors
    assert set(made.files) == {"model.safetensors", MANIFEST_PATH}


def test_an_index_of_more_files_than_there_are_is_no_checkpoint_to_guess_about() -> None:
    """An old index of thirty files over a new set of fifteen (CoSER#3)."""
    files = {**repository({"a": row(1)}, {"b": row(2)}), "model.safetensors": weights_file({"a": row(3)})}
    del files["model-00002-of-00002.safetensors"]
    fault = refusal_of(files)
    assert isinstance(fault, IncompleteCheckpoint)
    assert fault.problems == ("model-00002-of-00002.safetensors",)


def test_an_index_that_also_lists_what_is_no_tensor_is_refused_by_name() -> None:
    """Strings of a state dict that the index names and no file holds (huggingface_hub#4391)."""
    fault = refusal_of(repository({"a": row(1)}, {"b": row(2)}, version="model-00001-of-00002.safetensors"))
    assert isinstance(fault, CorruptFile)
    assert [problem.partition(":")[0] for problem in fault.problems] == ["version"]


def test_what_torch_consolidated_and_the_shards_that_it_left_below_are_each_read_alone(tmp_path: Path) -> None:
    """torch keeps ``sharded/`` inside of its output, where patterns that look deeper find everything twice."""
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True, enable_consolidation=True)
    files = saved({"w": torch.ones(2, 2)}, tmp_path, storage_writer=writer)
    expected = {"w": Piece.of(np.ones((2, 2), np.float32))}
    assert publish_files(files).tensors == expected
    shards = {name.removeprefix("sharded/"): raw for name, raw in files.items() if name.startswith("sharded/")}
    assert publish_files(shards, world_size=1).tensors == expected


# ---- names and entries of real training states ----


def test_extra_state_of_layers_and_plain_values_are_named_and_kept_out_of_the_weights(tmp_path: Path) -> None:
    """Serialised state of any length, held against the model or counted as missing (TransformerEngine#1860)."""
    model = {
        "w": torch.ones(2),
        "fp8.weight": torch.ones(3),
        "fp8._extra_state": torch.arange(251, dtype=torch.uint8),
        "norm._extra_state": torch.zeros(0, dtype=torch.uint8),
        "attn._extra_state": io.BytesIO(b"abc"),
    }
    made = publish_files(saved({"model": model, "step": 5, "note": "text"}, tmp_path))
    assert made.tensors == {"w": Piece.of(np.ones(2, np.float32)), "fp8.weight": Piece.of(np.ones(3, np.float32))}
    extras = {f"model.{name}" for name in model if name.endswith("_extra_state")}
    assert set(made.manifest.skipped) == {*extras, "step", "note"}


def test_parts_of_a_model_that_lie_in_lists_are_named_by_their_place(tmp_path: Path) -> None:
    """A list where a dictionary was expected (fms-acceleration#130)."""
    layers = [{"w": torch.full((2,), float(n))} for n in range(12)]
    made = publish_files(saved({"model": {"layers": layers, "head": [torch.ones(1)]}}, tmp_path))
    assert made.tensors == {
        **{f"layers.{n}.w": row(n) for n in range(12)},
        "head.0": Piece.of(np.ones(1, np.float32)),
    }


WRAPPED: dict[str, tuple[list[str], list[str]]] = {
    "compiled, under one outer key (Soup#335)": (["_orig_mod.a.w", "_orig_mod.b.w"], ["a.w", "b.w"]),
    "compiled layer by layer (torchtitan#2622)": (["layers.0._orig_mod.w", "norm.w"], ["layers.0.w", "norm.w"]),
    "some wrapped, some not (ray#43594)": (["module.embed.w", "decoder.w"], ["embed.w", "decoder.w"]),
    "wrapper in wrapper (axolotl#3166)": (
        ["layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.w", "layers.1._fsdp_wrapped_module.mlp.w"],
        ["layers.0.w", "layers.1.mlp.w"],
    ),
}


@pytest.mark.parametrize(("names", "clean"), WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("outer", [True, False], ids=["nested", "flat"])
def test_marks_of_wrappers_are_taken_from_each_name_that_bears_them(
    names: list[str], clean: list[str], outer: bool, tmp_path: Path
) -> None:
    model = {name: torch.full((2,), float(n)) for n, name in enumerate(names)}
    made = publish_files(saved({"model": model} if outer else model, tmp_path))
    assert made.tensors == {name: row(n) for n, name in enumerate(clean)}


def test_a_wrapped_and_a_plain_tensor_of_one_name_are_refused_by_both_names(tmp_path: Path) -> None:
    fault = refusal_of(saved({"_orig_mod.w": torch.ones(2), "w": torch.zeros(2)}, tmp_path))
    assert isinstance(fault, PlanError)
    assert "'_orig_mod.w'" in fault.problems[0]
    assert "'w'" in fault.problems[0]
