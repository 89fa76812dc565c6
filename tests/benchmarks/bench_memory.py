"""How much memory a large model takes, against a small one: what is 20 times as large should take no more.

A command, not a test::

    python tests/benchmarks/bench_memory.py --sizes 2e9 40e9 --out result

The models are sharded safetensors full of holes (sparse files: they read as zeros and take no room), of one tensor that
is half of the model and many that share the rest. They are read, checked, hashed and written to nowhere, each by a
process of its own. The peak that ``hfdcp plan`` announces stands beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from measuring import Rival, Table, compared, save, take_turns

from hfdcp_core.publish import Job, plan_only

RANKS, COLUMNS, SMALL = 4, 4096, 100
TO_NOWHERE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from hfdcp_core import publish
from hfdcp_core.consolidate import Nowhere, Terms, consolidate
from hfdcp_core.crew import Crew
from hfdcp_core.locate import reopen
from hfdcp_core.run import Run
from hfdcp_core.store import open_store
job = publish.Job.from_json(sys.argv[1])
publish.gather(job)
publish.reshard(job)
run, terms = Run(open_store(job.sink)), Terms(crew=Crew(job.files_at_once))
source = reopen(job, run.source())
def make(index):
    consolidate(run.file_plan(index), source, Nowhere(), terms=terms)
with ThreadPoolExecutor(job.files_at_once) as pool:
    list(pool.map(make, range(len(run.planned().files))))
"""
"""The chain as far as its files, which go nowhere."""


def main() -> int:
    """Make the models, measure, save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", type=lambda text: int(float(text)), default=[2_000_000_000, 40_000_000_000]
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--folder", type=Path, help="where the models go (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("bench-memory"), help="stem of the files of results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hfdcp-bench-", dir=options.folder) as scratch:
        jobs = [job_of(Path(scratch) / str(size), size) for size in options.sizes]
        save(options.out, [measured(jobs, options.sizes, options)], options=vars(options))
    return 0


def job_of(folder: Path, nbytes: int) -> Job:
    sparse(folder, nbytes)
    return Job(str(folder), str(folder / "out"), world_size=RANKS, max_file_size=max(1, nbytes // 8))


def sparse(folder: Path, nbytes: int) -> None:
    """Write the heads of a model's files, and let them be as long as they say."""
    folder.mkdir()
    rows = nbytes // 2 // (COLUMNS * 2) // RANKS
    shapes = {"large": rows, **{f"small.{number}": max(1, rows // SMALL) for number in range(SMALL)}}
    for rank in range(RANKS):
        entries, offsets, stop = {}, {}, 0
        for name, own in shapes.items():
            start, stop = stop, stop + own * COLUMNS * 2
            entries[name] = {"dtype": "BF16", "shape": [own, COLUMNS], "data_offsets": [start, stop]}
            offsets[name] = {"saved_offsets": [rank * own, 0]}
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        header = json.dumps({"__metadata__": metadata, **entries}).encode()
        header += b" " * (-len(header) % 8)
        with (folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + stop)


def measured(jobs: Sequence[Job], sizes: Sequence[int], options: argparse.Namespace) -> Table:
    named = {f"{size / 1e9:g} GB": job for size, job in zip(sizes, jobs, strict=True)}
    peaks = {name: plan_only(replace(job, sink=""))[1].peak_bytes >> 20 for name, job in named.items()}
    rivals = [
        Rival(
            name,
            [sys.executable, "-c", TO_NOWHERE, job.to_json()],
            count=lambda name=name: {"announced MiB": peaks[name]},
        )
        for name, job in named.items()
    ]
    turns = take_turns(rivals, repeat=options.repeat, patience_s=options.patience)
    return compared("Memory, sparse models into nowhere", turns, to=next(iter(turns)))


if __name__ == "__main__":
    sys.exit(main())
