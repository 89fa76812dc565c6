"""What the README tells a reader to type exists, and what it shows of the tree is there."""

import re
import shlex
from pathlib import Path

import pytest

from hfdcp_core.errors import HfdcpError
from hfdcp_flows.arguments import COMMANDS, build_parser, parse

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
SHOWN = sorted(
    {line.strip().removeprefix("$ ") for line in README.splitlines() if re.match(r"(\$| {3}) hfdcp [a-z]", line)}
)
OPTIONS = sorted(set(re.findall(r"--[a-z][a-z-]+", README)))


@pytest.mark.parametrize("line", SHOWN)
def test_a_command_that_is_shown_can_be_typed(line: str) -> None:
    assert parse(shlex.split(line)[1:]).command in line


def test_every_command_of_this_version_is_shown_or_named() -> None:
    assert [command.name for command in COMMANDS if f"hfdcp {command.name}" not in README] == []


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_is_named_exists(option: str) -> None:
    helps = [command.format_help() for command in _commands()]
    elsewhere = {"--root", "--signature", "--ignore"}  # of the Hub on loopback, and of model_signing
    assert option in elsewhere or any(re.search(rf"{option}\b(?!-)", text) for text in helps)


def _commands() -> list[object]:
    actions = [action for action in build_parser()._actions if action.dest == "command"]
    return list(actions[0].choices.values())


@pytest.mark.parametrize("fault", [HfdcpError, *HfdcpError.__subclasses__()], ids=lambda fault: fault.__name__)
def test_every_exit_status_is_explained(fault: type[HfdcpError]) -> None:
    assert f"\n| {fault.exit_status} | " in README


@pytest.mark.parametrize("script", re.findall(r"bash (\S+)", README))
def test_a_script_that_is_shown_is_there(script: str) -> None:
    assert (ROOT / script).is_file()


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_a_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_continuous_integration_calls_the_test_command_of_the_readme() -> None:
    assert "    bash .ci/test\n" in README
    assert '/test"' in (ROOT / ".ci" / "run").read_text().splitlines()[-1]
