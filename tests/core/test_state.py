"""How far a run is, and whether it should go on."""

import threading

import pytest

from hfdcp_core.errors import Cancelled
from hfdcp_core.state import SILENT, Cancellation


def test_nothing_is_cancelled_before_somebody_asks() -> None:
    Cancellation().check()


def test_a_wish_made_in_another_thread_stops_every_check_from_then_on() -> None:
    wish = Cancellation()
    thread = threading.Thread(target=wish.cancel)
    thread.start()
    thread.join()
    for _ in range(2):
        with pytest.raises(Cancelled, match="stopped on request") as stopped:
            wish.check()
        assert stopped.value.exit_status == 130


def test_silent_progress_takes_every_report() -> None:
    SILENT.begin("gather", 1)
    SILENT.advance(1)
    SILENT.say("done")
