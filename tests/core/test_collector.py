"""The garbage collector rests while many values are made, and no longer."""

from __future__ import annotations

import gc

import pytest

from hfdcp_core.collector import without_collector


@without_collector()
def _rests() -> bool:
    return not gc.isenabled()


def test_the_collector_rests_inside_of_a_function_each_time_it_is_called() -> None:
    assert (_rests(), gc.isenabled()) == (True, True)
    assert (_rests(), gc.isenabled()) == (True, True)


def test_it_works_again_after_a_fault() -> None:
    with pytest.raises(ValueError, match="fault"), without_collector():
        raise ValueError("fault")
    assert gc.isenabled()


def test_it_stays_still_where_it_was_before() -> None:
    gc.disable()
    try:
        _rests()
        assert not gc.isenabled()
    finally:
        gc.enable()
