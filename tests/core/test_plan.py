"""The join: a plan exists only where every wanted element comes from exactly one place."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.arrangement import arranged
from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, Catalog, FileStamp, Shard, Span, TensorSpec
from hfdcp_core.errors import PlanError
from hfdcp_core.layout import Target, lay_out, lay_out_for_ranks
from hfdcp_core.plan import BUFFERS, SCRATCH, Plan, Read, reshard, row_major, tile
from hfdcp_core.rearrange import joined, sliced
from hfdcp_core.recipe import Definition

Boxes = list[Box]


def shards_of(boxes: Sequence[Box], fqn: str = "t", dtype: str = "U8") -> list[Shard]:
    """Each box in a file of its own, named after its place in the list."""
    return [Shard(fqn, dtype, box, Span(f"{n:05d}.distcp", 0, 9), TORCH_SAVE) for n, box in enumerate(boxes)]


def spec_of(*shape: int) -> TensorSpec:
    return TensorSpec("U8", shape)


def box(text: str) -> Box:
    """The box that is written so: ``0:2, 1:3``."""
    ends = [tuple(map(int, part.split(":"))) for part in text.split(",") if part]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def boxes(*texts: str) -> Boxes:
    return [box(text) for text in texts]


def marked(shape: tuple[int, ...], found: Sequence[Box]) -> np.ndarray:
    """How many of the boxes hold each element: the oracle."""
    counts = np.zeros(shape, dtype=int)
    for part in found:
        counts[tuple(slice(a, b) for a, b in zip(part.offset, part.stop, strict=True))] += 1
    return counts


# ---- tiling, against the oracle -------------------------------------------------------------------------------------


def cut(shape: tuple[int, ...], cuts: Sequence[Sequence[int]]) -> Boxes:
    """The cells of a grid; cuts at the edges leave empty boxes, as more ranks than rows do."""
    edges = [[0, *sorted(c % (n + 1) for c in some), n] for n, some in zip(shape, cuts, strict=True)]
    intervals = [list(itertools.pairwise(axis)) for axis in edges]
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*intervals)]


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
CUTS = st.lists(st.integers(0, 9), max_size=3)


@st.composite
def split(draw: st.DrawFn, whole: Box) -> Boxes:
    """Halves of halves: cuts that go through the whole at first, and then not any more."""
    longest = [axis for axis, extent in enumerate(whole.shape) if extent > 1]
    if not longest or not draw(st.integers(0, 3)):
        return [whole]
    axis = draw(st.sampled_from(longest))
    at = draw(st.integers(1, whole.shape[axis] - 1))
    before, start, after = whole.offset[:axis], whole.offset[axis] + at, whole.offset[axis + 1 :]
    low = replace(whole, shape=(*whole.shape[:axis], at, *whole.shape[axis + 1 :]))
    rest = (*whole.shape[:axis], whole.shape[axis] - at, *whole.shape[axis + 1 :])
    high = Box((*before, start, *after), rest)
    return [*draw(split(low)), *draw(split(high))]


@st.composite
def coverings(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes]:
    """A tensor, and boxes that tile it, or that were damaged: some lost, doubled, moved, or added at random."""
    shape = draw(SHAPES)
    grid = st.tuples(*[CUTS] * len(shape)).map(lambda cuts: cut(shape, cuts))
    found = draw(st.one_of(grid, split(Box.whole(shape))))
    edges = [st.tuples(st.integers(0, extent), st.integers(0, extent)).map(sorted) for extent in shape]
    random = st.tuples(*edges).map(lambda ends: Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    kept = [part for part in found if draw(st.integers(0, 7))] if draw(st.booleans()) else found
    doubled = [part for part in kept if not draw(st.integers(0, 3))] if draw(st.booleans()) else []
    added = draw(st.lists(random, max_size=3)) if draw(st.booleans()) else []
    return shape, draw(st.permutations([*kept, *doubled, *added]))


@given(coverings())
def test_a_tiling_is_found_exactly_where_every_element_is_held_once(case: tuple[tuple[int, ...], Boxes]) -> None:
    shape, found = case
    distinct = list({part: None for part in found if part.volume})
    counts = marked(shape, distinct)
    chosen, problems = tile(TensorSpec("U8", shape), shards_of(found))
    if (counts == 1).all():
        assert problems == []
        assert {shard.box for shard in chosen} == set(distinct)
        assert len(chosen) == len(distinct)
        assert [s.box.offset for s in chosen] == sorted(s.box.offset for s in chosen)
    else:
        assert chosen == []
        assert any("overlap" in problem for problem in problems) == (counts > 1).any()
        assert any("no shard holds" in problem for problem in problems) == (counts == 0).any()


@given(coverings())
def test_the_reported_holes_are_exactly_what_is_missing(case: tuple[tuple[int, ...], Boxes]) -> None:
    shape, found = case
    _, problems = tile(TensorSpec("U8", shape), shards_of(found))
    named = [problem.split("[")[1].split("]")[0] for problem in problems if problem.startswith("no shard holds")]
    holes = marked(shape, boxes(*named)) if named else np.zeros(shape, dtype=int)
    missing = marked(shape, [part for part in found if part.volume]) == 0
    assert (holes <= missing).all()  # disjoint, and nothing that is there
    if not any("more holes" in problem for problem in problems):
        assert (holes == missing).all()


MISSING: dict[str, tuple[tuple[int, ...], Boxes, list[str]]] = {
    "first": ((6,), boxes("2:4", "4:6"), ["[0:2]"]),
    "middle": ((6,), boxes("0:2", "4:6"), ["[2:4]"]),
    "last": ((6,), boxes("0:2", "2:4"), ["[4:6]"]),
    "all": ((2, 3), [], ["[0:2, 0:3]"]),
    "corner of a grid": ((4, 4), boxes("0:2,0:2", "0:2,2:4", "2:4,0:2"), ["[2:4, 2:4]"]),
    "row of a grid": ((4, 4), boxes("0:2,0:2", "0:2,2:4"), ["[2:4, 0:4]"]),
    "column among columns": ((4, 6), boxes("0:4,0:2", "0:4,4:6"), ["[0:4, 2:4]"]),
    "inside": ((3, 3), boxes("0:1,0:3", "2:3,0:3", "1:2,0:1", "1:2,2:3"), ["[1:2, 1:2]"]),
    "middle of a pinwheel": ((3, 3), boxes("0:1,0:2", "0:2,2:3", "2:3,1:3", "1:3,0:1"), ["[1:2, 1:2]"]),
    "only empty shards": ((2,), boxes("0:0", "2:2"), ["[0:2]"]),
    "a scalar": ((), [], ["[]"]),
}


@pytest.mark.parametrize(("shape", "found", "holes"), MISSING.values(), ids=MISSING)
def test_missing_boxes_are_named(shape: tuple[int, ...], found: Boxes, holes: list[str]) -> None:
    spec = TensorSpec("U8", shape)
    assert tile(spec, shards_of(found)) == ([], [f"no shard holds {hole} of {spec}" for hole in holes])


def test_of_many_holes_three_are_named_and_the_rest_are_counted() -> None:
    found = [Box((n,), (1,)) for n in range(0, 20, 2)]
    _, problems = tile(spec_of(20), shards_of(found))
    assert [problem.split(" of ")[0] for problem in problems[:3]] == [
        "no shard holds [1:2]", "no shard holds [3:4]", "no shard holds [5:6]",
    ]  # fmt: skip
    assert problems[3:] == ["… and 7 more holes"]


TILINGS: dict[str, tuple[tuple[int, ...], Boxes]] = {
    "one": ((4, 4), boxes("0:4,0:4")),
    "rows": ((5, 4), boxes("0:2,0:4", "2:4,0:4", "4:5,0:4")),
    "columns": ((4, 5), boxes("0:4,0:2", "0:4,2:4", "0:4,4:5")),
    "uneven grid": ((3, 3), boxes("0:1,0:2", "0:1,2:3", "1:3,0:2", "1:3,2:3")),
    "rows that are cut differently": ((2, 4), boxes("0:1,0:1", "0:1,1:4", "1:2,0:3", "1:2,3:4")),
    "pinwheel": ((3, 3), boxes("0:1,0:2", "0:2,2:3", "2:3,1:3", "1:3,0:1", "1:2,1:2")),
    "replicas": ((2,), boxes("0:1", "1:2", "0:1", "1:2")),
    "more ranks than rows": ((2, 2), boxes("0:1,0:2", "1:2,0:2", "2:2,0:2", "2:2,0:2")),
    "scalar and its replica": ((), boxes("", "")),
}


@pytest.mark.parametrize(("shape", "found"), TILINGS.values(), ids=TILINGS)
def test_what_meshes_of_devices_write_is_a_tiling(shape: tuple[int, ...], found: Boxes) -> None:
    chosen, problems = tile(TensorSpec("U8", shape), shards_of(found))
    assert problems == []
    assert (marked(shape, [shard.box for shard in chosen]) == 1).all()


@pytest.mark.parametrize("found", [[], boxes("0:0,0:3"), boxes("0:0,0:1", "0:0,1:3")], ids=["none", "one", "two"])
def test_a_tensor_without_elements_needs_no_shard(found: Boxes) -> None:
    assert tile(spec_of(0, 3), shards_of(found)) == ([], [])


def test_of_replicas_the_first_by_file_is_taken_whatever_their_order() -> None:
    found = shards_of(boxes("0:2", "0:2", "0:2"))
    assert [tile(spec_of(2), order)[0] for order in itertools.permutations(found)] == [[found[0]]] * 6


def test_shards_that_meet_are_named_with_their_files() -> None:
    _, problems = tile(spec_of(4), shards_of(boxes("0:3", "2:4")))
    assert problems == ["boxes [0:3] in 00000.distcp[0:9] and [2:4] in 00001.distcp[0:9] overlap and are not the same"]


def test_of_many_overlaps_three_are_named() -> None:
    _, problems = tile(spec_of(9), shards_of([Box((n,), (9 - n,)) for n in range(9)]))
    assert len(problems) == 3
    assert all("overlap" in problem for problem in problems)


# ---- growth ---------------------------------------------------------------------------------------------------------


class Counted(tuple[int, ...]):
    """An offset that counts how often a number is taken from it."""

    __slots__ = ()

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        Counted.looked += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        Counted.looked += 1
        return super().__iter__()


def looks(shape: tuple[int, ...], found: Boxes) -> int:
    """How often offsets are looked at while a tensor is tiled."""
    Counted.looked = 0
    tile(TensorSpec("U8", shape), shards_of([Box(Counted(part.offset), part.shape) for part in found]))
    return Counted.looked


GROWING = {
    "grid": lambda n: cut((n, n), [range(n)] * 2),
    "rows, the last one lost": lambda n: cut((n * n, 1), [range(n * n), []])[:-2],
    "columns, one lost": lambda n: [part for part in cut((1, n * n), [[], range(n * n)]) if part.offset[1] != 7],
    "grid, one cell lost": lambda n: [part for part in cut((n, n), [range(n)] * 2) if part.offset != (3, 7)],
    "every other column": lambda n: cut((1, n * n), [[], range(n * n)])[::2],
}


@pytest.mark.parametrize("made", GROWING.values(), ids=GROWING)
def test_the_work_grows_with_the_number_of_shards_and_not_with_its_square(made: Callable[[int], Boxes]) -> None:
    few, many = made(16), made(64)
    shape = tuple(max(part.stop[axis] for part in many) for axis in range(2))
    small = tuple(max(part.stop[axis] for part in few) for axis in range(2))
    assert looks(shape, many) < 2 * len(many) / len(few) * looks(small, few)  # a square would be 16 times


def test_a_hundred_thousand_shards_of_one_tensor_are_looked_at_a_few_times_each() -> None:
    found = cut((400, 250), [range(400), range(250)])
    solid = [part for part in found if part.volume]
    assert len(solid) == 100_000
    assert looks((400, 250), solid) < 20 * len(solid)


@pytest.mark.parametrize("dim", [0, 1])
def test_from_ranks_to_ranks_the_work_grows_with_the_pieces_and_not_with_all_pairs_of_ranks(dim: int) -> None:
    def looks_for_each(ranks: int) -> float:
        spec = spec_of(4 * ranks, 4) if dim == 0 else spec_of(ranks, ranks)
        rows = spec.shape[0] // ranks
        held = [Box(Counted((rank * rows, 0)), (rows, spec.shape[1])) for rank in range(ranks)]
        source = Catalog("dcp", {"t": spec}, tuple(shards_of(held)))
        target = lay_out_for_ranks([Definition("t", spec, "t")], ranks=ranks, dim=dim)
        Counted.looked = 0
        copies = sum(len(file.copies) for file in reshard(source, target, window_bytes=64).files)
        return Counted.looked / copies

    assert looks_for_each(64) < 2 * looks_for_each(8)  # a look at all pairs would be 8 times


# ---- the plan -------------------------------------------------------------------------------------------------------

SOURCE = Catalog(
    "dcp",
    {"model.a": spec_of(4, 2), "model.b": spec_of(3), "model.e": spec_of(0, 2), "model.s": spec_of()},
    (
        *shards_of(boxes("0:2,0:2", "2:4,0:2"), "model.a"),
        *shards_of(boxes("0:3"), "model.b"),
        *shards_of(boxes("0:0,0:2"), "model.e"),
        *shards_of(boxes(""), "model.s"),
    ),
    (FileStamp(".metadata", 5, "1"), FileStamp("00000.distcp", 9, "1"), FileStamp("00001.distcp", 9, "1")),
)


def target_of(source: Catalog, *, max_file_size: int = 100, head: str = "model.") -> Target:
    named = [Definition(fqn.removeprefix(head), spec, fqn) for fqn, spec in source.tensors.items()]
    return lay_out(named, max_file_size=max_file_size)


def planned(source: Catalog = SOURCE, *, window_bytes: int = 64, max_file_size: int = 100) -> Plan:
    return reshard(source, target_of(source, max_file_size=max_file_size), window_bytes=window_bytes)


def test_a_file_plan_lists_the_shards_of_each_tensor_in_the_order_of_the_data() -> None:
    [file] = planned().files
    assert [fqn for fqn, _ in file.tensors] == ["a", "b", "e", "s"]
    assert [(copy.tensor, str(copy.box), file.shards[copy.read.shard].fqn) for copy in file.copies] == [
        (0, "[0:2, 0:2]", "model.a"),
        (0, "[2:4, 0:2]", "model.a"),
        (1, "[0:3]", "model.b"),
        (3, "[]", "model.s"),
    ]
    assert [copy.read for copy in file.copies] == [
        Read(0, 0, (2, 1)),
        Read(1, 0, (2, 1)),
        Read(2, 0, (1,)),
        Read(3, 0, ()),
    ]


def test_a_file_plan_knows_its_size_its_source_files_and_its_memory() -> None:
    [first, second] = planned(max_file_size=8).files
    assert (first.size, second.size) == (len(first.header) + 8, len(second.header) + 4)
    assert [stamp.path for stamp in first.stamps] == ["00000.distcp", "00001.distcp"]
    assert [stamp.path for stamp in second.stamps] == ["00000.distcp"]
    assert first.peak_bytes == (BUFFERS + SCRATCH) * 64


def test_a_plan_keeps_index_and_size_of_its_target() -> None:
    plan, target = planned(max_file_size=8), target_of(SOURCE, max_file_size=8)
    assert (plan.index, plan.total_size) == (target.index, 12)
    assert plan.index is not None


def test_all_problems_of_all_tensors_are_said_at_once() -> None:
    source = Catalog(
        "dcp",
        {name: spec_of(4) for name in ("short", "twice", "odd", "other")},
        (
            *shards_of(boxes("0:2"), "short"),
            *shards_of(boxes("0:3", "1:4"), "twice"),
            *shards_of(boxes("0:4"), "odd", "I8"),
            *shards_of(boxes("0:4"), "other"),
        ),
    )
    wanted = [Definition(name, spec, name) for name, spec in source.tensors.items() if name != "other"]
    wanted += [Definition("x", spec_of(4), "absent"), Definition("other", spec_of(5), "other")]
    with pytest.raises(PlanError, match="every wanted element exactly once") as caught:
        reshard(source, lay_out(wanted, max_file_size=4), window_bytes=1)
    assert sorted(caught.value.problems) == [
        "absent: no such tensor in the checkpoint",
        "odd: shard [0:4] in 00000.distcp[0:9] is I8, the tensor is U8",
        "other: is U8[4], but U8[5] is wanted",
        "short: no shard holds [2:4] of U8[4]",
        "twice: boxes [0:3] in 00000.distcp[0:9] and [1:4] in 00001.distcp[0:9] overlap and are not the same",
    ]


def test_a_tensor_without_any_shard_is_missing_whole() -> None:
    with pytest.raises(PlanError, match="exactly once") as caught:
        planned(Catalog("dcp", {"model.a": spec_of(2)}, ()))
    assert caught.value.problems == ("model.a: no shard holds [0:2] of U8[2]",)


def test_what_nobody_wants_may_be_incomplete() -> None:
    source = replace(SOURCE, tensors={**SOURCE.tensors, "optimizer.a": spec_of(4)})
    assert reshard(source, target_of(SOURCE), window_bytes=64).files == planned().files


# ---- the digest -----------------------------------------------------------------------------------------------------


def test_the_same_stamps_and_settings_give_the_same_digest() -> None:
    again = replace(SOURCE, files=SOURCE.files[::-1], shards=SOURCE.shards[::-1])
    assert planned(again).digest == planned().digest


def test_memory_does_not_change_what_is_made_and_not_the_digest() -> None:
    assert planned(window_bytes=1 << 20).digest == planned().digest


def renamed(old: str, new: str) -> Plan:
    target = target_of(SOURCE)
    named = [replace(d, fqn=new if d.fqn == old else d.fqn) for file in target.files for d in file.tensors]
    return reshard(SOURCE, lay_out(named, max_file_size=100), window_bytes=64)


def pair(made_of: dict[str, str]) -> Plan:
    """Two tensors of one kind; which is made of which is asked."""
    shards = (*shards_of(boxes("0:2"), "p"), *shards_of(boxes("0:2"), "q"))
    named = [Definition(new, spec_of(2), old) for new, old in made_of.items()]
    source = Catalog("dcp", {"p": spec_of(2), "q": spec_of(2)}, shards)
    return reshard(source, lay_out(named, max_file_size=9), window_bytes=1)


def with_stamp(**change: object) -> Plan:
    first, *rest = SOURCE.files
    return planned(replace(SOURCE, files=(replace(first, **change), *rest)))  # type: ignore[arg-type]


CHANGES = {
    "size of a source file": lambda: with_stamp(size=6),
    "tag of a source file": lambda: with_stamp(tag="2"),
    "name of a source file": lambda: with_stamp(path="other"),
    "one source file fewer": lambda: planned(replace(SOURCE, files=SOURCE.files[1:])),
    "format of the source": lambda: planned(replace(SOURCE, format="dcp-safetensors")),
    "name of a tensor": lambda: renamed("b", "bb"),
    "size of a file": lambda: planned(max_file_size=8),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_the_output_changes_the_digest(changed: Callable[[], Plan]) -> None:
    assert changed().digest != planned().digest


def test_which_tensor_is_made_of_which_is_in_the_digest() -> None:
    straight, swapped = pair({"p": "p", "q": "q"}), pair({"p": "q", "q": "p"})
    assert swapped.digest != straight.digest
    assert [file.header for file in swapped.files] == [file.header for file in straight.files]


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple))
def test_row_major_strides_are_numpys(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == np.zeros(shape, "u1").strides


# ---- arrangements ----


def test_a_shard_that_two_parts_of_a_tensor_come_from_is_listed_once() -> None:
    whole = arranged("t", spec_of(4, 2))
    swapped = joined([sliced(whole, 0, 2, 4), sliced(whole, 0, 0, 2)], 0)
    catalog = Catalog(
        "dcp", {"t": spec_of(4, 2)}, tuple(shards_of(boxes("0:4,0:2"))), (FileStamp("00000.distcp", 9, ""),)
    )
    definition = Definition("x", swapped.spec, "t", arrangements=(swapped,))
    [file] = reshard(catalog, lay_out([definition], max_file_size=100), window_bytes=1 << 16).files
    assert len(file.shards) == 1
    assert [(str(copy.box), copy.read.shard) for copy in file.copies] == [("[0:2, 0:2]", 0), ("[2:4, 0:2]", 0)]
