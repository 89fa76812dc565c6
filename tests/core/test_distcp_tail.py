"""A safetensors file at the end of a .distcp file says itself which boxes it holds, and which one was overwritten."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, TORCH_SAVE, Shard, Span, TensorSpec
from hfdcp_core.distcp_tail import Tail, boxes_held, header_places
from hfdcp_core.errors import CorruptFile
from hfdcp_core.safetensors_file import parse_header, write_header

PATH = "__0_0.distcp"
START = 100


def tail(tensors: Mapping[str, tuple[TensorSpec, tuple[int, ...]]], *, informed: bool = True) -> Tail:
    """Return what a file ends with that holds these boxes, by offset in torch's elements."""
    info = {fqn: {"saved_offsets": list(offset)} for fqn, (_, offset) in tensors.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(info)} if informed else {}
    raw, _ = write_header({fqn: spec for fqn, (spec, _) in tensors.items()}, metadata=metadata)
    return Tail(parse_header(raw, path=PATH), START)


def said(fqn: str, offset: tuple[int, ...], shape: tuple[int, ...], dtype: str = "F32") -> Shard:
    """Return a shard as ``.metadata`` has it."""
    return Shard(fqn, dtype, Box(offset, shape), Span(PATH, START, START + 4), TORCH_SAVE)


W = TensorSpec("F32", (2, 3))
TENSORS = {"w": TensorSpec("F32", (4, 3)), "b": TensorSpec("F32", (3,))}


def test_each_box_gets_the_span_that_the_header_gives_it() -> None:
    found = tail({"w": (W, (2, 0)), "b": (TensorSpec("F32", (3,)), (0,))})
    first = START + found.header.data_start
    held = boxes_held(found, [said("b", (0,), (3,)), said("w", (2, 0), (2, 3))], TENSORS, path=PATH)
    assert held.lost == ()
    assert held.shards == (
        Shard("b", "F32", Box((0,), (3,)), Span(PATH, first + 24, first + 36), RAW),
        Shard("w", "F32", Box((2, 0), (2, 3)), Span(PATH, first, first + 24), RAW),
    )


def test_a_box_in_whose_place_another_lies_is_lost() -> None:
    listed = [said("w", (0, 0), (2, 3)), said("w", (2, 0), (2, 3))]
    held = boxes_held(tail({"w": (W, (2, 0))}), listed, TENSORS, path=PATH)
    assert [shard.box for shard in held.shards] == [Box((2, 0), (2, 3))]
    assert held.lost == (listed[0],)


def test_offsets_of_packed_elements_are_counted_singly_and_scalars_have_none() -> None:
    found = tail({"q": (TensorSpec("F4", (2, 6)), (2, 3)), "s": (TensorSpec("BF16", ()), ())})
    listed = [said("q", (2, 6), (2, 6), "F4"), said("s", (), (), "BF16")]
    held = boxes_held(found, listed, {"q": TensorSpec("F4", (4, 12)), "s": TensorSpec("BF16", ())}, path=PATH)
    assert [shard.box for shard in held.shards] == [shard.box for shard in listed]


def test_tensors_without_elements_need_not_be_listed() -> None:
    found = tail({"b": (TensorSpec("F32", (0,)), (3,))})
    assert boxes_held(found, [], TENSORS, path=PATH).shards == ()


@pytest.mark.parametrize(
    ("held", "listed", "problem"),
    [
        pytest.param({}, [said("b", (0,), (3,))], r"b\[0:3\] in .*: not in the file", id="absent"),
        pytest.param(
            {"b": (TensorSpec("I32", (3,)), (0,))}, [said("b", (0,), (3,))], r"holds I32\[0:3\]", id="another dtype"
        ),
        pytest.param(
            {"w": (W, (1, 0))}, [said("w", (2, 0), (2, 3))], r"the file holds F32\[1:3, 0:3\]", id="another box"
        ),
        pytest.param({"b": (TensorSpec("F32", (3,)), (0,))}, [], r"b\[0:3\] .*not in \.metadata", id="not listed"),
    ],
)
def test_a_header_that_contradicts_the_metadata_is_refused(
    held: dict[str, tuple[TensorSpec, tuple[int, ...]]], listed: list[Shard], problem: str
) -> None:
    with pytest.raises(CorruptFile, match=problem):
        boxes_held(tail(held), listed, TENSORS, path=PATH)


def test_a_header_that_does_not_say_which_boxes_it_has_is_refused() -> None:
    with pytest.raises(CorruptFile, match="does not say which boxes"):
        boxes_held(tail({"w": (W, (2, 0))}, informed=False), [said("w", (2, 0), (2, 3))], TENSORS, path=PATH)


@pytest.mark.parametrize(
    ("window", "room", "places"),
    [
        (b"", 0, []),
        (b"\2\0\0\0\0\0\0\0{", 9, []),
        (b"\2\0\0\0\0\0\0\0{}", 10, [(0, 10)]),
        (b"PK\5\6" + b"\2\0\0\0\0\0\0\0{}", 14, [(4, 14)]),
        (b"#" * 65 + b"\2\0\0\0\0\0\0\0{}", 75, []),
        (b"\0{" * 40, 80, []),
        (b"\2\0\0\0\0\0\0\0{\0\0\0\0\0\0\0{\0\0\0\0\0\0\0{", 130, [(0, 10)]),
        (b"\0" * 8 + b"{" * 80, 10**6, [(0, 8)]),
    ],
    ids=["nothing", "cut short", "at once", "behind a frame", "too far", "too long", "one of three", "one of many"],
)
def test_a_header_may_begin_where_its_length_fits_and_its_brace_stands(
    window: bytes, room: int, places: list[tuple[int, int]]
) -> None:
    assert list(header_places(window, room)) == places


def test_no_more_than_a_few_places_are_tried() -> None:
    assert len(list(header_places(b"{" * 73, 2**64))) == 4
