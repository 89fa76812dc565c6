"""What all benchmarks share: rivals take turns, each as a process of its own, and what that took becomes a table.

::

    turns = take_turns([Rival("torch", command), Rival("hfdcp", command)], repeat=5, prepare=empty_the_sink)
    table = compared("row, 2 GB", turns, to="torch")
    save(Path("result"), [table])      # result.md and result.json; the Markdown is printed too

A turn begins when the machine is quiet, or after a minute. Rivals are interleaved in each repetition, so that a
neighbour's load meets all of them; a factor is the median of the factors of the repetitions.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

QUIET_SHARE = 0.85
"""Share of the processors that is idle on a quiet machine."""
RUNNER = """
import json, os, sys, time
total = lambda: [*map(int, open("/proc/stat").readline().split()[1:9])] if os.path.exists("/proc/stat") else [0] * 8
busy = lambda: sum(total()) - sum(total()[3:5])
quiet = os.open(os.devnull, os.O_WRONLY)
before, start = busy(), time.perf_counter()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, quiet, 1)])
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - start
cpu = usage.ru_utime + usage.ru_stime
others = max(0.0, (busy() - before) / os.sysconf("SC_CLK_TCK") - cpu)
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, cpu, usage.ru_maxrss * unit, others]))
"""
"""Starts the command from a process that is itself small: the kernel counts the memory of who starts a process as the
process's own, until it has replaced its program."""


@dataclass(frozen=True)
class Turn:
    """What one run of one rival took."""

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    others_cpu_seconds: float
    """Processor time that other processes took meanwhile: whether the figure can be trusted."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What else was counted: requests, bytes."""


@dataclass(frozen=True)
class Rival:
    """One way to do the work."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside ours."""
    prepare: Callable[[], None] = lambda: None
    """Called before each turn, beyond the clock."""
    count: Callable[[], Mapping[str, float]] = dict
    """Called after each turn; what it returns stands in the turn."""


@dataclass(frozen=True)
class Table:
    """A title, and rows that all have the same columns."""

    title: str
    rows: Sequence[Mapping[str, str | float | Sequence[float]]]
    notes: Sequence[str] = ()


# ---- turns ----------------------------------------------------------------------------------------------------------


def take_turn(rival: Rival, *, patience_s: float = 60.0) -> Turn:
    """Run one rival, when the machine is quiet.

    Raises:
        SystemExit: It failed; its words are on stderr.
    """
    rival.prepare()
    wait_until_quiet(patience_s)
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", RUNNER, *rival.command],
        capture_output=True,
        text=True,
        env={**_environment(), **rival.environment},
        check=False,
    )
    status, seconds, cpu, peak, others = json.loads(run.stdout)
    if status:
        raise SystemExit(f"{rival.name} ended with status {status}:\n{run.stderr}")
    return Turn(seconds, cpu, peak, others, rival.count())


def _environment() -> dict[str, str]:
    """Return ours, but with compiled modules, as any installed program has them: they are kept from the first turn on.

    Who wants no such files in this tree is heeded: they go elsewhere.
    """
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        own.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / "hfdcp-bench-compiled"))
    return own


def take_turns(
    rivals: Sequence[Rival], *, repeat: int, label: str = "", patience_s: float = 60.0
) -> dict[str, list[Turn]]:
    """Let all rivals take turns; repetition for repetition, each once."""
    turns: dict[str, list[Turn]] = {rival.name: [] for rival in rivals}
    for number in range(repeat):
        for rival in rivals:
            turn = take_turn(rival, patience_s=patience_s)
            turns[rival.name].append(turn)
            shown = f"{turn.seconds:.3f} s, {turn.peak_rss_bytes >> 20} MiB, others {turn.others_cpu_seconds:.1f} s"
            print(f"{label} {number + 1}/{repeat} {rival.name}: {shown}", file=sys.stderr, flush=True)
    return turns


def wait_until_quiet(patience_s: float) -> None:
    """Wait until other processes leave the processors alone, but no longer than ``patience_s``."""
    stop = time.monotonic() + patience_s
    while idle_share() < QUIET_SHARE and time.monotonic() < stop:
        pass


def idle_share(seconds: float = 0.4) -> float:
    """Return which share of the processors is idle just now; all of them where nobody counts."""
    before = _jiffies()
    time.sleep(seconds)
    busy, idle = (b - a for a, b in zip(before, _jiffies(), strict=True))
    return idle / (busy + idle) if busy + idle else 1.0


def _jiffies() -> tuple[int, int]:
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    counts = list(map(int, stat.open().readline().split()[1:9]))
    idle = sum(counts[3:5])
    return sum(counts) - idle, idle


# ---- figures --------------------------------------------------------------------------------------------------------


def median_s(turns: Sequence[Turn]) -> float:
    """Return the median time."""
    return statistics.median(turn.seconds for turn in turns)


def factor(slow: Sequence[Turn], fast: Sequence[Turn]) -> float:
    """Return how many times as long ``slow`` took as ``fast``: the median over the repetitions."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(slow, fast, strict=True))


def compared(title: str, turns: Mapping[str, Sequence[Turn]], *, to: str, notes: Sequence[str] = ()) -> Table:
    """Make a table of turns, with a column that says how many times as fast as rival ``to`` each one was."""
    rows: list[Mapping[str, str | float | Sequence[float]]] = []
    for name, taken in turns.items():
        counts = {key: statistics.median(turn.counts[key] for turn in taken) for key in taken[0].counts}
        row: Mapping[str, str | float | Sequence[float]] = {
            "rival": name,
            "median s": round(median_s(taken), 3),
            f"x as fast as {to}": round(factor(turns[to], taken), 2),
            "CPU s": round(statistics.median(turn.cpu_seconds for turn in taken), 2),
            "peak MiB": max(turn.peak_rss_bytes for turn in taken) >> 20,
            **counts,
            "others' CPU s": round(statistics.median(turn.others_cpu_seconds for turn in taken), 2),
            "all s": [round(turn.seconds, 3) for turn in taken],
        }
        rows.append(row)
    return Table(title, rows, notes)


def markdown(table: Table) -> str:
    """Return a table as Markdown; lists of single figures stay out of it."""
    columns = [name for name, value in table.rows[0].items() if isinstance(value, str | float | int)]
    lines = [f"### {table.title}", "", "| " + " | ".join(columns) + " |"]
    lines.append("|" + "|".join("---" if isinstance(table.rows[0][name], str) else "---:" for name in columns) + "|")
    lines += ["| " + " | ".join(str(row.get(name, "")) for name in columns) + " |" for row in table.rows]
    return "\n".join([*lines, "", *table.notes])


def save(stem: Path, tables: Sequence[Table], *, options: Mapping[str, object] | None = None) -> None:
    """Write all tables as ``stem.md`` and, with the machine that measured them, ``stem.json``; print the Markdown."""
    text = "\n\n".join(map(markdown, tables))
    document = {
        "machine": machine(),
        "options": {name: str(value) for name, value in (options or {}).items()},
        "tables": [asdict(table) for table in tables],
    }
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(text + "\n")
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print(text)


def machine() -> dict[str, str | int | None]:
    """Say where this was measured."""
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
