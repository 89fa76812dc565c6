"""Where tensors are laid out: file by file, byte by byte, as safetensors' and Hugging Face's own readers expect it."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import TABLE, Dtype
from hfdcp_core.errors import SHOWN_PROBLEMS, PlanError
from hfdcp_core.layout import Target, lay_out, lay_out_for_ranks
from hfdcp_core.recipe import Definition
from hfdcp_core.safetensors_file import parse_header, parse_index


def wanted(fqn: str, dtype: str = "U8", shape: tuple[int, ...] = (4,)) -> Definition:
    return Definition(fqn, TensorSpec(dtype, shape), f"saved.{fqn}")


def sized(**nbytes: int) -> list[Definition]:
    return [wanted(fqn, "U8", (size,)) for fqn, size in nbytes.items()]


def held(target: Target) -> list[list[str]]:
    """Names in each file."""
    return [[definition.fqn for definition in file.tensors] for file in target.files]


PACKINGS: dict[str, tuple[dict[str, int], list[list[str]]]] = {
    "all in one": ({"a": 3, "b": 3}, [["a", "b"]]),
    "exact fit": ({"a": 4, "b": 6, "c": 1}, [["a", "b"], ["c"]]),
    "one byte too many": ({"a": 4, "b": 7}, [["a"], ["b"]]),
    "larger than any file": ({"a": 1, "b": 25, "c": 1}, [["a"], ["b"], ["c"]]),
    "largest first": ({"a": 25, "b": 1, "c": 1}, [["a"], ["b", "c"]]),
    "empty tensors take no room": ({"a": 10, "b": 0, "c": 0, "d": 1}, [["a", "b", "c"], ["d"]]),
    "only empty tensors": ({"a": 0, "b": 0}, [["a", "b"]]),
    "the given order counts, not the best fit": ({"a": 6, "b": 6, "c": 4}, [["a"], ["b", "c"]]),
}


@pytest.mark.parametrize(("nbytes", "expected"), PACKINGS.values(), ids=PACKINGS)
def test_files_are_filled_in_order_up_to_the_largest_size(nbytes: dict[str, int], expected: list[list[str]]) -> None:
    assert held(lay_out(sized(**nbytes), max_file_size=10)) == expected


def test_one_file_has_the_plain_name_and_no_index() -> None:
    target = lay_out(sized(a=1), max_file_size=10)
    assert [file.path for file in target.files] == ["model.safetensors"]
    assert target.index is None


def test_several_files_are_numbered_and_their_index_says_where_everything_is() -> None:
    target = lay_out([wanted("z", "F32", (2, 2)), wanted("a", "BF16", (4,)), wanted("b", "I64", ())], max_file_size=16)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [file.path for file in target.files] == names
    assert target.index is not None
    index = json.loads(target.index)
    assert index["metadata"] == {"total_parameters": 9, "total_size": 32}
    assert list(index["weight_map"].items()) == [("a", names[1]), ("b", names[1]), ("z", names[0])]
    parsed = parse_index(target.index, path="index")
    assert (dict(parsed.weight_map), parsed.total_size) == (index["weight_map"], target.total_size)


def test_tensors_lie_by_item_size_then_by_name() -> None:
    kinds = [("b", "F32"), ("a", "F32"), ("z", "I64"), ("f", "F4"), ("e", "F6_E2M3"), ("d", "U8"), ("c", "BF16")]
    [file] = lay_out([wanted(fqn, dtype) for fqn, dtype in kinds], max_file_size=10**6).files
    assert [definition.fqn for definition in file.tensors] == ["z", "a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize("dtype", TABLE, ids=lambda dtype: dtype.name)
def test_every_dtype_takes_its_own_bits(dtype: Dtype) -> None:
    target = lay_out([wanted("a", dtype.name, (5, 8))], max_file_size=10**6)
    [shard] = target.catalog.shards
    assert shard.span.length == target.total_size == 5 * dtype.bits
    assert target.files[0].size == len(target.files[0].header) + 5 * dtype.bits


DTYPES = st.sampled_from([dtype.name for dtype in TABLE])
SPECS = st.builds(TensorSpec, DTYPES, st.lists(st.integers(0, 5), max_size=3).map(lambda dims: (*dims, 8)))
DEFINITIONS = st.dictionaries(st.text(min_size=1, max_size=6), SPECS, min_size=1, max_size=8).map(
    lambda specs: [Definition(fqn, spec, fqn) for fqn, spec in specs.items()]
)


@given(DEFINITIONS, st.integers(1, 400))
def test_headers_shards_and_index_say_the_same(definitions: list[Definition], max_file_size: int) -> None:
    target = lay_out(definitions, max_file_size=max_file_size)
    specs = {d.fqn: d.spec for d in definitions}
    assert dict(target.catalog.tensors) == specs
    assert list(target.catalog.tensors) == list(specs)
    assert target.total_size == sum(spec.nbytes for spec in specs.values()) == target.catalog.nbytes
    spans = {shard.fqn: shard.span for shard in target.catalog.shards}
    assert all(shard.box == Box.whole(specs[shard.fqn].shape) for shard in target.catalog.shards)
    for file in target.files:
        header = parse_header(file.header, path=file.path, file_size=file.size)
        assert header.data_start == len(file.header)
        assert header.data_start % 64 == 0
        assert header.metadata == {"format": "pt"}
        edge = header.data_start
        for definition, entry in zip(file.tensors, header.entries, strict=True):
            span = spans.pop(entry.fqn)
            assert (entry.fqn, entry.dtype, entry.shape) == (definition.fqn, definition.spec.dtype, entry.shape)
            assert (span.path, span.start, span.stop) == (file.path, edge, header.data_start + entry.stop)
            edge = span.stop
        assert edge == file.size
    assert not spans
    if len(target.files) > 1:
        assert target.index is not None
        named = {d.fqn: file.path for file in target.files for d in file.tensors}
        assert parse_index(target.index, path="index").weight_map == named


@given(DEFINITIONS, st.integers(1, 400))
def test_no_file_is_over_the_size_that_could_be_under_it(definitions: list[Definition], max_file_size: int) -> None:
    target = lay_out(definitions, max_file_size=max_file_size)
    bytes_of = [[d.spec.nbytes for d in file.tensors] for file in target.files]
    assert all(sum(sizes) <= max_file_size or max(sizes) > max_file_size for sizes in bytes_of)
    assert all(len([s for s in sizes if s]) == 1 for sizes in bytes_of if sum(sizes) > max_file_size)
    # whole tensors stay in their order from file to file
    position = {d.fqn: number for number, d in enumerate(definitions)}
    last = [max(position[d.fqn] for d in file.tensors) for file in target.files]
    first = [min(position[d.fqn] for d in file.tensors) for file in target.files]
    assert all(a < b for a, b in zip(last, first[1:], strict=False))


def test_the_formats_own_reader_takes_a_file_so_laid_out(tmp_path: Path) -> None:
    shapes = {"a": (2, 2), "e": (0, 2), "b": (3,)}
    [file] = lay_out([wanted(fqn, "F32", shape) for fqn, shape in shapes.items()], max_file_size=99).files
    (tmp_path / file.path).write_bytes(file.header + bytes(file.size - len(file.header)))
    with safe_open(tmp_path / file.path, "np") as opened:
        assert {name: opened.get_tensor(name).shape for name in shapes} == shapes
        assert set(opened.keys()) == set(shapes)
        assert opened.metadata() == {"format": "pt"}


# ---- a given file index ---------------------------------------------------------------------------------------------


def test_a_given_index_replaces_the_packing() -> None:
    target = lay_out(sized(a=5, b=5, c=5), max_file_size=1, file_index={"c": 1, "a": 2, "b": 1})
    assert held(target) == [["b", "c"], ["a"]]


def test_everything_that_is_wrong_with_a_given_index_is_said_at_once() -> None:
    with pytest.raises(PlanError, match="file index does not fit") as caught:
        lay_out(sized(a=1, b=1, c=1), max_file_size=9, file_index={"a": 0, "x": 1, "c": 4})
    assert caught.value.problems == (
        "b: in no file of the given index",
        "x: in the given index, but no such tensor is wanted",
        "a: file 0, but files count from 1",
        "no tensor is given to file 2",
        "no tensor is given to file 3",
    )


def test_an_empty_index_lacks_every_tensor() -> None:
    with pytest.raises(PlanError, match="does not fit") as caught:
        lay_out(sized(a=1), max_file_size=9, file_index={})
    assert caught.value.problems == ("a: in no file of the given index",)


def test_a_huge_number_of_files_is_refused_without_counting_them() -> None:
    with pytest.raises(PlanError, match="does not fit") as caught:
        lay_out(sized(a=1, b=1), max_file_size=9, file_index={"a": 1, "b": 10**15})
    assert len(caught.value.problems) == SHOWN_PROBLEMS


@given(st.lists(st.integers(1, 3), min_size=1, max_size=9))
def test_every_tensor_lies_in_the_file_it_was_given_to(numbers: list[int]) -> None:
    dense = {old: new for new, old in enumerate(sorted(set(numbers)), 1)}
    file_index = {f"t{position}": dense[number] for position, number in enumerate(numbers)}
    target = lay_out([wanted(fqn) for fqn in file_index], max_file_size=1, file_index=file_index)
    found = itertools.chain.from_iterable([(fqn, n) for fqn in names] for n, names in enumerate(held(target), 1))
    assert dict(found) == file_index


@pytest.mark.parametrize("dim", [2, 5, -3])
def test_a_dimension_that_no_tensor_has_is_refused_by_name(dim: int) -> None:
    definitions = [wanted("scalar", shape=()), wanted("w", "F32", (8, 6)), wanted("b")]
    with pytest.raises(PlanError, match=rf"no tensor has a dimension {dim} .*: w, F32\[8, 6\].* from -2 to 1"):
        lay_out_for_ranks(definitions, ranks=2, dim=dim)


def test_numbers_without_dimensions_are_laid_out_for_ranks_as_long_as_no_other_dimension_is_asked() -> None:
    target = lay_out_for_ranks([wanted("a", shape=()), wanted("b", shape=())], ranks=2, dim=0)
    assert held(target) == [["a", "b"], []]
    assert held(lay_out_for_ranks([], ranks=2, dim=7)) == [[], []]
    with pytest.raises(PlanError, match=r"no tensor has a dimension 1 .* from -1 to 0"):
        lay_out_for_ranks([wanted("a", shape=())], ranks=2, dim=1)


@pytest.mark.parametrize(
    ("shape", "dim", "expected"),
    [
        ((4, 3), 0, ["[0:2, 0:3]", "[2:4, 0:3]"]),
        ((6, 3), 0, ["[0:4, 0:3]", "[4:6, 0:3]"]),
        ((1, 4, 3), 1, ["[0:1, 0:2, 0:3]", "[0:1, 2:4, 0:3]"]),
        ((2, 4, 3), 1, ["[0:2, 0:4, 0:3]"]),
        ((2, 3), 1, ["[0:2, 0:3]"]),
        ((2, 8), 1, ["[0:2, 0:4]", "[0:2, 4:8]"]),
    ],
    ids=str,
)
def test_packed_kinds_are_cut_between_bytes_or_not_at_all(
    shape: tuple[int, ...], dim: int, expected: list[str]
) -> None:
    target = lay_out_for_ranks([wanted("w", "F4", shape)], ranks=2, dim=dim)
    assert [str(part.box) for file in target.files for part in file.parts] == expected
