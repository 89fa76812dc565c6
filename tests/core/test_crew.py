"""Threads help where a processor is free, and the same work is done, in the same order, where none is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from hfdcp_core.crew import Crew, Helper, usable_processors


def test_a_crew_is_crowded_while_as_many_files_are_made_as_there_are_processors() -> None:
    crew = Crew(2)
    with crew.making_a_file():
        assert not crew.crowded
        with crew.making_a_file():
            assert crew.crowded
        assert not crew.crowded


def test_a_processor_is_given_back_when_a_file_fails() -> None:
    crew = Crew(1)
    with pytest.raises(ValueError, match="broken"), crew.making_a_file():
        raise ValueError("broken")
    assert not crew.crowded


@pytest.mark.parametrize("processors", [1, 2], ids=["crowded", "free"])
def test_work_is_done_in_the_order_of_asking_by_a_helper_or_by_who_asks(processors: int) -> None:
    crew, done, threads = Crew(processors), [], set()

    def work(number: int) -> None:
        done.append(number)
        threads.add(threading.get_ident())

    with crew.making_a_file(), Helper(crew, "help") as helper:
        waits = [helper.begin(partial(work, number)) for number in range(5)]
        for wait in waits:
            wait()
    assert done == [0, 1, 2, 3, 4]
    assert (threads == {threading.get_ident()}) == (processors == 1)


def test_what_a_helper_still_has_to_do_is_done_before_what_is_asked_of_a_crowded_crew() -> None:
    crew, done, go = Crew(1), [], threading.Event()
    with Helper(crew, "help") as helper:
        helper.begin(lambda: (go.wait(), done.append("first"))[1])
        with crew.making_a_file():
            last = helper.begin(lambda: done.append("second"))
            go.set()
            last()
    assert done == ["first", "second"]


@pytest.mark.parametrize("processors", [1, 2], ids=["crowded", "free"])
def test_a_fault_reaches_who_waits(processors: int) -> None:
    def fail() -> None:
        raise ValueError("broken")

    crew = Crew(processors)
    with crew.making_a_file(), Helper(crew, "help") as helper, pytest.raises(ValueError, match="broken"):
        helper.begin(fail)()


def test_many_files_count_right() -> None:
    crew = Crew(1)

    def make(_: int) -> None:
        for _ in range(200):
            with crew.making_a_file():
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
    assert not crew.crowded
    with crew.making_a_file():
        assert crew.crowded


def test_there_is_a_processor() -> None:
    assert usable_processors() >= 1
