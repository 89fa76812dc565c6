"""Files for the ranks of a training: how tensors are cut, what the headers say, and what is refused when they lie."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hfdcp_core.box import Box
from hfdcp_core.catalog import Shard, Span, TensorSpec
from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, PlanError
from hfdcp_core.gather import gather
from hfdcp_core.layout import Target, lay_out_for_ranks, shard_name
from hfdcp_core.plan import Copy, Read
from hfdcp_core.recipe import Definition
from hfdcp_core.safetensors_file import RankInfo, parse_header, rank_info, sharding_info, write_header
from hfdcp_core.store import Sink, open_store
from hfdcp_core.windows import Strides, view_of


def target(ranks: int, dim: int, **shapes: tuple[str, tuple[int, ...]]) -> Target:
    """Lay tensors out for ranks."""
    specs = {name: TensorSpec(dtype, shape) for name, (dtype, shape) in shapes.items()}
    return lay_out_for_ranks((Definition(n, spec, n) for n, spec in specs.items()), ranks=ranks, dim=dim)


def boxes(laid_out: Target, name: str) -> list[Box]:
    """Return the boxes of one tensor, by rank."""
    return [part.box for file in laid_out.files for part in file.parts if part.definition.fqn == name]


@given(
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    dtype=st.sampled_from(["F32", "U8", "F4"]),
    ranks=st.integers(1, 5),
    dim=st.integers(-4, 3),
)
def test_the_parts_of_all_ranks_are_the_tensor(shape: tuple[int, ...], dtype: str, ranks: int, dim: int) -> None:
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    axes = max(1, len(shape))
    assume(-axes <= dim < axes)
    laid_out = target(ranks, dim, w=(dtype, shape))
    parts = boxes(laid_out, "w")
    assert sum(box.volume for box in parts) == Box.whole(shape).volume
    assert not any(a.intersect(b) for n, a in enumerate(parts) for b in parts[n + 1 :])
    assert [file.path for file in laid_out.files] == [shard_name(rank + 1) for rank in range(ranks)]
    assert laid_out.index is None
    for rank, file in enumerate(laid_out.files, 1):
        header = parse_header(file.header, path=file.path, file_size=file.size)
        held = {part.definition.fqn: part.box.offset for part in file.parts}
        assert sharding_info(header, path=file.path) == held
        assert rank_info(header, path=file.path) == RankInfo(rank, ranks, dict.fromkeys(held, shape))


def test_tensors_are_cut_as_torch_cuts_them() -> None:
    laid_out = target(4, 0, rows=("F32", (5, 3)), few=("F32", (2, 3)), scalar=("I64", ()))
    assert [box.shape[0] for box in boxes(laid_out, "rows")] == [2, 2, 1]
    assert [box.offset for box in boxes(laid_out, "few")] == [(0, 0), (1, 0)]
    assert boxes(laid_out, "scalar") == [Box((), ())]


def test_packed_elements_are_cut_between_bytes() -> None:
    assert [box.shape for box in boxes(target(3, -1, w=("F4", (2, 10))), "w")] == [(2, 4), (2, 4), (2, 2)]


# ---- what the headers say ----


def stored(*infos: dict[str, object] | str | None, shape: tuple[int, ...] = (1, 2)) -> Sink:
    """Return a store with a file for each rank that holds one row and says what it is told to."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for rank, info in enumerate(infos):
        metadata = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [rank, 0]}})}
        if info is not None:
            metadata["HFDCP_INFO"] = info if isinstance(info, str) else json.dumps(info)
        header, _ = write_header({"w": TensorSpec("U8", shape)}, metadata=metadata)
        store.put(shard_name(rank + 1), header + bytes(2))
    return store


def said(rank: int, ranks: int = 2, shape: tuple[int, ...] = (2, 2)) -> dict[str, object]:
    """Return what a file of ours says."""
    return {"rank": rank, "ranks": ranks, "shapes": {"w": shape}}


def test_what_our_files_state_proves_that_all_is_there() -> None:
    catalog = gather(stored(said(1), said(2)))
    assert (catalog.unproved, catalog.tensors["w"].shape) == (None, (2, 2))


@pytest.mark.parametrize(
    ("infos", "fault", "words"),
    [
        pytest.param((said(1, 3), said(2, 3)), IncompleteCheckpoint, "rank 3: shard-00003", id="a rank is absent"),
        pytest.param((said(1, 2), said(2, 3)), CorruptFile, "of several saves", id="other numbers of ranks"),
        pytest.param((said(1), None), CorruptFile, "shard-00002.* does not say", id="a file of torch's among ours"),
        pytest.param((said(1), said(2, 2, (3, 2))), CorruptFile, "different shapes", id="other shapes"),
        pytest.param(
            (said(1, 2, (1, 2)), said(2, 2, (1, 2))), CorruptFile, "smaller ones than they hold", id="too small"
        ),
    ],
)
def test_files_that_contradict_each_other_are_refused(infos: tuple, fault: type[Exception], words: str) -> None:
    with pytest.raises(fault, match=rf"(?s){words}"):
        gather(stored(*infos))


@pytest.mark.parametrize(
    "info",
    [
        "not JSON",
        {"rank": 1, "ranks": 1},
        {"rank": 1, "ranks": 1, "shapes": []},
        {"rank": 0, "ranks": 1, "shapes": {"w": [1, 2]}},
        {"rank": 2, "ranks": 1, "shapes": {"w": [1, 2]}},
        {"rank": True, "ranks": 1, "shapes": {"w": [1, 2]}},
        {"rank": 1, "ranks": 1, "shapes": {"w": [2]}},
        {"rank": 1, "ranks": 1, "shapes": {"v": [1, 2]}},
        {"rank": 1, "ranks": 1, "shapes": {"w": [-1, 2]}},
    ],
    ids=str,
)
def test_a_statement_that_cannot_be_is_refused(info: dict[str, object] | str) -> None:
    with pytest.raises(CorruptFile, match="HFDCP_INFO"):
        gather(stored(info))


# ---- views of packed kinds ----


def packed(offset: int, box: Box, strides: tuple[int, ...] = (8, 1)) -> Callable[[], Strides]:
    """Return a view of a (2, 8) shard of 4-bit elements."""
    shard = Shard("w", "F4", Box((0, 0), (2, 8)), Span("x", 0, 8))
    return lambda: view_of(Copy(0, box, Read(0, offset, strides)), shard)


def test_a_part_of_packed_elements_is_taken_by_the_byte() -> None:
    assert packed(4, Box((0, 0), (2, 4)))() == Strides(2, (2, 2), (4, 1))


@pytest.mark.parametrize(
    "view",
    [packed(1, Box((0, 0), (2, 4))), packed(0, Box((0, 0), (2, 3))), packed(0, Box((0, 0), (2, 4)), (1, 2))],
    ids=["begins inside a byte", "ends inside a byte", "another order"],
)
def test_a_part_that_would_split_bytes_is_refused(view: Callable[[], Strides]) -> None:
    with pytest.raises(PlanError, match=r"inside a byte|as it lies"):
        view()
