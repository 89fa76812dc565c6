"""The command line: ``hfdcp COMMAND …``.

`main` reads what was typed, shows progress on stderr while the command runs, prints its answer on stdout and turns
every fault into one clear message and an exit status. What the commands do stands in `hfdcp_flows.commands`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from hfdcp_core.errors import Cancelled, HfdcpError, StorageError
from hfdcp_core.state import Cancellation
from hfdcp_flows.arguments import parse
from hfdcp_flows.commands import ANSWERS, Control, heeds_a_wish
from hfdcp_flows.report import Answer
from hfdcp_flows.screen import shown

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What asks us to stop: Ctrl-C, and whoever manages processes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if sys.stderr is None:  # closed by the caller (2>&-): nobody wants to hear, which is no fault
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
    given = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in given
    if "--debug" not in given:
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs each failed request; errors say what matters
    try:
        answer = run(parse(given))
    except KeyboardInterrupt:
        return refuse(Cancelled("interrupted; run the same command again to go on from here"), as_json=as_json)
    except Exception as error:  # noqa: BLE001 - the edge of the program: every fault becomes a message and a status
        if "--debug" in given:
            traceback.print_exception(error)
        return refuse(error, as_json=as_json, every="inspect" in given[:1])
    try:
        write(sys.stdout, as_document(answer.document) if as_json else answer.text)
    except OSError as error:
        silence(sys.stdout)
        return refuse(StorageError(f"the command has done its work, but its answer cannot be written: {error}"))
    finally:
        answer.then()
    return answer.status


def run(args: Namespace) -> Answer:
    """Carry out a command, with progress on the screen and an ear for Ctrl-C."""
    cancellation = Cancellation()
    with stoppable(cancellation, heeding=heeds_a_wish(args)), shown(kind_of_screen(args)) as progress:
        return ANSWERS[args.command](args, Control(progress, cancellation))


def kind_of_screen(args: Namespace) -> str:
    """Return which progress suits: none, bars for a person who watches, lines for a log."""
    if args.quiet:
        return "none"
    return "bars" if sys.stderr.isatty() and not args.json else "lines"


@contextmanager
def stoppable(cancellation: Cancellation, *, heeding: bool) -> Iterator[None]:
    """Turn the first signal into a wish to stop, where the command is ``heeding`` it, and any other into an end."""
    wished = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal wished
        cancellation.cancel()
        if wished or not heeding:
            raise KeyboardInterrupt
        wished = True
        write(sys.stderr, "stopping; once more stops at once")

    before = {name: signal.signal(name, stop) for name in SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def refuse(error: Exception, *, as_json: bool = False, every: bool = False) -> int:
    """Say what went wrong, with ``every`` problem or the first ones, and return the exit status that belongs to it."""
    if isinstance(error, HfdcpError):
        message, problems, status = error.message, error.problems, error.exit_status
        text = "\n".join([message, *(f"  - {problem}" for problem in problems)]) if every else str(error)
    else:
        message, problems, status = f"unexpected {type(error).__name__}: {error}", (), HfdcpError.exit_status
        text = f"{message}\nthis is a fault of hfdcp; --debug shows where it happened"
    if as_json:
        what = {"class": type(error).__name__, "message": message, "problems": problems, "exit_status": status}
        # what `inspect` found wrong stands in one place, whether it could go on after it or not
        inspected = {"problems": problems or (message,), "exit_status": status} if every else {}
        write(sys.stdout, as_document({"error": what, **inspected}))
    else:
        write(sys.stderr, f"hfdcp: {text}")
    return status


def as_document(value: object) -> str:
    """Return the JSON document, in ASCII: whatever the terminal's encoding, it can be written and parsed."""
    return json.dumps(value, indent=2)


def write(stream: TextIO, text: str) -> None:
    """Print ``text``; where nobody reads any more (``hfdcp … | head``) the command has still done its work."""
    try:
        print(printable(text, stream.encoding), file=stream, flush=True)
    except BrokenPipeError:
        silence(stream)


def printable(text: str, encoding: str | None) -> str:
    r"""Escape what would steer a terminal or cannot be written there: names come from strangers' files.

    >>> printable("a\x1b[2Jb\ncafé", "ascii")
    'a\\x1b[2Jb\ncaf\\xe9'
    """
    shown = "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)
    encoding = encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def silence(stream: TextIO) -> None:
    """Let a stream that failed go nowhere: the interpreter flushes it once more at exit, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
