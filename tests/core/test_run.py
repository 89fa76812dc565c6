"""The documents of a run: what rests in the sink counts, whatever this process remembers of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hfdcp_core.box import Box
from hfdcp_core.catalog import Catalog, FileStamp, Shard, Skipped, Span, TensorSpec
from hfdcp_core.errors import PlanError, ValidationError
from hfdcp_core.plan import Copy, FilePlan, Plan, Read
from hfdcp_core.run import FileSummary, PlanSummary, Run
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
FILE = FilePlan(
    "model.safetensors",
    b"#" * 64,
    72,
    (("a", CATALOG.tensors["a"]),),
    CATALOG.shards,
    (Copy(0, Box((0,), (2,)), Read(0, 0, (1,))),),
    CATALOG.files,
    1 << 20,
)
PLAN = Plan((FILE,), None, "0" * 64, 8)
SUMMARY = PlanSummary(
    digest=PLAN.digest,
    files=(FileSummary(FILE.path, FILE.size, FILE.peak_bytes),),
    index=None,
    total_size=8,
    tensors=1,
    source_format="dcp",
    stamps=CATALOG.files,
    recipe="auto",
    include=(),
    exclude=(),
    skipped=("step",),
    unproved=None,
    ranks=0,
    shard_dim=0,
    tied={},
    config=None,
    keep_extra=False,
)


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


def test_a_file_plan_that_was_just_written_is_remembered_for_whoever_makes_the_file(tmp_path: Path) -> None:
    run = Run(open_store(str(tmp_path)))
    run.save_plan(SUMMARY, PLAN)
    assert run.header(0) == FILE.header
    assert run.file_plan(0) is FILE
    assert run.file_plan(0) is not FILE
    assert run.file_plan(0) == FILE
    assert run.header(0) == FILE.header
    with pytest.raises(PlanError, match="the step 'reshard' was not done here"):
        run.header(1)


def test_a_plan_is_read_once_and_whatever_replaces_it_is_seen(tmp_path: Path) -> None:
    run = Run(open_store(str(tmp_path)))
    run.save_plan(SUMMARY, PLAN)
    assert run.planned() == SUMMARY
    assert run.planned() is run.planned()
    other = replace(SUMMARY, digest="1" * 64)
    run.save_plan(other, PLAN)
    assert run.planned() == other
    document = tmp_path / ".hfdcp" / "plan.json"
    document.write_bytes(document.read_bytes()[:-9])
    with pytest.raises(ValidationError, match="not a plan"):
        run.planned()


@pytest.mark.parametrize("read", [Run.header, Run.file_plan], ids=["header", "all of it"])
def test_a_file_plan_that_was_damaged_since_is_refused(tmp_path: Path, read: Callable[[Run, int], object]) -> None:
    run = Run(open_store(str(tmp_path)))
    run.save_plan(SUMMARY, PLAN)
    document = tmp_path / ".hfdcp" / "plan" / "00001.json.gz"
    document.write_bytes(document.read_bytes()[:-9])
    with pytest.raises(ValidationError, match="not a readable file plan"):
        read(run, 0)
