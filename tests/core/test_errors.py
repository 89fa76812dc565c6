import inspect
import pickle

import pytest

from hfdcp_core import errors
from hfdcp_core.errors import (
    Conflict,
    HfdcpError,
    HubError,
    HubUnavailable,
    NoSpace,
    PlanError,
    RateLimited,
    StorageError,
    StorageNotFound,
)

CLASSES = [error for _, error in inspect.getmembers(errors, inspect.isclass) if issubclass(error, HfdcpError)]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_only_a_fault_of_the_world_is_worth_another_try(error: type[HfdcpError]) -> None:
    assert error.retryable is (error in {StorageError, RateLimited, HubUnavailable})


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_class_has_the_exit_status_of_its_branch(error: type[HfdcpError]) -> None:
    branch = next(
        parent for parent in reversed(error.__mro__) if issubclass(parent, HfdcpError) and "exit_status" in vars(parent)
    )
    branches = {
        "UsageError": 2,
        "SourceError": 3,
        "PlanError": 4,
        "StorageError": 5,
        "HubError": 6,
        "ValidationError": 7,
        "Cancelled": 130,
    }
    expected = next((status for name, status in branches.items() if name in {c.__name__ for c in error.__mro__}), 1)
    assert branch is HfdcpError
    assert error.exit_status == expected


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_the_tree_in_the_docstring_names_every_class(error: type[HfdcpError]) -> None:
    assert error.__name__ in (errors.__doc__ or "")


def test_a_message_lists_its_problems_below_it() -> None:
    assert str(PlanError("cannot", ["a: hole", "b: overlap"])) == "cannot\n  - a: hole\n  - b: overlap"


def test_a_message_spells_out_twenty_problems_and_counts_the_rest() -> None:
    error = PlanError("cannot", (f"problem {number}" for number in range(25)))
    lines = str(error).splitlines()
    assert len(error.problems) == 25
    assert lines[-2:] == ["  - problem 19", "  - … and 5 more"]


def test_problems_are_raised_once_for_all_and_not_without_any() -> None:
    PlanError.raise_for("cannot", [])
    with pytest.raises(PlanError, match="cannot") as caught:
        PlanError.raise_for("cannot", iter(["one", "two"]))
    assert caught.value.problems == ("one", "two")


def test_a_place_is_put_in_front_without_losing_class_or_problems() -> None:
    error = StorageNotFound("no such file", ["a"]).within("s3://bucket")
    assert type(error) is StorageNotFound
    assert (error.message, error.problems) == ("s3://bucket: no such file", ("a",))


@pytest.mark.parametrize("error", [NoSpace("full"), Conflict("moved", ["a", "b"]), HubError("down")], ids=repr)
def test_an_error_crosses_a_process_border_whole(error: HfdcpError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.message, again.problems) == (type(error), error.message, error.problems)
