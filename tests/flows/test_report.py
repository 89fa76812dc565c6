"""What a command tells a person."""

import pytest

from hfdcp_core.box import Box
from hfdcp_core.catalog import Shard, Skipped, Span, TensorSpec
from hfdcp_core.hub import Receipt
from hfdcp_core.inspection import Inspection, Tensor, Wanted
from hfdcp_core.job import Job
from hfdcp_core.manifest import FileRecord, Manifest, Statistics
from hfdcp_flows.report import (
    SHOWN_OVERFLOWS,
    SHOWN_SHARDS,
    SHOWN_TENSORS,
    left_out,
    of_inspection,
    of_manifest,
    of_receipt,
)

JOB = Job(source="runs/7b", sink="out", repo="me/7b")


def inspection(tensors: int, **more: object) -> Inspection:
    wanted = tuple(Wanted(f"w{n}", f"model.w{n}", TensorSpec("F32", (2,)), 4) for n in range(tensors))
    values = {"skipped": (), "unproved": None, "problems": ()} | more
    return Inspection(format="dcp", files=5, source_bytes=1000, wanted=wanted, **values)


def test_nothing_left_out_is_not_worth_a_line() -> None:
    assert left_out([]) == ""


def test_what_is_left_out_is_counted_by_reason_with_an_example() -> None:
    entries = [Skipped(f"optim.{n}", "optimizer state") for n in range(3)] + [Skipped("rng", "random-generator state")]
    assert left_out(entries) == ("left out 4 entries: 3 optimizer state (optim.0, …), 1 random-generator state (rng)")


def test_few_tensors_are_all_listed() -> None:
    text = of_inspection(inspection(SHOWN_TENSORS), JOB).text
    assert f"  w{SHOWN_TENSORS - 1}  F32[2]  4 shards" in text.splitlines()


def test_of_many_tensors_the_first_are_listed_and_the_rest_counted() -> None:
    lines = of_inspection(inspection(SHOWN_TENSORS + 1), JOB).text.splitlines()
    assert lines[-1] == "  … and 2 more (--json: all)"
    assert len(lines) == 2 + SHOWN_TENSORS


def test_problems_and_what_is_not_proved_are_said_last() -> None:
    found = inspection(0, unproved="no index", problems=("a: no shard holds [0:2]",))
    lines = of_inspection(found, JOB).text.splitlines()
    assert lines[-2:] == ["not proved complete: no index", "PROBLEM: a: no shard holds [0:2]"]
    assert "0 tensors, 0 B: none" in lines


@pytest.mark.parametrize(
    ("problems", "damaged", "status"),
    [((), 0, 0), (("a: no shard holds [0:2]",), 0, 4), (("a: CRC-32", "a: no shard holds [0:2]"), 1, 3)],
    ids=["nothing", "hole", "damaged-item"],
)
def test_the_status_is_that_of_the_fault_in_answer_and_document(
    problems: tuple[str, ...], damaged: int, status: int
) -> None:
    answer = of_inspection(inspection(1, problems=problems, damaged=damaged, examined=4), JOB)
    assert (answer.status, answer.document["exit_status"], answer.document["problems"]) == (
        status,
        status,
        list(problems),
    )
    said = "1 item damaged" if damaged else "nothing is damaged"
    assert f"read 4 shards from end to end: {said}" in answer.text.splitlines()


def rows(count: int, held: int) -> Tensor:
    """A tensor of so many rows, a file for each of those that are held."""
    shards = (
        Shard("model.w", "F32", Box((row, 0), (1, 2)), Span(f"__{row}_0.distcp", 100, 1100)) for row in range(held)
    )
    return Tensor("w", "model.w", TensorSpec("F32", (count, 2)), tuple(shards))


def test_a_tensor_is_drawn_with_a_line_for_each_shard_and_a_key_to_the_damage() -> None:
    lines = of_inspection(inspection(20, tensor=rows(3, 2)), JOB).text.splitlines()
    assert lines[1:4] == [
        "w  F32[3, 2]  2 shards",
        "saved as model.w",
        "down: dimension 0 of 3, across: dimension 1 of 2",
    ]
    assert lines[-3:] == [
        "  .  held by no shard",
        "  a  [0:1, 0:2]  rank 0: __0_0.distcp[100:1100]  1.0 KB",
        "  b  [1:2, 0:2]  rank 1: __1_0.distcp[100:1100]  1.0 KB",
    ]
    assert "w19" not in "".join(lines)


def test_of_many_shards_the_first_are_listed_and_the_rest_counted() -> None:
    count = SHOWN_SHARDS + 3
    answer = of_inspection(inspection(0, tensor=rows(count, count)), JOB)
    assert answer.text.splitlines()[-1] == "  … and 3 more (--json: all)"
    assert "held by" not in answer.text
    document = answer.document["tensor"]
    assert isinstance(document, dict)
    assert len(document["shards"]) == count


def receipt(*, created: bool, unchanged: bool) -> Receipt:
    return Receipt("me/7b", "main", "abc", "https://hub/me/7b", ("a", "b"), 2_000_000, created, unchanged)


def test_a_receipt_says_what_was_committed_where() -> None:
    assert of_receipt("push", receipt(created=True, unchanged=False), JOB).text == (
        "me/7b (created private): 2 files in one commit; 2.0 MB new, 0 B sent; the Hub's hashes are ours\n"
        "https://hub/me/7b\ncommit abc on main"
    )


def test_a_receipt_says_when_there_was_nothing_to_do() -> None:
    assert of_receipt("push", receipt(created=False, unchanged=True), JOB).text == (
        "me/7b already holds exactly this: https://hub/me/7b\ncommit abc on main"
    )


@pytest.mark.parametrize("tensors", [1, SHOWN_OVERFLOWS + 2])
def test_numbers_too_large_are_counted_and_the_worst_tensors_named(tensors: int) -> None:
    records = [FileRecord(f"{part}.safetensors", 1, "0", {}, overflowed={"w0": 50}) for part in "ab"]
    records += [FileRecord("c.safetensors", 1, "0", {}, overflowed={f"w{n}": n for n in range(1, tensors)})]
    lines = of_manifest("consolidate", Manifest("p", "s", "dcp", tuple(records)), JOB).text.splitlines()
    [line] = [line for line in lines if line.startswith("OVERFLOW")]
    assert line.startswith(f"OVERFLOW: {100 + sum(range(tensors))} numbers too large for the dtype")
    assert ": w0 100" in line
    assert line.endswith(" and 2 more") == (tensors > SHOWN_OVERFLOWS)


def test_where_every_number_fits_nothing_is_said_of_it() -> None:
    assert "OVERFLOW" not in of_manifest("consolidate", Manifest("p", "s", "dcp", ()), JOB).text


def test_tensors_with_nan_or_inf_or_nothing_but_zeros_are_warned_of() -> None:
    found = Statistics("basic", {"a": 2, "b": 7}, {"a": 1}, ("c",))
    records = (FileRecord("1", 1, "0" * 64, dict.fromkeys("abc", "crc64nvme:0"), statistics=found),)
    manifest = Manifest("0" * 64, "0" * 64, "dcp", records)
    lines = of_manifest("consolidate", manifest, JOB).text.splitlines()
    assert [line for line in lines if line.startswith("WARNING")] == [
        "WARNING: 2 tensors hold NaN: b 7, a 2",
        "WARNING: 1 tensor holds Inf: a 1",
        "WARNING: 1 tensor is all zero: c",
    ]
