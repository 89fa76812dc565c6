"""The two libraries' writers, consolidations and readers in every combination, between different numbers of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hfdcp_core.testing.dropin import run_ranks

WAYS = [("torch", way) for way in ("none", "torch", "ours")]
WAYS += [("ours", way) for way in ("none", "torch", "ours", "one-pass", "not-distributed")]
SIZES = [(saved, loaded) for saved in (1, 2, 4) for loaded in (1, 3)]

Row = tuple[str, str, str, int, int]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Row, Mapping[str, bool]]:
    """Save and load everything by four real ranks; say of each tensor whether it came back bit for bit."""
    folder = tmp_path_factory.mktemp("matrix")
    run_ranks(Path(__file__).with_name("matrix_ranks.py"), 4, str(folder))
    found = json.loads((Path(folder) / "rows.json").read_text())
    return {(writer, way, reader, saved, loaded): tensors for writer, way, reader, saved, loaded, tensors in found}


@pytest.mark.parametrize("reader", ["torch", "ours"])
@pytest.mark.parametrize(("writer", "way"), WAYS, ids=[f"{writer}-consolidated-{way}" for writer, way in WAYS])
def test_every_tensor_comes_back_bit_for_bit(
    writer: str, way: str, reader: str, rows: Mapping[Row, Mapping[str, bool]]
) -> None:
    # torch's own consolidation writes 0.0 for scalars and refuses integers (tests of torch's defects pin that)
    carried = {"row", "column", "grid", "replicate", "uneven"} | ({"fp8"} if way == "torch" else set())
    every = carried if way == "torch" else carried | {"scalar", "int", "bool", "fp8"}
    for saved, loaded in SIZES:
        tensors = rows[writer, way, reader, saved, loaded]
        assert tensors.keys() == every
        assert [name for name, right in tensors.items() if not right] == [], (saved, loaded)
