"""How fast, and in how much memory, a model is consolidated: ``hfdcp consolidate`` against torch's own consolidation.

A command, not a test::

    python tests/benchmarks/bench_consolidate.py --size 2e9 --repeat 5 --json result.json

Real ranks write one model as a distributed checkpoint (what training saves) and as sharded safetensors (what torch's
own consolidation starts from), for each layout. Then the contenders take turns, each as a whole process, all with the
same tensors in the same output files. Every output is held against the truth once. Sources are in the page cache;
before each turn older outputs are gone and what was written is on disk. hfdcp flushes its files to disk and hashes
them within its time; torch does neither.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hfdcp_core.dtypes import size_in_bytes
from hfdcp_core.testing.checkpoints import Format, Layout, Truth, compare_with_truth, read_truth, write_model

LAYOUTS: tuple[Layout, ...] = ("row", "column", "mixed")
FORMATS: tuple[Format, ...] = ("dcp", "dcp-safetensors")
OUTPUT = "out"
TORCH = """
import json, sys
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
source, sink, mapping, threads = sys.argv[1:]
consolidate_safetensors_files(source, sink, json.load(open(mapping)), num_threads=int(threads))
"""
"""What torch's own consolidation takes as a whole process."""


@dataclass(frozen=True)
class Contender:
    """One way to make the output."""

    name: str
    command: tuple[str, ...]
    truth: Truth


@dataclass(frozen=True)
class Turn:
    """What one run of one contender took."""

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Row:
    """One contender's median over all turns in one layout."""

    layout: str
    contender: str
    seconds: float
    times_as_fast_as_torch: float
    cpu_seconds: float
    peak_rss_bytes: int
    all_seconds: tuple[float, ...]


def main() -> int:
    """Write the models, let the contenders take turns, print a table and JSON."""
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="hfdcp-bench-", dir=options.folder) as scratch:
        rows = [row for layout in options.layouts for row in bench(layout, Path(scratch), options)]
    document = {
        "machine": machine(),
        "options": {k: str(v) for k, v in vars(options).items()},
        "rows": [*map(asdict, rows)],
    }
    print(table(rows))
    text = json.dumps(document, indent=1)
    if options.json:
        options.json.write_text(text)
    else:
        print(text)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=lambda text: int(float(text)), default=2_000_000_000, help="bytes of the model")
    parser.add_argument("--ranks", type=int, default=4, help="processes that save it")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["row", "column"])
    parser.add_argument("--files", type=int, default=4, help="output files")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each contender")
    parser.add_argument(
        "--folder", type=Path, help="where the model and the outputs go (default: the temporary folder)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the JSON goes (default: after the table)")
    return parser.parse_args(arguments)


def bench(layout: Layout, scratch: Path, options: argparse.Namespace) -> list[Row]:
    """Let all contenders take turns on one layout."""
    folder = scratch / layout
    truths = {kind: written(folder / kind, layout, kind, options) for kind in FORMATS}
    mapping = folder / "mapping.json"
    mapping.write_text(json.dumps(pack(truths["dcp"], options.files)))
    contenders = line_up(truths, folder / OUTPUT, mapping, options.ranks)
    for contender in contenders:
        take_turn(contender, folder / OUTPUT)
        if problems := compare_with_truth(contender.truth, folder / OUTPUT):
            raise SystemExit(f"{contender.name} is wrong: {problems[:3]}")
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    for number in range(options.repeat):
        for contender in contenders:
            turn = take_turn(contender, folder / OUTPUT)
            turns[contender.name].append(turn)
            print(f"{layout} {number + 1}/{options.repeat} {contender.name}: {turn.seconds:.2f} s", file=sys.stderr)
    shutil.rmtree(folder)
    return summarise(layout, turns)


def written(folder: Path, layout: Layout, kind: Format, options: argparse.Namespace) -> Truth:
    write_model(folder, total_bytes=options.size, ranks=options.ranks, layout=layout, format=kind)
    return read_truth(folder)


def pack(truth: Truth, files: int) -> dict[str, int]:
    """Share the tensors out over the files, in order, evenly."""
    sizes = {name: size_in_bytes(tensor.dtype, tensor.shape) for name, tensor in truth.tensors.items()}
    mapping, before = {}, 0
    for name, size in sizes.items():
        mapping[name] = 1 + min(files - 1, before * files // sum(sizes.values()))
        before += size
    return mapping


def line_up(truths: Mapping[Format, Truth], sink: Path, mapping: Path, ranks: int) -> list[Contender]:
    """Say what each contender runs."""
    hfdcp = (str(Path(sys.executable).parent / "hfdcp"), "consolidate", "--quiet", "--file-index", str(mapping))
    sharded = truths["dcp-safetensors"]
    torch = (sys.executable, "-c", TORCH, str(sharded.folder), str(sink), str(mapping), str(os.cpu_count()))
    return [
        Contender("torch, sharded safetensors", torch, sharded),
        Contender("hfdcp, distributed checkpoint", (*hfdcp, str(truths["dcp"].folder), str(sink)), truths["dcp"]),
        Contender(
            "hfdcp, sharded safetensors",
            (*hfdcp, "--world-size", str(ranks), str(sharded.folder), str(sink)),
            sharded,
        ),
    ]


def take_turn(contender: Contender, sink: Path) -> Turn:
    """Run one contender from an empty folder, with nothing left to be written back."""
    shutil.rmtree(sink, ignore_errors=True)
    sink.mkdir()
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(contender.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr
    log = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{contender.name} ended with status {process.returncode}:\n{log.decode(errors='replace')}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Turn(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)


def summarise(layout: str, turns: Mapping[str, Sequence[Turn]]) -> list[Row]:
    medians = {name: statistics.median(turn.seconds for turn in taken) for name, taken in turns.items()}
    torch = next(iter(medians.values()))
    return [
        Row(
            layout,
            name,
            round(medians[name], 3),
            round(torch / medians[name], 2),
            round(statistics.median(turn.cpu_seconds for turn in taken), 3),
            max(turn.peak_rss_bytes for turn in taken),
            tuple(round(turn.seconds, 3) for turn in taken),
        )
        for name, taken in turns.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| layout | contender | median s | times as fast as torch | CPU s | peak RSS MiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.layout} | {row.contender} | {row.seconds:.2f} | {row.times_as_fast_as_torch:.2f} "
        f"| {row.cpu_seconds:.2f} | {row.peak_rss_bytes / 2**20:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def machine() -> dict[str, str | int | None]:
    """Say where this was measured."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


if __name__ == "__main__":
    sys.exit(main())
