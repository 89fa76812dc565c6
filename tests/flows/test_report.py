"""What a command tells a person."""

from hfdcp_core.catalog import Skipped, TensorSpec
from hfdcp_core.hub import Receipt
from hfdcp_core.inspection import Inspection, Wanted
from hfdcp_core.job import Job
from hfdcp_flows.report import SHOWN_TENSORS, left_out, of_inspection, of_receipt

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


def receipt(*, created: bool, unchanged: bool) -> Receipt:
    return Receipt("me/7b", "main", "abc", "https://hub/me/7b", ("a", "b"), 2_000_000, created, unchanged)


def test_a_receipt_says_what_was_committed_where() -> None:
    assert of_receipt("push", receipt(created=True, unchanged=False), JOB).text == (
        "me/7b (created private): 2 files in one commit, 2.0 MB uploaded, and the Hub's hashes are ours\n"
        "https://hub/me/7b\ncommit abc on main"
    )


def test_a_receipt_says_when_there_was_nothing_to_do() -> None:
    assert of_receipt("push", receipt(created=False, unchanged=True), JOB).text == (
        "me/7b already holds exactly this: https://hub/me/7b\ncommit abc on main"
    )
