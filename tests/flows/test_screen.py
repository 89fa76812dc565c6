"""Progress for a person: plain lines in a log, bars on a terminal, nothing when asked."""

import io
import os
import pty
import subprocess
import sys
import threading

import pytest

from hfdcp_core.state import SILENT
from hfdcp_flows.screen import PLAIN_EVERY_S, PlainLines, in_bytes, shown


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def lines(stream: io.StringIO, clock: Clock) -> PlainLines:
    return PlainLines(stream, clock)


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (999_960, "1.0 MB"), (5_000_000_000, "5.0 GB"), (3e15, "3000.0 TB")],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(number: float, words: str) -> None:
    assert in_bytes(number) == words


def test_a_step_that_ends_gives_one_line_with_bytes_and_time(
    lines: PlainLines, stream: io.StringIO, clock: Clock
) -> None:
    lines.begin("consolidate", 2_000_000)
    lines.advance(2_000_000)
    clock.now_s += 2
    lines.begin("validate", 0)
    assert stream.getvalue() == "consolidate: 2.0 MB in 2.0 s\n"


def test_a_step_without_bytes_gives_its_time(lines: PlainLines, stream: io.StringIO, clock: Clock) -> None:
    lines.begin("gather", 0)
    clock.now_s += 0.5
    lines.close(whole=True)
    assert stream.getvalue() == "gather: 0.5 s\n"


def test_a_long_step_is_heard_of_now_and_then_with_rate_and_time_left(
    lines: PlainLines, stream: io.StringIO, clock: Clock
) -> None:
    lines.begin("consolidate", 100_000_000)
    for _ in range(4):
        clock.now_s += PLAIN_EVERY_S / 2
        lines.advance(10_000_000)
    assert stream.getvalue() == (
        "consolidate: 20.0 MB of 100.0 MB, 4.0 MB/s, 20 s left\nconsolidate: 40.0 MB of 100.0 MB, 4.0 MB/s, 15 s left\n"
    )


def test_a_step_that_was_stopped_says_how_far_it_came(lines: PlainLines, stream: io.StringIO) -> None:
    lines.begin("consolidate", 10_000)
    lines.advance(4_000)
    lines.close(whole=False)
    assert stream.getvalue() == "consolidate: stopped at 4.0 KB of 10.0 KB\n"


def test_a_short_step_without_bytes_is_not_worth_a_line(lines: PlainLines, stream: io.StringIO) -> None:
    lines.begin("gather", 0)
    lines.close(whole=True)
    assert stream.getvalue() == ""


def test_closing_twice_says_nothing_new(lines: PlainLines, stream: io.StringIO) -> None:
    lines.begin("gather", 10)
    lines.advance(10)
    lines.close(whole=True)
    once = stream.getvalue()
    lines.close(whole=True)
    assert stream.getvalue() == once


def test_bytes_from_many_threads_are_all_counted(lines: PlainLines, stream: io.StringIO) -> None:
    lines.begin("consolidate", 8_000)
    threads = [threading.Thread(target=lambda: [lines.advance(1) for _ in range(1_000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close(whole=True)
    assert stream.getvalue() == "consolidate: 8.0 KB in 0.0 s\n"


def test_a_line_is_written_as_it_is(lines: PlainLines, stream: io.StringIO) -> None:
    lines.say("left out 2 entries: [optim]")
    assert stream.getvalue() == "left out 2 entries: [optim]\n"


def test_quiet_shows_nothing() -> None:
    with shown("none") as progress:
        assert progress is SILENT


BARS = """
from hfdcp_flows.screen import shown
with shown("bars") as progress:
    progress.begin("consolidate", 2_000_000)
    progress.advance(2_000_000)
    progress.say("left out 2 entries: [optim]")
    progress.begin("validate", 0)
"""


def test_on_a_terminal_there_is_a_bar_with_bytes_and_lines_keep_their_brackets() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", BARS]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, check=True, env=environment)
    os.close(theirs)
    seen = b""
    while piece := _read(ours):
        seen += piece
    os.close(ours)
    text = seen.decode()
    assert "left out 2 entries: [optim]" in text
    assert "2.0/2.0 MB" in text
    assert "validate" in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says EIO where the other end is closed
        return b""
