"""What can be typed after ``hfdcp``: commands, and help texts that teach by example."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import hfdcp_core
from hfdcp_core.errors import UsageError
from hfdcp_flows import options


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
        for add in (*command.options, options.display):
            add(added)
    return parser


ABOUT = """\
Distributed PyTorch checkpoints become verified Hugging Face repositories: one pass, little memory, every byte checked.

Start with `hfdcp demo` (a real small checkpoint, published to a Hub on this machine), then look at your own:
  hfdcp inspect runs/7b/step-1000"""

STATUSES = """\
exit status: 0 done; 1 (diff) they differ; 2 usage; 3 the source is wrong; 4 what was asked cannot be; 5 storage
failed; 6 the Hub refused or failed; 7 what was written is not what was meant; 130 interrupted (the same command goes
on from there)
more about one command: hfdcp COMMAND --help"""

COMMANDS = (
    Command(
        "inspect",
        "say what lies at a URL: format, tensors, bytes, what is left out, all that is missing or damaged",
        "Reads metadata only (--deep: every byte), and writes nothing. The exit status tells of damage.",
        (
            "inspect runs/7b/step-1000",
            "inspect gs://bucket/step-1000 --json",
            "inspect runs/7b --latest --deep",
            "inspect runs/7b/step-1000 --tensor model.embed_tokens.weight",
        ),
        (options.url, options.looked_at, options.found, options.chosen, options.beside, options.stored),
    ),
    Command(
        "plan",
        "dry run: which files would be written, how large, in how much memory",
        "Proves that every wanted element comes from exactly one place, and writes nothing.",
        (
            "plan runs/7b/step-1000 --max-file-size 2GB",
            "plan runs/7b/step-1000 --include '*' --ranks 16",
            "plan runs/7b/step-1000 --recipe torchtitan-llama3 --config meta --explain lm_head.weight",
            "plan runs/7b/step-1000 --config meta --infer-recipe",
        ),
        (
            options.source,
            options.planned_sink,
            options.explained,
            options.found,
            options.chosen,
            options.numbers,
            options.counted,
            options.beside,
            options.completed,
            options.packed_or_cut,
            options.stored,
        ),
    ),
    Command(
        "consolidate",
        "write the checkpoint as safetensors files with index and manifest, or as files for the ranks of a training",
        "Gathers, reshards, consolidates and validates. A run that was stopped goes on where it was: give the same\n"
        "command again.",
        (
            "consolidate runs/7b/step-1000 out/7b",
            "consolidate gs://bucket/step-1000 out/7b --exclude 'ema.*' --memory 1GiB",
            "consolidate runs/7b/step-1000 out/7b --config meta/config.json --keep-extra",
            "consolidate runs/7b/step-1000 out/7b --dtype bfloat16 --keep-dtype '*.router.weight'",
            "consolidate hf://deepseek-ai/DeepSeek-V3 out/v3 --dequantize",
            "consolidate runs/7b/step-1000 for-8-ranks --recipe none --ranks 8",
            "consolidate runs/titan/step-1000 out/7b --recipe torchtitan-llama3 --base meta-llama/Llama-3.1-8B",
            "consolidate /mnt/node0/step-1000 out/7b --also /mnt/node1/step-1000 --also /mnt/node2/step-1000",
        ),
        (
            options.source,
            options.sink,
            options.found,
            options.chosen,
            options.numbers,
            options.counted,
            options.beside,
            options.completed,
            options.packed_or_cut,
            options.stored,
        ),
    ),
    Command(
        "diff",
        "compare two checkpoints or repositories, tensor by tensor",
        "Names, shapes, dtypes, bytes, and the largest absolute and relative error of each tensor, in any of the\n"
        "formats, a window at a time. The exit status is 1 where they differ.",
        (
            "diff runs/7b/step-1000 out/7b",
            "diff out/7b hf://me/7b --tolerance 1e-3",
            "diff runs/titan/step-1000 out/7b --recipe torchtitan-llama3 --recipe-b auto --config out/7b",
        ),
        (options.two, options.chosen, options.stored),
    ),
    Command(
        "validate",
        "read and hash an output again, against its manifest, its source or the Hub",
        "At any later day: tells whether every byte is still what was written.",
        (
            "validate out/7b",
            "validate out/7b --source runs/7b/step-1000 --repo me/7b",
            "validate --repo me/7b@step-1000 --verify full --public-key signer.pub",
            "validate out/7b --load-check require --check-logits '1, 2, 3' --reference base/7b",
        ),
        (
            options.sink_to_validate,
            options.compared,
            options.refused,
            options.loaded,
            options.found,
            options.stored,
        ),
    ),
    Command(
        "push",
        "commit a consolidated checkpoint to the Hub, in one commit",
        "Files gather on a branch of their own, are found right there, and become visible by one commit. The token is\n"
        "huggingface_hub's own: HF_TOKEN or `hf auth login`. A new repository is private.",
        (
            "push out/7b me/7b --message 'Step 1000'",
            "push out/7b me/7b --revision step-1000 --tag v1 --verify sample --sign signer.pem",
        ),
        (options.consolidated, options.repo, options.committed, options.refused, options.stored),
    ),
    Command(
        "publish",
        "run the whole chain: checkpoint in, verified repository out",
        "Files are streamed to the Hub as they are made, and none waits on the disk. A run that was stopped goes on\n"
        "where it was: give the same command again. Runs as a Prefect flow, on the API that is configured or else on\n"
        "an embedded server; --direct does without.",
        (
            "publish runs/7b/step-1000 me/7b",
            "publish gs://bucket/step-1000 me/7b --sink out/7b --direct",
            "publish runs/7b/step-1000 me/7b --fail-on nan,inf,zero",
            "publish runs/7b me/7b --latest",
            "publish runs/7b/step-1000 me/7b --revision step-1000 --tag step-1000 --verify sample",
        ),
        (
            options.source,
            options.repo,
            options.kept,
            options.found,
            options.chosen,
            options.numbers,
            options.counted,
            options.beside,
            options.completed,
            options.packed,
            options.committed,
            options.stored,
        ),
    ),
    Command(
        "demo",
        "publish a real small distributed checkpoint to a Hub on this machine",
        "Four torch.distributed ranks save it; nothing to sign up for, and nothing leaves the machine.",
        ("demo", "demo --folder try --direct --keep"),
        (options.demo,),
    ),
)
"""All commands, in the order of the overview."""
