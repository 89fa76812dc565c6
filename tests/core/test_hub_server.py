"""The real client of Hugging Face against the Hub on loopback, by LFS and by Xet."""

import hashlib
import json
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    constants,
    snapshot_download,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import disable_progress_bars

from hfdcp_core.testing.hub import Hub, HubFile, Settings
from hfdcp_core.testing.hub.http import Refused
from hfdcp_core.testing.hub.shards import parse_shard

# huggingface_hub 2.4 still sends LFS parts by an argument that httpx2 deprecates; it is theirs to change.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
disable_progress_bars()

REPO = "acme/m"
SMALL_LIMITS = Settings(multipart_bytes=200_000, part_bytes=100_000)


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


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", settings=SMALL_LIMITS) as hub:
        yield hub


@pytest.fixture
def api(hub: Hub) -> HfApi:
    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo(REPO, private=True)
    return api


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def add(path: str, data: bytes | Path) -> CommitOperationAdd:
    return CommitOperationAdd(path, data)


def commit(api: HfApi, *operations: object, **options: object) -> str:
    return api.create_commit(REPO, operations, commit_message="change", **options).oid


def get(hub: Hub, path: str, **headers: str) -> httpx2.Response:
    signed = {"authorization": f"Bearer {hub.token}", **headers}
    with httpx2.Client(follow_redirects=True) as client:
        return client.get(f"{hub.url}/{REPO}/resolve/main/{path}", headers=signed)


class TestRepositories:
    def test_the_token_belongs_to_the_user(self, api: HfApi) -> None:
        assert api.whoami()["name"] == "tester"

    def test_a_wrong_token_is_refused(self, hub: Hub) -> None:
        with pytest.raises(HfHubHTTPError, match="Invalid user token"):
            HfApi(endpoint=hub.url, token="wrong").whoami()

    def test_a_repository_is_created_once(self, api: HfApi) -> None:
        assert api.create_repo(REPO, exist_ok=True).repo_id == REPO
        with pytest.raises(HfHubHTTPError, match="already created"):
            api.create_repo(REPO)

    def test_somebody_elses_namespace_is_forbidden(self, api: HfApi) -> None:
        with pytest.raises(HfHubHTTPError, match="403"):
            api.create_repo("other/m")

    def test_a_private_repository_is_hidden_from_who_has_no_token(self, hub: Hub, api: HfApi) -> None:
        with pytest.raises(RepositoryNotFoundError):
            HfApi(endpoint=hub.url, token=False).repo_info(REPO)
        api.update_repo_settings(REPO, visibility="public")
        assert HfApi(endpoint=hub.url, token=False).repo_info(REPO).private is False
        assert not hub.private(REPO)

    def test_access_can_be_gated(self, api: HfApi) -> None:
        api.update_repo_settings(REPO, gated="manual")
        assert api.repo_info(REPO).gated == "manual"
        api.update_repo_settings(REPO, gated=False)
        assert api.repo_info(REPO).gated is False

    def test_the_right_to_write_can_be_asked_for(self, hub: Hub, api: HfApi) -> None:
        api.auth_check(REPO, write=True)
        with pytest.raises(RepositoryNotFoundError):
            HfApi(endpoint=hub.url, token=False).auth_check(REPO)

    def test_a_description_can_hold_every_file(self, api: HfApi) -> None:
        commit(api, add("w.safetensors", b"w"), add("a.txt", b"a"))
        siblings = {item.rfilename: item for item in api.repo_info(REPO, files_metadata=True).siblings}
        assert siblings["w.safetensors"].lfs.sha256 == sha256(b"w")
        assert (siblings["a.txt"].size, siblings["a.txt"].lfs) == (1, None)

    def test_a_deleted_repository_is_gone(self, api: HfApi) -> None:
        api.delete_repo(REPO)
        assert not api.repo_exists(REPO)

    def test_branches_and_tags_come_and_go(self, api: HfApi) -> None:
        api.create_branch(REPO, branch="staging/x")
        with pytest.raises(HfHubHTTPError, match="409"):
            api.create_branch(REPO, branch="staging/x")
        commit(api, add("a.txt", b"a"), revision="staging/x")
        api.create_tag(REPO, tag="v1", revision="staging/x")
        assert not api.file_exists(REPO, "a.txt")
        assert api.file_exists(REPO, "a.txt", revision="v1")
        refs = api.list_repo_refs(REPO)
        assert ({ref.name for ref in refs.branches}, [ref.name for ref in refs.tags]) == ({"main", "staging/x"}, ["v1"])
        api.delete_branch(REPO, branch="staging/x")
        api.delete_tag(REPO, tag="v1")
        with pytest.raises(RevisionNotFoundError):
            api.list_repo_files(REPO, revision="v1")

    def test_a_pull_request_is_merged(self, api: HfApi) -> None:
        pull = api.create_commit(REPO, [add("p.txt", b"p")], commit_message="propose", create_pr=True)
        assert pull.pr_revision == "refs/pr/1"
        assert not api.file_exists(REPO, "p.txt")
        assert api.get_discussion_details(REPO, 1).status == "open"
        assert [item.title for item in api.get_repo_discussions(REPO)] == ["propose"]
        assert len(api.list_repo_refs(REPO, include_pull_requests=True).pull_requests) == 1
        api.merge_pull_request(REPO, 1)
        assert api.file_exists(REPO, "p.txt")

    def test_a_draft_is_opened_and_written_to(self, api: HfApi) -> None:
        draft = api.create_pull_request(REPO, title="draft")
        commit(api, add("p.txt", b"p"), revision=draft.git_reference)
        api.change_discussion_status(REPO, draft.num, new_status="open")
        api.merge_pull_request(REPO, draft.num)
        assert api.file_exists(REPO, "p.txt")

    def test_history_is_squashed(self, api: HfApi) -> None:
        commit(api, add("a.txt", b"a"))
        api.super_squash_history(REPO)
        assert len(api.list_repo_commits(REPO)) == 1
        assert api.file_exists(REPO, "a.txt")

    def test_invalid_front_matter_is_refused(self, api: HfApi) -> None:
        commit(api, add("README.md", b"---\nlicense: mit\n---\n# x\n"))
        with pytest.raises(ValueError, match="bad yaml"):
            commit(api, add("README.md", b"---\nlicense: [1\n---\n"))

    @pytest.mark.usefixtures("mode")
    def test_a_hub_on_the_same_folder_finds_everything_again(self, tmp_path: Path) -> None:
        data = noise(250_000)
        with Hub(tmp_path / "again") as first:
            api = HfApi(endpoint=first.url, token=first.token)
            api.create_repo(REPO, private=True)
            commit(api, add("w.safetensors", data), add("a.txt", b"a"))
            api.create_pull_request(REPO, title="draft")
            before = first.files(REPO)
        with Hub(tmp_path / "again") as second:
            assert second.files(REPO) == before
            assert second.private(REPO)
            assert HfApi(endpoint=second.url, token=second.token).get_discussion_details(REPO, 1).title == "draft"
            assert second.download(REPO, "w.safetensors", tmp_path / "d").read_bytes() == data


class TestFiles:
    def test_what_is_pushed_is_described_and_comes_back(self, hub: Hub, api: HfApi, tmp_path: Path, mode: str) -> None:
        large, small = noise(350_000), noise(50_000, 1)
        (tmp_path / "large").write_bytes(large)
        oid = commit(
            api, add("a/large.safetensors", tmp_path / "large"), add("small.safetensors", small), add("c.json", b"{}")
        )
        info = {item.path: item for item in api.get_paths_info(REPO, ["a/large.safetensors", "c.json", "none"])}
        assert set(info) == {"a/large.safetensors", "c.json"}
        assert (info["a/large.safetensors"].lfs.sha256, info["a/large.safetensors"].size) == (sha256(large), 350_000)
        assert info["c.json"].lfs is None
        assert bool(info["a/large.safetensors"].xet_hash) == (mode == "xet")
        assert hub.files(REPO, oid)["small.safetensors"].sha256 == sha256(small)
        folder = Path(snapshot_download(REPO, endpoint=hub.url, token=hub.token, cache_dir=tmp_path / "cache"))
        assert (folder / "a/large.safetensors").read_bytes() == large
        assert (folder / "small.safetensors").read_bytes() == small
        assert not api.verify_repo_checksums(REPO, local_dir=folder).mismatches

    @pytest.mark.usefixtures("lfs")
    def test_lfs_objects_go_in_parts_and_without_the_token(self, hub: Hub, api: HfApi) -> None:
        commit(api, add("l.safetensors", noise(350_000)), add("s.safetensors", noise(50_000, 1)))
        assert len(hub.calls("/_lfs/part/", "PUT")) == 4
        assert len(hub.calls("/_lfs/complete/")) == len(hub.calls("/_lfs/put/")) == 1
        assert not any(call.authorized for call in hub.calls("/_lfs/(part|put)"))
        assert len(hub.calls("/lfs/verify")) == 2

    def test_xet_files_do_not_touch_lfs(self, hub: Hub, api: HfApi) -> None:
        commit(api, add("l.safetensors", noise(350_000)))
        assert hub.calls("/v1/xorbs/", "POST")
        assert hub.calls("/v2/shards", "POST")
        assert not hub.calls("/lfs/|/_lfs/")

    @pytest.mark.usefixtures("mode")
    def test_the_same_bytes_are_neither_sent_nor_committed_again(self, hub: Hub, api: HfApi) -> None:
        first = commit(api, add("w.safetensors", noise(50_000)))
        sent = len(hub.calls("/_lfs/|/v1/xorbs/"))
        assert commit(api, add("w.safetensors", noise(50_000))) == first
        assert len(hub.calls("/_lfs/|/v1/xorbs/")) == sent

    @pytest.mark.usefixtures("mode")
    def test_nothing_shows_before_the_commit(self, api: HfApi) -> None:
        operation = add("w.safetensors", noise(50_000))
        api.preupload_lfs_files(REPO, [operation])
        assert api.list_repo_files(REPO) == [".gitattributes"]
        commit(api, operation)
        assert api.list_repo_files(REPO) == [".gitattributes", "w.safetensors"]

    @pytest.mark.parametrize(
        ("asked", "status", "start", "stop"),
        [
            ("bytes=100-199", 206, 100, 200),
            ("bytes=299990-", 206, 299_990, 300_000),
            ("bytes=-5", 206, 299_995, 300_000),
            ("bytes=299990-400000", 206, 299_990, 300_000),
            ("lines=1-2", 200, 0, 300_000),
        ],
    )
    def test_ranges_are_served(self, hub: Hub, api: HfApi, asked: str, status: int, start: int, stop: int) -> None:
        data = noise(300_000)
        commit(api, add("w.safetensors", data))
        answer = get(hub, "w.safetensors", Range=asked)
        assert (answer.status_code, answer.content) == (status, data[start:stop])
        assert not any(call.authorized for call in hub.calls("/_cdn/"))

    def test_a_range_behind_the_end_is_refused(self, hub: Hub, api: HfApi) -> None:
        commit(api, add("a.txt", b"abc"))
        assert get(hub, "a.txt", Range="bytes=3-").status_code == 416

    def test_xet_gives_ranges_of_many_chunks(self, hub: Hub, api: HfApi) -> None:
        import hf_xet

        data = noise(1_500_000)
        commit(api, add("w.safetensors", data))
        xet = hub.files(REPO)["w.safetensors"].xet
        token = httpx2.get(
            f"{hub.url}/api/models/{REPO}/xet-read-token/main", headers={"authorization": f"Bearer {hub.token}"}
        ).json()
        group = hf_xet.XetSession().new_download_stream_group(
            endpoint=token["casUrl"], token=token["accessToken"], token_expiry_unix_secs=token["exp"]
        )
        stream = group.download_stream(hf_xet.XetFileInfo(xet, len(data)), start=700_001, end=1_400_003)
        assert b"".join(stream) == data[700_001:1_400_003]

    @pytest.mark.usefixtures("mode")
    def test_files_are_copied_and_deleted(self, hub: Hub, api: HfApi) -> None:
        commit(api, add("d/a.safetensors", noise(9_000)), add("d/b.txt", b"b"), add("c.txt", b"c"))
        before = hub.files(REPO)["d/a.safetensors"]
        commit(
            api,
            CommitOperationCopy("d/a.safetensors", "copy.safetensors"),
            CommitOperationDelete("d/", is_folder=True),
            CommitOperationDelete("c.txt"),
        )
        files = hub.files(REPO)
        assert set(files) == {".gitattributes", "copy.safetensors"}
        assert files["copy.safetensors"].sha256 == before.sha256
        with pytest.raises(EntryNotFoundError):
            commit(api, CommitOperationDelete("c.txt"))

    def test_a_stale_parent_is_refused(self, api: HfApi) -> None:
        head = api.repo_info(REPO).sha
        commit(api, add("a.txt", b"a"), parent_commit=head)
        with pytest.raises(HfHubHTTPError, match="A commit has happened since"):
            commit(api, add("b.txt", b"b"), parent_commit=head)

    def test_listings_come_in_pages(self, tmp_path: Path) -> None:
        with Hub(tmp_path, settings=Settings(page=3)) as hub:
            api = HfApi(endpoint=hub.url, token=hub.token)
            api.create_repo(REPO)
            commit(api, *(add(f"d/{number}.txt", b"%d" % number) for number in range(10)))
            listed = list(api.list_repo_tree(REPO, recursive=True, expand=True))
            assert len(listed) == 12
            assert {item.last_commit.title for item in listed if item.path.startswith("d/")} == {"change"}
            assert len(hub.calls("/tree/")) == 4
            with pytest.raises(EntryNotFoundError):
                list(api.list_repo_tree(REPO, "nope"))

    def test_safetensors_headers_are_read_by_range(self, api: HfApi) -> None:
        header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        commit(api, add("model.safetensors", struct.pack("<Q", len(header)) + header + bytes(8)))
        assert api.get_safetensors_metadata(REPO).parameter_count == {"F32": 2}

    def test_commits_are_listed(self, api: HfApi) -> None:
        api.create_commit(REPO, [add("a.txt", b"a")], commit_message="first", commit_description="why")
        commits = api.list_repo_commits(REPO)
        assert [(item.title, item.message) for item in commits] == [("first", "why"), ("initial commit", "")]


class TestRefusals:
    @pytest.mark.usefixtures("lfs")
    def test_an_object_that_was_never_sent_is_refused(self, api: HfApi) -> None:
        operation = add("w.safetensors", noise(1000))
        operation._upload_mode, operation._is_uploaded = "lfs", True
        with pytest.raises(HfHubHTTPError, match="does not exist"):
            commit(api, operation)

    @pytest.mark.usefixtures("lfs")
    def test_lfs_computes_the_digest_itself(self, api: HfApi) -> None:
        operation = add("w.safetensors", noise(1000))
        operation.upload_info.sha256 = b"\1" * 32
        with pytest.raises(RuntimeError, match="uploading") as error:
            commit(api, operation)
        assert error.value.__cause__.response.status_code == 400

    def test_xet_believes_a_digest_that_the_client_states(self, hub: Hub, api: HfApi, tmp_path: Path) -> None:
        (tmp_path / "w").write_bytes(noise(50_000))
        operation = add("w.safetensors", tmp_path / "w")
        operation.upload_info.sha256 = b"\2" * 32
        commit(api, operation)
        assert hub.files(REPO)["w.safetensors"].sha256 == "02" * 32

    def test_a_strict_hub_reads_xet_files_back(self, tmp_path: Path) -> None:
        (tmp_path / "w").write_bytes(noise(50_000))
        with Hub(tmp_path / "hub", settings=Settings(verify_xet=True)) as hub:
            api = HfApi(endpoint=hub.url, token=hub.token)
            api.create_repo(REPO)
            wrong = add("w.safetensors", tmp_path / "w")
            wrong.upload_info.sha256 = b"\2" * 32
            with pytest.raises(HfHubHTTPError, match="its shard states"):
                commit(api, wrong)
            commit(api, add("w.safetensors", tmp_path / "w"))
            assert hub.files(REPO)["w.safetensors"].sha256 == sha256(noise(50_000))

    @pytest.mark.parametrize(
        ("lines", "wrong"),
        [
            ([], "header"),
            ([{"key": "header", "value": {"summary": ""}}], "summary"),
            ([{"key": "header", "value": {"summary": "s"}}, {"key": "what", "value": {"path": "a"}}], "unknown key"),
            ([{"key": "header", "value": {"summary": "s"}}, {"key": "file", "value": {"path": "../a"}}], "path"),
            ([{"key": "header", "value": {"summary": "s"}}, {"key": "file", "value": {}}], "must be a string"),
            ([[1]], "expected a JSON object"),
        ],
        ids=["nothing", "no summary", "unknown key", "path", "no path", "no object"],
    )
    @pytest.mark.usefixtures("api")
    def test_a_malformed_commit_is_refused(self, hub: Hub, lines: list[object], wrong: str) -> None:
        answer = httpx2.post(
            f"{hub.url}/api/models/{REPO}/commit/main",
            content="\n".join(json.dumps(line) for line in lines).encode(),
            headers={"authorization": f"Bearer {hub.token}"},
        )
        assert answer.status_code == 400
        assert wrong in answer.json()["error"]

    @pytest.mark.parametrize(
        ("method", "path", "body", "status", "wrong"),
        [
            ("POST", "/api/repos/create", {"name": "x", "type": "dataset"}, 400, "models only"),
            ("POST", "/api/repos/create", {"name": 1}, 400, '"name" must be a string'),
            ("DELETE", f"/api/models/{REPO}/branch/nope", {}, 404, "does not exist"),
            ("POST", f"/api/models/{REPO}/preupload/main", {"files": [{}] * 257}, 400, "too many files"),
            ("POST", f"/api/models/{REPO}/preupload/main", {"files": 1}, 400, '"files" must be a list'),
            (
                "POST",
                f"/api/models/{REPO}/preupload/main",
                {"files": [{"path": "a", "size": "1"}]},
                400,
                '"size" must be an integer',
            ),
            ("POST", f"/api/models/{REPO}/paths-info/main", {"paths": ["a"] * 1001}, 413, "too many"),
            ("GET", f"/api/models/{REPO}/discussions/1", {}, 404, "Discussion not found"),
            ("POST", f"/{REPO}.git/info/lfs/objects/batch", {"operation": "download"}, 422, "unsupported"),
            ("POST", f"/{REPO}.git/info/lfs/verify", {"oid": "x", "size": 1}, 404, "not found"),
            ("PUT", "/_lfs/part/nope/1", {}, 404, "NoSuchUpload"),
            ("GET", f"/v1/xorbs/default/{'0' * 64}", {}, 404, "no such xorb"),
            ("GET", f"/v2/reconstructions/{'0' * 64}", {}, 404, "no such file"),
            ("GET", f"/_cdn/{'0' * 64}", {}, 404, "NoSuchKey"),
        ],
    )
    @pytest.mark.usefixtures("api")
    def test_a_request_that_makes_no_sense_is_refused(
        self, hub: Hub, method: str, path: str, body: object, status: int, wrong: str
    ) -> None:
        answer = httpx2.request(method, hub.url + path, json=body, headers={"authorization": f"Bearer {hub.token}"})
        assert (answer.status_code, wrong in answer.json()["error"]) == (status, True)

    def test_an_invalid_object_id_is_an_error_of_that_object_only(self, hub: Hub, api: HfApi) -> None:
        objects = [{"oid": "x", "size": 1}, {"oid": "0" * 64, "size": 1}]
        answer = httpx2.post(
            f"{hub.url}/{REPO}.git/info/lfs/objects/batch",
            json={"operation": "upload", "objects": objects},
            headers=api._build_hf_headers(),
        )
        assert [sorted(item) for item in answer.json()["objects"]] == [
            ["error", "oid", "size"],
            ["actions", "authenticated", "oid", "size"],
        ]

    @pytest.mark.usefixtures("api")
    @pytest.mark.parametrize(
        ("line", "wrong"),
        [
            ({"key": "file", "value": {"path": "a", "content": "x", "encoding": "base64"}}, "invalid base64"),
            ({"key": "file", "value": {"path": "a", "content": "x" * (11 << 20)}}, "larger than 10 MiB"),
            ({"key": "deletedFolder", "value": {"path": "a/"}}, "doesn't exist"),
        ],
        ids=["base64", "too large", "no folder"],
    )
    def test_a_change_that_cannot_be_leaves_nothing(self, hub: Hub, line: object, wrong: str) -> None:
        header = {"key": "header", "value": {"summary": "s"}}
        whole = {"key": "file", "value": {"path": "b", "content": "b"}}
        answer = httpx2.post(
            f"{hub.url}/api/models/{REPO}/commit/main",
            content="\n".join(json.dumps(item) for item in (header, whole, line)).encode(),
            headers={"authorization": f"Bearer {hub.token}"},
        )
        assert wrong in answer.json()["error"]
        assert set(hub.files(REPO)) == {".gitattributes"}

    def test_a_mistake_of_the_hub_itself_is_an_answer(self, hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
        (hub.root / "tmp").rmdir()
        answer = httpx2.put(f"{hub.url}/_lfs/put/{REPO}/{'0' * 64}/1", content=b"a")
        assert (answer.status_code, "the test Hub itself failed" in answer.json()["error"]) == (500, True)
        assert "FileNotFoundError" in capfd.readouterr().err

    def test_an_address_that_is_not_known_says_so(self, hub: Hub) -> None:
        assert httpx2.get(f"{hub.url}/nope").json() == {"error": "no such route: GET /nope"}

    @pytest.mark.parametrize("raw", [b"", bytes(40), bytes(32) + b"\2" + bytes(15)], ids=["empty", "version", "short"])
    def test_a_broken_shard_is_refused(self, raw: bytes) -> None:
        with pytest.raises(Refused, match="shard"):
            parse_shard(raw)

    def test_a_hub_without_xet_has_no_xet_token(self, tmp_path: Path) -> None:
        with Hub(tmp_path, settings=Settings(xet=False)) as hub:
            api = HfApi(endpoint=hub.url, token=hub.token)
            api.create_repo(REPO)
            with pytest.raises(ConnectionError):
                commit(api, add("w.safetensors", noise(1000)))


class TestFaults:
    def test_a_status_is_answered_as_often_as_asked(self, hub: Hub, api: HfApi) -> None:
        hub.fault("/revision/", method="GET", status=503, skip=1, times=2)
        statuses = []
        for _ in range(4):
            try:
                api.repo_info(REPO, revision="main")
                statuses.append(200)
            except HfHubHTTPError as error:
                statuses.append(error.response.status_code)
        assert statuses == [200, 503, 503, 200]
        assert [call.faulted for call in hub.calls("/revision/")] == [False, True, True, False]

    def test_an_answer_is_lost_after_the_work_was_done(self, hub: Hub, api: HfApi) -> None:
        hub.fault("/commit/", method="POST", after=True)
        with pytest.raises(httpx2.TransportError):
            commit(api, add("b.txt", b"b"))
        assert api.file_exists(REPO, "b.txt")
        assert [call.status for call in hub.calls("/commit/")] == [0]

    @pytest.mark.usefixtures("lfs")
    def test_a_connection_breaks_in_the_middle_of_a_body(self, hub: Hub, api: HfApi) -> None:
        hub.fault("/_lfs/part/.*/2", drop_after=50_000)
        commit(api, add("w.safetensors", noise(350_000)))
        assert len(hub.calls("/_lfs/part/.*/2")) == 2
        assert hub.files(REPO)["w.safetensors"].sha256 == sha256(noise(350_000))

    @pytest.mark.usefixtures("lfs")
    def test_a_corrupted_body_is_refused_by_lfs(self, hub: Hub, api: HfApi) -> None:
        hub.fault("/_lfs/put/", corrupt=True)
        with pytest.raises(RuntimeError, match="uploading"):
            commit(api, add("w.safetensors", noise(1000)))
        assert set(hub.files(REPO)) == {".gitattributes"}

    def test_a_body_may_come_in_chunks(self, hub: Hub, api: HfApi) -> None:
        lines = (
            json.dumps(line).encode() + b"\n"
            for line in (
                {"key": "header", "value": {"summary": "s"}},
                {"key": "file", "value": {"path": "a.txt", "content": "a"}},
            )
        )
        headers = {"authorization": f"Bearer {hub.token}"}
        assert httpx2.post(f"{hub.url}/api/models/{REPO}/commit/main", content=lines, headers=headers).is_success
        assert api.file_exists(REPO, "a.txt")

    def test_a_delay_ends_with_the_hub(self, tmp_path: Path) -> None:
        with Hub(tmp_path) as hub:
            hub.fault("/api/", delay_s=3600)
            with httpx2.Client(timeout=0.2) as client, pytest.raises(httpx2.ReadTimeout):
                client.get(f"{hub.url}/api/whoami-v2")

    def test_xet_storage_that_is_busy_is_asked_again(self, hub: Hub, api: HfApi) -> None:
        hub.fault("/v1/xorbs/", method="POST", status=503)
        commit(api, add("w.safetensors", noise(50_000)))
        assert [call.status for call in hub.calls("/v1/xorbs/", "POST")] == [503, 200]

    def test_no_token_is_kept(self, hub: Hub, api: HfApi) -> None:
        api.whoami()
        assert hub.calls("/whoami")[-1].authorized
        assert hub.token not in repr(hub.calls())


def test_a_file_of_the_hub_has_a_size_and_a_digest(hub: Hub, api: HfApi) -> None:
    commit(api, add("a.txt", b"abc"))
    assert hub.files(REPO)["a.txt"] == HubFile(
        3, "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f", commit=api.repo_info(REPO).sha
    )


def test_a_person_sees_repositories_and_files_in_a_browser(hub: Hub, api: HfApi) -> None:
    data = noise(1000)
    made = commit(api, add("w<1>.safetensors", data))
    home = httpx2.get(hub.url)
    assert home.headers["content-type"] == "text/html; charset=utf-8"
    assert f'<a href="/{REPO}">{REPO}</a></td><td>private' in home.text
    for page in (httpx2.get(f"{hub.url}/{REPO}").text, httpx2.get(f"{hub.url}/{REPO}/commit/{made}").text):
        assert f"<td>w&lt;1&gt;.safetensors</td><td>1,000</td><td>{sha256(data)}</td><td>Xet</td>" in page
        assert ".gitattributes" in page


def test_the_module_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hfdcp_core.testing.hub", "--root", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        exported = dict(server.stdout.readline().strip().removeprefix("export ").split("=", 1) for _ in range(2))
        assert HfApi(endpoint=exported["HF_ENDPOINT"], token=exported["HF_TOKEN"]).whoami()["name"] == "tester"
        server.terminate()
        assert server.wait(timeout=30) == 0
