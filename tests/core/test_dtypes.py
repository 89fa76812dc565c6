import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from hfdcp_core.dtypes import NOT_IN_SAFETENSORS, TABLE, Dtype, dtype_named, dtype_of_torch, size_in_bytes
from hfdcp_core.errors import UnknownDtype

OF_TORCH = [row for row in TABLE if row.torch]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_name_leads_to_its_row(row: Dtype) -> None:
    assert dtype_named(row.name) is row


@pytest.mark.parametrize("row", OF_TORCH, ids=lambda row: row.name)
def test_the_table_agrees_with_torch(row: Dtype) -> None:
    dtype = getattr(torch, str(row.torch))
    assert dtype_of_torch(str(row.torch)) is row
    assert row.bits * row.packed == dtype.itemsize * 8
    assert row.floating is dtype.is_floating_point


@pytest.mark.parametrize("row", OF_TORCH, ids=lambda row: row.name)
def test_the_table_agrees_with_what_safetensors_writes(row: Dtype, tmp_path) -> None:
    dtype = getattr(torch, str(row.torch))
    tensor = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    path = tmp_path / "one.safetensors"
    path.write_bytes(save({"t": tensor}))
    with safe_open(path, "pt") as file:
        found = file.get_slice("t")
        assert found.get_dtype() == row.name
        assert size_in_bytes(row.name, tuple(found.get_shape())) == tensor.nbytes


@pytest.mark.parametrize("name", ["", "f32", "F128", "float32"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownDtype, match=f"unknown dtype '{name}': safetensors has F64, F32"):
        dtype_named(name)


@pytest.mark.parametrize("name", sorted(NOT_IN_SAFETENSORS))
def test_a_dtype_that_the_format_cannot_hold_says_so(name: str) -> None:
    with pytest.raises(UnknownDtype, match=f"torch.{name}: safetensors cannot hold it"):
        dtype_of_torch(name)


def test_a_dtype_that_nobody_knows_says_so() -> None:
    with pytest.raises(UnknownDtype, match=r"torch.int3: it is not in the table"):
        dtype_of_torch("int3")


@given(row=st.sampled_from(TABLE), shape=st.lists(st.integers(0, 9), max_size=4).map(tuple))
def test_the_size_is_exact_or_refused(row: Dtype, shape: tuple[int, ...]) -> None:
    bits = row.bits
    for extent in shape:
        bits *= extent
    if bits % 8:
        with pytest.raises(UnknownDtype, match="ends inside a byte"):
            size_in_bytes(row.name, shape)
    else:
        assert size_in_bytes(row.name, shape) * 8 == bits
