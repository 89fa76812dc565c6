"""Every dtype of the format goes through the whole chain as bytes: whole, and cut by columns where a byte ends."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from hfdcp_core import publish
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import TABLE, Dtype, size_in_bytes
from hfdcp_core.errors import SourceError, UnknownDtype
from hfdcp_core.publish import Job
from hfdcp_core.safetensors_file import parse_header, write_header

ROWS, COLUMNS = 3, 24
CUTS = (0, 4, 16, 24)
"""Where a byte ends for elements of 4, 6 and 8 bits alike."""


def table(dtype: Dtype) -> np.ndarray:
    """Return the bytes of a matrix, one row for each of its rows; no byte is like its neighbours."""
    nbytes = size_in_bytes(dtype.name, (ROWS, COLUMNS))
    return (np.arange(nbytes) * 41 % 251).astype(np.uint8).reshape(ROWS, -1)


def write(path: Path, spec: TensorSpec, data: np.ndarray, metadata: dict[str, str]) -> None:
    header, _ = write_header({"w": spec}, metadata=metadata)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header + data.tobytes())


def written(folder: Path) -> tuple[TensorSpec, bytes]:
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    [entry] = parse_header(raw[:start], path="model.safetensors", file_size=len(raw)).entries
    return TensorSpec(entry.dtype, entry.shape), raw[start:]


@pytest.mark.parametrize("dtype", TABLE, ids=lambda dtype: dtype.name)
def test_a_whole_tensor_keeps_its_bytes(dtype: Dtype, tmp_path: Path) -> None:
    spec = TensorSpec(dtype.name, (ROWS, COLUMNS))
    write(tmp_path / "in" / "model.safetensors", spec, table(dtype), {})
    publish.make(Job(str(tmp_path / "in"), str(tmp_path / "out")))
    assert written(tmp_path / "out") == (spec, table(dtype).tobytes())


@pytest.mark.parametrize("dtype", TABLE, ids=lambda dtype: dtype.name)
def test_columns_are_put_together_byte_by_byte(dtype: Dtype, tmp_path: Path) -> None:
    for rank, (start, stop) in enumerate(itertools.pairwise(CUTS), 1):
        info = {
            "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, start // dtype.packed]}})
        }  # torch's elements
        part = table(dtype)[:, start * dtype.bits // 8 : stop * dtype.bits // 8]
        name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        write(tmp_path / "in" / name, TensorSpec(dtype.name, (ROWS, stop - start)), part, info)
    publish.make(Job(str(tmp_path / "in"), str(tmp_path / "out"), world_size=len(CUTS) - 1))
    assert written(tmp_path / "out") == (TensorSpec(dtype.name, (ROWS, COLUMNS)), table(dtype).tobytes())


def test_an_unknown_dtype_is_an_error_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in" / "model.safetensors"
    write(path, TensorSpec("F32", (2,)), np.zeros(8, np.uint8), {})
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"'))
    with pytest.raises(UnknownDtype, match="'w': unknown dtype 'F99'") as caught:
        publish.make(Job(str(tmp_path / "in"), str(tmp_path / "out")))
    assert isinstance(caught.value, SourceError)
