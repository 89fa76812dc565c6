"""What a command found or did: as text for a person, and as a document for a script."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hfdcp_core import wire
from hfdcp_core.catalog import Skipped
from hfdcp_core.diff import ONLY_A, ONLY_B, SHAPE, Diff, TensorDiff
from hfdcp_core.explain import Explanation
from hfdcp_core.homes import of_rank
from hfdcp_core.hub import Receipt
from hfdcp_core.infer import Proposal, as_yaml
from hfdcp_core.inspection import Inspection, Tensor, Wanted
from hfdcp_core.job import FULL, METADATA, SAMPLE, Gathered, Job, Planned
from hfdcp_core.manifest import MANIFEST_PATH, Manifest
from hfdcp_core.name_patterns import collapsed
from hfdcp_core.picture import HOLE, OVERLAP, draw
from hfdcp_core.quantization import Change
from hfdcp_core.state import in_bytes
from hfdcp_core.statistics import merged, told

WIDEST_NAME = 60
"""Longer names push their row to the right, not all rows."""
SHOWN_NAMES = 2
"""How many names are given before one stands for the rest."""
SHOWN_TENSORS = 12
"""How many tensors are listed where many are."""
SHOWN_OVERFLOWS = 5
"""How many tensors with numbers too large are named."""
SHOWN_SHARDS = 40
"""How many shards of one tensor are listed."""
Document = Mapping[str, object]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say when it is done."""

    document: Document
    """For ``--json``."""
    text: str
    """For a person."""
    then: Callable[[], None] = nothing
    """What goes on after it was said."""
    status: int = 0
    """Exit status of the command."""


def left_out(skipped: Sequence[Skipped]) -> str:
    """Say in a line what is not in the output and why, or nothing where everything is.

    >>> left_out([Skipped("optim.step", "optimizer state"), Skipped("rng", "not a tensor")])
    'left out 2 entries: 1 optimizer state (optim.step), 1 not a tensor (rng)'
    """
    by_reason: dict[str, list[str]] = {}
    for entry in skipped:
        by_reason.setdefault(entry.reason, []).append(entry.name)
    if not by_reason:
        return ""
    reasons = ", ".join(f"{len(names)} {reason} ({some(names)})" for reason, names in by_reason.items())
    return f"left out {counted(len(skipped), 'entry', 'entries')}: {reasons}"


def some(names: Sequence[str]) -> str:
    """Name a few of many.

    >>> some(["a", "b"]), some(["a", "b", "c", "d", "e"])
    ('a, b', 'a, …')
    """
    return ", ".join(names) if len(names) <= SHOWN_NAMES else f"{names[0]}, …"


def counted(number: int, one: str, many: str = "") -> str:
    """Write a number with its noun.

    >>> counted(1, "file"), counted(2, "file"), counted(2, "entry", "entries")
    ('1 file', '2 files', '2 entries')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def of_inspection(found: Inspection, job: Job) -> Answer:
    """Tell what lies at a URL, and everything that is wrong with it."""
    document = {
        "command": "inspect",
        "source": job.source,
        "nbytes": found.nbytes,
        "exit_status": found.exit_status,
        **_encoded(found),
    }
    lines = [
        f"{job.source}: {found.format}, {counted(found.files, 'file')}, {in_bytes(found.source_bytes)}",
        *found.said,
        *(_boxes(found.tensor) if found.tensor else _contents(found)),
        *_examined(found),
        *(f"PROBLEM: {problem}" for problem in found.problems),
    ]
    return Answer(document, "\n".join(lines), status=found.exit_status)


def _contents(found: Inspection) -> list[str]:
    return [
        f"{counted(len(found.wanted), 'tensor')}, {in_bytes(found.nbytes)}: {_by_dtype(found.wanted)}",
        *_tensors(found.wanted),
        *_notes(found.skipped, found.unproved),
    ]


def _examined(found: Inspection) -> list[str]:
    if not found.examined:
        return []
    what = f"{counted(found.damaged, 'item')} damaged" if found.damaged else "nothing is damaged"
    if found.spoilt_copies:
        spoilt = counted(found.spoilt_copies, "damaged copy", "damaged copies")
        what = f"{spoilt} of what is whole in another place, {what if found.damaged else 'nothing else'}"
    return [f"read {counted(found.examined, 'shard')} from end to end: {what}"]


def _boxes(tensor: Tensor) -> list[str]:
    """Draw the boxes of a tensor, and list the shards that hold them."""
    picture = draw(tensor.spec.shape, [shard.box for shard in tensor.shards])
    drawn = "".join(picture.lines)
    held = [
        f"  {letter}  {shard.box}  {of_rank(shard.span.path)}[{shard.span.start}:{shard.span.stop}]  "
        f"{in_bytes(shard.span.length)}"
        for letter, shard in zip(picture.letters, tensor.shards, strict=True)
    ]
    more = [f"  … and {len(held) - SHOWN_SHARDS} more (--json: all)"] if len(held) > SHOWN_SHARDS else []
    return [
        f"{tensor.fqn}  {tensor.spec}  {counted(len(held), 'shard')}",
        *([f"saved as {tensor.source}"] if tensor.source != tensor.fqn else []),
        *picture.lines,
        *(
            f"  {sign}  {what}"
            for sign, what in ((HOLE, "held by no shard"), (OVERLAP, "held by several"))
            if sign in drawn
        ),
        *held[:SHOWN_SHARDS],
        *more,
    ]


def _by_dtype(tensors: Iterable[Wanted]) -> str:
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.spec.dtype] = counts.get(tensor.spec.dtype, 0) + 1
    return ", ".join(f"{count} {dtype}" for dtype, count in sorted(counts.items(), key=lambda row: -row[1])) or "none"


def _tensors(tensors: Sequence[Wanted]) -> list[str]:
    shown = tensors if len(tensors) <= SHOWN_TENSORS else tensors[: SHOWN_TENSORS - 1]
    width = min(WIDEST_NAME, max((len(tensor.fqn) for tensor in shown), default=0))
    lines = [f"  {tensor.fqn:<{width}}  {tensor.spec}  {counted(tensor.shards, 'shard')}" for tensor in shown]
    return lines if len(shown) == len(tensors) else [*lines, f"  … and {len(tensors) - len(shown)} more (--json: all)"]


def _notes(skipped: Sequence[Skipped], unproved: str | None) -> list[str]:
    notes = [left_out(skipped)] if skipped else []
    return [*notes, f"not proved complete: {unproved}"] if unproved else notes


def of_plan(gathered: Gathered, planned: Planned, job: Job, explained: Sequence[Explanation] = ()) -> Answer:
    """Tell what would be written, and where some of it would come from."""
    document = {
        "command": "plan",
        "source": job.source,
        "sink": job.sink,
        "gathered": _encoded(gathered),
        "plan": _encoded(planned),
        **({"explained": [_encoded(one) for one in explained]} if explained else {}),
    }
    shards, copies = counted(gathered.shards, "shard"), counted(planned.copies, "copy", "copies")
    size = in_bytes(sum(file.size for file in planned.files))
    files = f"{counted(planned.tensors, 'tensor')} in {_files(len(planned.files), job.ranks, job.shard_dim)}"
    lines = [
        f"{job.source}: {gathered.format}, {counted(gathered.files, 'file')}, {shards}",
        *gathered.said,
        *_notes(gathered.skipped, gathered.unproved),
        *_tied(planned.tied),
        *(f"left out by the recipe: {line}" for line in collapsed(planned.dropped)),
        *planned.said,
        *map(_change, planned.changes),
        f"would write {files}, {size}, by {copies}, in at most {planned.peak_bytes >> 20} MiB of memory",
        *_uncut(planned.uncut, job.shard_dim),
        *(f"  {file.path}  {in_bytes(file.size)}{'  (done)' if file.done else ''}" for file in planned.files),
        f"plan {planned.digest[:16]}",
        *itertools.chain.from_iterable(map(_explained, explained)),
    ]
    return Answer(document, "\n".join(lines))


def _explained(one: Explanation) -> list[str]:
    """Tell where a tensor comes from."""
    start, stop = one.span
    cut = f", counted as {list(one.fine)}" if f"{list(one.fine)}" not in one.kind else ""
    hidden = one.count - len(one.reads)
    return [
        f"{one.fqn}  {one.kind}  in {one.path}[{start}:{stop}]",
        *([f"  rule: {one.rule}"] if one.rule else []),
        *([f"  then: {one.operation}"] if one.operation else []),
        f"  of {', '.join(one.sources) or 'nothing: all zeros'}{cut}",
        f"  {counted(one.count, 'read')}, {in_bytes(one.nbytes)}",
        *(
            f"  {read.box} <- {read.shard}, from element {read.first}, strides {list(read.strides)}"
            for read in one.reads
        ),
        *([f"  … and {counted(hidden, 'more read', 'more reads')}"] if hidden else []),
    ]


def of_proposals(proposals: Sequence[Proposal]) -> Answer:
    """Give a proposed recipe, as a file that a person completes."""
    text = as_yaml(proposals)
    return Answer({"command": "plan", "proposals": [_encoded(one) for one in proposals], "recipe": text}, text.rstrip())


def of_diff(found: Diff, a: str, b: str, *, tolerance: float) -> Answer:
    """Tell how two checkpoints differ; the worst first."""
    odd = sorted(found.different(tolerance), key=lambda one: (one.what not in _STRUCTURE, -(one.relative_max or 0)))
    document = {
        "command": "diff",
        "a": a,
        "b": b,
        "tolerance": tolerance,
        "equal": not odd,
        "diff": _encoded_diff(found),
    }
    hidden = len(odd) - SHOWN_TENSORS
    same = len(found.tensors) - len(odd)
    lines = [
        *map(_differs, odd[:SHOWN_TENSORS]),
        *([f"… and {counted(hidden, 'more tensor')}"] if hidden > 0 else []),
        f"{counted(same, 'tensor')} equal, {counted(len(odd), 'tensor')} different; {in_bytes(found.nbytes)} read",
    ]
    return Answer(document, "\n".join(lines), status=1 if odd else 0)


_STRUCTURE = (ONLY_A, ONLY_B, SHAPE)
"""Ways to differ that come before numbers."""


def _encoded_diff(found: Diff) -> object:
    """Return it for JSON, which has no infinity."""
    rows = [
        {
            "fqn": one.fqn,
            "what": one.what,
            "a": one.a,
            "b": one.b,
            "differing": one.differing,
            "first": list(one.first) if one.first is not None else None,
            "error_max": _number(one.error_max),
            "relative_max": _number(one.relative_max),
            "digests": list(one.digests),
        }
        for one in found.tensors
    ]
    return {"tensors": rows, "nbytes": found.nbytes, "source_digests": list(found.source_digests)}


def _number(value: float | None) -> float | str | None:
    return "inf" if value == math.inf else value


def _differs(one: TensorDiff) -> str:
    """Tell in a line how a tensor differs."""
    if one.what in {ONLY_A, ONLY_B}:
        return f"{one.fqn}  {one.what}: {one.a or one.b}"
    kinds = one.a if one.a == one.b else f"{one.a} against {one.b}"
    if one.what == SHAPE:
        return f"{one.fqn}  {kinds}"
    if one.error_max is None:
        return f"{one.fqn}  {kinds}: unequal in {counted(one.differing, 'element')}"
    first = f", first at {list(one.first)}" if one.first is not None else ""
    return (
        f"{one.fqn}  {kinds}: unequal in {counted(one.differing, 'element')}{first}, "
        f"by {one.error_max:.3g} at most, relative {one.relative_max:.3g}"
    )


def _files(number: int, ranks: int, dim: int) -> str:
    """Say how many files there are, and for whom.

    >>> _files(2, 0, 0), _files(2, 2, 1)
    ('2 files', '2 files for 2 ranks, cut along dimension 1')
    """
    files = counted(number, "file")
    return f"{files} for {counted(ranks, 'rank')}, cut along dimension {dim}" if ranks else files


def _uncut(tensors: int, dim: int) -> list[str]:
    """Say which tensors are not cut for the ranks.

    >>> _uncut(2, 1), _uncut(0, 1)
    (['not cut, in the first file: 2 tensors without a dimension 1'], [])
    """
    return [f"not cut, in the first file: {counted(tensors, 'tensor')} without a dimension {dim}"] if tensors else []


def _tied(tied: Mapping[str, str]) -> list[str]:
    """Say which tensors are left out because their bytes are there under another name."""
    return [f"left out {name}: tied to {kept}, and its bytes are the same" for name, kept in tied.items()]


def _change(change: Change) -> str:
    """Say what happens to numbers, and how much room that takes or saves.

    >>> _change(Change("cast from F32 to BF16", 2, 4000, 2000))
    '2 tensors cast from F32 to BF16: 4.0 KB become 2.0 KB'
    """
    what = f"{counted(change.tensors, 'tensor')} {change.what}"
    return f"{what}: {in_bytes(change.before)} become {in_bytes(change.after)}"


def _overflowed(manifest: Manifest) -> list[str]:
    """Say of how many numbers not even the magnitude could be kept."""
    counts: dict[str, int] = {}
    for record in manifest.records:
        for name, count in record.overflowed.items():
            counts[name] = counts.get(name, 0) + count
    if not counts:
        return []
    worst = sorted(counts, key=lambda name: (-counts[name], name))
    shown = ", ".join(f"{name} {counts[name]}" for name in worst[:SHOWN_OVERFLOWS])
    more = f" and {len(worst) - SHOWN_OVERFLOWS} more" if len(worst) > SHOWN_OVERFLOWS else ""
    total = counted(sum(counts.values()), "number")
    return [f"OVERFLOW: {total} too large for the dtype, so infinite now (or its largest): {shown}{more}"]


def of_manifest(command: str, manifest: Manifest, job: Job, *, before: bool = False) -> Answer:
    """Tell what was written, now or ``before``, or found to be as it was written."""
    document = {
        "command": command,
        "sink": job.sink,
        "source": job.source,
        "repo": job.repo,
        "manifest": _encoded(manifest),
    }
    where = job.sink or f"{job.repo}@{job.revision}"
    verdict = _VERDICT["before" if before else command if job.sink else job.verify]
    size = in_bytes(sum(record.size for record in manifest.files))
    tensors = counted(len({name for record in manifest.records for name in record.tensors}), "tensor")
    files = _files(len(manifest.records), manifest.ranks, manifest.shard_dim)
    lines = [
        f"{where}: {verdict}: {tensors} in {files}, {size}",
        *(f"  {record.path}  {in_bytes(record.size)}  sha256 {record.sha256[:16]}…" for record in manifest.files),
        f"manifest: {MANIFEST_PATH} (plan {manifest.plan_digest[:16]})",
    ]
    if command == "validate" and job.source:
        lines.append(f"{job.source} gives the same today")
    if command == "validate" and job.repo and job.sink:
        lines.append(f"{job.repo} on the Hub holds the same")
    lines += [*_tied(manifest.tied), *_overflowed(manifest), *told(merged(manifest.records))]
    if manifest.unproved:
        lines.append(f"not proved complete: {manifest.unproved}")
    return Answer(document, "\n".join(lines))


_VERDICT = {
    "consolidate": "complete and checked",
    "before": "was complete before (hfdcp validate reads every byte again)",
    "validate": "every byte is what was written",
    METADATA: "as its manifest says, by the hashes that the Hub states",
    SAMPLE: "as its manifest says, by the hashes that the Hub states and a sample that was read back",
    FULL: "every byte was read back, and is what was written",
}


def of_receipt(command: str, receipt: Receipt, job: Job) -> Answer:
    """Tell what is on the Hub now."""
    document = {"command": command, "source": job.source, "sink": job.sink, "receipt": _encoded(receipt)}
    if receipt.unchanged:
        lines = [f"{receipt.repo} already holds exactly this: {receipt.url}"]
    else:
        made = f" (created {'public' if job.public else 'private'})" if receipt.created else ""
        there = f", {in_bytes(receipt.deduplicated_bytes)} there already" if receipt.deduplicated_bytes else ""
        new, sent = in_bytes(receipt.uploaded_bytes), in_bytes(receipt.moved_bytes)
        files = f"{counted(len(receipt.files), 'file')} in one commit"
        found = "the Hub's hashes are ours"
        lines = [f"{receipt.repo}{made}: {files}; {new} new, {sent} sent{there}; {found}", receipt.url]
    tagged = f", tagged {receipt.tag}" if receipt.tag else ""
    lines.append(f"commit {receipt.commit} on {receipt.revision}{tagged}")
    return Answer(document, "\n".join([*lines, *(f"checked {check}" for check in receipt.checks)]))


def _encoded(value: object) -> dict[str, object]:
    document = wire.encode(value)
    assert isinstance(document, dict)
    return {**document}
