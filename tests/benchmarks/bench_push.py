"""How fast a checkpoint gets to the Hub, in how much memory and disk: streamed, against a copy that is uploaded.

A command, not a test::

    python tests/benchmarks/bench_push.py --size 2e9 --files 20 --repeat 3 --out result

The rival is what one does without streaming: consolidate to the disk, then ``huggingface_hub.upload_folder``. Either
goes by Xet and by LFS, to a new Hub on loopback in each turn, whose storage takes whatever comes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from measuring import Rival, Table, compared, save, take_turns

from hfdcp_core.job import Job
from hfdcp_core.testing.checkpoints import write_model
from hfdcp_core.testing.hub import Hub

REPO = "acme/m"
STREAMED = "import sys; from hfdcp_core import publish; publish.publish(publish.Job.from_json(sys.argv[1]))"
COPIED = """
import sys
from hfdcp_core import publish
from huggingface_hub import HfApi
job = publish.Job.from_json(sys.argv[1])
publish.make(job)
api = HfApi()
api.create_repo(job.repo, private=True)
api.upload_folder(repo_id=job.repo, folder_path=job.sink, ignore_patterns=[".hfdcp/*"])
"""


class Place:
    """A Hub that is new in each turn, and the folders that a turn writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work, self.cache = folder / "work", folder / "cache"
        self._open = ExitStack()
        self.hub = Hub(folder / "hub")
        self.port = int(self.hub.url.rpartition(":")[2])
        self._open.enter_context(self.hub)

    def renew(self) -> None:
        """Forget everything."""
        self.close()
        for path in (self.work, self.cache, self.folder / "hub"):
            shutil.rmtree(path, ignore_errors=True)
        self.hub = self._open.enter_context(Hub(self.folder / "hub", self.port))

    def close(self) -> None:
        """Stop the Hub."""
        self._open.close()

    def count(self) -> Mapping[str, float]:
        """Say what came in, and what lies on the disk."""
        came = sum(call.received_bytes for call in self.hub.calls("/v1/xorbs/|/_lfs/"))
        return {"MB sent": round(came / 1e6), "MB on disk": round(_size(self.work) / 1e6, 1)}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    """Write the checkpoint, measure, save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=lambda text: int(float(text)), default=2_000_000_000)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--folder", type=Path, help="where everything lies (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("bench-push"), help="stem of the files of results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hfdcp-bench-", dir=options.folder) as scratch:
        folder = Path(scratch)
        truth = write_model(folder / "model", total_bytes=options.size, ranks=4)
        place = Place(folder)
        try:
            tables = [measured(way, truth.folder, place, options) for way in ("Xet", "LFS")]
        finally:
            place.close()
        save(options.out, tables, options=vars(options))
    return 0


def measured(way: str, source: Path, place: Place, options: argparse.Namespace) -> Table:
    """Let both take turns, by one way."""
    usual = {"endpoint": place.hub.url, "max_file_size": options.size // options.files}
    streamed = Job(str(source), str(place.work), REPO, stream="hub", **usual)
    copied = Job(str(source), str(place.work), REPO, **usual)
    rivals = [
        _rival(f"{name}, {way}", script, job, way, place)
        for name, script, job in (
            ("consolidate, then upload_folder", COPIED, copied),
            ("hfdcp publish", STREAMED, streamed),
        )
    ]
    turns = take_turns(rivals, repeat=options.repeat, patience_s=options.patience)
    title = f"{options.size / 1e9:g} GB in {options.files} files to a Hub on loopback, by {way}"
    return compared(title, turns, to=next(iter(turns)))


def _rival(name: str, script: str, job: Job, way: str, place: Place) -> Rival:
    command: Sequence[str] = [sys.executable, "-c", script, job.to_json()]
    environment = {
        **place.hub.environment,
        "HF_HOME": str(place.cache / "hf"),
        "HF_XET_CACHE": str(place.cache / "xet"),
        "HF_HUB_DISABLE_XET": "1" if way == "LFS" else "0",
        "TMPDIR": os.environ.get("TMPDIR", tempfile.gettempdir()),
    }
    return Rival(name, command, environment, place.renew, place.count)


if __name__ == "__main__":
    sys.exit(main())
