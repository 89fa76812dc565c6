"""The options of the commands, in groups: each function adds one group to a parser."""

from __future__ import annotations

import argparse

from hfdcp_core.job import AUTO, FAIL, LOAD_CHECKS, METADATA, ON_CONFLICT, VERIFY_LEVELS
from hfdcp_core.recipe_sources import shipped
from hfdcp_core.statistics import BASIC, LEVELS
from hfdcp_flows.typed import block, count, file_index, filled, json_object, named_size, refusable, size, tolerance


def source(parser: argparse.ArgumentParser) -> None:
    """The checkpoint that is read."""
    parser.add_argument(
        "source", metavar="SOURCE", type=filled, help="checkpoint: a folder, or any URL that fsspec knows"
    )


def url(parser: argparse.ArgumentParser) -> None:
    """The checkpoint that is looked at."""
    parser.add_argument("source", metavar="URL", type=filled, help="checkpoint: a folder, or any URL that fsspec knows")


def found(parser: argparse.ArgumentParser) -> None:
    """Where the checkpoint is, if one URL does not say it."""
    group = parser.add_argument_group("where the checkpoint is")
    group.add_argument(
        "--also",
        metavar="URL",
        type=filled,
        action="append",
        default=[],
        help="another place that holds files of the same checkpoint, such as a node's own disk; may be repeated",
    )
    group.add_argument(
        "--latest",
        action="store_true",
        help="the newest complete step below the place that is named; steps that are not complete are passed over",
    )


def sink(parser: argparse.ArgumentParser) -> None:
    """Where the output goes."""
    parser.add_argument("sink", metavar="SINK", type=filled, help="where the output goes: a folder or URL")


def sink_to_validate(parser: argparse.ArgumentParser) -> None:
    """The output that is looked at again."""
    parser.add_argument(
        "sink",
        metavar="SINK",
        nargs="?",
        type=filled,
        help="a consolidated checkpoint: folder or URL; without one, --repo is held against its own manifest",
    )


def planned_sink(parser: argparse.ArgumentParser) -> None:
    """Where the output would go."""
    parser.add_argument("sink", metavar="SINK", nargs="?", type=filled, help="where the output would go")


def two(parser: argparse.ArgumentParser) -> None:
    """The two sides that are compared."""
    for name in "ab":
        parser.add_argument(
            name,
            metavar=name.upper(),
            type=filled,
            help="checkpoint or repository: a folder, or any URL that fsspec knows",
        )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=tolerance,
        default=0.0,
        help="largest relative error that still counts as equal (default: 0, every bit the same)",
    )
    parser.add_argument(
        "--recipe-b",
        metavar="NAME",
        type=filled,
        help="how the tensors of B are named (default: as --recipe says for both)",
    )
    parser.add_argument(
        "--config",
        metavar="URL",
        type=filled,
        help="the model's config.json, or a folder with one, for a recipe that asks for sizes (default: the one beside "
        "each checkpoint)",
    )


def completed(parser: argparse.ArgumentParser) -> None:
    """What makes a model repository complete, and whether it would load."""
    group = parser.add_argument_group("the rest of the repository")
    group.add_argument(
        "--base",
        metavar="MODEL",
        type=filled,
        help="folder or repository (org/name) of the model that config, tokenizer, processors, licence and code are "
        "copied from; its config is corrected to what is written",
    )
    group.add_argument("--card", action="store_true", help="write a model card (README.md); with --base it always is")
    _load_check(group)
    _check_logits(group)


def loaded(parser: argparse.ArgumentParser) -> None:
    """Whether what was written would load."""
    group = parser.add_argument_group("would it load")
    _load_check(group)
    _check_logits(group)


def _load_check(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--load-check",
        choices=LOAD_CHECKS,
        default=AUTO,
        help="ask transformers whether it would load the tensors as the config says, before anything is written: where "
        "that is possible (auto, default), never (off), or as a condition (require)",
    )


def _check_logits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--check-logits",
        metavar="PROMPT",
        type=filled,
        help="load the finished model for real and run it on this text, or on ids between commas",
    )
    group.add_argument(
        "--reference", metavar="MODEL", type=filled, help="folder of a model whose logits must be the same"
    )
    group.add_argument(
        "--logits-tolerance",
        metavar="X",
        type=tolerance,
        default=0.0,
        help="how much the logits may differ (default: not at all)",
    )


def explained(parser: argparse.ArgumentParser) -> None:
    """Tensors of the output of which more is told."""
    parser.add_argument(
        "--explain",
        metavar="FQN",
        type=filled,
        action="append",
        default=[],
        help="say where this tensor of the output comes from: rule, sources, operations, byte ranges; may be repeated",
    )
    parser.add_argument(
        "--infer-recipe",
        action="store_true",
        help="propose a recipe by names and shapes, for the model of --config or --base; a person completes it",
    )


def consolidated(parser: argparse.ArgumentParser) -> None:
    """The output that is pushed."""
    parser.add_argument(
        "sink", metavar="CHECKPOINT", type=filled, help="what `hfdcp consolidate` wrote: a folder or URL"
    )


def repo(parser: argparse.ArgumentParser) -> None:
    """The repository on the Hub."""
    parser.add_argument("repo", metavar="REPO", type=filled, help="repository on the Hub, as owner/name")


def compared(parser: argparse.ArgumentParser) -> None:
    """What an output is compared with."""
    parser.add_argument(
        "--source", metavar="URL", type=filled, help="read this checkpoint too, and compare every tensor"
    )
    parser.add_argument(
        "--repo", metavar="REPO[@REV]", type=filled, help="hold what the Hub has against the manifest, as owner/name"
    )
    _verified(parser)
    parser.add_argument(
        "--public-key",
        metavar="FILE.pem",
        type=filled,
        help="the repository must be signed with the key that belongs to this one",
    )


def _verified(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--verify",
        choices=VERIFY_LEVELS,
        default=METADATA,
        help="what is looked at on the Hub: sizes and hashes as it states them (metadata, default); headers and some "
        "tensors read back too (sample); every byte read back and hashed (full)",
    )


def chosen(parser: argparse.ArgumentParser) -> None:
    """Which tensors are taken, under which names."""
    group = parser.add_argument_group("which tensors, under which names")
    group.add_argument(
        "--include",
        metavar="GLOB",
        type=filled,
        action="append",
        default=[],
        help="take these names only; may be repeated; '*' takes every tensor, optimizer state too",
    )
    group.add_argument(
        "--exclude",
        metavar="GLOB",
        type=filled,
        action="append",
        default=[],
        help="leave these names out; may be repeated",
    )
    group.add_argument(
        "--recipe",
        metavar="NAME",
        type=filled,
        default="auto",
        help="auto: wrapper prefixes cleaned (default); none: names as saved; rules such as module,strip:net; "
        f"{', '.join(shipped())}; transformers; a file (.yaml); or module:function, which is traced",
    )
    group.add_argument(
        "--size",
        dest="sizes",
        metavar="NAME=N",
        type=named_size,
        action="append",
        default=[],
        help="a size that the recipe asks for and no config states; may be repeated",
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


def beside(parser: argparse.ArgumentParser) -> None:
    """What belongs to a model beside its tensors."""
    group = parser.add_argument_group("tied tensors, and what is no tensor")
    group.add_argument(
        "--config",
        metavar="URL",
        type=filled,
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


def numbers(parser: argparse.ArgumentParser) -> None:
    """In which dtype numbers are written, and whether with scales."""
    group = parser.add_argument_group("numbers")
    group.add_argument(
        "--dtype",
        metavar="NAME",
        type=filled,
        help="cast floating tensors to bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2 (default: "
        "as saved)",
    )
    group.add_argument(
        "--keep-dtype",
        metavar="GLOB",
        type=filled,
        action="append",
        default=[],
        help="leave these tensors as saved, with their scales; may be repeated",
    )
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--dequantize",
        action="store_true",
        help="multiply fp8 and MXFP4 numbers with their scales, into --dtype (default here: bfloat16)",
    )
    either.add_argument(
        "--quantize",
        metavar="HOW",
        type=filled,
        help="fp8-block: matrices of linear layers become fp8 with a scale for every block of 128x128, and config.json "
        "says so",
    )
    group.add_argument(
        "--block-size",
        metavar="RxC",
        type=block,
        default=(),
        help="rows and columns of a block with a scale (default: what config.json says, or the shapes)",
    )


def counted(parser: argparse.ArgumentParser) -> None:
    """What is counted of the numbers while they pass, and what ends the run."""
    group = parser.add_argument_group("statistics")
    group.add_argument(
        "--stats",
        dest="statistics",
        choices=LEVELS,
        default=BASIC,
        help="none; basic: which tensors hold NaN or Inf, or are all zero (default); full: the largest magnitude of "
        "every tensor too",
    )
    _refused(group)


def refused(parser: argparse.ArgumentParser) -> None:
    """What ends the command, of what was counted when the output was made."""
    _refused(parser.add_argument_group("statistics"))


def _refused(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fail-on",
        metavar="nan,inf,zero",
        type=refusable,
        default=(),
        help="publish nothing where a tensor holds NaN or Inf, or is all zero: any of the three, with commas between",
    )


def looked_at(parser: argparse.ArgumentParser) -> None:
    """How closely a checkpoint is looked at."""
    group = parser.add_argument_group("how closely")
    group.add_argument(
        "--tensor", metavar="FQN", type=filled, help="draw the boxes of this tensor, by its saved or its clean name"
    )
    group.add_argument(
        "--deep", action="store_true", help="open every item and read it once, against its checksum and the metadata"
    )


def packed(parser: argparse.ArgumentParser) -> None:
    """How the files of a model repository are made."""
    group = parser.add_argument_group("output files")
    _packing(group)
    _made(group)


def packed_or_cut(parser: argparse.ArgumentParser) -> None:
    """How the files of a model repository, or of the ranks of a training, are made."""
    group = parser.add_argument_group("output files")
    _packing(group).add_argument(
        "--ranks",
        metavar="M",
        type=count,
        default=0,
        help="one file for each of M ranks instead, in the form of torch's sharded safetensors, for a training to load",
    )
    group.add_argument(
        "--shard-dim", metavar="D", type=int, help="dimension along which tensors are cut for the ranks (default: 0)"
    )
    _made(group)


def _packing(group: argparse._ArgumentGroup) -> argparse._MutuallyExclusiveGroup:
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
    return either


def _made(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--memory",
        metavar="SIZE",
        type=size,
        default=0,
        help="peak memory of the process (default: 256MiB; 1GiB where a storage is remote)",
    )
    group.add_argument(
        "--workers", metavar="N", type=count, default=0, help="output files in flight (default: one for each core)"
    )
    group.add_argument("--overwrite", action="store_true", help="replace another output that the sink holds")


def kept(parser: argparse.ArgumentParser) -> None:
    """How the whole chain is run."""
    parser.add_argument(
        "--sink",
        metavar="URL",
        type=filled,
        help="keep the output here too, in the same pass (default: on the Hub only)",
    )
    parser.add_argument(
        "--spool",
        metavar="DIR",
        type=filled,
        help="by LFS, which wants the digest first: room for the files in flight, so that the source is read once "
        "(default: it is read twice)",
    )
    parser.add_argument("--direct", action="store_true", help="run the same five steps without Prefect")


def committed(parser: argparse.ArgumentParser) -> None:
    """What the commit is, and what is looked at before and after it."""
    group = parser.add_argument_group("commit")
    group.add_argument(
        "--revision",
        metavar="BRANCH",
        type=filled,
        default="main",
        help="branch to commit to (default: main); a new one begins where main stands",
    )
    group.add_argument("--message", metavar="TEXT", type=filled, help="commit message")
    group.add_argument("--tag", metavar="NAME", type=filled, help="tag the commit")
    group.add_argument(
        "--pr", dest="pull_request", action="store_true", help="open a pull request instead of moving the branch"
    )
    group.add_argument(
        "--public",
        action="store_true",
        help="accept a repository that everybody can read, and make a new one so (default: private)",
    )
    group.add_argument(
        "--replace", action="store_true", help="put the output in the place of weights that hfdcp did not write"
    )
    group.add_argument(
        "--on-conflict",
        choices=ON_CONFLICT,
        default=FAIL,
        help="where somebody else commits meanwhile: fail (default), or retry upon their commit",
    )
    _verified(group)
    group.add_argument(
        "--sign",
        metavar="KEY.pem",
        type=filled,
        help="sign the output with this private key (P-256, P-384 or P-521), as model_signing does",
    )


def stored(parser: argparse.ArgumentParser) -> None:
    """Options for fsspec."""
    group = parser.add_argument_group("storage")
    for name, whose in (
        ("--storage-options", "both ends"),
        ("--source-options", "the source"),
        ("--sink-options", "the sink"),
    ):
        group.add_argument(name, metavar="JSON|@FILE", type=json_object, help=f"fsspec's options for {whose}")


def demo(parser: argparse.ArgumentParser) -> None:
    """Where and how the demo goes."""
    parser.add_argument(
        "--folder",
        metavar="DIR",
        type=filled,
        default="hfdcp-demo",
        help="where everything goes (default: ./hfdcp-demo)",
    )
    parser.add_argument("--direct", action="store_true", help="without Prefect: half a minute quicker")
    parser.add_argument("--keep", action="store_true", help="leave the Hub on loopback running until Ctrl-C")


def display(parser: argparse.ArgumentParser) -> None:
    """What is shown; every command has these."""
    group = parser.add_argument_group("what is shown")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout, errors too")
    group.add_argument("--quiet", action="store_true", help="no progress, only the result")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
