"""What can be typed after ``hfdcp``."""

import argparse
import shlex
from pathlib import Path

import pytest

from hfdcp_core.errors import UsageError
from hfdcp_flows.arguments import COMMANDS, Command, Parser, parse
from hfdcp_flows.typed import count, file_index, json_object, size

EXAMPLES = [example for command in COMMANDS for example in command.examples]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_in_the_help_is_a_command_line_that_parses(example: str) -> None:
    assert parse(shlex.split(example)).command == example.split(maxsplit=1)[0]


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse([command, "--help"])
    shown = capsys.readouterr().out
    assert f"\nexamples:\n  hfdcp {command}" in shown
    assert "--json" in shown


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("700B", 700),
        ("5GB", 5 * 10**9),
        ("500 MB", 5 * 10**8),
        ("256MiB", 256 << 20),
        ("1.5gib", 3 << 29),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_may_have_a_unit(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "5G", "GB", "-1", "0", "0.4B", "1,5GB", "5 GB 2", "nan", "1e9"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; write for example 5GB"):
        size(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", ""])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of 1 or more"):
        count(text)


def test_options_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text('{"token": "anon"}')
    assert json_object(f"@{tmp_path}/options.json") == {"token": "anon"}


@pytest.mark.parametrize("text", ['{"secret": "abc', "[1]", "3", "@does-not-exist", "secret"])
def test_what_is_no_json_object_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a JSON object") as caught:
        json_object(text)
    assert "secret" not in str(caught.value)


def test_a_file_index_gives_every_name_its_number(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"a": 1, "b": 2}')
    assert file_index(f"{tmp_path}/index.json") == {"a": 1, "b": 2}


@pytest.mark.parametrize("value", ["0", "-1", "true", '"1"', "1.0", "null"])
def test_a_file_number_that_is_none_is_refused_by_name(tmp_path: Path, value: str) -> None:
    (tmp_path / "index.json").write_text(f'{{"fine": 1, "wrong.weight": {value}}}')
    with pytest.raises(argparse.ArgumentTypeError, match=r"it is not for wrong\.weight"):
        file_index(f"{tmp_path}/index.json")


WRONG = {
    "no-command": ([], "the following arguments are required: COMMAND"),
    "unknown-command": (["merge"], "invalid choice: 'merge'"),
    "no-sink": (["consolidate", "a"], "required: SINK"),
    "unknown-option": (["inspect", "a", "--fast"], "unrecognized arguments: --fast"),
    "abbreviated-option": (["inspect", "a", "--incl", "b"], "unrecognized arguments"),
    "size": (["plan", "a", "--max-file-size", "huge"], "argument --max-file-size: 'huge' is not a size"),
    "publish-for-ranks": (["publish", "a", "me/b", "--ranks", "4"], "unrecognized arguments: --ranks 4"),
    "no-ranks": (["plan", "a", "--ranks", "0"], "argument --ranks: '0' is not a whole number of 1 or more"),
    "ranks-of-a-size": (["plan", "a", "--ranks", "4", "--max-file-size", "5GB"], "argument --max-file-size"),
    "two-layouts": (["plan", "a", "--max-file-size", "5GB", "--file-index", "x"], "argument --file-index"),
}


@pytest.mark.parametrize(("argv", "message"), WRONG.values(), ids=WRONG)
def test_a_command_line_that_makes_no_sense_is_a_usage_error_that_shows_the_way(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)usage: hfdcp.*see: hfdcp .*--help") as caught:
        parse(argv)
    assert message in str(caught.value)


def taking_text(command: Command) -> tuple[list[str], list[str]]:
    """Return the names of a command's arguments, and of its options that take a value."""
    parser = Parser(add_help=False)
    for add in command.options:
        add(parser)
    valued = [action for action in parser._actions if action.nargs != 0]
    return (
        [action.dest for action in valued if not action.option_strings],
        [action.option_strings[0] for action in valued if action.option_strings],
    )


@pytest.mark.parametrize("command", COMMANDS, ids=[command.name for command in COMMANDS])
def test_an_empty_text_is_refused_wherever_one_can_be_given(command: Command) -> None:
    """A shell makes one of a variable that is not set; ``--tensor ""`` must not be as if nothing had been asked."""
    names, options = taking_text(command)
    given = [["x" if place != number else "" for place in range(len(names))] for number in range(len(names))]
    given += [["x"] * len(names) + [option, ""] for option in options]
    assert given
    for arguments in given:
        with pytest.raises(UsageError, match=r"^argument \S+: ") as caught:
            parse([command.name, *arguments])
        assert "see: hfdcp" in str(caught.value)


def test_patterns_may_be_repeated() -> None:
    args = parse(["inspect", "a", "--include", "x.*", "--include", "y", "--exclude", "z"])
    assert (args.include, args.exclude) == (["x.*", "y"], ["z"])


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["--version"])
    assert capsys.readouterr().out.startswith("hfdcp 0.")
