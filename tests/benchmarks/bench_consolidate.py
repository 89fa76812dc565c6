"""How fast, and in how much memory, a model is consolidated on one machine: hfdcp, torch, accelerate, and the floor.

A command, not a test::

    python tests/benchmarks/bench_consolidate.py --folder /dev/shm --out result

It writes ``result.md``, ``result.json`` and ``result.svg``. Real ranks write models, as a distributed checkpoint and
as sharded safetensors; *cast* is a model of F32 that becomes BF16; others are *sheets*, of which see `cases`. Every
rival's output is held against the truth once, which also fills the caches; then rivals take turns, each as a whole
process. hfdcp hashes and flushes to disk within its time, torch and accelerate do neither. ``--folder`` on tmpfs leaves
the disk out of it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import cases
import rivals
from cases import Case
from measuring import Table, Turn, compared, factor, save, take_turn, take_turns
from plot import draw

LAYOUTS = ("row", "column", "mixed")
SHEETS = {"tall": cases.TALL, "wide": cases.WIDE, "grid": cases.GRID, "many": cases.MANY}
GOALS = (
    ("of the floor's time", rivals.HFDCP, rivals.FLOOR, 1.25),
    ("of the floor's time with both checksums", rivals.HFDCP, rivals.FLOOR_CHECKED, 1.1),
    ("of the floor's time without hashing", rivals.HFDCP_UNHASHED, rivals.FLOOR_COPY, 1.25),
)


def main() -> int:
    """Write the cases one after the other, let the rivals take turns, save what came out."""
    options = parse(sys.argv[1:])
    tables = []
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="hfdcp-bench-", dir=options.folder) as scratch:
            tables.append(bench(maker(name, options)(Path(scratch) / "case"), Path(scratch) / "out", options))
        save(options.out, tables, options=vars(options))
    draw(options.out.with_suffix(".svg"), tables)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=[*LAYOUTS, "cast", *SHEETS], default=["row", "column", "cast", *SHEETS]
    )
    parser.add_argument("--rivals", nargs="+", help="beginnings of the names of those who take part (default: all)")
    parser.add_argument("--size", type=lambda text: int(float(text)), default=2_000_000_000, help="bytes of a model")
    parser.add_argument("--ranks", type=int, default=4, help="processes that save it")
    parser.add_argument("--files", type=int, default=4, help="output files of a model")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each rival")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--folder", type=Path, help="where models and outputs go (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("bench-consolidate"), help="stem of the files of results")
    return parser.parse_args(arguments)


def maker(name: str, options: argparse.Namespace) -> Callable[[Path], Case]:
    """Return what writes a case."""
    if name in SHEETS:
        return partial(cases.sheet, kind=SHEETS[name])
    if name == "cast":
        return partial(cases.cast, nbytes=options.size, ranks=options.ranks, files=options.files)
    return partial(cases.model, layout=name, nbytes=options.size, ranks=options.ranks, files=options.files)


def bench(case: Case, sink: Path, options: argparse.Namespace) -> Table:
    """Let all rivals do one case."""
    wanted = tuple(options.rivals or ("",))
    taking_part = [rival for rival in rivals.rivals_of(case, sink) if rival.name.startswith(wanted)]
    for rival in taking_part:
        take_turn(rival, patience_s=0)
        if not rival.name.startswith("floor") and (problems := case.problems(sink)):
            raise SystemExit(f"{case.name}: {rival.name} is wrong: {problems[:3]}")
    turns = take_turns(taking_part, repeat=options.repeat, label=case.name, patience_s=options.patience)
    shutil.rmtree(sink)
    title = f"{case.name}: {case.nbytes / 1e9:.2f} GB, {case.ranks} ranks"
    to = next((name for name in (rivals.TORCH, rivals.TORCH_LOAD) if name in turns), next(iter(turns)))
    return compared(title, turns, to=to, notes=list(notes(turns)))


def notes(turns: Mapping[str, Sequence[Turn]]) -> list[str]:
    """Hold hfdcp against the floor."""
    return [
        f"{ours}: {factor(turns[ours], turns[floor]):.2f} {what} (goal: at most {goal})"
        for what, ours, floor, goal in GOALS
        if ours in turns and floor in turns
    ]


if __name__ == "__main__":
    sys.exit(main())
