"""The drop-in consolidation functions: torch's names and arguments, and a word wherever torch says none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hfdcp_core import consolidate_safetensors_files, consolidate_safetensors_files_on_every_rank
from hfdcp_core.errors import CorruptFile, HfdcpError, IncompleteCheckpoint, PlanError
from hfdcp_core.testing.dropin import differences
from hfdcp_core.testing.in_memory import Piece, weights_file

INDEX = "model.safetensors.index.json"
WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
TRUTH = {
    "w": torch.from_numpy(WEIGHT),
    "scalar": torch.tensor(3.5),
    "count": torch.arange(3),
    "flag": torch.tensor(True),
}
MAPPING = {"w": 1, "scalar": 2, "count": 2, "flag": 2}


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}-model-00001-of-00001.safetensors"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """What torch's writer leaves of two ranks: one tensor cut by columns, the others whole with the first rank."""
    folder = tmp_path / "shards"
    folder.mkdir()
    whole = {name: Piece.of(TRUTH[name].numpy(), at=[0] * TRUTH[name].dim()) for name in ("scalar", "count", "flag")}
    for rank, columns in enumerate([slice(0, 4), slice(4, 6)]):
        pieces = {"w": Piece.of(np.ascontiguousarray(WEIGHT[:, columns]), at=[0, columns.start])}
        (folder / shard_name(rank + 1)).write_bytes(weights_file({**pieces, **(whole if rank == 0 else {})}))
    return folder


def loaded(folder: Path) -> Mapping[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("mapping", [MAPPING, None], ids=["mapped", "as they come"])
@pytest.mark.parametrize("function", [consolidate_safetensors_files, consolidate_safetensors_files_on_every_rank])
def test_every_value_is_kept(shards: Path, tmp_path: Path, mapping: dict[str, int] | None, function: object) -> None:
    """torch makes 0.0 of scalars, refuses integers, and needs a folder that is there and a mapping."""
    assert callable(function)
    function(str(shards), str(tmp_path / "whole"), mapping, 2)
    assert differences(loaded(tmp_path / "whole"), TRUTH) == []
    index = json.loads((tmp_path / "whole" / INDEX).read_text())
    files = {name: f"model-{number:05d}-of-00002.safetensors" for name, number in MAPPING.items()}
    assert index["weight_map"] == (files if mapping else dict.fromkeys(TRUTH, "model-00001-of-00001.safetensors"))


def test_it_may_be_done_again_in_the_same_place(shards: Path, tmp_path: Path) -> None:
    for mapping in (MAPPING, None, MAPPING):
        consolidate_safetensors_files(shards, tmp_path / "whole", mapping)
        assert differences(loaded(tmp_path / "whole"), TRUTH) == []


def test_any_storage_will_do(shards: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(shards), "/consolidation-test/shards", recursive=True)
    try:
        consolidate_safetensors_files("memory://consolidation-test/shards", "memory://consolidation-test/whole")
        memory.get("/consolidation-test/whole", str(shards.parent / "whole"), recursive=True)
        assert differences(loaded(shards.parent / "whole"), TRUTH) == []
    finally:
        memory.rm("/consolidation-test", recursive=True)


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ({**MAPPING, "ghost": 1}, "ghost: in the given index, but no such tensor"),
        ({"w": 1, "scalar": 1, "count": 1}, "flag: in no file of the given index"),
    ],
    ids=["ghost", "unmapped"],
)
def test_a_mapping_that_does_not_fit_is_an_error_unless_it_may_be(
    shards: Path, tmp_path: Path, mapping: dict[str, int], problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        consolidate_safetensors_files(shards, tmp_path / "whole", mapping)
    assert not list((tmp_path / "whole").glob("*")) if (tmp_path / "whole").exists() else True
    consolidate_safetensors_files(shards, tmp_path / "whole", mapping, strict=False)
    assert differences(loaded(tmp_path / "whole"), TRUTH) == []


def lost_first(folder: Path) -> None:
    (folder / shard_name(1)).unlink()


def lost_last(folder: Path) -> None:
    (folder / shard_name(2)).unlink()


def retyped(folder: Path) -> None:
    piece = Piece.of(np.ascontiguousarray(WEIGHT[:, 4:]).astype(np.float64), at=[0, 4])
    (folder / shard_name(2)).write_bytes(weights_file({"w": piece}))


def stale(folder: Path) -> None:
    other = Piece.of(np.ascontiguousarray(WEIGHT[:, 4:]) + 1, at=[0, 4])
    (folder / shard_name(3)).write_bytes(weights_file({"w": other}))


def cut(folder: Path) -> None:
    path = folder / shard_name(2)
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lost_first, IncompleteCheckpoint),
        (lost_last, IncompleteCheckpoint),
        (retyped, CorruptFile),
        (stale, HfdcpError),
        (cut, CorruptFile),
    ],
)
def test_damage_is_an_error_and_leaves_an_older_output_as_it_was(
    shards: Path, tmp_path: Path, damage: object, kind: type[HfdcpError]
) -> None:
    """torch fills what is lost with zeros, takes stale shards, and reads one dtype's bytes as another's."""
    assert callable(damage)
    whole = tmp_path / "whole"
    consolidate_safetensors_files(shards, whole)
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    damage(shards)
    with pytest.raises(kind):
        consolidate_safetensors_files(shards, whole, world_size=2)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before
