"""What is done so far: the documents of one run, at rest in its sink under ``.hfdcp/``.

They are the record of truth. Each step finds here what the step before it left, so that a run can be inspected, taken
up again after a crash, or finished by hand, on another machine, with or without Prefect. A step therefore needs no more
than the sink's URL and the number of a file.

::

    .hfdcp/lock                     held by whoever runs the chain
    .hfdcp/source.json              which folder of the source it was, and which place holds which file
    .hfdcp/catalog.json.gz          what was gathered
    .hfdcp/plan.json                what is planned, without the copies
    .hfdcp/plan/00001.json.gz       the copies of one file
    .hfdcp/records/NAME.json        a file that is whole, and the stamp it had then
    .hfdcp/hashed/NAME.json         a file that was hashed, and is about to be sent
    .hfdcp/sent/NAME.json           a file whose bytes the Hub has
    .hfdcp/target.json              the repository that it goes to, as it was found
    .hfdcp/beside.json              files that we put beside the weights
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from hfdcp_core import wire
from hfdcp_core.catalog import Catalog, FileStamp
from hfdcp_core.errors import PlanError, SinkOccupied, StorageNotFound, ValidationError
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH, STATE_FOLDER, FileRecord, Manifest, Numerics
from hfdcp_core.plan import FilePlan, Plan
from hfdcp_core.quantization import Change
from hfdcp_core.store import Sink

_SOURCE = f"{STATE_FOLDER}/source.json"
_CATALOG = f"{STATE_FOLDER}/catalog.json.gz"
_PLAN = f"{STATE_FOLDER}/plan.json"
_LOCK = f"{STATE_FOLDER}/lock"
_RECORDS = f"{STATE_FOLDER}/records"
_SENT = f"{STATE_FOLDER}/sent"
_HASHED = f"{STATE_FOLDER}/hashed"
_TARGET = f"{STATE_FOLDER}/target.json"
_BESIDE = f"{STATE_FOLDER}/beside.json"
_GATHERED: dict[bytes, Catalog] = {}
"""The catalog that this process wrote last, by the SHA-256 of its document: it need not be read from it, and once."""
_RESHARDED: dict[bytes, FilePlan] = {}
"""The file plans that this process wrote last, likewise."""
_PLANNED: dict[bytes, PlanSummary] = {}
"""The plan that this process read last, likewise: every file that is made asks for it."""


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One wanted file, without its copies."""

    path: str
    """Its name."""
    size: int
    """Bytes of the whole file."""
    peak_bytes: int
    """Bytes in flight while it is made, at most."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan without its copies: what a person, a scheduler and the last step need of it."""

    digest: str
    """Stands for the source's stamps and everything that was asked."""
    files: tuple[FileSummary, ...]
    """The wanted files, in order."""
    index: bytes | None
    """The Hugging Face index; None where one file needs none."""
    total_size: int
    """Bytes of all tensors."""
    tensors: int
    """How many tensors are wanted."""
    source_format: str
    """Format of the source."""
    stamps: tuple[FileStamp, ...]
    """All files of the source, as they were when gathered."""
    recipe: str
    """Which recipe gave the names."""
    include: tuple[str, ...]
    """Patterns that chose the tensors, where there were any."""
    exclude: tuple[str, ...]
    """Patterns that left tensors out."""
    skipped: tuple[str, ...]
    """Names of the entries that are left out."""
    unproved: str | None
    """Why completeness could not be proved, where that was accepted."""
    ranks: int
    """Ranks of a training that the files are sharded for; 0 for a model repository."""
    shard_dim: int
    """Dimension along which tensors are cut for the ranks."""
    tied: Mapping[str, str]
    """Tensors that are left out because the config ties them to another one: name and kept name."""
    config: bytes | None
    """The config that belongs to the output, where it had to be changed."""
    keep_extra: bool
    """Whether entries that are no tensors are saved apart."""
    numerics: Numerics = field(default_factory=Numerics)
    """What is done to the numbers."""
    rules: str = ""
    """The recipe as plain data, where its name alone does not say it."""
    assets: tuple[FileStamp, ...] = ()
    """Files of the base that are copied, as they were when they were listed."""
    left_in_base: tuple[str, ...] = ()
    """Files of the base that are neither assets nor weights."""
    corrections: tuple[str, ...] = ()
    """What was corrected in the config."""
    loads: str = ""
    """What transformers said of loading it, where it was asked and all was well."""
    dropped: tuple[str, ...] = ()
    """Tensors, as saved, that the recipe leaves out."""
    changes: tuple[Change, ...] = ()
    """The same, kind by kind, for a person."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Saved:
    """A file that was made, and the state in which it was left."""

    plan_digest: str
    """The plan that it belongs to."""
    record: FileRecord
    """What was written."""
    stamp: FileStamp
    """The file in the sink, when it was whole."""


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file whose bytes the Hub has."""

    plan_digest: str
    """The plan that it belongs to."""
    record: FileRecord
    """What was sent."""
    moved_bytes: int = 0
    """Bytes of it that went over the network."""
    deduplicated_bytes: int = 0
    """Bytes of it that the storage had before."""


@dataclass(frozen=True, slots=True)
class Target:
    """The repository as it was found before anything was sent."""

    repo: str
    """Its name."""
    endpoint: str
    """Address of the Hub; empty for the usual one."""
    revision: str
    """The branch."""
    commit: str
    """Where the branch stood, or would begin."""
    new: bool
    """Whether the branch is not there yet."""
    created: bool
    """Whether the repository had to be created."""
    regular: tuple[str, ...] = ()
    """Planned files that the Hub would keep as regular ones: they cannot be streamed, and travel in the commit."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Where in the named source the checkpoint was found, so that no later step finds another one."""

    folder: str = ""
    """The folder that holds it, relative to every place that was named; empty where that is the place itself."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """Of a checkpoint in several places: the number of the place, from 0, that each file is read from."""
    elsewhere: Mapping[str, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    """Spans of files that are read from another place: start, stop, and the place's number."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Files that lie beside the weights and are ours; so another run knows which it may replace or remove."""

    files: tuple[FileRecord, ...] = ()
    """What was put there."""


class Run:
    """The documents of one run, in one sink."""

    def __init__(self, sink: Sink) -> None:
        """Take a sink; nothing is read or written yet."""
        self.sink = sink

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep every other process from writing to the sink.

        Raises:
            SinkOccupied: Another one is at it.
        """
        with self.sink.hold(_LOCK, "hfdcp"):
            yield

    def read(self, path: str) -> bytes | None:
        """Return a small file of the sink, or None where there is none."""
        try:
            return self.sink.read_whole(path)
        except StorageNotFound:
            return None

    def save_source(self, pinned: Pinned) -> None:
        """Keep where the checkpoint was found."""
        self.sink.put(_SOURCE, wire.dumps("source", pinned))

    def source(self) -> Pinned:
        """Return where the checkpoint was found; the named place itself where nothing was kept.

        Raises:
            ValidationError: What was kept is damaged.
        """
        raw = self.read(_SOURCE)
        return Pinned() if raw is None else wire.loads("source", Pinned, raw)

    def save_catalog(self, catalog: Catalog) -> None:
        """Keep what was gathered."""
        raw = wire.dump_catalog(catalog)
        self.sink.put(_CATALOG, raw)
        _GATHERED.clear()
        _GATHERED[hashlib.sha256(raw).digest()] = catalog

    def catalog(self) -> Catalog:
        """Return what was gathered.

        Raises:
            PlanError: Nothing was.
        """
        raw = self._needed(_CATALOG, "gather")
        return _GATHERED.pop(hashlib.sha256(raw).digest(), None) or wire.load_catalog(raw)

    def save_plan(self, planned: PlanSummary, plan: Plan) -> None:
        """Keep a plan: the copies first, so that where the plan is, they are."""
        _RESHARDED.clear()
        for number, file in enumerate(plan.files):
            raw = wire.dump_file_plan(file)
            self.sink.put(_file_plan(number), raw)
            _RESHARDED[hashlib.sha256(raw).digest()] = file
        self.sink.put(_PLAN, wire.dumps("plan", planned))

    def planned(self) -> PlanSummary:
        """Return the plan without its copies.

        Raises:
            PlanError: There is none.
        """
        raw = self._needed(_PLAN, "reshard")
        digest = hashlib.sha256(raw).digest()
        found = _PLANNED.get(digest)
        if found is None:
            found = wire.loads("plan", PlanSummary, raw)
            _PLANNED.clear()
            _PLANNED[digest] = found
        return found

    def file_plan(self, number: int) -> FilePlan:
        """Return the copies of one file, counted from 0.

        Raises:
            PlanError: There is no such file.
        """
        raw = self._needed(_file_plan(number), "reshard")
        return _RESHARDED.pop(hashlib.sha256(raw).digest(), None) or wire.load_file_plan(raw)

    def header(self, number: int) -> bytes:
        """Return the first bytes of a planned file, counted from 0, up to its data.

        Raises:
            PlanError: There is no such file.
        """
        return wire.load_file_header(self._needed(_file_plan(number), "reshard"))

    def _needed(self, path: str, step: str) -> bytes:
        raw = self.read(path)
        if raw is None:
            raise PlanError(f"{self.sink.url}: there is no {path}: the step {step!r} was not done here")
        return raw

    def save_record(self, digest: str, record: FileRecord) -> None:
        """Keep what was written of a file that is whole."""
        saved = Saved(digest, record, self.sink.stat(record.path))
        self.sink.put(_record(record.path), wire.dumps("record", saved))

    def record(self, digest: str, path: str) -> FileRecord | None:
        """Return the record of a file if it was made for this plan and nobody touched it since."""
        raw = self.read(_record(path))
        if raw is None:
            return None
        try:
            saved = wire.loads("record", Saved, raw)
            whole = saved.plan_digest == digest and saved.stamp == self.sink.stat(path)
        except (ValidationError, StorageNotFound):
            return None
        return saved.record if whole else None

    # ---- on the Hub ----

    def save_sent(self, sent: SentFile) -> None:
        """Keep that the Hub has the bytes of a file."""
        self.sink.put(_sent(sent.record.path), wire.dumps("sent", sent))

    def sent(self, digest: str, path: str) -> SentFile | None:
        """Return what was sent of a file for this plan, or None."""
        return self._sent_file(_sent(path), digest)

    def _sent_file(self, document: str, digest: str) -> SentFile | None:
        raw = self.read(document)
        try:
            found = None if raw is None else wire.loads("sent", SentFile, raw)
        except ValidationError:
            return None
        return found if found is not None and found.plan_digest == digest else None

    def forget_sent(self, path: str) -> None:
        """Know no more that the Hub has a file."""
        self.sink.delete(_sent(path))

    def forget(self, path: str) -> None:
        """Know nothing more of a file: neither here nor on the Hub is it what it should be."""
        self.forget_sent(path)
        self.sink.delete(_hashed(path))
        self.sink.delete(path)

    def save_hashed(self, digest: str, record: FileRecord) -> None:
        """Keep what a file was found to be that nobody has yet."""
        self.sink.put(_hashed(record.path), wire.dumps("sent", SentFile(digest, record)))

    def hashed(self, digest: str, path: str) -> FileRecord | None:
        """Return what a file of this plan was found to be, or None."""
        found = self._sent_file(_hashed(path), digest)
        return found.record if found else None

    def save_target(self, target: Target) -> None:
        """Keep how the repository was found."""
        self.sink.put(_TARGET, wire.dumps("target", target))

    def target(self) -> Target | None:
        """Return how the repository was found, or None where nobody looked."""
        raw = self.read(_TARGET)
        try:
            return None if raw is None else wire.loads("target", Target, raw)
        except ValidationError:
            return None

    def manifest(self) -> Manifest | None:
        """Return the manifest, or None where the output is not complete.

        Raises:
            ValidationError: What lies there is no manifest.
        """
        raw = self.read(MANIFEST_PATH)
        return None if raw is None else wire.load_manifest(raw)

    # ---- beside the weights ----

    def put_beside(self, files: Mapping[str, bytes]) -> tuple[FileRecord, ...]:
        """Write the files that lie beside the weights, and remove those of an earlier run that nobody changed."""
        for record in self._beside().files:
            if record.path not in files and self._holds(record):
                self.sink.delete(record.path)
        records = tuple(FileRecord(path, len(data), _sha256(data)) for path, data in files.items())
        self.sink.put(_BESIDE, wire.dumps("beside", Beside(records)))  # first: a crash must not make them a stranger's
        for path, data in files.items():
            self.sink.put(path, data)
        return records

    def refuse_other(self, path: str, data: bytes, *, overwrite: bool) -> None:
        """Refuse to replace a file that somebody else put beside the weights.

        Raises:
            SinkOccupied: There is one, it is another one, and ``overwrite`` is not given.
        """
        ours = {record.path for record in self._beside().files if self._holds(record)}
        if not overwrite and path not in ours and self.read(path) not in {None, data}:
            raise SinkOccupied(f"{self.sink.url} holds another {path} (--overwrite replaces it)", [path])

    def _beside(self) -> Beside:
        raw = self.read(_BESIDE)
        try:
            return Beside() if raw is None else wire.loads("beside", Beside, raw)
        except ValidationError:
            return Beside()

    def _holds(self, record: FileRecord) -> bool:
        raw = self.read(record.path)
        return raw is not None and _sha256(raw) == record.sha256

    # ---- occupancy ----

    def output_files(self) -> tuple[str, ...]:
        """Return what loaders would take for a model: weight files, index, manifest."""
        try:
            files = self.sink.list().files
        except StorageNotFound:
            return ()
        return tuple(f.path for f in files if f.path in {INDEX_PATH, MANIFEST_PATH} or f.path.endswith(".safetensors"))

    def occupy(self, planned: PlanSummary, *, overwrite: bool) -> None:
        """Make room for a plan: go on where it was begun, refuse what somebody else left, or remove it if asked to.

        Raises:
            SinkOccupied: The sink holds another output and ``overwrite`` is not given.
        """
        present = self.output_files()
        manifest_digest, plan_digest = self._digests()
        mine = {file.path for file in planned.files} if planned.digest in {manifest_digest, plan_digest} else set()
        foreign = {path for path in present if path.endswith(".safetensors")} - mine
        other_index = INDEX_PATH in present and self.read(INDEX_PATH) != planned.index
        other_manifest = MANIFEST_PATH in present and manifest_digest != planned.digest
        if not (foreign or other_index or other_manifest):
            return
        if not overwrite:
            raise SinkOccupied(f"{self.sink.url} holds another output (--overwrite replaces it)", present)
        for path in sorted(present, key=lambda path: (path != MANIFEST_PATH, path != INDEX_PATH)):
            self.sink.delete(path)

    def _digests(self) -> tuple[str | None, str | None]:
        """Return the plan digests that the manifest and the plan here state, where they can be read."""
        try:
            manifest = self.manifest()
        except ValidationError:
            manifest = None
        raw = self.read(_PLAN)
        try:
            plan = None if raw is None else wire.loads("plan", PlanSummary, raw)
        except ValidationError:
            plan = None
        return (manifest.plan_digest if manifest else None), (plan.digest if plan else None)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_plan(number: int) -> str:
    return f"{STATE_FOLDER}/plan/{number + 1:05d}.json.gz"


def _sent(path: str) -> str:
    return f"{_SENT}/{path}.json"


def _hashed(path: str) -> str:
    return f"{_HASHED}/{path}.json"


def _record(path: str) -> str:
    return f"{_RECORDS}/{path}.json"
