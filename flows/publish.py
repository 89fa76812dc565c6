"""The main flow: a checkpoint becomes a verified repository. Gather, reshard, consolidate each file, validate, push.

The flow holds the sink for its whole run, and lets as many output files be in flight as it is told. A failed file's own
error comes out of it, with the problems of all files that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

from prefect import Task, flow, unmapped
from prefect.context import FlowRunContext
from prefect.futures import PrefectFuture, wait
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.utilities.annotations import quote
from pydantic import BaseModel, Field

from hfdcp_core.errors import Cancelled, HfdcpError
from hfdcp_core.hub import Receipt
from hfdcp_core.publish import Job, Planned, hold, passes
from hfdcp_core.state import SILENT, Cancellation, Progress
from hfdcp_flows import embedded
from hfdcp_tasks.consolidate import consolidate
from hfdcp_tasks.gather import gather
from hfdcp_tasks.options import Session, session
from hfdcp_tasks.push import push
from hfdcp_tasks.reshard import reshard
from hfdcp_tasks.validate import validate


class Selection(BaseModel):
    """Which checkpoint and which of its tensors are taken, and under which names."""

    include: tuple[str, ...] = Field(
        default=(), title="Include", description="Globs of names to take; none: every weight."
    )
    exclude: tuple[str, ...] = Field(default=(), title="Exclude", description="Globs of names to leave out.")
    recipe: str = Field(
        default="auto",
        title="Recipe",
        description="auto cleans wrappers' prefixes; none keeps every name; or a shipped recipe, transformers, a file.",
    )
    sizes: dict[str, int] = Field(
        default={}, title="Sizes", description="Sizes that the recipe asks for and no config states, by name."
    )
    also: tuple[str, ...] = Field(
        default=(), title="Also", description="URLs of further places that hold files of the same checkpoint."
    )
    latest: bool = Field(
        default=False, title="Latest step", description="Take the newest complete step below the source."
    )
    world_size: int = Field(
        default=0,
        ge=0,
        title="World size",
        description="How many ranks wrote the checkpoint, where nothing in it says so; 0: unknown.",
    )
    accept_unproved: bool = Field(
        default=False, title="Accept unproved", description="Go on where nothing shows that the checkpoint is complete."
    )
    config: str = Field(
        default="",
        title="Config",
        description="URL of the model's config.json, which says what is tied; none: the one beside the checkpoint.",
    )
    untie: bool = Field(
        default=False, title="Untie", description="Write all tied tensors, and a config that says they are not tied."
    )
    keep_extra: bool = Field(
        default=False, title="Keep extra", description="Save entries that are plain values, not tensors, as JSON."
    )


class Layout(BaseModel):
    """How the tensors are packed into files."""

    max_file_size: int = Field(default=5_000_000_000, gt=0, title="Largest file", description="Bytes.")
    file_index: dict[str, int] = Field(
        default={}, title="File of each tensor", description="Number of the file by tensor name; none: packed by size."
    )
    overwrite: bool = Field(default=False, title="Overwrite", description="Replace another output that the sink holds.")


class Numbers(BaseModel):
    """In which dtype numbers are written, whether with scales, and what is counted of them."""

    dtype: str = Field(
        default="", title="Dtype", description="Cast floating tensors to this one, such as bfloat16; none: as saved."
    )
    keep_dtype: tuple[str, ...] = Field(
        default=(), title="Keep dtype", description="Globs of names that stay as saved, with their scales."
    )
    dequantize: bool = Field(
        default=False, title="Dequantize", description="Multiply fp8 and MXFP4 numbers with their scales."
    )
    quantize: str = Field(
        default="", title="Quantize", description="fp8-block: linear layers become fp8 with scales; none: as they are."
    )
    block_size: tuple[int, ...] = Field(
        default=(), title="Block size", description="Rows and columns of a block; none: what config or shapes say."
    )
    statistics: Literal["none", "basic", "full"] = Field(
        default="basic",
        title="Statistics",
        description="basic: which tensors hold NaN or Inf, or are all zero; full: the largest magnitude of each too.",
    )
    fail_on: tuple[Literal["nan", "inf", "zero"], ...] = Field(
        default=(), title="Fail on", description="Publish nothing where a tensor holds these; zero: nothing but zeros."
    )


class Repository(BaseModel):
    """Where on the Hub the output goes. The token is found as huggingface_hub finds it where the flow runs."""

    revision: str = Field(default="main", title="Branch", description="A new one begins where main stands.")
    endpoint: str = Field(
        default="", title="Endpoint", description="Address of the Hub; none: huggingface_hub's own default."
    )
    message: str = Field(default="", title="Commit message", description="None: one that counts tensors and files.")
    tag: str = Field(default="", title="Tag", description="Name of a tag for the commit; none: no tag.")
    pull_request: bool = Field(
        default=False, title="Pull request", description="Open a pull request instead of moving the branch."
    )
    public: bool = Field(
        default=False,
        title="Public",
        description="Accept a repository that everybody can read, and make a new one so; otherwise it is private.",
    )
    replace: bool = Field(
        default=False, title="Replace", description="Put the output in the place of weights that hfdcp did not write."
    )
    on_conflict: Literal["fail", "retry"] = Field(
        default="fail",
        title="On conflict",
        description="Where somebody else commits meanwhile: fail, or retry upon their commit.",
    )
    verify: Literal["metadata", "sample", "full"] = Field(
        default="metadata",
        title="Verify",
        description="metadata: hashes as the Hub states them; sample: some tensors read back; full: every byte.",
    )
    stream: Literal["hub", "both"] = Field(
        default="hub",
        title="Where files go",
        description="hub: to the Hub alone, the sink keeps the state; both: the sink keeps the files too.",
    )
    spool: str = Field(
        default="",
        title="Spool",
        description="By LFS: folder for the files in flight, so that the source is read once; none: it is read twice.",
    )
    sign: str = Field(default="", title="Sign", description="Path of the private key to sign with; none: unsigned.")


class Completion(BaseModel):
    """What makes a model repository complete, and whether it would load."""

    base: str = Field(
        default="",
        title="Base model",
        description="Folder or repository that config, tokenizer, processors, licence and code are copied from.",
    )
    card: bool = Field(default=False, title="Card", description="Write a model card; with a base model it always is.")
    load_check: Literal["auto", "off", "require"] = Field(
        default="auto", title="Load check", description="Ask transformers before anything is written."
    )
    check_logits: str = Field(
        default="", title="Check logits", description="Run the finished model on this text, or on ids between commas."
    )
    reference: str = Field(default="", title="Reference", description="Folder of a model with the same logits.")
    logits_tolerance: float = Field(default=0.0, ge=0, title="Tolerance", description="How much they may differ.")


class Resources(BaseModel):
    """What the run may use of its machine."""

    memory_bytes: int = Field(
        default=0,
        ge=0,
        title="Memory",
        description="Budget for the whole process, in bytes; 0: 256 MiB, or 1 GiB where a storage is remote.",
    )
    workers: int = Field(default=0, ge=0, title="Workers", description="Output files in flight; 0: one for each core.")


_NOTHING = ("world_size", "file_index")
"""Options that the form says by 0 or an empty mapping, as it has no good field for "nothing or a number"."""
SELECTION, NUMBERS, LAYOUT, REPOSITORY, RESOURCES = Selection(), Numbers(), Layout(), Repository(), Resources()
COMPLETION = Completion()


@flow(name="publish", flow_run_name="publish-{repo}", persist_result=False)
def publish(
    source: str,
    repo: str,
    *,
    sink: str,
    selection: Selection = SELECTION,
    numbers: Numbers = NUMBERS,
    layout: Layout = LAYOUT,
    completion: Completion = COMPLETION,
    repository: Repository = REPOSITORY,
    resources: Resources = RESOURCES,
) -> dict[str, Any]:
    """Publish a distributed checkpoint as a verified Hugging Face repository.

    Args:
        source: URL or path of the checkpoint.
        repo: Repository on the Hub, as owner/name; it is created private where there is none.
        sink: URL or path of the folder that keeps the state of the run, and the output too where it is asked to.
        selection: Which tensors are taken, and under which names.
        numbers: In which dtype they are written, and whether with scales.
        layout: How the tensors are packed into files.
        completion: What lies beside them, and whether it would load.
        repository: Where on the Hub the output goes.
        resources: What the run may use of its machine.

    Returns:
        The receipt of the commit.
    """
    job = job_of(source, repo, sink, groups=(selection, numbers, layout, completion, repository, resources))
    with session(), hold(job):
        gather(job)
        consolidate_each(job, reshard(job))
        validate(job)
        return asdict(push(job))


def job_of(source: str, repo: str, sink: str, *, groups: Iterable[BaseModel]) -> Job:
    """Return the job that the flow's parameters describe; each group's fields are named as the job's."""
    options: dict[str, Any] = {}
    for group in groups:
        options |= group.model_dump()
    for name in _NOTHING:
        options[name] = options[name] or None
    return Job(source=source, sink=sink, repo=repo, **options)


def parameters_of(job: Job) -> dict[str, Any]:
    """Return the parameters with which the flow does ``job``."""
    groups: dict[str, type[BaseModel]] = {
        "selection": Selection,
        "numbers": Numbers,
        "layout": Layout,
        "completion": Completion,
        "repository": Repository,
        "resources": Resources,
    }
    return {
        "source": job.source,
        "repo": job.repo,
        "sink": job.sink,
        **{name: _group(group, job) for name, group in groups.items()},
    }


def _group(group: type[BaseModel], job: Job) -> BaseModel:
    values = {name: getattr(job, name) for name in group.model_fields}
    return group(**{name: value for name, value in values.items() if value is not None})


def run(
    job: Job, *, progress: Progress = SILENT, cancellation: Cancellation | None = None, debug: bool = False
) -> Receipt:
    """Do ``job`` by the flow, on the Prefect API that is configured or else on an embedded one: for the command line.

    Raises:
        HfdcpError: The error of the step that failed, as it was raised.
        Cancelled: Somebody pressed Ctrl-C or ended the process.
    """
    shared = Session(progress=progress, cancellation=cancellation or Cancellation())
    return Receipt(**embedded.run(publish, parameters_of(job), shared=shared, debug=debug))


def consolidate_each(job: Job, planned: Planned) -> None:
    """Write every file of the plan, several at once, each in a task run of its own.

    Raises:
        HfdcpError: The error of the file that failed; one error for all files where several did.
    """
    paths = [file.path for file in planned.files]
    with session() as shared, _task_runner(job) as runner, _stopping_threads(shared):
        shared.progress.begin("consolidate", planned.nbytes * passes(job))
        # quote: Prefect would look for futures in every entry of the job, once for each file
        each: Task[..., Any] = consolidate
        mapped = {"job": quote(unmapped(job)), "index": range(len(paths)), "path": paths}
        futures = runner.map(each, mapped)
        wait(futures)
        _raise_failures(futures)


@contextmanager
def _task_runner(job: Job) -> Iterator[TaskRunner[Any]]:
    """Give the job's number of threads; a runner on other machines, which the flow was given, has its own bounds."""
    context = FlowRunContext.get()
    if context and not isinstance(context.task_runner, ThreadPoolTaskRunner):
        yield context.task_runner
    else:
        threads: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=job.files_at_once)
        with threads:
            yield threads


@contextmanager
def _stopping_threads(shared: Session) -> Iterator[None]:
    """Stop the task threads when this one is interrupted: Prefect waits for them, and they get no signal."""
    try:
        yield
    except Exception:
        raise
    except BaseException:
        shared.cancellation.cancel()
        raise


def _raise_failures(futures: Sequence[PrefectFuture[Any]]) -> None:
    """Raise the errors of the files that failed as one error, in the plan's order."""
    failed = [future for future in futures if future.state.is_failed() or future.state.is_crashed()]
    if failed:
        raise one_error([future.result(raise_on_failure=False) for future in failed], files=len(futures))


def one_error(errors: Sequence[BaseException], *, files: int) -> BaseException:
    r"""Return one error for those of several files: the first that no retry helps against, with all problems.

    >>> from hfdcp_core.errors import CorruptFile, StorageError
    >>> str(one_error([StorageError("a: reset"), CorruptFile("b: bad CRC")], files=3))
    '2 of 3 output files failed\n  - a: reset\n  - b: bad CRC'
    """
    faults = [error for error in errors if not isinstance(error, Cancelled)] or errors[:1]
    worst = next((error for error in faults if not getattr(error, "retryable", False)), faults[0])
    if len(faults) == 1 or not isinstance(worst, HfdcpError):
        return worst
    return type(worst)(
        f"{len(faults)} of {files} output files failed", [line for error in faults for line in _lines(error)]
    )


def _lines(error: BaseException) -> list[str]:
    """Return every problem of an error, with what it says of them all in front."""
    if isinstance(error, HfdcpError):
        return [f"{error.message}: {problem}" for problem in error.problems] or [error.message]
    return [f"{type(error).__name__}: {error}"]
