"""The documents of a run: what rests in the sink counts, whatever this process remembers of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, FileStamp, Shard, Skipped, Span, TensorSpec
from hfdcp_core.errors import PlanError, ValidationError
from hfdcp_core.run import Run
from hfdcp_core.store import open_store

CATALOG = Catalog(
    "dcp",
    {"a": TensorSpec("F32", (2,))},
    (Shard("a", "F32", Box((0,), (2,)), Span("__0_0.distcp", 0, 900), "torch_save"),),
    (FileStamp("__0_0.distcp", 900, "1"),),
    (Skipped("step", "not a tensor"),),
    nesting={"a": ("a",)},
)
OTHER = Catalog("dcp", {"b": TensorSpec("F32", (0,))}, ())
DOCUMENT = ".hfdcp/catalog.json.gz"


def test_a_catalog_that_was_just_written_reads_as_another_process_reads_it(tmp_path: Path) -> None:
    run = Run(open_store(str(tmp_path)))
    run.save_catalog(CATALOG)
    assert run.catalog() is CATALOG
    assert run.catalog() is not CATALOG  # it is remembered for the next step, and no longer
    assert run.catalog() == CATALOG


def test_what_lies_in_the_sink_counts_and_not_what_was_written_last(tmp_path: Path) -> None:
    one, two = (Run(open_store(str(tmp_path / name))) for name in ("one", "two"))
    one.save_catalog(CATALOG)
    two.save_catalog(OTHER)
    assert one.catalog() == CATALOG
    (tmp_path / "one" / DOCUMENT).write_bytes((tmp_path / "two" / DOCUMENT).read_bytes())
    assert one.catalog() == OTHER


def test_a_catalog_that_was_damaged_since_is_refused(tmp_path: Path) -> None:
    run = Run(open_store(str(tmp_path)))
    run.save_catalog(CATALOG)
    document = tmp_path / DOCUMENT
    document.write_bytes(document.read_bytes()[:-9])
    with pytest.raises(ValidationError, match="not a readable catalog"):
        run.catalog()


def test_a_catalog_that_is_gone_is_missed(tmp_path: Path) -> None:
    run = Run(open_store(str(tmp_path)))
    run.save_catalog(CATALOG)
    (tmp_path / DOCUMENT).unlink()
    with pytest.raises(PlanError, match="the step 'gather' was not done here"):
        run.catalog()
