"""What can be typed after ``hfdcp``: commands, options, and help texts that teach by example."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hfdcp_core
from hfdcp_core.errors import UsageError

UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{infix}B": base ** (power + 1)
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("KMGT")
}
"""Bytes in one unit: KB, MB, GB and TB are decimal, KiB, MiB, GiB and TiB are binary."""
_UNITS_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}


def size(text: str) -> int:
    """Return a number of bytes that was written with or without a unit.

    >>> size("5GB"), size("256MiB"), size("1.5 kb"), size("1000")
    (5000000000, 268435456, 1500, 1000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS_BY_LOWER.get(found[2]) if found else None
    if found is None or unit is None or (nbytes := round(float(found[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 5GB, 500MB or 256MiB")
    return nbytes


def count(text: str) -> int:
    """Return a whole number of at least one.

    >>> count("4")
    4
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def json_object(text: str) -> Mapping[str, object]:
    """Return a JSON object, given as such or as ``@file``.

    >>> json_object('{"anon": true}')
    {'anon': True}
    """
    try:
        value = json.loads(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        # What stands in the options may be a secret, so the message does not repeat it.
        raise argparse.ArgumentTypeError(f"not a JSON object, nor @file with one ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('not a JSON object such as \'{"token": "anon"}\'')
    return value


def file_index(text: str) -> Mapping[str, int]:
    """Return the tensors' file numbers from a JSON file: ``{"model.norm.weight": 1, …}``."""
    value = json_object(f"@{text}")
    wrong = [fqn for fqn, number in value.items() if type(number) is not int or number < 1]
    if wrong:
        raise argparse.ArgumentTypeError(f"{text}: a file number is 1, 2, …; it is not for {', '.join(wrong[:5])}")
    return {fqn: number for fqn, number in value.items() if isinstance(number, int)}


@dataclass(frozen=True, slots=True)
class Command:
    """One command, as its help shows it."""

    name: str
    """What is typed after ``hfdcp``."""
    summary: str
    """Its line in the overview."""
    about: str
    """What one should know before using it."""
    examples: tuple[str, ...]
    """Command lines that work, without the leading ``hfdcp``."""
    options: tuple[Callable[[argparse.ArgumentParser], None], ...]
    """What adds its arguments to a parser."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command, and how to see what would be right."""
        raise UsageError(f"{message}\n{self.format_usage().strip()}\nsee: {self.prog} --help")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line.

    Raises:
        UsageError: It makes no sense.
    """
    return build_parser().parse_args(argv)


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="hfdcp", description=ABOUT, epilog=STATUSES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"hfdcp {hfdcp_core.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.\n{command.about}",
            epilog="\n".join(["examples:", *(f"  hfdcp {example}" for example in command.examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for add in (*command.options, _display):
            add(added)
    return parser


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="checkpoint: a folder, or any URL that fsspec knows")


def _url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="URL", help="checkpoint: a folder, or any URL that fsspec knows")


def _found(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where the checkpoint is")
    group.add_argument(
        "--also",
        metavar="URL",
        action="append",
        default=[],
        help="another place that holds files of the same checkpoint, such as a node's own disk; may be repeated",
    )
    group.add_argument(
        "--latest",
        action="store_true",
        help="the newest complete step below the place that is named; steps that are not complete are passed over",
    )


def _sink(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sink", metavar="SINK", help="where the output goes: a folder or URL")


def _sink_to_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sink", metavar="SINK", nargs="?", default="", help="a consolidated checkpoint: folder or URL")


def _planned_sink(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sink", metavar="SINK", nargs="?", default="", help="where the output would go")


def _consolidated(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sink", metavar="CHECKPOINT", help="what `hfdcp consolidate` wrote: a folder or URL")


def _repo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", metavar="REPO", help="repository on the Hub, as owner/name")


def _compared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source", metavar="URL", default="", help="read this checkpoint too, and compare every tensor"
    )
    parser.add_argument("--repo", metavar="REPO", default="", help="compare with what the Hub has, as owner/name")
    parser.add_argument("--revision", metavar="REV", default="main", help="which revision of REPO (default: main)")


def _chosen(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which tensors, under which names")
    group.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        default=[],
        help="take these names only; may be repeated; '*' takes every tensor, optimizer state too",
    )
    group.add_argument(
        "--exclude", metavar="GLOB", action="append", default=[], help="leave these names out; may be repeated"
    )
    group.add_argument(
        "--recipe",
        metavar="NAME",
        default="auto",
        help="auto: wrapper prefixes cleaned (default); none: names as saved; or rules such as module,strip:net",
    )
    group.add_argument(
        "--world-size",
        metavar="N",
        type=count,
        help="how many ranks wrote it, where the files do not state the global shapes",
    )
    group.add_argument(
        "--accept-unproved",
        action="store_true",
        help="go on where nothing proves that the checkpoint is complete; the manifest says so",
    )


def _beside(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tied tensors, and what is no tensor")
    group.add_argument(
        "--config",
        metavar="URL",
        default="",
        help="the model's config.json, or a folder with one (default: the one beside the checkpoint); a head that it "
        "ties to the embedding is left out where the bytes are equal",
    )
    group.add_argument(
        "--untie", action="store_true", help="write tied tensors too, and a config.json that says they are not tied"
    )
    group.add_argument(
        "--keep-extra",
        action="store_true",
        help="save numbers, texts, lists and dictionaries of the checkpoint as hfdcp-extra.json, and push that too",
    )


def _shaped(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output files")
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--max-file-size",
        metavar="SIZE",
        type=size,
        default=5_000_000_000,
        help="at most so many bytes of tensors in a file (default: 5GB)",
    )
    either.add_argument(
        "--file-index", metavar="FILE.json", type=file_index, help='which tensor goes into which file: {"name": 1, …}'
    )
    group.add_argument(
        "--memory", metavar="SIZE", type=size, default=256 << 20, help="peak memory of the process (default: 256MiB)"
    )
    group.add_argument(
        "--workers", metavar="N", type=count, default=0, help="output files in flight (default: one for each core)"
    )
    group.add_argument("--overwrite", action="store_true", help="replace another output that the sink holds")


def _kept(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sink", metavar="URL", default="", help="keep the output here (default: a work folder, removed after success)"
    )
    parser.add_argument("--direct", action="store_true", help="run the same five steps without Prefect")


def _committed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("commit")
    group.add_argument("--revision", metavar="BRANCH", default="main", help="branch to commit to (default: main)")
    group.add_argument("--message", metavar="TEXT", default="", help="commit message")
    group.add_argument(
        "--allow-public",
        action="store_true",
        help="push to a repository that is public already; new ones are always private",
    )


def _replacing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace another model that the repository holds")


def _stored(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("storage")
    for name, whose in (
        ("--storage-options", "both ends"),
        ("--source-options", "the source"),
        ("--sink-options", "the sink"),
    ):
        group.add_argument(name, metavar="JSON|@FILE", type=json_object, help=f"fsspec's options for {whose}")


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", metavar="DIR", default="hfdcp-demo", help="where everything goes (default: ./hfdcp-demo)"
    )
    parser.add_argument("--direct", action="store_true", help="without Prefect: half a minute quicker")
    parser.add_argument("--keep", action="store_true", help="leave the Hub on loopback running until Ctrl-C")


def _display(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is shown")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout, errors too")
    group.add_argument("--quiet", action="store_true", help="no progress, only the result")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


ABOUT = """\
Distributed PyTorch checkpoints become verified Hugging Face repositories: one pass, little memory, every byte checked.

Start with `hfdcp demo` (a real small checkpoint, published to a Hub on this machine), then look at your own:
  hfdcp inspect runs/7b/step-1000"""

STATUSES = """\
exit status: 0 done; 2 usage; 3 the source is wrong; 4 what was asked cannot be; 5 storage failed; 6 the Hub refused
or failed; 7 what was written is not what was meant; 130 interrupted (the same command goes on from there)
more about one command: hfdcp COMMAND --help"""

COMMANDS = (
    Command(
        "inspect",
        "say what lies at a URL: format, tensors, bytes, what is left out, what is missing",
        "Reads metadata only, and writes nothing.",
        ("inspect runs/7b/step-1000", "inspect gs://bucket/step-1000 --json", "inspect runs/7b --latest"),
        (_url, _found, _chosen, _beside, _stored),
    ),
    Command(
        "plan",
        "dry run: which files would be written, how large, in how much memory",
        "Proves that every wanted element comes from exactly one place, and writes nothing.",
        ("plan runs/7b/step-1000 --max-file-size 2GB",),
        (_source, _planned_sink, _found, _chosen, _beside, _shaped, _stored),
    ),
    Command(
        "consolidate",
        "write the checkpoint as safetensors files with index and manifest",
        "Gathers, reshards, consolidates and validates. A run that was stopped goes on where it was: give the same\n"
        "command again.",
        (
            "consolidate runs/7b/step-1000 out/7b",
            "consolidate gs://bucket/step-1000 out/7b --exclude 'ema.*' --memory 1GiB",
            "consolidate runs/7b/step-1000 out/7b --config meta/config.json --keep-extra",
            "consolidate /mnt/node0/step-1000 out/7b --also /mnt/node1/step-1000 --also /mnt/node2/step-1000",
        ),
        (_source, _sink, _found, _chosen, _beside, _shaped, _stored),
    ),
    Command(
        "validate",
        "read and hash an output again, against its manifest, its source or the Hub",
        "At any later day: tells whether every byte is still what was written.",
        ("validate out/7b", "validate out/7b --source runs/7b/step-1000 --repo me/7b"),
        (_sink_to_validate, _compared, _found, _stored),
    ),
    Command(
        "push",
        "commit a consolidated checkpoint to the Hub, in one commit",
        "The token is huggingface_hub's own: HF_TOKEN or `hf auth login`. A new repository is private.",
        ("push out/7b me/7b --message 'Step 1000'",),
        (_consolidated, _repo, _committed, _replacing, _stored),
    ),
    Command(
        "publish",
        "run the whole chain: checkpoint in, verified repository out",
        "Runs as a Prefect flow, on the API that is configured or else on an embedded server; --direct does without.",
        (
            "publish runs/7b/step-1000 me/7b",
            "publish gs://bucket/step-1000 me/7b --sink out/7b --direct",
            "publish runs/7b me/7b --latest",
        ),
        (_source, _repo, _kept, _found, _chosen, _beside, _shaped, _committed, _stored),
    ),
    Command(
        "demo",
        "publish a real small distributed checkpoint to a Hub on this machine",
        "Four torch.distributed ranks save it; nothing to sign up for, and nothing leaves the machine.",
        ("demo", "demo --folder try --direct --keep"),
        (_demo,),
    ),
)
"""All commands, in the order of the overview."""
