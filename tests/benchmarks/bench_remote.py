"""How fast, and with how many requests and bytes, a model goes from one object storage to the same one.

A command, not a test::

    python tests/benchmarks/bench_remote.py --size 1e9 --repeat 5 --result result

A storage on loopback runs in a process of its own: our Google Cloud Storage, or localbucket for S3. Real ranks write a
model, which is put there; then the rivals take turns: ``hfdcp consolidate``, which checks and hashes, and a *plain
copy* of the same bytes through the same library (ranges of 8 MiB, many in flight, a streamed write of each file), which
does neither. Both share the cores with the storage. What was asked for is counted by the storage itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec
from measuring import Rival, Table, compared, save, take_turns

from hfdcp_core.store import Sink, configure, open_store
from hfdcp_core.testing.checkpoints import Layout, write_model
from hfdcp_core.testing.gcs_server import BUCKET
from hfdcp_core.testing.servers import fast_s3_server

LAYOUTS: tuple[Layout, ...] = ("row", "column", "mixed")
PIECE = 8 << 20
COPY = """
import json, os, sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
import fsspec
protocol, options, source, sink, at_once, block = sys.argv[1:]
fs = fsspec.filesystem(protocol, **json.loads(options))
PIECE = 8 << 20

def copy(entry):
    name, size = entry["name"], entry["size"]
    def read(start):
        return fs.cat_file(name, start=start, end=min(start + PIECE, size))
    target = f"{sink}/{name.rpartition('/')[2]}"
    with ThreadPoolExecutor(8) as pool, fs.open(target, "wb", block_size=int(block)) as file:
        ahead = deque()
        for start in range(0, size, PIECE):
            ahead.append(pool.submit(read, start))
            if len(ahead) >= 8:
                file.write(ahead.popleft().result())
        while ahead:
            file.write(ahead.popleft().result())

files = [entry for entry in fs.ls(source, detail=True) if entry["type"] == "file"]
with ThreadPoolExecutor(int(at_once)) as pool:
    list(pool.map(copy, files))
"""
"""The plain copy, as a whole process."""


@dataclass(frozen=True)
class Storage:
    """A storage that runs."""

    protocol: str
    url: str
    options: Mapping[str, object]
    counts: bool
    """Whether it tells what it was asked for."""


def main() -> int:
    """Write the models, let the rivals take turns, print a table."""
    options = parse(sys.argv[1:])
    tables: list[Table] = []
    with tempfile.TemporaryDirectory(prefix="hfdcp-bench-", dir=options.folder) as scratch:
        for storage in options.storages:
            for layout in options.layouts:
                with STORAGES[storage](Path(scratch)) as running:
                    tables.append(bench(running, layout, Path(scratch) / f"{storage}-{layout}", options))
    save(options.result, tables, options=vars(options))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=lambda text: int(float(text)), default=1_000_000_000, help="bytes of the model")
    parser.add_argument("--ranks", type=int, default=4, help="processes that save it")
    parser.add_argument("--storages", nargs="+", choices=list(STORAGES), default=["gcs", "s3"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["row", "column"])
    parser.add_argument("--files", type=int, default=4, help="output files")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each rival")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--folder", type=Path, help="where the model goes first (default: the temporary folder)")
    parser.add_argument(
        "--result", type=Path, default=Path("bench-remote"), help="where the figures go, without ending"
    )
    return parser.parse_args(arguments)


# ---- storages -------------------------------------------------------------------------------------------------------


@contextmanager
def gcs(_scratch: Path) -> Iterator[Storage]:
    command = [sys.executable, "-m", "hfdcp_core.testing.gcs_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        try:
            yield Storage("gs", url, {"token": "anon", "project": "test", "endpoint_url": url}, counts=True)
        finally:
            server.terminate()


@contextmanager
def s3(scratch: Path) -> Iterator[Storage]:
    with fast_s3_server(scratch / "s3") as server:
        yield Storage("s3", server.url, server.options, counts=False)


STORAGES = {"gcs": gcs, "s3": s3}


def asked(storage: Storage, method: str = "GET") -> Mapping[str, int]:
    """Return what was asked for since the last time that the journal was deleted."""
    if not storage.counts:
        return {}
    request = urllib.request.Request(f"{storage.url}/journal", method=method)
    with urllib.request.urlopen(request) as reply:
        found: Mapping[str, int] = json.load(reply)
        return found


# ---- turns ----------------------------------------------------------------------------------------------------------


def bench(storage: Storage, layout: Layout, folder: Path, options: argparse.Namespace) -> Table:
    """Let both rivals take turns on one layout."""
    configure(storage.protocol, storage.options)
    place = f"{BUCKET}/{layout}"
    source = open_store(f"{storage.protocol}://{place}/checkpoint")
    needed = put(folder, layout, source, options)

    def prepare() -> None:
        empty(storage, f"{place}/out", f"{place}/copy")
        asked(storage, "DELETE")

    def count() -> Mapping[str, float]:
        sums = asked(storage)
        if not sums:
            return {}
        requests = sum(sums.get(method, 0) for method in ("GET", "POST", "PUT", "DELETE"))
        return {"requests": requests, "bytes read / needed": round(sums["sent"] / needed, 4)}

    def rival(name: str, *command: str) -> Rival:
        environment = {
            f"FSSPEC_{storage.protocol.upper()}": json.dumps(storage.options),
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "PYTHONWARNINGS": "ignore",
        }
        return Rival(name, command, environment, prepare, count)

    hfdcp, at_once = str(Path(sys.executable).parent / "hfdcp"), str(os.cpu_count())
    copy = (storage.protocol, json.dumps(storage.options), source.url, f"{place}/copy", at_once, str(PIECE))
    sized = ("--quiet", "--overwrite", "--max-file-size", str(-(-needed // options.files)))
    rivals = [
        rival("plain copy", sys.executable, "-c", COPY, *copy),
        rival("hfdcp", hfdcp, "consolidate", *sized, source.url, f"{storage.protocol}://{place}/out"),
    ]
    turns = take_turns(rivals, repeat=options.repeat, label=f"{storage.protocol} {layout}", patience_s=options.patience)
    return compared(f"{storage.protocol} to {storage.protocol}, {layout}, {needed} bytes", turns, to="plain copy")


def put(folder: Path, layout: Layout, source: Sink, options: argparse.Namespace) -> int:
    """Write the model, put its files into the storage, and return how many bytes they have."""
    write_model(folder, total_bytes=options.size, ranks=options.ranks, layout=layout, format="dcp")
    total = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.name == ".metadata" or path.suffix == ".distcp"):
            upload = source.create(path.name, path.stat().st_size)
            with path.open("rb") as file:
                while part := file.read(PIECE):
                    upload.write(memoryview(part))
            upload.commit()
            total += path.stat().st_size
            path.unlink()
    return total


def empty(storage: Storage, *folders: str) -> None:
    fs = fsspec.filesystem(storage.protocol, **storage.options)
    fs.invalidate_cache()
    for folder in folders:
        for name in fs.find(folder):
            fs.rm_file(name)


if __name__ == "__main__":
    sys.exit(main())
