"""A record says what was written; the manifest is all records, written last. Where it lies, the output is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MANIFEST_PATH = "hfdcp-manifest.json"
"""Name of the manifest, in a sink and in a repository."""
INDEX_PATH = "model.safetensors.index.json"
"""Name of the Hugging Face index."""
EXTRA_PATH = "hfdcp-extra.json"
"""Name of the file with the entries that are no tensors but plain values."""
CONFIG_PATH = "config.json"
"""Name of a model's config, in a repository and beside a checkpoint."""
STATE_FOLDER = ".hfdcp"
"""Folder of our own state in a sink; never published."""


@dataclass(frozen=True, slots=True)
class CrcPart:
    """A checked part of a source item whose stored CRC-32 covers more than that part."""

    item: str
    """The item, as ``file[start:stop]``."""
    start: int
    """First byte of the part, counted in the item's payload."""
    stop: int
    """Behind the last byte of the part."""
    crc32: int
    """CRC-32 of the part alone."""
    payload_size: int
    """Bytes of the whole payload."""
    payload_crc32: int
    """CRC-32 that the source states for the whole payload."""


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """How far a written file's source bytes were held against the source's own checksums."""

    verified: int = 0
    """Items whose stored CRC-32 was found right."""
    unchecked: int = 0
    """Items that carry no CRC-32 (raw safetensors bytes, or a writer told not to compute it)."""
    parts: tuple[CrcPart, ...] = ()
    """Parts of items that other files read the rest of."""
    mended: tuple[str, ...] = ()
    """Items that are damaged in one place and were taken from another, as ``file[start:stop]``."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the floating numbers of tensors look like; names only where there is something to say."""

    level: str = "none"
    """How much was looked at: ``none``, ``basic``, ``full`` (`hfdcp_core.statistics.LEVELS`)."""
    nan: Mapping[str, int] = field(default_factory=dict)
    """How many numbers are NaN, by tensor."""
    inf: Mapping[str, int] = field(default_factory=dict)
    """How many numbers are infinite, by tensor."""
    zero: tuple[str, ...] = ()
    """Tensors whose numbers are all zero."""
    absmax: Mapping[str, float] = field(default_factory=dict)
    """The largest magnitude of the finite numbers, by tensor; of ``full`` only."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file that was written, and what was hashed on the way."""

    path: str
    """Name of the file, relative to its store."""
    size: int
    """Bytes."""
    sha256: str
    """Lower-case hex: the identity that the Hub keeps for weight files; empty where nobody hashed the file."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Digest of each tensor in the file, or of the part of it that lies there.

    ``crc64nvme:<hex>`` of its logical row-major little-endian bytes; empty where nobody hashed the file.
    """
    source: SourceCheck = field(default_factory=SourceCheck)
    """What was checked of the bytes it was made from."""
    overflowed: Mapping[str, int] = field(default_factory=dict)
    """Of tensors that were cast or scaled: how many numbers their dtype cannot hold, where there are any."""
    statistics: Statistics = field(default_factory=Statistics)
    """What the written numbers look like, of each tensor or of the part of it that lies in the file."""
    xet: str = ""
    """Lower-case hex: the Hub's content address of the file in its Xet storage; empty where nobody computed it."""

    @property
    def bare(self) -> FileRecord:
        """The same file, without what differs from one place that it was written to to another."""
        return replace(self, xet="")


@dataclass(frozen=True, slots=True)
class Numerics:
    """What is asked of the numbers: in which dtype they are written, and whether with scales."""

    dtype: str = ""
    """Safetensors name of the dtype that floating tensors are cast to; empty where they stay as saved."""
    keep_dtype: tuple[str, ...] = ()
    """Patterns of the tensors that stay as saved all the same."""
    dequantize: bool = False
    """Whether numbers with scales become plain ones."""
    quantize: str = ""
    """`FP8_BLOCK`, or empty for plain numbers."""
    block_size: tuple[int, ...] = ()
    """Rows and columns of a block that has a scale of its own; empty where the shapes say it."""

    @property
    def asked(self) -> bool:
        """Whether anything is."""
        return bool(self.dtype or self.dequantize or self.quantize)


FP8_BLOCK = "fp8-block"
"""Quantise the matrices of linear layers to ``F8_E4M3``, with a scale for every block."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that was written, and from what."""

    plan_digest: str
    """Digest of the plan: same source stamps and settings, same digest."""
    source_digest: str
    """Digest of the source's stamps; stands for the source in what is published."""
    source_format: str
    """Format of the source."""
    records: tuple[FileRecord, ...]
    """The weight files, in the plan's order."""
    extra_files: tuple[FileRecord, ...] = ()
    """Other files that belong to the output: the index where there is one."""
    total_size: int = 0
    """Bytes of all tensors, as the index states them."""
    recipe: str = "none"
    """Which recipe gave the names."""
    include: tuple[str, ...] = ()
    """Patterns that chose the tensors, where there were any."""
    exclude: tuple[str, ...] = ()
    """Patterns that left tensors out."""
    ranks: int = 0
    """Ranks of a training that the files are sharded for; 0 for a model repository."""
    shard_dim: int = 0
    """Dimension along which tensors are cut for the ranks."""
    unproved: str | None = None
    """Why completeness could not be proved, where it was accepted unproved."""
    skipped: tuple[str, ...] = ()
    """Names of the entries that were left out."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Versions of what wrote it."""
    checks: tuple[str, ...] = ()
    """What was checked before the manifest was written."""
    numerics: Numerics = field(default_factory=Numerics)
    """What was done to the numbers."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Tensors that were left out because the config ties them to another one of the same bytes: name and kept name."""
    corrections: tuple[str, ...] = ()
    """What was corrected in the base's config."""
    rules: str = ""
    """The recipe as plain data, where its name alone does not say it."""

    @property
    def hashed(self) -> bool:
        """Whether every weight file was."""
        return all(record.sha256 for record in self.records)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file that the output consists of, but the manifest itself."""
        return (*self.records, *self.extra_files)

    def says_the_same(self, other: Manifest | None) -> bool:
        """Whether another manifest describes the same output: made by whatever version, and checked however."""
        return other is not None and self.output == other.output

    @property
    def output(self) -> Manifest:
        """The same, without who made and checked it, and where its files lie."""
        records, extra = (tuple(record.bare for record in files) for files in (self.records, self.extra_files))
        return replace(self, records=records, extra_files=extra, tools={}, checks=())
