import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.box import Box


@st.composite
def boxes(draw: st.DrawFn, dimensions: int) -> Box:
    offset = draw(st.tuples(*[st.integers(0, 5)] * dimensions))
    return Box(offset, draw(st.tuples(*[st.integers(0, 5)] * dimensions)))


PAIRS = st.integers(0, 3).flatmap(lambda dimensions: st.tuples(boxes(dimensions), boxes(dimensions)))


def elements(box: Box) -> set[tuple[int, ...]]:
    """Every index that a box holds: the meaning that all laws are about."""
    return set(itertools.product(*(range(a, b) for a, b in zip(box.offset, box.stop, strict=True))))


@given(PAIRS)
def test_the_intersection_holds_what_both_hold(pair: tuple[Box, Box]) -> None:
    a, b = pair
    shared = a.intersect(b)
    assert (elements(shared) if shared else set()) == elements(a) & elements(b)
    assert a.intersect(b) == b.intersect(a)


@given(PAIRS)
def test_what_is_left_and_what_is_shared_partition_the_box(pair: tuple[Box, Box]) -> None:
    a, b = pair
    parts = list(a.minus(b))
    shared = a.intersect(b)
    assert sum(part.volume for part in parts) + (shared.volume if shared else 0) == a.volume
    assert set().union(*map(elements, parts)) == elements(a) - elements(b)
    assert all(part.volume for part in parts)
    assert all(one.intersect(other) is None for one, other in itertools.combinations(parts, 2))


@given(PAIRS)
def test_within_means_that_no_element_and_no_edge_is_outside(pair: tuple[Box, Box]) -> None:
    a, b = pair
    if a.within(b):
        assert elements(a) <= elements(b)
        assert Box.whole(b.shape).intersect(a.relative_to(b)) == (a.relative_to(b) if a.volume else None)
    elif a.volume:
        assert not elements(a) <= elements(b)


@given(boxes(3))
def test_a_box_is_the_slices_it_is_written_as(box: Box) -> None:
    array = np.arange(1000).reshape(10, 10, 10)
    cut = eval(f"array{box}", {"array": array})
    assert cut.shape == box.shape
    assert cut.size == box.volume == len(elements(box))


def test_a_scalar_has_one_box_of_one_element() -> None:
    scalar = Box.whole(())
    assert (scalar.volume, scalar.stop, str(scalar)) == (1, (), "[]")
    assert scalar.intersect(scalar) == scalar
    assert list(scalar.minus(scalar)) == []


def test_an_empty_box_is_inside_at_the_edge_and_leaves_nothing() -> None:
    empty = Box((4, 0), (0, 3))
    assert empty.within(Box.whole((4, 3)))
    assert empty.intersect(Box.whole((4, 3))) is None
    assert list(empty.minus(Box.whole((4, 3)))) == []


def test_boxes_of_other_dimensions_are_not_within() -> None:
    assert not Box((0,), (1,)).within(Box.whole((1, 1)))


@pytest.mark.parametrize(
    ("offset", "shape", "message"),
    [((0,), (1, 1), "as many offsets as extents"), ((-1,), (1,), "no negative"), ((0,), (-1,), "no negative")],
    ids=["ranks differ", "negative offset", "negative extent"],
)
def test_what_is_no_box_is_refused(offset: tuple[int, ...], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Box(offset, shape)
