"""The picture of a tensor's boxes: to scale, and no damage is too small to be seen."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.box import Box
from hfdcp_core.picture import COLUMNS, HOLE, LETTERS, OVERLAP, ROWS, draw


def inside(lines: tuple[str, ...]) -> list[str]:
    """What the frame holds."""
    return [line.partition("│")[2].rstrip("│") for line in lines if "│" in line]


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """The boxes of a mesh: every dimension cut into so many equal parts."""
    steps = [
        [(number * extent // count, (number + 1) * extent // count) for number in range(count)]
        for extent, count in zip(shape, parts, strict=True)
    ]
    return [
        Box(tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))
        for ends in itertools.product(*steps)
    ]


def test_every_box_has_its_letter_and_its_share_of_the_picture() -> None:
    picture = draw((4, 8), [Box((0, 0), (3, 8)), Box((3, 0), (1, 2)), Box((3, 2), (1, 6))])
    assert picture.letters == ("a", "b", "c")
    assert inside(picture.lines) == ["a" * 72] * 3 + ["b" * 18 + "c" * 54]
    assert picture.lines[0] == "down: dimension 0 of 4, across: dimension 1 of 8"


def test_where_boxes_begin_is_written_above_and_beside() -> None:
    picture = draw((384, 1056), grid((384, 1056), (2, 2)))
    assert picture.lines[1].split() == ["0", "528"]
    assert picture.lines[1].index("528") == picture.lines[3].index("b")
    labels = [line.partition("│")[0].strip() for line in picture.lines if "│" in line]
    assert [label for label in labels if label] == ["0", "192"]
    assert labels.index("192") == next(n for n, row in enumerate(inside(picture.lines)) if "c" in row)


def test_no_place_is_written_twice() -> None:
    boxes = [Box((0, 0), (192, 528)), Box((0, 528), (192, 528)), Box((165, 528), (192, 528))]
    lines = draw((384, 1056), boxes).lines
    labels = [label for line in lines if "│" in line if (label := line.partition("│")[0].strip())]
    assert labels == ["0", "165", "192", "357"]
    assert lines[1].split() == ["0", "528"]


@pytest.mark.parametrize("shape", [(1_000_003,), (1_000_003, 7), (3, 999_983)])
def test_one_element_that_nobody_holds_is_seen(shape: tuple[int, ...]) -> None:
    axis = shape.index(max(shape))
    lost = shape[axis] // 3
    rest = Box.whole(shape).minus(Box((0,) * axis + (lost,) + (0,) * (len(shape) - axis - 1), (1,) * len(shape)))
    drawn = "".join(inside(draw(shape, list(rest)).lines))
    assert HOLE in drawn
    assert OVERLAP not in drawn


def test_one_element_that_two_boxes_hold_is_seen() -> None:
    drawn = inside(draw((1_000_003,), [Box((0,), (500_000,)), Box((499_999,), (500_004,))]).lines)
    assert "".join(dict.fromkeys("".join(drawn))) == "a!b"


def test_where_a_hole_and_an_overlap_share_a_cell_the_overlap_is_seen() -> None:
    boxes = [Box((0,), (3000,)), Box((2999,), (1,)), Box((3001,), (6999,))]
    drawn = "".join(inside(draw((10_000,), boxes).lines))
    assert OVERLAP in drawn
    assert HOLE not in drawn


def test_equal_boxes_are_replicas_and_no_overlap() -> None:
    picture = draw((2, 2), [Box((0, 0), (2, 2)), Box((0, 0), (2, 2))])
    assert picture.letters == ("a", "a")
    assert set("".join(inside(picture.lines))) == {"a"}


def test_a_box_without_elements_has_a_blank_for_a_letter() -> None:
    picture = draw((4,), [Box((4,), (0,)), Box((0,), (4,))])
    assert picture.letters == (" ", "a")
    assert set("".join(inside(picture.lines))) == {"a"}


def test_letters_begin_anew_where_there_are_more_boxes() -> None:
    picture = draw((100,), grid((100,), (100,)))
    assert picture.letters == tuple((LETTERS * 2)[:100])
    assert not {HOLE, OVERLAP} & {*LETTERS}


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)])
def test_a_tensor_without_elements_has_no_picture(shape: tuple[int, ...]) -> None:
    assert draw(shape, [Box.whole(shape)]).lines == ()


def test_a_scalar_is_one_element() -> None:
    picture = draw((), [Box((), ())])
    assert picture.lines[0] == "one element"
    assert set("".join(inside(picture.lines))) == {"a"}
    assert set("".join(inside(draw((), []).lines))) == {HOLE}


def test_of_many_dimensions_those_that_are_cut_are_shown() -> None:
    shape = (6, 5, 8, 7)
    picture = draw(shape, grid(shape, (2, 1, 4, 1)))
    assert picture.lines[0] == "down: dimension 0 of 6, across: dimension 2 of 8"
    assert picture.lines[1] == "at 0:5 of 5 in dimension 1, 0:7 of 7 in dimension 3"
    assert {row[0] for row in inside(picture.lines)} == {"a", "e"}


def test_where_one_dimension_is_cut_the_largest_other_is_shown_with_it() -> None:
    shape = (4, 2, 9)
    assert draw(shape, grid(shape, (2, 1, 1))).lines[0] == "down: dimension 0 of 4, across: dimension 2 of 9"


def test_where_more_than_two_dimensions_are_cut_the_place_with_the_damage_is_shown() -> None:
    shape = (8, 8, 8)
    boxes = grid(shape, (2, 2, 2))
    assert draw(shape, boxes).lines[1] == "at 0:4 of 8 in dimension 2"
    picture = draw(shape, boxes[:-1])
    assert picture.lines[1] == "at 4:8 of 8 in dimension 2"
    assert HOLE in "".join(inside(picture.lines))


def test_numbers_above_the_columns_are_left_out_where_there_is_no_room() -> None:
    picture = draw((2, 1_000_000), grid((2, 1_000_000), (1, 70)))
    numbers = picture.lines[1].split()
    assert 5 < len(numbers) < 20
    assert len(picture.lines[1]) <= COLUMNS


SHAPES = st.lists(st.integers(1, 3000), min_size=0, max_size=4).map(tuple)


@st.composite
def meshes(draw_one: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor and the boxes of a mesh over it."""
    shape = draw_one(SHAPES)
    parts = tuple(draw_one(st.integers(1, min(extent, 4))) for extent in shape)
    return shape, grid(shape, parts)


@settings(max_examples=40, deadline=None)
@given(meshes())
def test_what_is_whole_shows_no_damage_and_keeps_its_size(mesh: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = mesh
    picture = draw(shape, boxes)
    assert set("".join(inside(picture.lines))) <= {*LETTERS}
    assert len(picture.lines) <= ROWS
    assert max(map(len, picture.lines[1:])) <= COLUMNS


@settings(max_examples=40, deadline=None)
@given(meshes(), st.data())
def test_a_box_that_is_lost_or_too_large_is_seen(mesh: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = mesh
    victim = data.draw(st.sampled_from(boxes))
    rest = [box for box in boxes if box != victim]
    assert HOLE in "".join(inside(draw(shape, rest).lines))
    if rest:
        assert OVERLAP in "".join(inside(draw(shape, [*boxes, Box.whole(shape)]).lines))
