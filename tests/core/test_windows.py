"""The arithmetic of windows, where a whole consolidation does not reach it; the rest is in `test_consolidate`."""

import pytest

from hfdcp_core.box import Box
from hfdcp_core.errors import PlanError
from hfdcp_core.windows import lattice_box


@pytest.mark.parametrize(
    ("dtype", "box"),
    [("F4", Box((0, 1), (2, 2))), ("F4", Box((0, 2), (2, 3))), ("F6_E2M3", Box((0, 0), (2, 2)))],
    ids=["begins-inside-a-byte", "ends-inside-a-byte", "six-bits"],
)
def test_a_box_of_a_packed_kind_that_cuts_a_byte_is_refused(dtype: str, box: Box) -> None:
    with pytest.raises(PlanError, match=f"of {dtype} begins or ends inside a byte"):
        lattice_box(dtype, box)


@pytest.mark.parametrize(
    ("dtype", "box", "expected"),
    [
        ("F4", Box((3, 2), (1, 6)), Box((3, 1), (1, 3))),
        ("F6_E3M2", Box((0, 4), (2, 8)), Box((0, 3), (2, 6))),
        ("BF16", Box((1, 1), (1, 1)), Box((1, 1), (1, 1))),
        ("I64", Box((), ()), Box((), ())),
    ],
)
def test_a_box_of_whole_bytes_is_counted_in_items(dtype: str, box: Box, expected: Box) -> None:
    assert lattice_box(dtype, box) == expected
