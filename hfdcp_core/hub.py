"""Push: what a manifest names becomes one commit on the Hub, from a stage on which everything was found right.

1. Before anything is sent: may the token write, is the repository as private as it should be, where does the branch
   stand, whose weights lie there, would the Hub take the card and files of these sizes?
2. Large files go to a stage (`hfdcp_core.hub_stage`), but those that the branch or the stage holds already.
3. The stage is held against the records.
4. One commit upon the very head that was looked at: large files as copies on the server, small ones, the manifest last,
   and without what an earlier push left. So a loader sees the old model or the new one.
5. The commit is held against the records, tagged, and the stage goes.

Every step can be done again. What is there is known by its content, never by what a call answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from hfdcp_core import wire
from hfdcp_core.consolidate import Creator
from hfdcp_core.errors import (
    Conflict,
    HfdcpError,
    HubRejected,
    HubUnavailable,
    StorageNotFound,
    ValidationError,
)
from hfdcp_core.hub_client import Change, Committed, Copied, Gone, RemoteFile, Repository, Sent, Small, git_name
from hfdcp_core.hub_stage import Stage, difference, send
from hfdcp_core.hub_target import (
    Terms,
    look_at,
    open_target,
    published_manifest,
    refuse_large,
    repository_of,
    stale_files,
    weights_of,
)
from hfdcp_core.hub_verify import read_back
from hfdcp_core.job import FAIL, METADATA, RETRY, SAMPLE
from hfdcp_core.manifest import MANIFEST_PATH, FileRecord, Manifest
from hfdcp_core.mending import Furthest
from hfdcp_core.run import SentFile, Target
from hfdcp_core.safetensors_file import header_length
from hfdcp_core.signing import SIGNATURE_PATH, Signer, signature_problems
from hfdcp_core.state import SILENT, Cancellation, Progress
from hfdcp_core.store import Sink, Source

CARD_PATH = "README.md"
"""The model card, which the Hub shows first."""
FILES_AT_ONCE = 2
"""Files of a finished output that are sent at the same time: each takes what hf_xet has of it in its hands."""
BLOCK_BYTES = 4 << 20
CONFLICTS = 5
"""How often a commit is tried upon the commits of others."""
STAGE_CHECK = "on the Hub's staging branch: "
"""In front of what the manifest says of checks that were done there."""


CHECKS: Mapping[str, str] = {
    "metadata": "sizes, sha256 and Xet hashes as the Hub states them",
    "sample": "sizes, sha256 and Xet hashes as the Hub states them; headers and some tensors read back",
    "full": "sizes, sha256 and Xet hashes as the Hub states them; every byte read back and hashed",
}
"""What each level of verification looks at."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a push has done."""

    repo: str
    """The repository, as ``namespace/name``."""
    revision: str
    """The branch, or that of the pull request."""
    commit: str
    """Id of the commit at which everything was found right."""
    url: str
    """Where a person sees that commit, or the pull request."""
    files: tuple[str, ...]
    """Every file of the output, the manifest with them."""
    uploaded_bytes: int
    """Bytes of the files that were not there already."""
    created: bool
    """Whether the repository is new."""
    unchanged: bool
    """Whether everything was there already, so that nothing was committed."""
    moved_bytes: int = 0
    """Bytes of large files that went over the network."""
    deduplicated_bytes: int = 0
    """Bytes of large files that the storage had already."""
    tag: str = ""
    """The tag that names the commit."""
    checks: tuple[str, ...] = ()
    """What was held against the records, before the commit and after it."""


# ---- the push -------------------------------------------------------------------------------------------------------


def push(
    manifest: Manifest,
    store: Sink,
    repo: str,
    terms: Terms | None = None,
    *,
    target: Target | None = None,
    sent: Mapping[str, SentFile] | None = None,
    progress: Progress = SILENT,
    cancellation: Cancellation | None = None,
) -> Receipt:
    """Make what a manifest names one commit on the Hub.

    The token is found as huggingface_hub finds it. Files other than weights that lie in the repository and are not in
    the manifest are left alone.

    Args:
        manifest: What was written; the store has it at `MANIFEST_PATH`.
        store: Where the files lie that are not on the stage.
        repo: The repository, as ``namespace/name``.
        terms: How.
        target: The repository as it was found before files were streamed to its stage; it is looked at where None.
        sent: Files that were streamed to its stage.
        progress: Who wants to know.
        cancellation: Heeded while waiting and between blocks of a file.

    Raises:
        ValidationError: The files in the store are not what the manifest says, or what the Hub then holds is not.
        HubRejected: The repository is public, or the Hub does not take something.
        Conflict: There are weight files of somebody else, or somebody pushed in the meantime.
        HubDenied: The token is absent, wrong, or may not write there.
        HubUnavailable: The Hub is down, or does not answer; push again.
        RateLimited: The Hub asks to wait, longer than we would.
    """
    terms, sent = terms or Terms(), sent or {}
    signer = Signer.load(terms.sign) if terms.sign else None
    _refuse_other_store(manifest, store, sent)
    repository = repository_of(repo, terms, cancellation)
    target = target or open_target(repository, terms)
    stage = Stage(repository, manifest.plan_digest)
    work = _Push(repository, stage, manifest, store, terms, sent, progress, cancellation or Cancellation())
    return work.run(target, signer)


def _refuse_other_store(manifest: Manifest, store: Sink, sent: Mapping[str, SentFile]) -> None:
    """Refuse a store that does not hold what its manifest says."""
    if wire.load_manifest(store.read(MANIFEST_PATH, 0, store.stat(MANIFEST_PATH).size)) != manifest:
        raise ValidationError(f"{store.url}: its {MANIFEST_PATH} is not the manifest to push; validate it first")
    problems = [_wrong_size(store, record) for record in manifest.files if record.path not in sent]
    ValidationError.raise_for(
        f"{store.url} does not hold what its manifest says; consolidate again",
        (problem for problem in problems if problem),
    )


def _wrong_size(store: Sink, record: FileRecord) -> str | None:
    try:
        size = store.stat(record.path).size
    except StorageNotFound:
        return f"{record.path}: not there"
    return None if size == record.size else f"{record.path}: {size} bytes, expected {record.size}"


def write_from(
    store: Source,
    record: FileRecord,
    into: Creator,
    *,
    progress: Progress = SILENT,
    cancellation: Cancellation | None = None,
) -> None:
    """Write a file of a store into what is given.

    Args:
        store: Where it lies.
        record: The file.
        into: Takes it.
        progress: Hears of every block.
        cancellation: Heeded between blocks.

    Raises:
        StorageError: Reading failed.
        ValidationError, HubError: As what it is written into.
    """
    upload = into.create(record.path, record.size)
    try:
        for block in blocks_of(store, record):
            if cancellation:
                cancellation.check()
            upload.write(block)
            progress.advance(len(block))
        upload.commit()
    except BaseException:
        upload.abort()
        raise


def blocks_of(store: Source, record: FileRecord) -> Iterator[memoryview]:
    """Give the bytes of a file of a store, each block in the same memory."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, record.size)))
    for start in range(0, record.size, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, record.size - start)]
        store.read_into(record.path, start, block)
        yield block


@dataclass(slots=True)
class _Push:
    """One push, and what is known of it so far."""

    repository: Repository
    stage: Stage
    manifest: Manifest
    store: Sink
    terms: Terms
    sent: Mapping[str, SentFile]
    progress: Progress
    cancellation: Cancellation
    arrived: dict[str, Sent] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)

    def run(self, target: Target, signer: Signer | None) -> Receipt:
        files = self.manifest.files
        paths = {record.path for record in files} | ({SIGNATURE_PATH} if signer else set())
        stale = stale_files(self.repository, target, paths, self.terms)
        self._refuse_tag()
        there = self.repository.files([record.path for record in files], target.commit)
        missing = [record for record in files if self._differs(record, there.get(record.path))]
        former = published_manifest(self.repository, target.commit)
        signed = signer is None or SIGNATURE_PATH in self.repository.root(target.commit)
        if not missing and not stale and signed and self.manifest.says_the_same(former):
            return self._unchanged(target)
        self._refuse_before_sending(missing, target)
        large = self._large(missing, target)
        self._send([record for record in missing if record.path in large], target)
        published = self._published()
        raw = wire.dump_manifest(published)
        record = FileRecord(MANIFEST_PATH, len(raw), hashlib.sha256(raw).hexdigest())
        small = {one.path: self._whole(one) for one in missing if one.path not in large} | {MANIFEST_PATH: raw}
        records = (*published.files, record)
        if signer:
            digests = {one.path: one.sha256 for one in records}
            small[SIGNATURE_PATH] = signer.bundle(self.repository.name.rpartition("/")[2], digests)
        committed = self._commit(target, sorted(large), small, stale)
        self._verify(committed.commit, records, small, stale)
        self._finish(committed.commit, record.sha256)
        return self._receipt(target, committed, [*(one.path for one in files), MANIFEST_PATH], missing, len(raw))

    # ---- what is there, and what would not be taken ----

    def _differs(self, record: FileRecord, remote: RemoteFile | None) -> str | None:
        problem = difference(record, remote)
        if problem or remote is None or remote.sha256 is not None:
            return problem
        same = record.path not in self.sent and git_name(record.size, blocks_of(self.store, record)) == remote.blob
        return None if same else f"{record.path}: another content of the same size"

    def _refuse_tag(self) -> None:
        commit = self.repository.tags().get(self.terms.tag) if self.terms.tag else None
        if commit and not self.manifest.says_the_same(published_manifest(self.repository, commit)):
            raise Conflict(f"{self.repository.name} has a tag {self.terms.tag} that names another commit", [commit])

    def _refuse_before_sending(self, missing: Sequence[FileRecord], target: Target) -> None:
        here = [record for record in missing if record.path not in self.sent]
        refuse_large({record.path: (record.size, self._header_bytes(record)) for record in here})
        for record in here:
            if record.path == CARD_PATH:
                text = self._whole(record).decode(errors="replace")
                self.repository.check_card(text, target.revision)

    def _header_bytes(self, record: FileRecord) -> int:
        if not record.tensors or record.size < 8:
            return 0
        return header_length(self.store.read(record.path, 0, 8), path=record.path)

    def _large(self, missing: Sequence[FileRecord], target: Target) -> set[str]:
        asked = {
            record.path: (record.size, self.store.read(record.path, 0, min(512, record.size)))
            for record in missing
            if record.path not in self.sent
        }
        large = self.repository.large(asked, target.commit) if asked else frozenset()
        return {record.path for record in missing if record.path in large or record.path in self.sent}

    # ---- bytes ----

    def _send(self, records: Sequence[FileRecord], target: Target) -> None:
        """Bring large files to the stage, and hold it against them."""
        if records:
            self.stage.open(target.commit)
        there = self.stage.files([record.path for record in records])
        needed = [record for record in records if difference(record, there.get(record.path))]
        self.progress.begin("push", sum(record.size for record in needed))
        if not records:
            return
        if lost := [record.path for record in needed if record.path in self.sent]:
            raise HubUnavailable(
                "files that were streamed are not on the stage; publish again, they are sent anew", lost
            )
        with ThreadPoolExecutor(FILES_AT_ONCE, "hfdcp-push") as pool:
            for record, sent in zip(needed, pool.map(self._send_one, needed), strict=True):
                self.arrived[record.path] = sent
        self.stage.flush()
        expected = [self._expected(record) for record in records]
        problems = self.stage.problems(expected)
        if not problems:
            problems = read_back(self.repository, self.stage.branch, expected, self.terms.verify, self.progress)
        where = f"{self.repository.name}@{self.stage.branch}"
        ValidationError.raise_for(f"{where} is not what was written; {self.terms.revision} is untouched", problems)
        self.checks.append(f"{STAGE_CHECK}{CHECKS[self.terms.verify]}")

    def _expected(self, record: FileRecord) -> FileRecord:
        if arrived := self.arrived.get(record.path):
            return replace(record, xet=arrived.xet)
        streamed = self.sent.get(record.path)
        return replace(record, xet=streamed.record.xet) if streamed else record

    def _send_one(self, record: FileRecord) -> Sent:
        furthest = Furthest(self.progress)

        def produce(into: Creator) -> None:
            furthest.again()
            write_from(self.store, record, into, progress=furthest, cancellation=self.cancellation)

        sent = send(self.stage, record.path, record.size, produce, digest=lambda: record.sha256, progress=furthest)
        if sent.sha256 != record.sha256:
            raise self._changed(record, sent.sha256)
        self.stage.add(replace(record, xet=sent.xet))
        return sent

    def _changed(self, record: FileRecord, found: str) -> ValidationError:
        problem = f"{record.path}: sha256 is {found}, expected {record.sha256}"
        return ValidationError(f"{self.store.url} is no longer what was written; consolidate again", [problem])

    def _whole(self, record: FileRecord) -> bytes:
        data = self.store.read(record.path, 0, record.size)
        found = hashlib.sha256(data).hexdigest()
        if found != record.sha256:
            raise self._changed(record, found)
        return data

    # ---- the commit ----

    def _published(self) -> Manifest:
        """Return the manifest as it goes to the repository: with what arrived, and what was checked there."""
        records, extra = (
            tuple(map(self._expected, files)) for files in (self.manifest.records, self.manifest.extra_files)
        )
        checks = (*self.manifest.checks, *self.checks)
        return replace(self.manifest, records=records, extra_files=extra, checks=checks)

    def _commit(
        self, target: Target, large: Sequence[str], small: Mapping[str, bytes], stale: Sequence[str]
    ) -> Committed:
        """Commit everything at once, upon the head that was looked at, or upon a later one where the terms allow it."""
        if target.new:
            self.repository.create_branch(target.revision, target.commit)
        for _ in range(CONFLICTS if self.terms.on_conflict == RETRY else 1):
            changes: list[Change] = [
                *(Copied(path, self.stage.branch) for path in large),
                *(Small(path, data) for path, data in small.items()),
                *(Gone(path) for path in stale),
            ]
            try:
                return self._commit_upon(target, changes, small)
            except Conflict as conflict:
                fault = conflict
                head = self.repository.look(target.revision)
                if self.terms.on_conflict == FAIL or head is None or head.commit == target.commit:
                    raise
                self.progress.say(f"somebody pushed {head.commit[:12]} meanwhile; committing upon it (--on-conflict)")
                target = replace(target, commit=head.commit)
                ours = {*(record.path for record in self.manifest.files), *small}
                stale = stale_files(self.repository, target, ours, self.terms)
        raise fault

    def _commit_upon(self, target: Target, changes: Sequence[Change], small: Mapping[str, bytes]) -> Committed:
        digest = hashlib.sha256(small[MANIFEST_PATH]).hexdigest()

        def commit() -> Committed:
            return self.repository.commit(
                target.revision,
                changes,
                message=self.terms.message or _message(self.manifest),
                description=f"{MANIFEST_PATH} has sha256 {digest}",
                parent=target.commit,
                pull_request=self.terms.pull_request,
            )

        def opened() -> Committed | None:
            for request in self.repository.pull_requests():
                there = self.repository.files([MANIFEST_PATH], request.revision).get(MANIFEST_PATH)
                head = self.repository.look(request.revision) if there and there.holds(small[MANIFEST_PATH]) else None
                if head:
                    return replace(request, commit=head.commit)
            return None

        def made() -> Committed | None:
            head = self.repository.look(target.revision)
            if head is None or head.commit == target.commit:
                return None
            there = self.repository.files([MANIFEST_PATH], head.commit).get(MANIFEST_PATH)
            return Committed(head.commit) if there and there.holds(small[MANIFEST_PATH]) else None

        if self.terms.pull_request:
            return opened() or self.repository.settled(commit, opened)
        return self.repository.settled(commit, made)

    def _verify(
        self, commit: str, records: Sequence[FileRecord], small: Mapping[str, bytes], stale: Sequence[str]
    ) -> None:
        """Hold the commit against the records."""
        there = self.repository.files([*(record.path for record in records), *small, *stale], commit)
        problems = [difference(record, there.get(record.path)) for record in records]
        for path, data in small.items():
            remote = there.get(path)
            if remote is None or not remote.holds(data):
                problems.append(f"{path}: not there, or another content")
        problems += [f"{path}: still there" for path in stale if path in there]
        if not any(problems) and self.terms.verify != METADATA:
            problems += read_back(self.repository, commit, self._published().records, SAMPLE)
        ValidationError.raise_for(
            f"{self.repository.url(commit)} is visible, but is not what was written; push again, or revert it",
            dict.fromkeys(problem for problem in problems if problem),
        )
        self.checks.append(f"at the commit: {CHECKS[METADATA if self.terms.verify == METADATA else SAMPLE]}")

    def _unchanged(self, target: Target) -> Receipt:
        """Look at what is there as closely as asked, and leave it."""
        problems = read_back(self.repository, target.commit, self.manifest.records, self.terms.verify, self.progress)
        ValidationError.raise_for(f"{self.repository.url(target.commit)} is not what was written", problems)
        self.checks.append(f"at the commit: {CHECKS[self.terms.verify]}")
        raw = self.repository.read(MANIFEST_PATH, target.commit)
        self._finish(target.commit, hashlib.sha256(raw).hexdigest())
        paths = [*(record.path for record in self.manifest.files), MANIFEST_PATH]
        return replace(self._receipt(target, Committed(target.commit), paths, (), 0), unchanged=True)

    def _finish(self, commit: str, digest: str) -> None:
        """Tag the commit, and take the stage away."""
        if self.terms.tag:
            message = f"{MANIFEST_PATH} has sha256 {digest}; {'; '.join(self.checks)}"
            self.repository.tag(self.terms.tag, commit, message)
        try:
            if self.stage.exists():
                self.stage.remove()
        except HfdcpError as error:
            self.progress.say(f"everything is published, but the branch {self.stage.branch} stays: {error}")

    def _receipt(
        self, target: Target, committed: Committed, paths: Sequence[str], missing: Sequence[FileRecord], more: int
    ) -> Receipt:
        done: Sequence[Sent | SentFile] = [*self.arrived.values(), *self.sent.values()] if missing else []
        found = "everything found right at"
        self.progress.say(
            f"{target.repo}: {len(missing)} of {len(paths)} files are new, {found} {committed.commit[:12]}"
        )
        return Receipt(
            repo=target.repo,
            revision=committed.revision or target.revision,
            commit=committed.commit,
            url=committed.pull_request or self.repository.url(committed.commit),
            files=tuple(paths),
            uploaded_bytes=sum(record.size for record in missing) + more,
            created=target.created,
            unchanged=False,
            moved_bytes=sum(one.moved_bytes for one in done),
            deduplicated_bytes=sum(one.deduplicated_bytes for one in done),
            tag=self.terms.tag,
            checks=tuple(self.checks),
        )


def _message(manifest: Manifest) -> str:
    tensors = sum(len(record.tensors) for record in manifest.records)
    return f"Publish {tensors} tensors, {len(manifest.records)} files (hfdcp)"


# ---- at any later day -----------------------------------------------------------------------------------------------


def read_card(repo: str, terms: Terms) -> str:
    """Return the model card that a repository has, or nothing where there is none.

    Raises:
        HubDenied, HubUnavailable, RateLimited: As for `push`.
    """
    repository = repository_of(repo, terms)
    head, _ = look_at(repository, terms.revision)
    if head is None or CARD_PATH not in repository.root(head.commit):
        return ""
    return repository.read(CARD_PATH, head.commit).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Published:
    """What a repository holds, held against a manifest."""

    manifest: Manifest
    """The manifest."""
    commit: str
    """Where the revision stands."""
    problems: tuple[str, ...]
    """What is wrong; nothing where all is well."""


def look_again(
    repo: str,
    terms: Terms,
    *,
    manifest: Manifest | None = None,
    public_key: str = "",
    progress: Progress = SILENT,
    cancellation: Cancellation | None = None,
) -> Published:
    """Hold a published repository against a manifest: of large files what the Hub says of them, regular ones whole.

    Args:
        repo: The repository, as ``namespace/name``.
        terms: Which revision of it, and how closely it is looked at.
        manifest: The manifest; the repository's own where None.
        public_key: Path of the key in PEM that it must be signed with; empty to look at no signature.
        progress: Hears of what is read back.
        cancellation: Heeded while waiting.

    Raises:
        HubRejected: There is no such repository or revision.
        ValidationError: It holds no manifest that can be read.
        UsageError: There is no such key.
        HubDenied, HubUnavailable, RateLimited: As for `push`.
    """
    repository = repository_of(repo, terms, cancellation)
    head = repository.look(terms.revision)
    if head is None:
        raise HubRejected(f"there is no repository {repo}, or the token may not see it")
    root = repository.root(head.commit)
    where = f"{repo}@{terms.revision}"
    if MANIFEST_PATH not in root and manifest is None:
        raise ValidationError(f"{where} holds no {MANIFEST_PATH}: nothing says what its bytes should be")
    raw = repository.read(MANIFEST_PATH, head.commit) if MANIFEST_PATH in root else b""
    expected = manifest or _parsed(raw, where)
    progress.begin("validate", sum(record.size for record in expected.files))
    problems = _problems(repository, head.commit, expected)
    if manifest is not None and not manifest.says_the_same(published_manifest(repository, head.commit, root)):
        problems.append(f"{MANIFEST_PATH}: not there, or not this manifest")
    ours = {record.path for record in expected.files}
    problems += [f"{one}: a weight file that the manifest does not name" for one in weights_of(root) if one not in ours]
    if public_key:
        signature = repository.read(SIGNATURE_PATH, head.commit) if SIGNATURE_PATH in root else b""
        digests = {record.path: record.sha256 for record in expected.files}
        digests[MANIFEST_PATH] = hashlib.sha256(raw).hexdigest()
        problems += (
            signature_problems(signature, public_key, digests) if signature else [f"{SIGNATURE_PATH}: not there"]
        )
    if not problems:
        problems += read_back(repository, head.commit, expected.records, terms.verify, progress)
    return Published(expected, head.commit, tuple(problems))


def _parsed(raw: bytes, where: str) -> Manifest:
    try:
        return wire.load_manifest(raw)
    except ValidationError as error:
        raise ValidationError(f"{where}: its {MANIFEST_PATH} cannot be read: {error}") from error


def _problems(repository: Repository, commit: str, manifest: Manifest) -> list[str]:
    """Hold what the Hub says of every file against its record; of those that it keeps as regular ones, the content."""
    there = repository.files([record.path for record in manifest.files], commit)
    problems = []
    for record in manifest.files:
        remote = there.get(record.path)
        problem = difference(record, remote)
        if not problem and remote is not None and remote.sha256 is None:
            found = hashlib.sha256(repository.read(record.path, commit)).hexdigest()
            problem = None if found == record.sha256 else f"{record.path}: another content of the same size"
        if problem:
            problems.append(problem)
    return problems
