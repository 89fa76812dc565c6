"""The arithmetic of windows, where a whole consolidation does not reach it; the rest is in `test_consolidate`."""

import json
import random
from pathlib import Path

import pytest
from safetensors import deserialize

from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import PlanError
from hfdcp_core.inspection import inspect
from hfdcp_core.job import Job
from hfdcp_core.layout import shard_name
from hfdcp_core.publish import make
from hfdcp_core.safetensors_file import SHARDING_INFO, write_header
from hfdcp_core.windows import lattice_box, windows


@pytest.mark.parametrize(
    ("dtype", "box", "shape"),
    [
        ("F4", Box((0, 1), (2, 2)), (2, 8)),
        ("F4", Box((0, 2), (2, 3)), (2, 8)),
        ("F6_E2M3", Box((0, 0), (2, 2)), (2, 8)),
        ("F4", Box((1, 0), (2, 3)), (4, 3)),
        ("F4", Box((0, 0), (3, 3)), (4, 3)),
        ("F4", Box((0, 0), (4, 2)), (4, 3)),
        ("F4", Box((0, 0, 0), (2, 2, 3)), (2, 4, 3)),
    ],
    ids=["begins", "ends", "six-bits", "odd-row-begins", "odd-row-ends", "columns-of-odd-rows", "no-run-of-odd-rows"],
)
def test_a_box_of_a_packed_kind_that_cuts_a_byte_is_refused(dtype: str, box: Box, shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=rf"of {dtype}\[[\d, ]+\] begins or ends inside a byte"):
        lattice_box(dtype, box, shape)


@pytest.mark.parametrize(
    ("dtype", "box", "shape", "expected"),
    [
        ("F4", Box((3, 2), (1, 6)), (4, 8), Box((3, 1), (1, 3))),
        ("F6_E3M2", Box((0, 4), (2, 8)), (4, 16), Box((0, 3), (2, 6))),
        ("BF16", Box((1, 1), (1, 1)), (2, 3), Box((1, 1), (1, 1))),
        ("I64", Box((), ()), (), Box((), ())),
        ("F4", Box((0, 0), (2, 3)), (2, 3), Box((0,), (3,))),
        ("F4", Box((2, 0), (2, 3)), (6, 3), Box((3,), (3,))),
        ("F4", Box((1, 0, 0), (1, 2, 3)), (2, 4, 3), Box((6,), (3,))),
        ("F6_E2M3", Box((0, 0), (2, 2)), (2, 2), Box((0,), (3,))),
    ],
)
def test_a_box_of_whole_bytes_is_counted_in_items(dtype: str, box: Box, shape: tuple[int, ...], expected: Box) -> None:
    assert lattice_box(dtype, box, shape) == expected


def test_windows_end_at_the_grain_of_what_makes_them_where_they_are_large_enough() -> None:
    tensors = [TensorSpec("U8", (10, 4))]
    rows = [
        [piece.box.shape[0] for window in windows(tensors, size, grains=grains) for piece in window]
        for size, grains in ((28, {}), (28, {0: (4, 1)}), (8, {0: (4, 1)}))
    ]
    assert rows == [[7, 3], [4, 4, 2], [2, 2, 2, 2, 2]]


ODD_ROWS = {"a": ("F4", (2, 3)), "b": ("F6_E2M3", (2, 2)), "c": ("F4", (6, 5)), "d": ("F4", (2, 4, 3))}


def odd_rows(folder: Path) -> dict[str, bytes]:
    """Write a file of tensors whose rows end inside a byte, and return the bytes of each."""
    specs = {name: TensorSpec(*spec) for name, spec in ODD_ROWS.items()}
    header, entries = write_header(specs, metadata={"format": "pt"})
    data = random.Random(0).randbytes(sum(spec.nbytes for spec in specs.values()))
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(header + data)
    return {entry.fqn: data[entry.start : entry.stop] for entry in entries}


def read_by_safetensors(path: Path) -> dict[str, bytes]:
    return {name: bytes(tensor["data"]) for name, tensor in deserialize(path.read_bytes())}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whole_tensors_whose_rows_end_inside_a_byte_are_copied_for_any_number_of_ranks_and_back(
    tmp_path: Path, ranks: int
) -> None:
    """As safetensors' own reader has it, only a whole tensor must end with a byte."""
    held = odd_rows(tmp_path / "source")
    make(Job(str(tmp_path / "source"), str(tmp_path / "ranks"), ranks=ranks))
    make(Job(str(tmp_path / "ranks"), str(tmp_path / "out")))
    make(Job(str(tmp_path / "source"), str(tmp_path / "direct")))
    for folder in ("source", "out", "direct"):
        assert read_by_safetensors(tmp_path / folder / "model.safetensors") == held


def test_a_cut_inside_a_byte_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for rank in (1, 2):  # half of the columns of F6_E2M3[2, 4] each
        offsets = {"w": {"saved_offsets": [0, 2 * rank - 2]}}
        metadata = {SHARDING_INFO: json.dumps(offsets), "format": "pt"}
        header, _ = write_header({"w": TensorSpec("F6_E2M3", (2, 2))}, metadata=metadata)
        (source / shard_name(rank)).write_bytes(header + bytes(3))
    job = Job(str(source), str(tmp_path / "out"), world_size=2)
    with pytest.raises(PlanError, match="cannot be taken apart") as caught:
        make(job)
    assert (
        "w: [0:2, 0:2] of F6_E2M3[2, 4] begins or ends inside a byte, so it cannot be copied" in caught.value.problems
    )
    assert not list(tmp_path.glob("out/*.safetensors"))
    assert inspect(job).problems == caught.value.problems
