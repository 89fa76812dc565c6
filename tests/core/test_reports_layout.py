"""Reports of wrong values, by how tensors were cut: replicated, empty, overlapping, several boxes of one rank.

Each test stands for a kind of report that users of such checkpoints made somewhere; the reference is to one of them.
"""

from __future__ import annotations

import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hfdcp_core.errors import CorruptFile, HfdcpError, IncompleteCheckpoint, PlanError
from hfdcp_core.testing.in_memory import Files, Piece, publish_files, rank_files, refusal_of


def values(*shape: int) -> np.ndarray:
    """Return an array in which no two elements are equal."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def rows(whole: np.ndarray, ranks: int) -> list[Piece]:
    """Cut an array by rows as torch's ``Shard(0)`` does: ranks behind the last row hold an empty part."""
    step = -(-whole.shape[0] // ranks)
    starts = [min(rank * step, whole.shape[0]) for rank in range(ranks)]
    return [Piece.of(whole[start : start + step], at=(start, *(0 for _ in whole.shape[1:]))) for start in starts]


def same(whole: np.ndarray, ranks: int) -> list[Piece]:
    """Hold an array on every rank, as ``Replicate`` or a plain buffer does."""
    return [Piece.of(whole, at=(0,) * whole.ndim)] * ranks


def saved(state: Mapping[str, object], folder: Path, *, sharded: bool = False) -> Files:
    """Save with torch's own writer, in this process alone, and return the files."""
    way: dict[str, object] = {"checkpoint_id": folder}
    if sharded:
        way = {"storage_writer": HuggingFaceStorageWriter(str(folder), save_distributed=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nothing is distributed
        dcp.save(dict(state), no_dist=True, **way)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- what every rank holds, and what only some hold ----

HELD: dict[str, tuple[Callable[[np.ndarray, int], list[Piece]], np.ndarray]] = {
    "a norm cut evenly, all parts with equal values": (rows, np.ones(40, np.float32)),
    "a table cut over all ranks": (rows, values(64, 3)),
    "a table that does not divide": (rows, values(19, 3)),
    "one block for all, so that only the first rank holds any (pytorch#163480)": (rows, values(1, 6, 5)),
    "fewer rows than ranks: equal empty parts are not replicas of data (pytorch#117392)": (rows, values(3, 4)),
    "a buffer of one element on every rank (verl#7610)": (same, values(1)),
    "a buffer of many elements on every rank (oumi#2618)": (same, values(11)),
    "a scalar on every rank, which joining along rows cannot take": (same, np.float32(2.5)),
    "an integer scalar on every rank": (same, np.int64(7)),
    "a flag on every rank": (same, np.array(True)),
}


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(("held", "whole"), HELD.values(), ids=HELD)
def test_offsets_decide_whether_parts_are_joined_or_one_is_taken(
    held: Callable[[np.ndarray, int], list[Piece]], whole: np.ndarray, ranks: int
) -> None:
    parts = held(whole, ranks)
    made = publish_files(rank_files(*({"w": part} for part in parts)), world_size=ranks)
    assert made.tensors == {"w": Piece.of(whole)}
    assert made.manifest.unproved is None


@pytest.mark.parametrize("lost", range(8))
def test_no_part_of_a_table_cut_over_eight_ranks_can_be_lost_unseen(lost: int) -> None:
    """A vocabulary that came out at an eighth of its length (NeMo-RL#2029)."""
    files = dict(rank_files(*({"embed.weight": part} for part in rows(values(64, 3), 8))))
    name = sorted(files)[lost]
    del files[name]
    fault = refusal_of(files, world_size=8)
    assert isinstance(fault, IncompleteCheckpoint)
    assert fault.problems == (f"rank {lost}: {name} is not there",)


def test_a_tensor_that_only_one_rank_has_is_taken_from_there() -> None:
    """Stages of a pipeline, and keys that an adapter adds on one of them (Automodel#3248)."""
    first, last = Piece.of(values(2, 3), at=(0, 0)), Piece.of(values(5), at=(0,))
    made = publish_files(rank_files({"embed": first}, {"layers.9.bias": last}), world_size=2)
    assert made.tensors == {"embed": Piece.of(values(2, 3)), "layers.9.bias": Piece.of(values(5))}


def test_experts_that_every_rank_numbers_from_zero_are_not_taken_for_replicas() -> None:
    """The same names on every rank, with other experts behind them (KempnerForge#202)."""
    ranks = [
        {f"experts.{n}.w": Piece.of(values(2, 2) * (rank * 2 + n + 1), at=(0, 0)) for n in (0, 1)} for rank in (0, 1)
    ]
    fault = refusal_of(rank_files(*ranks), world_size=2)
    assert isinstance(fault, CorruptFile)
    assert [problem.partition("[")[0] for problem in fault.problems] == ["experts.0.w", "experts.1.w"]


def test_ranks_without_anything_leave_files_that_are_no_damage(tmp_path: Path) -> None:
    """An empty file beside the others (pytorch#120356), and a file without a tensor."""
    files = saved({"w": torch.ones(2, 2)}, tmp_path / "dcp")
    assert publish_files({**files, "__1_0.distcp": b""}).tensors == {"w": Piece.of(np.ones((2, 2), np.float32))}
    parts = rank_files({"w": Piece.of(values(2, 2), at=(0, 0))}, {"w": Piece.of(values(0, 2), at=(2, 0))})
    assert publish_files(parts, world_size=2).tensors == {"w": Piece.of(values(2, 2))}


# ---- several boxes of one tensor on one rank ----


class TwoBoxes(torch.Tensor):
    """A tensor of which one rank saves two boxes, as a ``ShardedTensor`` with two local shards or strided shards do."""

    BOXES: Sequence[ChunkStorageMetadata] = tuple(
        ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 2])) for row in (0, 2)
    )

    def __create_write_items__(self, fqn: str, _whole: object) -> list[WriteItem]:
        properties, size = TensorProperties(dtype=torch.float32), torch.Size([4, 2])
        return [
            WriteItem(
                MetadataIndex(fqn, box.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(box, properties, size),
            )
            for box in self.BOXES
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return list(self.BOXES)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        start = index.offset[0]
        return self.as_subclass(torch.Tensor)[start : start + 2].clone()


def test_two_boxes_of_one_rank_are_both_taken_and_where_the_writer_lost_one_it_is_named(tmp_path: Path) -> None:
    """Disjoint parts of one rank (transformers#48802); torch's Hugging Face writer keeps the last of them only."""
    state = {"w": torch.from_numpy(values(4, 2)).as_subclass(TwoBoxes)}
    assert publish_files(saved(state, tmp_path / "dcp")).tensors == {"w": Piece.of(values(4, 2))}
    fault = refusal_of(saved(state, tmp_path / "hf", sharded=True), world_size=1)
    assert isinstance(fault, PlanError)
    assert fault.problems == ("w: no shard holds [0:2, 0:2] of F32[4, 2]",)


# ---- boxes that do not fit together ----


def distributed(boxes: Sequence[tuple[int, int]], folder: Path, *, total: int) -> Files:
    """Return a distributed checkpoint whose ``.metadata`` lists these rows of one tensor."""
    whole = torch.from_numpy(values(total, 2))
    files = dict(saved({f"part{n}": whole[a:b].clone() for n, (a, b) in enumerate(boxes)}, folder))
    metadata: Metadata = pickle.load(io.BytesIO(files[".metadata"]))
    infos = [metadata.storage_data[MetadataIndex(f"part{n}", torch.Size([0, 0]))] for n in range(len(boxes))]
    chunks = [ChunkStorageMetadata(torch.Size([a, 0]), torch.Size([b - a, 2])) for a, b in boxes]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([total, 2]), chunks)
    data = {MetadataIndex("w", torch.Size([a, 0])): info for (a, _), info in zip(boxes, infos, strict=True)}
    files[".metadata"] = pickle.dumps(Metadata({"w": tensor}, {"w": ("w",)}, data))
    return files


def as_ranks(boxes: Sequence[tuple[int, int]], *, total: int) -> Files:
    """Return sharded safetensors with these rows of one tensor, a file for each."""
    return rank_files(*({"w": Piece.of(values(total, 2)[a:b], at=(a, 0))} for a, b in boxes))


OVERLAPS = {
    "neighbours by a row, though the values agree": [(0, 3), (2, 5), (4, 7)],
    "one inside another": [(0, 7), (2, 4)],
    "sizes of composed sharding that add up to too much (torchtitan#4593)": [(0, 3), (3, 6), (5, 7)],
}


@pytest.mark.parametrize("boxes", OVERLAPS.values(), ids=OVERLAPS)
def test_boxes_that_overlap_are_refused_whatever_they_hold(boxes: list[tuple[int, int]], tmp_path: Path) -> None:
    """Offsets of uneven shards, computed wrongly when they were saved (pytorch#161368)."""
    for files in (distributed(boxes, tmp_path / "dcp", total=7), as_ranks(boxes, total=7)):
        fault = refusal_of(files, accept_unproved=True)
        assert isinstance(fault, PlanError)
        assert fault.problems
        assert all("w: boxes" in problem and "overlap" in problem for problem in fault.problems)


GAPS = {
    "first": ([(2, 4), (4, 6)], "[0:2, 0:2]"),
    "middle": ([(0, 2), (4, 6)], "[2:4, 0:2]"),
    "last": ([(0, 2), (2, 4)], "[4:6, 0:2]"),
    "a row that nobody was given (pytorch#163843)": ([(0, 2), (2, 4), (5, 6)], "[4:5, 0:2]"),
}


@pytest.mark.parametrize(("boxes", "hole"), GAPS.values(), ids=GAPS)
def test_rows_that_no_box_holds_are_named_and_never_filled(
    boxes: list[tuple[int, int]], hole: str, tmp_path: Path
) -> None:
    fault = refusal_of(distributed(boxes, tmp_path, total=6))
    assert isinstance(fault, PlanError)
    assert fault.problems == (f"w: no shard holds {hole} of F32[6, 2]",)


# ---- any cut ----

Cut = list[tuple[tuple[slice, ...], int]]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Cut, int]:
    """Draw a shape, the boxes of a grid over it, and the rank that holds each; no rank holds two."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    grid: list[tuple[slice, ...]] = [()]
    for extent in shape:
        marks = sorted({0, extent, *draw(st.lists(st.integers(1, extent), max_size=1))})
        grid = [(*box, slice(*ends)) for box in grid for ends in itertools.pairwise(marks)]
    order = draw(st.permutations(range(len(grid))))
    return shape, list(zip(grid, order, strict=True)), draw(st.integers(0, len(grid) - 1))


@given(cuts())
@settings(max_examples=30, deadline=None)
def test_a_tensor_comes_out_whole_however_it_was_cut_and_a_lost_box_is_never_quiet(
    case: tuple[tuple[int, ...], Cut, int],
) -> None:
    """Offsets along any dimension, runs that are not rows (pytorch#158380), ranks in any order."""
    extents, boxes, lost = case
    whole = values(*extents)
    held = {rank: {"w": Piece.of(whole[box], at=[part.start for part in box])} for box, rank in boxes}
    ranks = [held[rank] for rank in range(len(boxes))]
    assert publish_files(rank_files(*ranks), world_size=len(ranks)).tensors == {"w": Piece.of(whole)}
    files = dict(rank_files(*ranks))
    del files[sorted(files)[lost]]
    try:
        made = publish_files(files, accept_unproved=True)
    except HfdcpError:
        return
    assert made.manifest.unproved  # nothing in this format says how long the tensor was, and that is confessed
    shape = made.tensors["w"].shape
    assert made.tensors["w"] == Piece.of(whole[tuple(map(slice, shape))])
