"""Pushing and comparing, by the real client against the Hub on loopback, by LFS and by Xet."""

import hashlib
import json
import random
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    set_client_factory,
)
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils._http import default_client_factory

from hfdcp_core import wire
from hfdcp_core.errors import (
    Conflict,
    HfdcpError,
    HubDenied,
    HubRejected,
    HubUnavailable,
    RateLimited,
    StorageNotFound,
    ValidationError,
)
from hfdcp_core.hub import CHECKS, STAGE_CHECK, Receipt, look_again, push
from hfdcp_core.hub_calls import ANSWER_S, Patience
from hfdcp_core.hub_target import Terms
from hfdcp_core.manifest import EXTRA_PATH, INDEX_PATH, MANIFEST_PATH, FileRecord, Manifest
from hfdcp_core.safetensors_file import parse_header
from hfdcp_core.state import SILENT, Progress
from hfdcp_core.store import Sink, open_store
from hfdcp_core.testing.hub import EVER, Hub, Settings
from hfdcp_core.validate import Hasher

# huggingface_hub 2.4 still sends LFS parts by an argument that httpx2 deprecates; it is theirs to change.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "acme/m"
TOKEN = "hf_SecretThatNobodyMaySee"
A, B, C = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def weights_file(size: int, seed: int) -> bytes:
    """A safetensors file of so many bytes, with two tensors."""
    data = noise(size - 8 - HEADER_SIZE, seed)
    cut = len(data) // 3
    spans = {"a": (0, cut), "b": (cut, len(data))}
    rows = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in spans.items()}
    return HEADER_SIZE.to_bytes(8, "little") + json.dumps(rows).encode().ljust(HEADER_SIZE) + data


HEADER_SIZE = 160
FILES = {A: weights_file(250_000, 1), B: weights_file(60_000, 2), C: weights_file(1000, 3)}
SIZE = sum(len(data) for data in FILES.values())


class Told:
    """Takes down what it is told, and does something when bytes have been sent."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.total = self.done = 0
        self.lines: list[str] = []
        self.step = ""
        self._then = then

    def begin(self, step: str, total_bytes: int) -> None:
        self.step, self.total = step, total_bytes

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        self._then()

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(params=["xet", "lfs"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which way large files go: the client's own switch, set as its environment variable would."""
    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = request.param == "lfs"
    yield request.param
    constants.HF_HUB_DISABLE_XET = before


@pytest.fixture
def lfs() -> Iterator[None]:
    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    yield
    constants.HF_HUB_DISABLE_XET = before


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", settings=Settings(token=TOKEN, multipart_bytes=200_000, part_bytes=100_000)) as hub:
        yield hub


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)


@pytest.fixture
def repo(api: HfApi) -> None:
    api.create_repo(REPO, private=True)


@pytest.fixture
def store(tmp_path: Path) -> Sink:
    return open_store(tmp_path / "sink")


@pytest.fixture(params=["local", "memory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    return open_store(tmp_path / "sink" if request.param == "local" else f"memory://{tmp_path.name}")


def record(path: str, data: bytes) -> FileRecord:
    """What is known of a file; one that is no safetensors file has no tensors."""
    header = parse_header(data[: 8 + HEADER_SIZE], path=path, file_size=len(data)) if len(data) >= 1000 else None
    hasher = Hasher(header)
    hasher.update(memoryview(data))
    return FileRecord(path, len(data), hasher.sha256, tensors=hasher.tensors)


def written(store: Sink, files: Mapping[str, bytes] = FILES) -> Manifest:
    """Put an output into a store: files, an index and the manifest."""
    index = repr(sorted(files)).encode()
    manifest = Manifest(
        plan_digest="p",
        source_digest="s",
        source_format="dcp",
        records=tuple(record(path, data) for path, data in files.items()),
        extra_files=(record(INDEX_PATH, index),),
    )
    for path, data in {**files, INDEX_PATH: index, MANIFEST_PATH: wire.dump_manifest(manifest)}.items():
        store.put(path, data)
    return manifest


ONCE = Patience(tries=1, quota_s=0)
"""Tests of what an answer means want to hear it."""


def pushed(
    hub: Hub,
    store: Sink,
    files: Mapping[str, bytes] = FILES,
    *,
    progress: Progress = SILENT,
    patience: Patience = ONCE,
    **terms: object,
) -> Receipt:
    return push(
        written(store, files),
        store,
        REPO,
        Terms(endpoint=hub.url, patience=patience, **terms),
        progress=progress,
    )


def compare(manifest: Manifest, hub: Hub, **terms: object) -> tuple[str, ...]:
    return look_again(REPO, Terms(endpoint=hub.url, **terms), manifest=manifest).problems


def weights(hub: Hub) -> dict[str, str | None]:
    return {path: file.sha256 for path, file in hub.files(REPO).items() if path.endswith(".safetensors")}


def commits(hub: Hub) -> list[int]:
    return [call.status for call in hub.calls("/commit/(?!hfdcp)", "POST")]


def expected(files: Mapping[str, bytes] = FILES) -> dict[str, str | None]:
    return {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}


class TestPush:
    def test_everything_arrives_private_and_in_one_commit(
        self, hub: Hub, api: HfApi, any_store: Sink, mode: str, tmp_path: Path
    ) -> None:
        told = Told()
        receipt = pushed(hub, any_store, progress=told)
        assert hub.private(REPO)
        assert commits(hub) == [200]
        assert weights(hub) == expected()
        assert set(hub.files(REPO)) == {".gitattributes", *FILES, INDEX_PATH, MANIFEST_PATH}
        assert hub.files(REPO) == hub.files(REPO, receipt.commit)
        there = wire.load_manifest(hub.download(REPO, MANIFEST_PATH, tmp_path / "d").read_bytes())
        assert there.says_the_same(written(any_store))
        assert there.checks == (f"{STAGE_CHECK}{CHECKS['metadata']}",)
        assert [one.xet for one in there.records] == [hub.files(REPO)[path].xet or "" for path in FILES]
        assert hub.download(REPO, A, tmp_path / "d").read_bytes() == FILES[A]
        assert bool(hub.files(REPO)[A].xet) == (mode == "xet")
        total = SIZE + hub.files(REPO)[INDEX_PATH].size + hub.files(REPO)[MANIFEST_PATH].size
        assert SIZE <= receipt.moved_bytes <= (SIZE if mode == "lfs" else 1.01 * SIZE)
        assert receipt == Receipt(
            repo=REPO,
            revision="main",
            commit=api.repo_info(REPO).sha or "",
            url=f"{hub.url}/{REPO}/commit/{receipt.commit}",
            files=(*FILES, INDEX_PATH, MANIFEST_PATH),
            uploaded_bytes=total,
            created=True,
            unchanged=False,
            moved_bytes=receipt.moved_bytes,
            checks=(*there.checks, f"at the commit: {CHECKS['metadata']}"),
        )
        assert (told.step, told.total, told.done) == ("push", SIZE, SIZE)
        assert set(hub.refs(REPO)) == {"refs/heads/main"}

    def test_the_commit_says_what_it_holds(self, hub: Hub, api: HfApi, store: Sink) -> None:
        pushed(hub, store)
        pushed(hub, store, {A: b"other"}, message="My own words")
        digest = hashlib.sha256(hub.read(REPO, MANIFEST_PATH)).hexdigest()
        second, first = api.list_repo_commits(REPO)[:2]
        assert (first.title, second.title) == ("Publish 6 tensors, 3 files (hfdcp)", "My own words")
        assert second.message == f"hfdcp-manifest.json has sha256 {digest}"

    @pytest.mark.usefixtures("mode")
    def test_what_is_there_already_is_neither_sent_nor_committed(self, hub: Hub, any_store: Sink) -> None:
        first = pushed(hub, any_store)
        before = len(hub.calls("/preupload|/_lfs/|/v1/|/v2/|/commit"))
        again = pushed(hub, any_store)
        assert again == replace(
            first, uploaded_bytes=0, created=False, unchanged=True, moved_bytes=0, checks=first.checks[1:]
        )
        assert len(hub.calls("/preupload|/_lfs/|/v1/|/v2/|/commit")) == before

    @pytest.mark.usefixtures("mode")
    def test_only_what_differs_is_sent(self, hub: Hub, store: Sink) -> None:
        pushed(hub, store)
        changed = {**FILES, B: weights_file(60_000, 9)}
        told = Told()
        receipt = pushed(hub, store, changed, progress=told)
        assert weights(hub) == expected(changed)
        assert told.done == 60_000
        assert receipt.uploaded_bytes == 60_000 + hub.files(REPO)[MANIFEST_PATH].size
        assert commits(hub) == [200, 200]

    def test_a_store_that_is_not_local_needs_no_disk(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spool = tmp_path / "spool"
        spool.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(spool))
        seen: list[int] = []
        store = open_store(f"memory://{tmp_path.name}")
        pushed(hub, store, progress=Told(lambda: seen.append(len(list(spool.rglob("*"))))))
        assert seen
        assert not any(seen)
        assert weights(hub) == expected()

    def test_the_clients_own_progress_bars_keep_quiet_and_come_back(
        self, hub: Hub, store: Sink, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = are_progress_bars_disabled()
        enable_progress_bars()
        try:
            pushed(hub, store)
            assert not are_progress_bars_disabled()
        finally:
            if before:
                disable_progress_bars()
        assert capsys.readouterr().err == ""

    def test_a_branch_is_pushed_to(self, hub: Hub, api: HfApi, store: Sink) -> None:
        api.create_repo(REPO, private=True)
        api.create_branch(REPO, branch="staging/a")
        receipt = pushed(hub, store, revision="staging/a")
        assert (receipt.created, receipt.revision) == (False, "staging/a")
        assert set(hub.files(REPO)) == {".gitattributes"}
        assert A in hub.files(REPO, "staging/a")

    def test_weights_that_the_repository_keeps_as_regular_files_are_compared_too(
        self, hub: Hub, api: HfApi, any_store: Sink
    ) -> None:
        api.create_repo(REPO, private=True)
        api.create_commit(REPO, [CommitOperationDelete(".gitattributes")], commit_message="no LFS")
        pushed(hub, any_store)
        assert weights(hub) == dict.fromkeys(FILES)
        assert pushed(hub, any_store).unchanged
        receipt = pushed(hub, any_store, {**FILES, C: weights_file(1000, 8)})
        assert receipt.uploaded_bytes == 1000 + hub.files(REPO)[MANIFEST_PATH].size

    def test_an_empty_file_is_pushed(self, hub: Hub, any_store: Sink) -> None:
        pushed(hub, any_store, {"model.safetensors": b""})
        assert hub.files(REPO)["model.safetensors"].size == 0

    def test_other_files_are_left_alone(self, hub: Hub, api: HfApi, store: Sink) -> None:
        api.create_repo(REPO, private=True)
        api.create_commit(
            REPO, [CommitOperationAdd("README.md", b"---\nlicense: mit\n---\n# mine\n")], commit_message="card"
        )
        pushed(hub, store)
        assert {"README.md", A} < set(hub.files(REPO))


class TestRepositoriesThatHoldSomethingElse:
    @pytest.mark.usefixtures("mode")
    def test_stale_files_of_an_earlier_push_are_deleted_in_the_same_commit(self, hub: Hub, store: Sink) -> None:
        pushed(hub, store)
        single = {"model.safetensors": noise(100)}
        pushed(hub, store, single)
        assert weights(hub) == expected(single)
        assert commits(hub) == [200, 200]

    def test_values_of_an_earlier_push_go_when_they_are_no_longer_kept(self, hub: Hub, store: Sink) -> None:
        pushed(hub, store, {"model.safetensors": noise(100), EXTRA_PATH: b"{}"})
        assert EXTRA_PATH in hub.files(REPO)
        pushed(hub, store, {"model.safetensors": noise(100)})
        assert EXTRA_PATH not in hub.files(REPO)

    def test_a_file_of_that_name_that_somebody_else_put_there_is_left_alone(
        self, hub: Hub, api: HfApi, store: Sink
    ) -> None:
        pushed(hub, store)
        api.create_commit(REPO, [CommitOperationAdd(EXTRA_PATH, b"{}")], commit_message="theirs")
        assert pushed(hub, store).unchanged
        assert EXTRA_PATH in hub.files(REPO)

    @pytest.mark.parametrize("manifest", [None, b"{}", b"\xff"], ids=["none", "another document", "no JSON"])
    def test_weights_of_somebody_else_are_refused(
        self, hub: Hub, api: HfApi, store: Sink, manifest: bytes | None
    ) -> None:
        api.create_repo(REPO, private=True)
        theirs = [CommitOperationAdd("other.safetensors", b"x"), CommitOperationAdd("a/b.safetensors", b"y")]
        if manifest is not None:
            theirs.append(CommitOperationAdd(MANIFEST_PATH, manifest))
        api.create_commit(REPO, theirs, commit_message="theirs")
        with pytest.raises(Conflict, match=r"hfdcp did not write; .*--replace") as error:
            pushed(hub, store)
        assert error.value.problems == ("other.safetensors",)
        assert commits(hub) == [200]
        pushed(hub, store, replace=True)
        assert set(weights(hub)) == {*FILES, "a/b.safetensors"}

    def test_a_public_repository_is_refused_unless_allowed(self, hub: Hub, api: HfApi, store: Sink) -> None:
        api.create_repo(REPO, private=False)
        with pytest.raises(HubRejected, match=r"acme/m is public.*--public"):
            pushed(hub, store)
        assert set(hub.files(REPO)) == {".gitattributes"}
        pushed(hub, store, public=True)
        assert weights(hub) == expected()

    @pytest.mark.usefixtures("mode")
    def test_a_branch_that_is_not_there_is_made_where_the_main_one_stands(
        self, hub: Hub, api: HfApi, store: Sink
    ) -> None:
        api.create_repo(REPO, private=True)
        api.create_commit(REPO, [CommitOperationAdd("notes.txt", b"mine")], commit_message="notes")
        receipt = pushed(hub, store, revision="step-1000")
        assert (receipt.created, receipt.revision) == (False, "step-1000")
        assert set(hub.files(REPO)) == {".gitattributes", "notes.txt"}
        assert set(hub.files(REPO, "step-1000")) == {*hub.files(REPO), *FILES, INDEX_PATH, MANIFEST_PATH}

    def test_a_commit_of_somebody_else_in_the_meantime_is_a_conflict(self, hub: Hub, api: HfApi, store: Sink) -> None:
        def interfere() -> None:
            api.create_commit(REPO, [CommitOperationAdd("b.txt", b"b")], commit_message="theirs")

        with pytest.raises(Conflict, match="somebody pushed since"):
            pushed(hub, store, progress=Told(interfere))
        assert set(hub.files(REPO)) == {".gitattributes", "b.txt"}
        assert pushed(hub, store).commit == api.repo_info(REPO).sha

    def test_an_ignore_file_that_excludes_weights_is_reported(self, hub: Hub, api: HfApi, store: Sink) -> None:
        api.create_repo(REPO, private=True)
        api.create_commit(REPO, [CommitOperationAdd(".gitignore", b"*.safetensors\n")], commit_message="ignore")
        with pytest.raises(HubRejected, match=r"\.gitignore"):
            pushed(hub, store)


class TestDamage:
    def test_a_file_of_another_size_is_refused_before_anything_is_asked(self, hub: Hub, any_store: Sink) -> None:
        manifest = written(any_store)
        any_store.put(A, FILES[A][:-1])
        any_store.delete(B)
        with pytest.raises(ValidationError, match="consolidate again") as error:
            push(manifest, any_store, REPO, Terms(endpoint=hub.url, patience=ONCE))
        assert error.value.problems == (f"{A}: 249999 bytes, expected 250000", f"{B}: not there")
        assert not hub.calls()

    def test_a_manifest_that_is_not_the_stored_one_is_refused(self, hub: Hub, store: Sink) -> None:
        manifest = replace(written(store), plan_digest="another")
        with pytest.raises(ValidationError, match="not the manifest to push"):
            push(manifest, store, REPO, Terms(endpoint=hub.url, patience=ONCE))

    def test_a_store_without_a_manifest_is_refused(self, hub: Hub, store: Sink) -> None:
        manifest = written(store)
        store.delete(MANIFEST_PATH)
        with pytest.raises(StorageNotFound, match=MANIFEST_PATH):
            push(manifest, store, REPO, Terms(endpoint=hub.url, patience=ONCE))

    @pytest.mark.usefixtures("mode")
    @pytest.mark.parametrize("lfs_files", [True, False], ids=["large", "regular"])
    def test_a_file_that_changed_is_found_before_the_commit(
        self, hub: Hub, api: HfApi, any_store: Sink, lfs_files: bool
    ) -> None:
        api.create_repo(REPO, private=True)
        if not lfs_files:
            api.create_commit(REPO, [CommitOperationDelete(".gitattributes")], commit_message="no LFS")
        before = commits(hub)
        manifest = written(any_store)
        any_store.put(A, weights_file(250_000, 7))
        with pytest.raises(ValidationError, match=expected()[A]):
            push(manifest, any_store, REPO, Terms(endpoint=hub.url, patience=ONCE))
        assert commits(hub) == before

    @pytest.mark.usefixtures("mode")
    def test_bytes_that_are_damaged_on_the_way_are_refused(self, tmp_path: Path, store: Sink) -> None:
        with Hub(tmp_path / "strict", settings=Settings(token=TOKEN, verify_xet=True)) as hub:
            hub.fault("/_lfs/put/|/v1/xorbs/", corrupt=True)
            with pytest.raises(HubRejected, match="sha256"):
                pushed(hub, store)
            assert set(hub.files(REPO)) == {".gitattributes"}
            assert commits(hub) == []

    @pytest.mark.usefixtures("mode")
    def test_a_hub_that_holds_something_else_at_the_commit_is_found(self, hub: Hub, store: Sink) -> None:
        digest = "0" * 64
        other = (
            f'[{{"type":"file","path":"{A}","size":250000,"oid":"x","lfs":{{"oid":"{digest}","size":1,"pointerSize":1}}}},'
            f'{{"type":"file","path":"{INDEX_PATH}","size":{len(repr(sorted(FILES)))},"oid":"x"}},'
            f'{{"type":"file","path":"{B}","size":5,"oid":"x"}}]'
        )
        hub.fault("/paths-info/", status=200, body=other, skip=5)
        with pytest.raises(ValidationError, match="is visible, but is not what was written") as error:
            pushed(hub, store)
        assert error.value.problems == (
            f"{A}: sha256 is {digest}, expected {expected()[A]}",
            f"{B}: 5 bytes, expected 60000",
            f"{C}: not there",
            f"{MANIFEST_PATH}: not there",
            f"{INDEX_PATH}: not there, or another content",
            f"{MANIFEST_PATH}: not there, or another content",
        )

    def test_a_stale_file_that_stays_is_found(self, hub: Hub, store: Sink) -> None:
        pushed(hub, store)
        at = hub.files(REPO)
        listing = ",".join(f'{{"type":"file","path":"{path}","size":{at[path].size},"oid":"x"}}' for path in (A, B, C))
        hub.fault("/paths-info/", status=200, body=f"[{listing}]", skip=5)
        with pytest.raises(ValidationError, match=rf"{A}: still there"):
            pushed(hub, store, {"model.safetensors": b"1"})


class TestUnclearAnswers:
    @pytest.mark.usefixtures("mode")
    def test_a_lost_answer_of_a_commit_that_was_made_is_a_success(self, hub: Hub, api: HfApi, store: Sink) -> None:
        hub.fault("/commit/main", after=True)
        receipt = pushed(hub, store)
        assert receipt.commit == api.repo_info(REPO).sha
        assert weights(hub) == expected()
        assert commits(hub) == [0]

    @pytest.mark.parametrize(
        "fault", [{"drop_after": 1}, {"status": 504}], ids=["connection closed", "gateway timeout"]
    )
    def test_a_commit_that_was_not_made_can_be_pushed_again(self, hub: Hub, store: Sink, fault: dict[str, int]) -> None:
        hub.fault("/commit/main", **fault)
        with pytest.raises(HubUnavailable, match="push again later"):
            pushed(hub, store)
        assert set(hub.files(REPO)) == {".gitattributes"}
        pushed(hub, store)
        assert weights(hub) == expected()

    def test_a_commit_of_somebody_else_is_not_taken_for_ours(self, hub: Hub, api: HfApi, store: Sink) -> None:
        def interfere() -> None:
            api.create_commit(REPO, [CommitOperationAdd(MANIFEST_PATH, b"theirs")], commit_message="theirs")

        hub.fault("/commit/main", status=502, skip=1)  # the first is theirs
        with pytest.raises(Conflict, match="somebody pushed since"):
            pushed(hub, store, {A: b"a"}, progress=Told(interfere), patience=Patience(tries=2, pause_s=0.01))
        assert set(hub.files(REPO)) == {".gitattributes", MANIFEST_PATH}


LIMIT = {"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
STATUSES = [
    (401, {}, HubDenied, r"HF_TOKEN"),
    (403, {}, HubDenied, r"HF_TOKEN"),
    (403, {"X-Error-Code": "GatedRepo"}, HubDenied, r"403"),
    (400, {"X-Error-Message": "too odd"}, HubRejected, r"too odd"),
    (404, {}, HubRejected, r"404"),
    (409, {}, Conflict, r"somebody pushed"),
    (412, {}, Conflict, r"somebody pushed"),
    (413, {}, HubRejected, r"413"),
    (422, {}, HubRejected, r"422"),
    (429, LIMIT, RateLimited, r"wait 55 s"),
    (429, {"Retry-After": "7"}, RateLimited, r"wait 7 s"),
    (429, {}, RateLimited, r"answered 429"),
    (500, {}, HubUnavailable, r"push again later"),
    (503, {}, HubUnavailable, r"push again later"),
]


class TestErrors:
    @pytest.mark.parametrize("path", ["/revision/", "/paths-info/", "/commit/"])
    @pytest.mark.parametrize(("status", "headers", "kind", "says"), STATUSES)
    @pytest.mark.usefixtures("repo")
    def test_each_answer_has_its_error_and_none_shows_the_token(
        self,
        hub: Hub,
        store: Sink,
        path: str,
        status: int,
        headers: dict[str, str],
        kind: type[HfdcpError],
        says: str,
    ) -> None:
        hub.fault(path, status=status, headers=headers, body=f'{{"error":"Bearer {TOKEN}"}}')
        with pytest.raises(kind, match=says) as error:
            pushed(hub, store, {A: b"a"})
        assert type(error.value) is kind
        assert TOKEN not in str(error.value)
        assert set(hub.files(REPO)) == {".gitattributes"}

    @pytest.mark.usefixtures("mode")
    def test_a_storage_that_denies_is_denied(self, hub: Hub, store: Sink) -> None:
        hub.fault("/v1/xorbs|/lfs/objects/batch", status=403, times=EVER)
        with pytest.raises(HubDenied):
            pushed(hub, store)

    def test_no_token_is_denied(self, hub: Hub, store: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(HubDenied, match="set HF_TOKEN"):
            pushed(hub, store)

    def test_a_public_repository_cannot_be_written_without_a_token(
        self, hub: Hub, api: HfApi, store: Sink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        api.create_repo(REPO, private=False)
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(HubDenied, match="401"):
            pushed(hub, store, public=True)

    @pytest.mark.parametrize("wrong", ["hf_AnotherTokenThatIsWrong", "hf_Schlüssel"], ids=["unknown", "not ASCII"])
    def test_a_wrong_token_is_not_shown(
        self, hub: Hub, store: Sink, monkeypatch: pytest.MonkeyPatch, wrong: str
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", wrong)
        with pytest.raises((HubDenied, HubRejected)) as error:
            pushed(hub, store)
        assert wrong not in "".join(traceback.format_exception(error.value))

    def test_somebody_elses_namespace_is_denied(self, hub: Hub, store: Sink) -> None:
        with pytest.raises(HubDenied, match=r"cannot create other/m.*403.*namespace"):
            push(written(store), store, "other/m", Terms(endpoint=hub.url, patience=ONCE))

    @pytest.mark.parametrize("name", ["a/b/c", "a b", "-a/b"])
    def test_a_name_that_cannot_be_is_rejected(self, hub: Hub, store: Sink, name: str) -> None:
        with pytest.raises(HubRejected, match=name):
            push(written(store), store, name, Terms(endpoint=hub.url, patience=ONCE))

    def test_a_hub_that_is_down_is_unavailable(self, store: Sink) -> None:
        with socket.socket() as bound:  # bound and not listening: nobody else gets the port, nobody answers
            bound.bind(("127.0.0.1", 0))
            with pytest.raises(HubUnavailable, match="cannot look at acme/m@main"):
                push(
                    written(store),
                    store,
                    REPO,
                    Terms(endpoint=f"http://127.0.0.1:{bound.getsockname()[1]}", patience=ONCE),
                )

    def test_an_answer_that_is_not_json_is_rejected(self, hub: Hub, store: Sink) -> None:
        hub.fault("/revision/", status=200, body="<html>")
        with pytest.raises(HubRejected, match="cannot look at"):
            pushed(hub, store)

    def test_a_hub_without_xet_is_named(self, tmp_path: Path, store: Sink) -> None:
        with (
            Hub(tmp_path / "no-xet", settings=Settings(token=TOKEN, xet=False)) as hub,
            pytest.raises(HubRejected, match=r"by Xet \(HF_HUB_DISABLE_XET=1 takes LFS\).*404"),
        ):
            pushed(hub, store)

    def test_the_offline_switch_of_the_client_is_named(self, hub: Hub, store: Sink) -> None:
        constants.HF_HUB_OFFLINE = True
        try:
            with pytest.raises(HubRejected, match="OFFLINE"):
                pushed(hub, store)
        finally:
            constants.HF_HUB_OFFLINE = False

    def test_a_repository_that_cannot_be_seen_after_it_was_created_is_rejected(self, hub: Hub, store: Sink) -> None:
        hub.fault("/revision/", status=404, headers={"X-Error-Code": "RepoNotFound"}, times=2)
        with pytest.raises(HubRejected, match="cannot be seen"):
            pushed(hub, store)

    def test_a_repository_without_a_commit_is_rejected(self, hub: Hub, store: Sink) -> None:
        hub.fault("/revision/", status=200, body='{"id":"acme/m","private":true}')
        with pytest.raises(HubRejected, match="no commit to build upon"):
            pushed(hub, store)


class TestWaiting:
    @pytest.fixture(autouse=True)
    def _restore(self) -> Iterator[None]:
        yield
        set_client_factory(default_client_factory)

    def test_a_wait_has_an_end(self, hub: Hub, store: Sink) -> None:
        set_client_factory(default_client_factory)
        pushed(hub, store, {A: b"a"})
        assert get_session().timeout.read == ANSWER_S

    def test_the_callers_own_client_is_kept_and_a_hung_hub_is_unavailable(self, hub: Hub, store: Sink) -> None:
        made: list[httpx2.Client] = []

        def own() -> httpx2.Client:
            made.append(httpx2.Client(timeout=0.5))
            return made[-1]

        set_client_factory(own)
        hub.fault("/revision/", delay_s=3600)
        with pytest.raises(HubUnavailable, match="cannot look at"):
            pushed(hub, store, {A: b"a"})
        assert get_session() is made[0]
        assert made[0].timeout.read == 0.5


class TestCompare:
    @pytest.mark.usefixtures("mode")
    def test_what_was_pushed_is_found_right(self, hub: Hub, store: Sink) -> None:
        receipt = pushed(hub, store)
        assert compare(written(store), hub) == ()
        assert compare(written(store), hub, revision=receipt.commit) == ()

    def test_every_difference_is_named(self, hub: Hub, api: HfApi, store: Sink) -> None:
        pushed(hub, store)
        api.create_commit(
            REPO,
            [
                CommitOperationAdd(A, weights_file(250_000, 5)),
                CommitOperationAdd(B, b"short"),
                CommitOperationDelete(C),
                CommitOperationAdd(INDEX_PATH, repr(sorted(FILES)).encode().swapcase()),
                CommitOperationAdd("extra.safetensors", b"x"),
                CommitOperationDelete(MANIFEST_PATH),
            ],
            commit_message="theirs",
        )
        changed = hashlib.sha256(weights_file(250_000, 5)).hexdigest()
        assert compare(written(store), hub) == (
            f"{A}: sha256 is {changed}, expected {expected()[A]}",
            f"{B}: 5 bytes, expected 60000",
            f"{C}: not there",
            f"{INDEX_PATH}: another content of the same size",
            f"{MANIFEST_PATH}: not there, or not this manifest",
            "extra.safetensors: a weight file that the manifest does not name",
        )

    def test_many_files_are_asked_for_in_pieces(self, hub: Hub, api: HfApi) -> None:
        api.create_repo(REPO, private=True)
        many = tuple(record(f"{number}.safetensors", b"") for number in range(501))
        manifest = Manifest("p", "s", "dcp", many)
        assert len(compare(manifest, hub)) == 502
        assert len(hub.calls("/paths-info/")) == 2

    def test_a_repository_that_is_not_there_is_rejected(self, hub: Hub, store: Sink) -> None:
        with pytest.raises(HubRejected, match="no repository acme/m"):
            compare(written(store), hub)
