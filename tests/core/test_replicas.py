"""Copies of one box that ranks saved each for itself: equal ones are one tensor, others are told and never mixed."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from hfdcp_core.errors import CorruptFile, PlanError
from hfdcp_core.testing.in_memory import Files, Piece, publish_files, refusal_of

WIDE = torch.arange(600_000.0).reshape(1000, 600)


def saved_by(rank: int, state: Mapping[str, torch.Tensor], folder: Path) -> Files:
    """Return what a rank leaves that saves without the others: a file, and metadata of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nothing is distributed
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"__{rank}_0.distcp"
    return {
        f"__{rank}.metadata": pickle.dumps(metadata),
        f"__{rank}_0.distcp": (folder / "__0_0.distcp").read_bytes(),
    }


def saved(*ranks: Mapping[str, torch.Tensor], folder: Path) -> Files:
    return {
        path: raw for rank, state in enumerate(ranks) for path, raw in saved_by(rank, state, folder / str(rank)).items()
    }


SAME = {
    "copies": (torch.ones(3), torch.ones(3)),
    "a transposed copy": (WIDE, WIDE.t().contiguous().t()),
    "a part of a larger storage": (torch.arange(9.0)[3:6], torch.arange(3.0, 6.0)),
    "nothing": (torch.ones(0, 2), torch.ones(0, 2)),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_equal_copies_are_one_tensor(one: torch.Tensor, other: torch.Tensor, tmp_path: Path) -> None:
    made = publish_files(saved({"w": one}, {"w": other}, folder=tmp_path))
    assert made.tensors == {"w": Piece.of(one.numpy())}


def last_changed(whole: torch.Tensor) -> torch.Tensor:
    changed = whole.clone()
    changed[-1, -1] += 1
    return changed


OTHER = {
    "other values under one name (pytorch#120356)": (torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])),
    "one element, in another order of storage": (WIDE, last_changed(WIDE).t().contiguous().t()),
}


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_values_that_ranks_have_each_for_themselves_are_refused_by_name_and_can_be_left_out(
    one: torch.Tensor, other: torch.Tensor, tmp_path: Path
) -> None:
    files = saved({"t": one, "w": torch.ones(2)}, {"t": other, "w": torch.ones(2)}, folder=tmp_path)
    fault = refusal_of(files)
    assert isinstance(fault, PlanError)
    (problem,) = fault.problems
    assert problem.startswith("t: ranks saved different values under this name")
    assert "__0_0.distcp" in problem
    assert "__1_0.distcp" in problem
    assert publish_files(files, exclude=("t",)).tensors == {"w": Piece.of(np.ones(2, np.float32))}


def test_a_damaged_copy_is_damage(tmp_path: Path) -> None:
    files = dict(saved({"t": torch.ones(5)}, {"t": torch.ones(5)}, folder=tmp_path))
    files["__1_0.distcp"] = files["__1_0.distcp"].replace(b"PK\x01\x02", b"PK\x01\x03")
    assert isinstance(refusal_of(files), CorruptFile)
