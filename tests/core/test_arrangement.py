"""Arrangements, against numpy: whatever is done to them, each element is where numpy puts it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core import arrangement as values
from hfdcp_core import rearrange
from hfdcp_core.arrangement import Arrangement, Patch, arranged, coarse, is_plain, merged
from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import PlanError
from hfdcp_core.pull_back import fine_boxes, meeting, reach_of, restricted
from hfdcp_core.testing.arrangements import evaluated, index_in_source, place_in_target

Array = npt.NDArray[np.int64]
Pair = tuple[Arrangement, Array]


def source(name: str, shape: tuple[int, ...], first: int = 1) -> Pair:
    """A source tensor whose elements count from a number, and its arrangement."""
    return arranged(name, TensorSpec("F32", shape)), np.arange(first, first + math.prod(shape)).reshape(shape)


# ---- a law: any chain of operations ---------------------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Pair], Mapping[str, Array]]:
    """Tensors that came out of random operations on two sources, and those."""
    shapes = st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=3).map(tuple)
    first = source("a", draw(shapes))
    second = source("b", draw(shapes), 1000)
    pool = [first, second]
    for _ in range(draw(st.integers(1, 6))):
        made = draw(st.sampled_from(OPERATIONS))(draw, pool)
        if made is not None and made[1].size <= 600:
            pool.append(made)
    return pool, {"a": first[1], "b": second[1]}


def a_permutation(draw: st.DrawFn, pool: list[Pair]) -> Pair:
    given_, array = draw(st.sampled_from(pool))
    order = draw(st.permutations(range(array.ndim)))
    return rearrange.permuted(given_, order), array.transpose(order)


def a_slice(draw: st.DrawFn, pool: list[Pair]) -> Pair | None:
    given_, array = draw(st.sampled_from(pool))
    if not array.ndim:
        return None
    axis = draw(st.integers(0, array.ndim - 1))
    start = draw(st.integers(0, array.shape[axis]))
    stop = draw(st.integers(start, array.shape[axis]))
    return rearrange.sliced(given_, axis, start, stop), array.take(range(start, stop), axis)


def a_selection(draw: st.DrawFn, pool: list[Pair]) -> Pair | None:
    given_, array = draw(st.sampled_from(pool))
    if not array.size or not array.ndim:
        return None
    axis = draw(st.integers(-array.ndim, array.ndim - 1))
    index = draw(st.integers(0, array.shape[axis] - 1))
    return rearrange.selected(given_, axis, index), array.take(index, axis)


def a_shape(draw: st.DrawFn, pool: list[Pair]) -> Pair | None:
    given_, array = draw(st.sampled_from(pool))
    extents, rest = [], array.size
    while rest > 1 and draw(st.booleans()):
        extents.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= extents[-1]
    shape = (*extents, rest)
    try:
        return rearrange.regrouped(given_, shape), array.reshape(shape)
    except PlanError:
        return None  # what is refused has a test of its own


def a_joint(draw: st.DrawFn, pool: list[Pair]) -> Pair | None:
    _, array = draw(st.sampled_from(pool))
    if not array.ndim:
        return None
    axis = draw(st.integers(0, array.ndim - 1))
    outline = np.delete(array.shape, axis).tolist()
    fitting = [p for p in pool if p[1].ndim == array.ndim and np.delete(p[1].shape, axis).tolist() == outline]
    parts = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3))
    return rearrange.joined([p[0] for p in parts], axis), np.concatenate([p[1] for p in parts], axis)


def a_stack(draw: st.DrawFn, pool: list[Pair]) -> Pair:
    _, array = draw(st.sampled_from(pool))
    parts = draw(st.lists(st.sampled_from([p for p in pool if p[1].shape == array.shape]), min_size=1, max_size=3))
    axis = draw(st.integers(0, array.ndim))
    return rearrange.stacked([p[0] for p in parts], axis), np.stack([p[1] for p in parts], axis)


def a_padding(draw: st.DrawFn, pool: list[Pair]) -> Pair | None:
    given_, array = draw(st.sampled_from(pool))
    if not array.ndim:
        return None
    axis, more = draw(st.integers(0, array.ndim - 1)), draw(st.integers(0, 2))
    widths = [(0, more if number == axis else 0) for number in range(array.ndim)]
    return rearrange.padded(given_, axis, array.shape[axis] + more), np.pad(array, widths)


def fewer_or_more_dimensions(draw: st.DrawFn, pool: list[Pair]) -> Pair:
    given_, array = draw(st.sampled_from(pool))
    if array.ndim and draw(st.booleans()):
        return coarse(given_, draw(st.integers(0, array.ndim - 1))), array
    return merged(given_), array


OPERATIONS = (
    a_permutation,
    a_slice,
    a_selection,
    a_shape,
    a_joint,
    a_stack,
    a_padding,
    fewer_or_more_dimensions,
)


@given(chains())
@settings(deadline=None)
def test_elements_are_where_numpy_puts_them(chain: tuple[list[Pair], Mapping[str, Array]]) -> None:
    pool, arrays = chain
    for made, array in pool:
        assert made.shape == array.shape
        assert (evaluated(made, arrays) == array).all()


@given(chains(), st.data())
@settings(deadline=None)
def test_a_box_of_a_source_gives_just_the_elements_that_lie_in_it(
    chain: tuple[list[Pair], Mapping[str, Array]], data: st.DataObject
) -> None:
    pool, arrays = chain
    patches = [patch for made, _ in pool for patch in made.patches if patch.source]
    patch = data.draw(st.sampled_from(patches)) if patches else None
    if patch is None:
        return
    shape = arrays[patch.source].shape
    offset = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for part, start in meeting(patch, box):
        for index in np.ndindex(*part.shape):
            place = tuple(map(sum, zip(part.offset, index, strict=True)))
            assert place not in found
            found[place] = index_in_source(Patch(part, patch.source, start, patch.moves), index)
    every = ((place_in_target(patch, i), index_in_source(patch, i)) for i in np.ndindex(*patch.box.shape))
    assert found == {place: there for place, there in every if Box(there, (1,) * len(there)).within(box)}
    assert all(Box(there, (1,) * len(there)).within(reach_of(patch)) for there in found.values())


@given(chains(), st.data())
@settings(deadline=None)
def test_a_box_of_a_target_is_the_same_box_of_its_elements(
    chain: tuple[list[Pair], Mapping[str, Array]], data: st.DataObject
) -> None:
    pool, arrays = chain
    made, array = data.draw(st.sampled_from(pool))
    if not array.size:
        return
    offset = tuple(data.draw(st.integers(0, extent - 1)) for extent in array.shape)
    box = Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(array.shape, offset, strict=True)))
    part = array[tuple(map(slice, box.offset, box.stop))]
    assert (evaluated(restricted(made, box), arrays) == part).all()
    fine, seen = array.reshape(made.fine), np.zeros(array.shape, np.int64)
    for finer, inside in fine_boxes(box, array.shape, made.fine):
        there = tuple(map(slice, inside.offset, inside.stop))
        seen[there] += 1
        assert (fine[tuple(map(slice, finer.offset, finer.stop))].reshape(inside.shape) == array[there]).all()
    assert seen.sum() == box.volume == seen[tuple(map(slice, box.offset, box.stop))].sum()


@pytest.mark.parametrize("low", range(0, 26, 1))
def test_shards_may_end_anywhere_in_rows_that_change_places(low: int) -> None:
    """Heads of eight rows, whose pairs are put half a head apart: a shard may begin and end inside of both."""
    patch = Patch(Box((0, 0, 0), (3, 2, 4)), "q", (1,), ((0, 8), (0, 1), (0, 2)))
    every = {index: index_in_source(patch, index)[0] for index in np.ndindex(3, 2, 4)}
    for high in range(low + 1, 27):
        found: dict[tuple[int, ...], int] = {}
        for part, start in meeting(patch, Box((low,), (high - low,))):
            steps = Patch(part, "q", start, patch.moves)
            found |= {place_in_target(steps, i): index_in_source(steps, i)[0] for i in np.ndindex(*part.shape)}
        assert found == {place: there for place, there in every.items() if low <= there < high}


def test_rows_whose_steps_overlap_are_found_one_by_one() -> None:
    patch = Patch(Box((0, 0), (3, 4)), "w", (0,), ((0, 2), (0, 5)))
    held = Box((5,), (3,))
    assert sorted(
        (place_in_target(patch, i)) for i in np.ndindex(3, 4) if 5 <= index_in_source(patch, i)[0] < 8
    ) == sorted(
        tuple(map(sum, zip(part.offset, i, strict=True)))
        for part, _ in meeting(patch, held)
        for i in np.ndindex(*part.shape)
    )


# ---- what is kept small, and what is refused ------------------------------------------------------------------------


def test_a_source_as_it_is_is_plain() -> None:
    spec = TensorSpec("F32", (4, 6))
    there_and_back = rearrange.permuted(rearrange.permuted(arranged("w", spec), (1, 0)), (1, 0))
    assert is_plain(there_and_back, spec)
    assert not is_plain(rearrange.permuted(arranged("w", spec), (1, 0)), spec)
    assert not is_plain(rearrange.zeros("F32", (4, 6)), spec)
    assert not is_plain(rearrange.regrouped(arranged("w", spec), (2, 2, 6)), spec)
    one = arranged("w", TensorSpec("F32", (6, 6)))
    assert not is_plain(rearrange.permuted(one, (1, 0)), one.spec)


def test_parts_that_come_together_again_are_one_patch() -> None:
    """Where a part ends does not cost a patch; a rename of rows must stay a plain copy."""
    whole = arranged("w", TensorSpec("F32", (6, 4)))
    rows = rearrange.regrouped(rearrange.regrouped(whole, (2, 3, 4)), (6, 4))
    assert rows.groups == ((6,), (4,))
    assert len(rows.patches) == 1


def test_rows_that_a_boundary_cuts_are_cut_only_there() -> None:
    rope = rearrange.regrouped(
        rearrange.permuted(rearrange.regrouped(arranged("q", TensorSpec("F32", (64, 8))), (4, 8, 2, 8)), (0, 2, 1, 3)),
        (64, 8),
    )
    both = rearrange.joined([rope, arranged("k", TensorSpec("F32", (32, 8)))], 0)
    assert len(both.patches) == 2
    odd = rearrange.joined([rope, arranged("k", TensorSpec("F32", (33, 8)))], 0)
    assert len(odd.patches) == 4 * 2 + 1
    one_head = rearrange.joined([rope, arranged("k", TensorSpec("F32", (16, 8)))], 0)
    assert [patch.box.shape for patch in one_head.patches] == [(4, 2, 8, 8), (1, 2, 8, 8)]
    cut = rearrange.sliced(both, 0, 1, 95)
    assert [len([p for p in cut.patches if p.source == name]) for name in "qk"] == [4 * 2, 1]
    assert merged(rearrange.sliced(rope, 0, 0, 16)).fine == (2, 8, 8)
    unit = rearrange.regrouped(rearrange.sliced(rope, 0, 0, 16), (1, 2, 8, 8))
    assert merged(unit).shape == (1, 2, 8, 8)
    assert rearrange.regrouped(rearrange.permuted(unit, (0, 2, 1, 3)), (16, 8)).groups == ((16,), (8,))


def test_single_elements_are_not_moved_by_the_million(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MOST_PATCHES", 5)
    turned = rearrange.permuted(rearrange.regrouped(arranged("w", TensorSpec("F32", (64,))), (8, 8)), (1, 0))
    with pytest.raises(PlanError, match="more than is practical"):
        rearrange.sliced(rearrange.regrouped(turned, (64,)), 0, 1, 63)


W = arranged("w", TensorSpec("F32", (4, 6)))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: rearrange.permuted(W, (0, 0)), "no order of the 2 dimensions"),
        (lambda: rearrange.permuted(W, (0, 2)), "no dimension 2 of 2"),
        (lambda: rearrange.regrouped(W, (5, 5)), "it has 24 elements"),
        (lambda: rearrange.regrouped(W, (-1, -1)), "it has 24 elements"),
        (lambda: rearrange.regrouped(W, (3, 8)), "boundaries of both shapes cross"),
        (lambda: rearrange.regrouped(arranged("w", TensorSpec("F32", (12, 2))), (3, 8)), None),
        (lambda: rearrange.sliced(W, 0, 1, 5), r"\[1:5\] is outside of dimension 0"),
        (lambda: rearrange.selected(W, 1, 6), "index 6 is outside of dimension 1"),
        (lambda: rearrange.joined([W, arranged("v", TensorSpec("F16", (4, 6)))], 0), "cannot be joined"),
        (lambda: rearrange.joined([W, arranged("v", TensorSpec("F32", (4, 5)))], 0), "cannot be joined"),
        (lambda: rearrange.joined([W, arranged("v", TensorSpec("F32", (4,)))], 0), "cannot be joined"),
        (lambda: rearrange.padded(W, 0, 3), "longer than 3"),
    ],
)
def test_what_cannot_be_is_refused(act, words: str | None) -> None:  # type: ignore[no-untyped-def]
    if words is None:
        assert act().shape == (3, 8)
        return
    with pytest.raises(PlanError, match=words):
        act()


def test_tensors_without_an_element_have_no_patch() -> None:
    empty = arranged("w", TensorSpec("F32", (0, 4)))
    assert not empty.patches
    assert rearrange.regrouped(empty, (2, 0)).shape == (2, 0)
    assert rearrange.joined([empty, empty], 0).shape == (0, 4)
    assert rearrange.joined([empty, arranged("v", TensorSpec("F32", (2, 4)))], 0).sources == ("v",)
    assert rearrange.zeros("F32", (0,)).patches == ()


def test_what_is_not_there_has_no_source() -> None:
    padded = rearrange.padded(arranged("w", TensorSpec("F32", (3,))), 0, 5)
    assert padded.sources == ("w",)
    assert [patch.source for patch in padded.patches] == ["w", ""]
    assert list(itertools.chain.from_iterable(patch.box.shape for patch in padded.patches)) == [3, 2]
