"""What is asked of a run, and what its steps report: small values that cross every border."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hfdcp_core import wire
from hfdcp_core.catalog import Skipped
from hfdcp_core.errors import UsageError, ValidationError
from hfdcp_core.manifest import Numerics
from hfdcp_core.operation import OPERAND_WINDOWS, WORKSPACE_BYTES
from hfdcp_core.plan import AHEAD_BYTES, BUFFERS, SCRATCH
from hfdcp_core.quantization import Change, numerics_of
from hfdcp_core.statistics import BASIC, LEVELS, NONE, REFUSABLE

_REF = re.compile(r"(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))[\w][\w.+/-]*(?<![/.])", re.ASCII)
"""Names of branches and tags that git takes and that need no quoting anywhere."""
_REPO = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
MEMORY_AT_START = 96 << 20
"""What the command takes before a byte moves: interpreter, numpy, checksums (measured: 45 to 70 MiB), and slack."""
REMOTE_AT_START = 112 << 20
"""What the libraries of a remote storage take besides (measured: gcsfs 68 MiB, s3fs 46 MiB), and their connections."""
AHEAD_MEMORY = AHEAD_BYTES + (64 << 20)
"""What a file from a remote source takes: what is read ahead, and once more what the library has in its hands of it."""
UPLOAD_MEMORY = 64 << 20
"""What a file takes on its way to a remote sink: two chunks of 16 MiB, or what other libraries make of one."""
TENSOR_MEMORY, SHARD_MEMORY = 2 << 10, 1280
"""What is known and planned of each tensor and each shard (measured with 200,000 of either: 1.6 KB and 1.0 KB)."""
KNOWN_AT_START = 16 << 20
"""As much of that as `MEMORY_AT_START` has room for."""
AUTO, OFF, REQUIRE = "auto", "off", "require"
LOAD_CHECKS = (AUTO, OFF, REQUIRE)
"""Ask transformers where that is possible; not at all; or refuse what it cannot judge."""
METADATA, SAMPLE, FULL = "metadata", "sample", "full"
VERIFY_LEVELS = (METADATA, SAMPLE, FULL)
"""What is held against the records after a push: what the Hub says of each file; some of each file's bytes too; all."""
FAIL, RETRY = "fail", "retry"
ON_CONFLICT = (FAIL, RETRY)
"""What to do where somebody else commits to the branch in the meantime."""
STREAM_ONLY, STREAM_BOTH = "hub", "both"
STREAMS = ("", STREAM_ONLY, STREAM_BOTH)
"""Where files go as they are made: into the sink; to the Hub; to both at once."""
HUB_AT_START = 160 << 20
"""What the client of the Hub takes besides, with the Xet storage's (measured: 130 MiB)."""
HUB_MEMORY = 208 << 20
"""What a file takes on its way to the Hub: hf_xet has that much of it in its hands (measured: 180 MiB)."""
USUAL_MEMORY, REMOTE_MEMORY = 256 << 20, 1 << 30
LARGEST_WINDOW = 4 << 20
"""Larger windows only take memory: hashing and writing are as fast with 4 MiB."""
SMALLEST_WINDOW = 64 << 10
"""Below this, calls cost more than bytes."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked. Plain values, no secrets: it may be shown, stored and sent."""

    source: str
    """URL of the checkpoint."""
    sink: str
    """URL of the folder that the output is written to."""
    repo: str = ""
    """Repository that it is pushed to, as ``org/name``."""
    revision: str = "main"
    """Branch that it is pushed to."""
    endpoint: str = ""
    """URL of the Hub; empty for the one that the Hub's own client is set to."""
    include: tuple[str, ...] = ()
    """Patterns of the tensors that are wanted, by their saved names; empty for all weights."""
    exclude: tuple[str, ...] = ()
    """Patterns of tensors that are left out."""
    recipe: str = "auto"
    """How names are cleaned, or which recipe says what becomes of tensors (`hfdcp_core.recipe_sources`)."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that a recipe asks for and no config states, by name."""
    max_file_size: int = 5_000_000_000
    """Tensor bytes in one file at most."""
    file_index: Mapping[str, int] | None = None
    """Number of the file, from 1, for every tensor; replaces the packing by size."""
    ranks: int = 0
    """Ranks of a training that the output is sharded for; 0 for a model repository."""
    shard_dim: int = 0
    """Dimension along which tensors are cut for the ranks."""
    memory_bytes: int = 0
    """Bytes that the command and its threads may take in all; 0 for `USUAL_MEMORY`, or `REMOTE_MEMORY` where the source
    or the sink is remote or files go to the Hub: more where ``workers`` asks for it."""
    workers: int = 0
    """Files that are made at once; 0 for one for each core, or as many as the memory is enough for."""
    overwrite: bool = False
    """Whether another output in the sink may be replaced."""
    world_size: int | None = None
    """How many ranks saved the checkpoint, where it does not state whole shapes itself."""
    accept_unproved: bool = False
    """Whether to go on where nothing proves that no shard is lost."""
    public: bool = False
    """Whether the repository may be public, and is made so where it is new."""
    message: str = ""
    """Message of the commit."""
    replace: bool = False
    """Whether weights of somebody else in the repository may be replaced."""
    tag: str = ""
    """Name of a tag for the commit."""
    pull_request: bool = False
    """Whether the commit opens a pull request instead of moving the branch."""
    verify: str = METADATA
    """How closely what arrived is looked at: `METADATA`, `SAMPLE` or `FULL`."""
    on_conflict: str = FAIL
    """What to do where somebody else commits in the meantime: `FAIL`, or `RETRY` upon their commit."""
    stream: str = ""
    """Where files go as they are made: one of `STREAMS`."""
    spool: str = ""
    """Folder for one file at a time on its way to a Hub that wants the digest first; empty to read the source twice."""
    sign: str = ""
    """Path of the private key that the output is signed with; empty for not at all."""
    also: tuple[str, ...] = ()
    """URLs of further places that hold files of the same checkpoint."""
    latest: bool = False
    """Whether the newest complete step below the source is meant."""
    keep_extra: bool = False
    """Whether entries that are no tensors are saved apart, where they are plain values."""
    config: str = ""
    """URL of the model's config, or of a folder with a ``config.json``; empty to look beside the checkpoint."""
    untie: bool = False
    """Whether tensors that the config ties are all written, and the config says so."""
    dtype: str = ""
    """Dtype that floating tensors are cast to, as torch or safetensors names it; empty where they stay as saved."""
    keep_dtype: tuple[str, ...] = ()
    """Patterns of tensors that stay as saved all the same, by their saved or clean names."""
    dequantize: bool = False
    """Whether numbers with scales become plain ones, of ``dtype`` or bfloat16."""
    quantize: str = ""
    """How plain numbers get scales: ``fp8-block``, or empty for not at all."""
    block_size: tuple[int, ...] = ()
    """Rows and columns of a block that has a scale; empty for what the config or the shapes say."""
    hashing: bool = True
    """Whether what is written is hashed; without, the output can be neither validated again nor pushed."""
    statistics: str = BASIC
    """How much is counted of the floating numbers that are written: ``none``, ``basic`` or ``full``."""
    fail_on: tuple[str, ...] = ()
    """What no tensor may hold, so that nothing is published: of ``nan``, ``inf``, ``zero`` (nothing but zeros)."""

    base: str = ""
    """Folder or repository of the model that the rest of the repository is taken from: config, tokenizer, licence."""
    card: bool = False
    """Whether a model card is written; with a base it always is."""
    load_check: str = AUTO
    """Whether transformers is asked if it would load the output: `AUTO`, `OFF` or `REQUIRE`."""
    check_logits: str = ""
    """Prompt, or ids between commas, that the finished model is run on; empty for not at all."""
    reference: str = ""
    """Folder of a model whose logits are compared."""
    logits_tolerance: float = 0.0
    """How much they may differ."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        least = (
            self.max_file_size - 1,
            self.workers,
            self.ranks,
            0 if self.world_size is None else self.world_size - 1,
        )
        if min(least) < 0:
            raise UsageError("sizes and numbers of workers and ranks are positive")
        if self.repo and not _REPO.fullmatch(self.repo):
            raise UsageError(
                f"{self.repo!r} names no repository: it is written namespace/name, of letters, digits and ._-"
            )
        if self.ranks and (self.base or self.card or self.check_logits):
            raise UsageError("files for ranks are no model repository: they take no base, no card, and have no logits")
        if self.ranks and (self.file_index is not None or self.repo):
            raise UsageError("files for ranks are no model repository: they take no file index, and are not pushed")
        if len({self.source, *self.also}) <= len(self.also):
            raise UsageError("a place is named twice; --also names further ones than the source")
        assert self.numerics is not None  # refuses what makes no sense together
        self._refuse_unknown_statistics()
        if self.load_check not in LOAD_CHECKS:
            raise UsageError(f"--load-check {self.load_check!r}: it is one of {', '.join(LOAD_CHECKS)}")
        if (self.reference or self.logits_tolerance) and not self.check_logits:
            raise UsageError("--reference and --logits-tolerance say what --check-logits compares with")
        self._refuse_odd_push()

    def _refuse_odd_push(self) -> None:
        for option, value, values in (
            ("--verify", self.verify, VERIFY_LEVELS),
            ("--on-conflict", self.on_conflict, ON_CONFLICT),
            ("stream", self.stream, STREAMS),
        ):
            if value not in values:
                raise UsageError(f"{option} {value!r}: it is one of {', '.join(filter(None, values))}")
        if self.stream and not self.repo:
            raise UsageError("what is streamed to the Hub needs a repository")
        if self.stream and not self.hashing:
            raise UsageError("what goes to the Hub is hashed")
        if self.stream == STREAM_ONLY and self.check_logits:
            raise UsageError("--check-logits needs the model on a local disk: keep it there with --sink")
        for option, name in (("--revision", self.revision), ("--tag", self.tag or "none")):
            if not _REF.fullmatch(name):
                raise UsageError(f"{option} {name!r} is no name of a branch or tag: it is of letters, digits and ._+/-")
        if self.pull_request and self.revision != "main":
            raise UsageError("--pr: a pull request is made to main; leave --revision out")
        if self.pull_request and self.tag:
            raise UsageError("--pr and --tag: the commit that a tag would name comes when the pull request is merged")

    def _refuse_unknown_statistics(self) -> None:
        if self.statistics not in LEVELS:
            raise UsageError(f"--stats {self.statistics!r}: it is one of {', '.join(LEVELS)}")
        if unknown := [kind for kind in self.fail_on if kind not in REFUSABLE]:
            raise UsageError(f"--fail-on {','.join(unknown)!r}: it is any of {','.join(REFUSABLE)}")
        if self.fail_on and self.statistics == NONE:
            raise UsageError(f"--fail-on {','.join(self.fail_on)} needs statistics: --stats basic or full")

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(wire.encode(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read it from what `to_json` wrote.

        Raises:
            ValidationError: It is something else.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValidationError(f"not a job: {error}") from error
        return wire.decode_as(cls, data)

    @property
    def numerics(self) -> Numerics:
        """What is asked of the numbers.

        Raises:
            UsageError: It makes no sense.
        """
        return numerics_of(
            dtype=self.dtype,
            keep_dtype=self.keep_dtype,
            dequantize=self.dequantize,
            quantize=self.quantize,
            block_size=self.block_size,
        )

    @property
    def budget_bytes(self) -> int:
        """Bytes that the command and its threads may take in all."""
        if self.memory_bytes or not self.remote_file_bytes:
            return self.memory_bytes or USUAL_MEMORY
        wanted = self.workers * (self.remote_file_bytes + LARGEST_WINDOW * (BUFFERS + SCRATCH) + WORKSPACE_BYTES)
        return max(REMOTE_MEMORY, self.start_bytes + wanted)

    @property
    def start_bytes(self) -> int:
        """What the command takes before a byte moves."""
        afar = any(map(_is_remote, (self.source, *self.also, self.sink)))
        return MEMORY_AT_START + (REMOTE_AT_START if afar else 0) + (HUB_AT_START if self.stream else 0)

    @property
    def remote_file_bytes(self) -> int:
        """What each file in flight takes beside its windows, as the source or the sink is remote, or the Hub one."""
        from_afar = any(map(_is_remote, (self.source, *self.also)))
        to_afar = (UPLOAD_MEMORY if _is_remote(self.sink) else 0) + (HUB_MEMORY if self.stream else 0)
        return (AHEAD_MEMORY if from_afar else 0) + to_afar

    @property
    def files_at_once(self) -> int:
        """How many files are made at the same time."""
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS
        if self.workers or not self.remote_file_bytes:
            return self.workers or usable or 1
        each = self.remote_file_bytes + LARGEST_WINDOW * (BUFFERS + SCRATCH)
        return max(1, min(usable or 1, (self.budget_bytes - self.start_bytes) // each))

    @property
    def window_bytes(self) -> int:
        """How much of a file is made at a time, so that all files in flight keep within the memory.

        Raises:
            UsageError: The memory is less than the smallest windows take.
        """
        return self.window_beside(0)

    def window_beside(self, held: int, *, operated: bool = False) -> int:
        """Return how much of a file is made at a time while ``held`` bytes are taken by what is known of tensors.

        Where nobody said how much memory there is, what is known of tensors comes on top of the usual. ``operated``:
        whether numbers are worked on though nobody asked for it, as a recipe may.

        Raises:
            UsageError: The memory is less than that and the smallest windows take.
        """
        budget, taken = self.budget_bytes, self.start_bytes + (held if self.memory_bytes else 0)
        each = (budget - taken) // self.files_at_once - self.remote_file_bytes
        numeric = operated or self.numerics.asked
        beside, parts = (WORKSPACE_BYTES, OPERAND_WINDOWS) if numeric else (0, 0)
        share = (each - beside) // (BUFFERS + SCRATCH + parts)
        if share < SMALLEST_WINDOW:
            windows = SMALLEST_WINDOW * (BUFFERS + SCRATCH + parts) + beside
            least = taken + self.files_at_once * (windows + self.remote_file_bytes)
            raise UsageError(f"--memory of {budget} bytes is too little: at least {-(-least >> 20)} MiB are needed")
        return min(LARGEST_WINDOW, share // SMALLEST_WINDOW * SMALLEST_WINDOW)


def known_bytes(tensors: int, shards: int) -> int:
    """Return what it takes at most, beyond what a command takes anyway, to know and plan so many tensors and shards."""
    return max(0, tensors * TENSOR_MEMORY + shards * SHARD_MEMORY - KNOWN_AT_START)


def _is_remote(url: str) -> bool:
    """Tell whether a URL leads away from this machine.

    >>> [_is_remote(url) for url in ("/data", "file:///data", "memory://x", "gs://b/k", "simplecache::gs://b/k")]
    [False, False, False, True, True]
    """
    return "://" in url and url.partition("://")[0] not in {"file", "local", "memory"}


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was found."""

    format: str
    """Format of the checkpoint."""
    tensors: int
    """Tensors that are wanted."""
    shards: int
    """Shards of all tensors."""
    files: int
    """Files of the checkpoint."""
    nbytes: int
    """Bytes of the wanted tensors."""
    skipped: tuple[Skipped, ...]
    """What is left out, and why."""
    source_digest: str
    """Stands for the files of the checkpoint in the state in which they were found."""
    unproved: str | None
    """Why it cannot be shown that everything is there; None where it can."""
    folder: str = ""
    """The folder below the source that holds it; empty where that is the source itself."""
    said: tuple[str, ...] = ()
    """What a person should hear of how it was found."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One wanted file."""

    path: str
    """Its name."""
    size: int
    """Its bytes."""
    done: bool
    """Whether it is already whole."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What will be done."""

    digest: str
    """Same source and same settings, same digest."""
    files: tuple[PlannedFile, ...]
    """The wanted files, in order."""
    tensors: int
    """Tensors in all of them."""
    nbytes: int
    """Bytes of all of them."""
    copies: int
    """Boxes that move."""
    peak_bytes: int
    """Memory that the work takes at most, with everything that the command itself takes."""
    changes: tuple[Change, ...] = ()
    """What happens to numbers that do not stay as saved."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are left out because the config ties them to another one of the same bytes: name and kept name."""
    dropped: tuple[str, ...] = ()
    """Tensors, as saved, that the recipe leaves out."""
    said: tuple[str, ...] = ()
    """What a person should hear: corrections of the config, what of the base is left out, whether it would load."""
    uncut: int = 0
    """Of files for ranks: tensors that lie whole in the first one, since they have too few dimensions to be cut."""
