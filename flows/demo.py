"""``hfdcp demo``: four real ranks save a model, it is published to a Hub on this machine, and comes back bit for bit.

Nothing is made up for it: torch's own processes save the checkpoint, the flow that publishes is the one for real work,
and the Hub on loopback is spoken to by the real ``huggingface_hub``.
"""

from __future__ import annotations

import os
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hfdcp_core.errors import PlanError, ValidationError
from hfdcp_core.hub import Receipt
from hfdcp_core.job import STREAM_BOTH, Job
from hfdcp_core.manifest import MANIFEST_PATH
from hfdcp_core.state import Progress, in_bytes
from hfdcp_flows.report import Answer, counted, nothing

REPO = "acme/sharded-llama"
"""What the repository is called."""
MARK = ".hfdcp-demo"
"""A file that tells a folder of ours from anybody else's."""
MAX_FILE_SIZE = 8_000_000
"""Small, so that there are several files and an index."""
AT_HOME = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
"""Variables for libraries that would otherwise draw over our lines or call somewhere."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the demo keeps what."""

    root: Path
    """All of it."""

    @property
    def output(self) -> Path:
        """The consolidated checkpoint."""
        return self.root / "output"

    @property
    def hub(self) -> Path:
        """What the Hub on loopback stores."""
        return self.root / "hub"

    @property
    def cache(self) -> Path:
        """huggingface_hub's own files, kept away from the user's."""
        return self.root / "hf-home"

    @property
    def downloaded(self) -> Path:
        """What came back from the Hub."""
        return self.root / "downloaded"


def demo(args: Namespace, publish: Callable[[Job], Receipt], progress: Progress) -> Answer:
    """Tell the whole story, and stop where anything is not as it should be.

    Raises:
        ValidationError: What was downloaded is not what the ranks saved.
        PlanError: The folder holds something that is not ours.
    """
    from hfdcp_core.testing import checkpoints
    from hfdcp_core.testing.demo import RANKS, write_demo_checkpoint

    folders = Folders(empty_folder(Path(args.folder)))
    progress.say(f"1/3 {RANKS} torch.distributed ranks save a sharded model to {folders.root} …")
    truth = write_demo_checkpoint(folders.root)
    with ExitStack() as stack:
        job = stack.enter_context(hub_on_loopback(folders, str(truth.folder)))
        progress.say(
            f"2/3 publishing it {'without Prefect' if args.direct else 'by the Prefect flow'} to {job.endpoint} …"
        )
        receipt = publish(job)
        progress.say("3/3 downloading it again with huggingface_hub, and comparing …")
        download(folders, job)
        problems = checkpoints.compare_with_truth(truth, folders.downloaded)
        ValidationError.raise_for("what was downloaded is not what the ranks saved", problems)
        keep = stack.pop_all() if args.keep else None
    run = "" if args.direct else f"publish-{job.repo}"
    return Answer(
        document(folders, job, receipt, run),
        story(folders, job, receipt, run, tensors=len(truth.cleaned), kept=args.keep),
        serve_until_interrupted(keep) if keep else nothing,
    )


def empty_folder(folder: Path) -> Path:
    """Make the folder, or empty it where it is the demo's own.

    Raises:
        PlanError: It holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"{folder} is a file; name a folder with --folder")
    if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise PlanError(f"{folder} is not empty and no earlier demo made it; name another with --folder")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    return folder


@contextmanager
def hub_on_loopback(folders: Folders, source: str) -> Iterator[Job]:
    """Serve a Hub, lead huggingface_hub there, and give the job that publishes ``source`` to it."""
    before = dict(os.environ)
    os.environ.update(AT_HOME | {"HF_HOME": str(folders.cache.absolute())})
    from hfdcp_core.testing.hub import Hub

    try:
        with Hub(folders.hub) as hub:
            os.environ.update(hub.environment)
            yield Job(
                source,
                str(folders.output),
                REPO,
                endpoint=hub.url,
                max_file_size=MAX_FILE_SIZE,
                stream=STREAM_BOTH,
            )
    finally:
        os.environ.clear()
        os.environ.update(before)


def download(folders: Folders, job: Job) -> None:
    """Fetch the repository as anybody would."""
    from huggingface_hub import HfApi

    HfApi(endpoint=job.endpoint).snapshot_download(job.repo, local_dir=folders.downloaded)


def serve_until_interrupted(hub: ExitStack) -> Callable[[], None]:
    """Return what leaves the Hub running until Ctrl-C."""

    def serve() -> None:
        with hub, suppress(KeyboardInterrupt):
            signal.pause()

    return serve


def document(folders: Folders, job: Job, receipt: Receipt, run: str) -> Mapping[str, object]:
    """Say what was done, for a script."""
    return {
        "command": "demo",
        "checkpoint": job.source,
        "output": str(folders.output),
        "manifest": str(folders.output / MANIFEST_PATH),
        "downloaded": str(folders.downloaded),
        "flow_run": run,
        "receipt": asdict(receipt),
    }


def story(folders: Folders, job: Job, receipt: Receipt, run: str, *, tensors: int, kept: bool) -> str:
    """Say what was done and where to look, for a person."""
    files = [path for path in folders.output.iterdir() if path.suffix == ".safetensors"]
    size = in_bytes(sum(path.stat().st_size for path in files))
    rows = [
        ("saved by the ranks", job.source, "what dcp.save left: shards, optimizer state and all"),
        ("published", str(folders.output), f"{counted(len(files), 'file')}, {size}, index and {MANIFEST_PATH}"),
        ("on the Hub", f"{job.endpoint}/{job.repo}", f"one commit, {receipt.commit[:12]}"),
        ("downloaded again", str(folders.downloaded), f"all {tensors} tensors equal what the ranks held, bit for bit"),
    ]
    if run:
        rows.append(("Prefect flow run", run, "`prefect server start` shows it, unless your API is elsewhere"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {what:<{widths[0]}}  {where:<{widths[1]}}  {note}" for what, where, note in rows]
    end = f"The Hub serves until Ctrl-C: export HF_ENDPOINT={job.endpoint} HF_TOKEN={os.environ.get('HF_TOKEN', '')}"
    follow = "Now your own:  hfdcp inspect CHECKPOINT   then   hfdcp publish CHECKPOINT REPO"
    return "\n".join(["It went well: what the ranks saved is on the Hub.", *lines, end if kept else follow])
