"""How fast real ranks save whole tensors: our writer in one pass against torch's save and consolidation.

A command, not a test::

    python tests/benchmarks/bench_save.py --size 1e9 --ranks 4 --repeat 5 --stem result

Each turn is a ``torchrun`` of its own that builds the same state dict, half of it cut by rows and half by columns, and
says how long ``dcp.save`` took on the slowest rank, how many bytes the ranks wrote by then, and how much memory a save
took beyond what was there before. Every output is read back once and held against what was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import Table, save, wait_until_quiet

RANKS = """
import json, logging, os, resource, sys, time, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
which, folder, nbytes, check = sys.argv[1], sys.argv[2], int(float(sys.argv[3])), sys.argv[4] == "check"
warnings.simplefilter("ignore"); logging.disable(logging.CRITICAL); torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh, count = init_device_mesh("cpu", (world,)), 16
rows = nbytes // count // (2 * 4096)
state = {}
for number in range(count):
    dim, local = number % 2, None
    shape = (rows // world * world, 4096)
    part = [shape[0] // world, shape[1]] if dim == 0 else [shape[0], shape[1] // world]
    source = torch.Generator().manual_seed(100 * number + rank)
    local = torch.randint(-9, 9, part, generator=source, dtype=torch.int16).view(torch.bfloat16)
    state[f"layers.{number}.weight"] = torch.distributed.tensor.DTensor.from_local(local, mesh, [Shard(dim)])
if which == "torch":
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True,
                                          thread_count_consolidation=os.cpu_count())
else:
    from hfdcp_core import HuggingFaceStorageWriter
    later = {"hash": "later"} if which == "hfdcp, hashing later" else {}
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True, **later)
def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])
open("/proc/self/clear_refs", "w").write("5")
before_rss = status("VmRSS")
dist.barrier(); start = time.perf_counter()
dcp.save(state, storage_writer=writer)
dist.barrier(); seconds = time.perf_counter() - start
peak = (status("VmHWM") - before_rss) * 1024
right = True
if check:
    blank = {n: torch.distributed.tensor.DTensor.from_local(torch.zeros_like(v.to_local()), mesh, v.placements)
             for n, v in state.items()}
    dcp.load(blank, storage_reader=dcp.HuggingFaceStorageReader(folder))
    bits = lambda tensor: tensor.to_local().view(torch.int16)
    right = all(torch.equal(bits(blank[n]), bits(state[n])) for n in state)
seen = [None] * world
dist.all_gather_object(seen, [seconds, peak, right])
if rank == 0:
    print("SEEN " + json.dumps(seen))
dist.destroy_process_group()
"""
RIVALS = ("torch", "hfdcp", "hfdcp, hashing later")


def turn(rival: str, options: argparse.Namespace, scratch: Path, *, check: bool) -> tuple[float, int, int]:
    """Save once; return seconds of the slowest rank, the most extra memory of a rank, and the bytes on disk."""
    folder = scratch / "out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    script = scratch / "ranks.py"
    script.write_text(RANKS)
    wait_until_quiet(20.0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    run = subprocess.run(
        [*command, str(script), rival, str(folder), str(options.size), "check" if check else "-"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    if run.returncode:
        raise SystemExit(f"{rival}:\n{run.stderr[:4000]}")
    seen = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("SEEN ")).removeprefix("SEEN "))
    if not all(right for _, _, right in seen):
        raise SystemExit(f"{rival}: what was read back is not what was saved")
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return max(s for s, _, _ in seen), max(peak for _, peak, _ in seen), written


def main() -> int:
    """Let the writers take turns, and print a table."""
    parser = argparse.ArgumentParser(description="Save whole tensors from several ranks: hfdcp against torch.")
    parser.add_argument("--size", type=float, default=1e9, help="bytes of the state dict (default: 1e9)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", help="where to save; default: the system's temporary folder")
    parser.add_argument("--stem", default="bench-save", help="where the table goes: STEM.md and STEM.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hfdcp-bench-", dir=options.folder) as scratch:
        turns = {
            number: {rival: turn(rival, options, Path(scratch), check=number == 0) for rival in RIVALS}
            for number in range(options.repeat)
        }
    rows = []
    for rival in RIVALS:
        taken = [each[rival] for each in turns.values()]
        times = [each["torch"][0] / each[rival][0] for each in turns.values()]
        rows.append(
            {
                "writer": rival,
                "median s": round(statistics.median(s for s, _, _ in taken), 3),
                "x as fast as torch": round(statistics.median(times), 2),
                "bytes left / bytes of tensors": round(statistics.median(w for _, _, w in taken) / options.size, 2),
                "most extra MiB of a rank": max(peak for _, peak, _ in taken) >> 20,
                "all s": [round(s, 3) for s, _, _ in taken],
            }
        )
    title = f"{options.ranks} ranks save {options.size / 1e9:g} GB as whole tensors, half by rows, half by columns"
    save(Path(options.stem), [Table(title, rows)], options=vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
