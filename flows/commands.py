"""What each command does: make a `Job` of what was typed, call the core or the flow once, and hand back an `Answer`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from hfdcp_core import diff as differing
from hfdcp_core import inspection
from hfdcp_core import publish as core
from hfdcp_core.errors import UsageError
from hfdcp_core.hub import Receipt
from hfdcp_core.job import OFF, STREAM_BOTH, STREAM_ONLY, Gathered, Job
from hfdcp_core.state import Cancellation, Progress
from hfdcp_core.store import configure
from hfdcp_flows import report
from hfdcp_flows.report import Answer
from hfdcp_flows.work_folder import work_folder


@dataclass(frozen=True, slots=True)
class Control:
    """Whom a running command reports to, and who may stop it."""

    progress: Progress
    """Hears how far it is."""
    cancellation: Cancellation
    """Heeded between windows of bytes."""


def inspect(args: Namespace, control: Control) -> Answer:
    """Say what lies at a URL."""
    job = job_of(args)
    control.progress.begin("gather", 0)
    found = inspection.inspect(job, tensor=args.tensor or "", deep=args.deep, progress=control.progress)
    return report.of_inspection(found, job)


def plan(args: Namespace, control: Control) -> Answer:
    """Say what would be written."""
    job = job_of(args)
    control.progress.begin("reshard", 0)
    if args.infer_recipe:
        return report.of_proposals(core.infer_recipe(job))
    gathered, planned, told = core.explain_only(job, tuple(args.explain))
    return report.of_plan(gathered, planned, job, told)


def consolidate(args: Namespace, control: Control) -> Answer:
    """Gather, reshard, consolidate and validate."""
    job = job_of(args)
    with core.hold(job):
        gathered = core.gather(job, progress=control.progress)
        say_what_is_left_out(gathered, control)
        planned = core.reshard(job, progress=control.progress)
        core.consolidate_all(job, progress=control.progress, cancellation=control.cancellation)
        manifest = core.validate(job, progress=control.progress)
    return report.of_manifest("consolidate", manifest, job, before=all(file.done for file in planned.files))


def diff(args: Namespace, control: Control) -> Answer:
    """Compare two checkpoints or repositories."""
    job = job_of(args)
    sides = replace(job, source=args.a), replace(job, source=args.b, recipe=args.recipe_b or job.recipe)
    found = differing.diff(*sides, progress=control.progress, cancellation=control.cancellation)
    return report.of_diff(found, args.a, args.b, tolerance=args.tolerance)


def validate(args: Namespace, control: Control) -> Answer:
    """Read and hash an output again."""
    if not (args.sink or args.repo):
        raise UsageError("nothing is named: an output (SINK), or a repository (--repo)")
    if args.public_key and not args.repo:
        raise UsageError("--public-key says who signed the repository: say which (--repo)")
    if not args.sink and (args.source or args.check_logits):
        raise UsageError("--source and --check-logits need the output at hand: name it (SINK)")
    if args.repo:
        args.repo, _, revision = args.repo.partition("@")
        args.revision = revision or "main"
    job = job_of(args)
    manifest = core.validate_again(job, public_key=args.public_key or "", progress=control.progress)
    return report.of_manifest("validate", manifest, job)


def push(args: Namespace, control: Control) -> Answer:
    """Commit a consolidated checkpoint to the Hub."""
    job = job_of(args)
    receipt = core.push(job, progress=control.progress, cancellation=control.cancellation)
    return report.of_receipt("push", receipt, job)


def publish(args: Namespace, control: Control) -> Answer:
    """Run the whole chain; where no sink is named, a work folder keeps the state."""
    job = job_of(args)
    job = replace(job, stream=STREAM_BOTH if job.sink else STREAM_ONLY)
    assert job.window_bytes  # refuses too little memory for what is streamed
    # Looking first costs a read of the metadata, and saves starting a server for what cannot be done.
    gathered, planned = core.plan_only(replace(job, load_check=OFF))  # the chain itself asks transformers
    say_what_is_left_out(gathered, control)
    if job.sink:
        return report.of_receipt("publish", chain(job, control, args), job)
    with work_folder(job, planned.digest, control.progress) as sink:
        receipt = chain(replace(job, sink=sink), control, args)
    return report.of_receipt("publish", receipt, job)


def chain(job: Job, control: Control, args: Namespace) -> Receipt:
    """Run the five steps: by the Prefect flow, or without Prefect where ``--direct`` is given."""
    if args.direct:
        return core.publish(job, progress=control.progress, cancellation=control.cancellation)
    control.progress.say("starting Prefect, and its own server where none is configured (--direct does without) …")
    # Prefect asks this before it tells its makers of every run; who wants to be counted sets it to 0.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    from hfdcp_flows import publish as flow

    return flow.run(job, progress=control.progress, cancellation=control.cancellation, debug=args.debug)


def demo(args: Namespace, control: Control) -> Answer:
    """Publish a real small checkpoint to a Hub on this machine."""
    from hfdcp_flows import demo as story

    return story.demo(args, lambda job: chain(job, control, args), control.progress)


ANSWERS: Mapping[str, Callable[[Namespace, Control], Answer]] = {
    "inspect": inspect,
    "plan": plan,
    "consolidate": consolidate,
    "diff": diff,
    "validate": validate,
    "push": push,
    "publish": publish,
    "demo": demo,
}
"""What carries out each command."""


def heeds_a_wish(args: Namespace) -> bool:
    """Whether the command stops by itself soon after it was asked to, leaving everything tidy."""
    return args.command in {"consolidate", "push"} or (args.command == "publish" and bool(args.direct))


JOB_OPTIONS = frozenset(field.name for field in fields(Job))
"""Options that are fields of a job, under the same name."""


def job_of(args: Namespace) -> Job:
    """Return what is asked as a value; storage options are set for the process and stay there."""
    given = {name: value for name, value in vars(args).items() if name in JOB_OPTIONS and value is not None}
    if "shard_dim" in given and not args.ranks:
        raise UsageError("--shard-dim says how tensors are cut for ranks: say for how many (--ranks M)")
    given |= {name: tuple(given[name]) for name in ("include", "exclude", "also", "keep_dtype") if name in given}
    given |= {"sizes": dict(given["sizes"])} if "sizes" in given else {}
    job = Job(**({"source": "", "sink": ""} | given) | ({"memory_bytes": args.memory} if "memory" in args else {}))
    assert job.window_bytes  # refuses too little memory before anything is read
    for protocol, options in storage_options(args, job).items():
        configure(protocol, options)
    return job


def storage_options(args: Namespace, job: Job) -> Mapping[str, Mapping[str, object]]:
    """Return the storage options of each protocol that is used.

    Raises:
        UsageError: Options are given for a local path, or both ends need other ones of the same protocol.
    """
    chosen: dict[str, dict[str, object]] = {}
    sources = (job.source, *job.also, *filter(None, (getattr(args, "a", ""), getattr(args, "b", ""))))
    for end, urls in (("source", sources), ("sink", (job.sink,))):
        own = getattr(args, f"{end}_options", None)
        protocols = sorted({protocol for url in urls if (protocol := protocol_of(url))})
        if own and not protocols:
            raise UsageError(f"--{end}-options are given, but the {end} {urls[0]!r} is not a URL of a remote storage")
        options = {**(getattr(args, "storage_options", None) or {}), **(own or {})}
        if options and any(chosen.setdefault(protocol, options) != options for protocol in protocols):
            raise UsageError(f"source and sink are both {protocols[0]}://, so they cannot have options of their own")
    common = getattr(args, "storage_options", None)
    if common and (protocol := protocol_of(job.config) or protocol_of(job.base)):
        chosen.setdefault(protocol, dict(common))
    if common and not chosen:
        raise UsageError("--storage-options are given, but nothing lies in a remote storage")
    return chosen


def protocol_of(url: str) -> str:
    """Return the protocol that options of a URL are meant for; empty for a local path.

    >>> protocol_of("gs://bucket/step-1"), protocol_of("simplecache::s3://bucket/x"), protocol_of("runs/7b")
    ('gs', 's3', '')
    """
    scheme, separator, _ = url.partition("://")
    protocol = scheme.rpartition("::")[2] if separator else ""
    return "" if protocol in {"file", "local"} else protocol


def say_what_is_left_out(gathered: Gathered, control: Control) -> None:
    """Tell a person what will not be in the output, and why."""
    if line := report.left_out(gathered.skipped):
        control.progress.say(line)
