import pytest

from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, Catalog, Shard, Span, TensorSpec
from hfdcp_core.errors import UnknownDtype

SPEC = TensorSpec("F32", (4, 8))


def shard(box: Box, fqn: str = "w") -> Shard:
    return Shard(fqn, "F32", box, Span("a.bin", 0, 8))


def test_a_tensor_knows_its_bytes_and_how_it_is_written() -> None:
    assert (SPEC.nbytes, str(SPEC), str(TensorSpec("F4", ()))) == (128, "F32[4, 8]", "F4[]")


def test_a_tensor_of_an_unknown_dtype_has_no_size() -> None:
    with pytest.raises(UnknownDtype, match="F7"):
        _ = TensorSpec("F7", (1,)).nbytes


def test_a_span_may_be_empty_and_is_written_half_open() -> None:
    assert (Span("a", 3, 3).length, str(Span("a.bin", 8, 24))) == (0, "a.bin[8:24]")


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)], ids=["before the file", "backwards"])
def test_what_is_no_span_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"a.bin: \[.*\) is not a span"):
        Span("a.bin", start, stop)


def test_a_shard_is_raw_unless_told_and_says_where_it_lies() -> None:
    one = shard(Box((0, 0), (4, 2)))
    assert (one.encoding, str(one)) == (RAW, "w[0:4, 0:2] in a.bin[0:8]")


def test_a_catalog_counts_the_bytes_of_its_tensors_once_whatever_its_shards() -> None:
    whole = shard(Box.whole((4, 8)))
    assert Catalog("dcp", {"w": SPEC, "b": TensorSpec("BF16", (3,))}, (whole, whole)).nbytes == 134


@pytest.mark.parametrize(
    ("stray", "message"),
    [
        (shard(Box((0, 0), (1, 1)), "v"), "v.*no tensor of that name"),
        (shard(Box((3, 0), (2, 8))), r"outside of its tensor of shape \[4, 8\]"),
        (shard(Box((0,), (4,))), "outside of its tensor"),
    ],
    ids=["unknown tensor", "over the edge", "other rank"],
)
def test_a_shard_that_cannot_belong_to_its_tensor_is_refused(stray: Shard, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Catalog("dcp", {"w": SPEC}, (stray,))
