"""What very many shards cost: ``.metadata`` of up to a million of them is read, proved whole, planned and written down.

A command, not a test::

    python tests/benchmarks/bench_metadata.py --json result.json
    python tests/benchmarks/bench_metadata.py --quick

The checkpoint is that of a training on many ranks: about a thousand tensors, each cut into a row shard for every rank.
Only its ``.metadata`` is real, made of torch's own classes; the files it names are as long as it says and hold nothing
(sparse files), which is as far as planning looks. Two commands take turns, each as a whole process:

- ``hfdcp plan``: read ``.metadata``, list what it holds, prove that the boxes tile the tensors, and plan every copy;
- gather and reshard, the first two steps of every run, which also write the catalog and the plan down in ``.hfdcp/``.

The cost of a shard should be the same however many there are, and the documents a few bytes for each.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from measuring import Rival, Table, Turn, median_s, save, take_turns

COUNTS = (10_000, 100_000, 1_000_000)
QUICK = (1_000, 10_000)
TENSORS = 1_000
WRITER = """
import pickle, sys
from pathlib import Path
from torch import Size, bfloat16
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata,
)
folder, ranks, tensors, width = Path(sys.argv[1]), *map(int, sys.argv[2:])
length = 4 * width * 2 + 1600  # four rows of BF16, and the archive around them
entries, places, nesting = {}, {}, {}
for number in range(tensors):
    fqn = f"model.layers.{number // 10}.mlp.experts.{number % 10}.weight"
    starts = [Size([4 * rank, 0]) for rank in range(ranks)]
    boxes = [ChunkStorageMetadata(start, Size([4, width])) for start in starts]
    entries[fqn] = TensorStorageMetadata(TensorProperties(bfloat16), Size([4 * ranks, width]), boxes)
    nesting[fqn] = tuple(fqn.split(".", 1))
    for rank, start in enumerate(starts):
        places[MetadataIndex(fqn, start)] = _StorageInfo(f"__{rank}_0.distcp", number * length, length)
folder.mkdir(parents=True)
(folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, nesting, places)))
for rank in range(ranks):
    with open(folder / f"__{rank}_0.distcp", "wb") as file:
        file.truncate(tensors * length)
"""
"""Writes the checkpoint, in a process of its own: torch and its classes take memory."""
STEPS = """
import sys
from hfdcp_core import publish
from hfdcp_core.job import Job
job = Job(*sys.argv[1:])
publish.gather(job)
publish.reshard(job)
"""
"""The first two steps of every run."""


def main() -> int:
    """Write the checkpoints, let the commands take turns, print a table, and write both."""
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="hfdcp-bench-", dir=options.folder) as scratch:
        tables = [bench(count, Path(scratch), options) for count in options.counts]
    joined = Table("metadata of many shards", [row for table in tables for row in table.rows], tables[0].notes)
    save(options.json.with_suffix(""), [joined], options=vars(options))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, help="numbers of shards")
    parser.add_argument("--repeat", type=int, default=3, help="turns of each command")
    parser.add_argument("--quick", action="store_true", help="small numbers, once: to see that it works")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go (default: the temporary folder)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=Path("bench_metadata.json"), help="the result; FILE.md beside it"
    )
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine, each turn")
    options = parser.parse_args(arguments)
    if options.quick:
        options.counts, options.repeat, options.patience = QUICK, 1, 0.0
    return options


def bench(count: int, scratch: Path, options: argparse.Namespace) -> Table:
    """Let both commands take turns on a checkpoint of so many shards."""
    source, sink = scratch / "ckpt", scratch / "out"
    tensors = min(TENSORS, count)
    ranks = count // tensors
    subprocess.run([sys.executable, "-c", WRITER, str(source), str(ranks), str(tensors), "64"], check=True)
    hfdcp = str(Path(sys.executable).parent / "hfdcp")
    rivals = [
        Rival("plan", (hfdcp, "plan", "--quiet", str(source))),
        Rival(
            "gather and reshard",
            (sys.executable, "-c", STEPS, str(source), str(sink)),
            prepare=partial(shutil.rmtree, sink, ignore_errors=True),
            count=partial(documents, sink),
        ),
    ]
    label = f"{ranks * tensors} shards"
    turns = take_turns(rivals, repeat=options.repeat, label=label, patience_s=options.patience)
    metadata = (source / ".metadata").stat().st_size
    rows = [row_of(name, taken, shards=ranks * tensors, metadata=metadata) for name, taken in turns.items()]
    shutil.rmtree(source)
    return Table("", rows, ("Whole processes; `.hfdcp/` holds the catalog and the plan of every file.",))


def documents(sink: Path) -> Mapping[str, float]:
    """Count what was written down."""
    return {"documents": sum(path.stat().st_size for path in sink.rglob("*") if path.is_file())}


def row_of(name: str, turns: Sequence[Turn], *, shards: int, metadata: int) -> Mapping[str, str | float]:
    """Say what a command took, as a whole and for each shard."""
    written = turns[0].counts.get("documents", 0)
    return {
        "command": name,
        "shards": shards,
        "median s": round(median_s(turns), 2),
        "us for each": round(median_s(turns) / shards * 1e6, 1),
        "CPU s": round(min(turn.cpu_seconds for turn in turns), 2),
        "peak MiB": max(turn.peak_rss_bytes for turn in turns) >> 20,
        ".metadata MiB": round(metadata / 2**20, 1),
        ".hfdcp MiB": round(written / 2**20, 2),
        "others' CPU s": round(max(turn.others_cpu_seconds for turn in turns), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
