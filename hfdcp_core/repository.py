"""A repository that is complete: beside the weights a config that fits them, the base's assets, and a card.

Two moments. When the plan is made, it is settled what will lie beside the weights, and whether transformers would load
them (`settle`). When the weights are written, those files are made (`files`): the card tells what was written.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass

from hfdcp_core import assets
from hfdcp_core.assets import CARD_PATH, Assets
from hfdcp_core.errors import SourceError, ValidationError
from hfdcp_core.homes.steps import step_of
from hfdcp_core.job import OFF, Job
from hfdcp_core.load_check import NO_REPOSITORY, NOT_ASKED, LoadReport, judge
from hfdcp_core.manifest import CONFIG_PATH, FileRecord
from hfdcp_core.model_card import Provenance, write_card
from hfdcp_core.plan import Plan, stamps_digest
from hfdcp_core.run import PlanSummary, Run
from hfdcp_core.store import Source
from hfdcp_core.tying import Settled, base_url, config_at_hand

SHOWN = 5
"""How many names are given."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What will lie beside the weights."""

    config: bytes | None
    """The config, where it comes from a base or had to be changed."""
    corrections: tuple[str, ...]
    """What was corrected in it."""
    assets: Assets
    """What is copied from the base."""

    @property
    def said(self) -> tuple[str, ...]:
        """What a person should hear of it."""
        left = self.assets.left_out
        shown = ", ".join(left[:SHOWN]) + (f" and {len(left) - SHOWN} more" if len(left) > SHOWN else "")
        return (*self.corrections, *([f"files of the base that are left out: {shown}"] if left else []))


def settle(settled: Settled, source: Source, job: Job) -> Beside:
    """Settle what will lie beside the weights.

    Raises:
        SourceError: There is no config in the base, or what is there is none.
        PlanError: An asset is too large to be one.
    """
    found = assets.look(job)
    before = config_at_hand(job, source) if job.base else None
    if before is None:
        return Beside(settled.config, (), found)
    changed = before.text if settled.config is None else settled.config.decode()
    after = assets.corrected(changed, settled.definitions)
    return Beside(after.encode(), assets.corrections(before.text, after), found)


def judged(beside: Beside, plan: Plan, source: Source, job: Job) -> LoadReport:
    """Say whether transformers would load what is planned.

    Raises:
        PlanError: It would not, or that cannot be judged where the job requires it.
    """
    if job.ranks or job.load_check == OFF:
        return LoadReport(why=NO_REPOSITORY if job.ranks else NOT_ASKED)
    text = beside.config.decode() if beside.config else _config_text(source, job)
    config: Mapping[str, object] = json.loads(text) if text else {}
    return judge(config, {file.path: file.header for file in plan.files}, job)


def _config_text(source: Source, job: Job) -> str:
    """Return the config; one that merely lies beside the checkpoint, and is none, is nobody's concern."""
    try:
        config = config_at_hand(job, source)
    except SourceError:
        if job.config:
            raise
        return ""
    return config.text if config else ""


# ---- when the weights are written -----------------------------------------------------------------------------------


def files(run: Run, planned: PlanSummary, records: tuple[FileRecord, ...], job: Job, there: str) -> Mapping[str, bytes]:
    """Return what lies beside the weights, but for the config and plain values.

    Args:
        run: Where the weights lie.
        planned: What was planned.
        records: The weights.
        job: What is asked.
        there: The card that the repository has already; empty for none.

    Raises:
        SourceChanged: The base is not what it was when the plan was made.
        ValidationError: The card would not be taken by the Hub.
    """
    found = assets.fetch(job, planned.assets)
    theirs = found.pop(CARD_PATH, None)
    found.pop(CONFIG_PATH, None)  # which is corrected
    if job.card or job.base:
        existing = there or _text(run.read(CARD_PATH), run.sink.url) or _text(theirs, job.base)
        found[CARD_PATH] = write_card(_provenance(run, planned, records, job), existing).encode()
    return found


def _text(raw: bytes | None, where: str) -> str:
    try:
        return "" if raw is None else raw.decode()
    except UnicodeDecodeError as error:
        raise ValidationError(f"{where}: {CARD_PATH} is no text: {error}") from error


def _provenance(run: Run, planned: PlanSummary, records: tuple[FileRecord, ...], job: Job) -> Provenance:
    step = step_of((run.source().folder or job.source).rstrip("/").rpartition("/")[2])
    rows = {
        **({"step": str(step)} if step is not None else {}),
        "source format": planned.source_format,
        "source digest": f"`{stamps_digest(planned.stamps)}`",
        "recipe": planned.recipe,
        "tensors": f"{planned.tensors} ({planned.total_size} bytes)",
        **({"numbers": "; ".join(change.what for change in planned.changes)} if planned.changes else {}),
        **({"tied": ", ".join(f"{name} to {kept}" for name, kept in planned.tied.items())} if planned.tied else {}),
        **(
            {"config": "; ".join(line.partition(": ")[2] for line in planned.corrections)}
            if planned.corrections
            else {}
        ),
        **({"loading": planned.loads} if planned.loads else {}),
        "plan": f"`{planned.digest}`",
        "made with": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    base = base_url(job.base) if job.base else ""
    name = base.removeprefix("hf://").partition("@")[0] if base.startswith("hf://") else ""
    return Provenance(rows, records, name)


def versions() -> Mapping[str, str]:
    """Return what is installed here of what counts for an output."""
    found = {}
    for name in ("hfdcp", "torch", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
