"""Streaming to the Hub, by the real client against the Hub on loopback, by Xet and by LFS: the table of faults."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import CommitOperationAdd, HfApi, constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from hfdcp_core import publish, wire
from hfdcp_core.errors import Conflict, HfdcpError, HubDenied, HubRejected, HubUnavailable, RateLimited, ValidationError
from hfdcp_core.hub import CHECKS, STAGE_CHECK, Receipt
from hfdcp_core.hub_client import Repository
from hfdcp_core.job import RETRY, STREAM_BOTH, STREAM_ONLY, Job
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH
from hfdcp_core.state import SILENT, Cancellation, Progress
from hfdcp_core.testing.checkpoints import Truth, compare_with_truth, write_model
from hfdcp_core.testing.faulty import faulty_store
from hfdcp_core.testing.hub import EVER, Hub, Settings

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "acme/m"
IN_ORDER: Any = {"file_index": None, "max_file_size": 500_000}
"""Files of tensors that lie beside one another; of tensors that do not, what lies between is read with them."""
FILES = 6
TOKEN = "hf_SecretThatNobodyMaySee"
BYTES_IN = r"/v1/xorbs/|/_lfs/(put|part)/"
"""Requests that carry bytes of weights."""
LAST_BYTES = {"xet": r"/v1/xorbs/", "lfs": r"/_lfs/(put|part)/"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A checkpoint of 3 MB that torch wrote. Read only."""
    return write_model(tmp_path_factory.mktemp("model"), total_bytes=3_000_000, ranks=2)


@pytest.fixture(params=["xet", "lfs"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which way large files go."""
    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = request.param == "lfs"
    yield request.param
    constants.HF_HUB_DISABLE_XET = before


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long we would have waited, each time; the waiting itself is left out."""
    waited: list[float] = []

    def wait(self: Cancellation, seconds: float) -> None:
        waited.append(seconds)
        self.check()

    monkeypatch.setattr(Cancellation, "wait", wait)
    return waited


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", settings=Settings(token=TOKEN, multipart_bytes=400_000, part_bytes=200_000)) as hub:
        yield hub


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)


@pytest.fixture
def job(model: Truth, hub: Hub, tmp_path: Path) -> Job:
    spread = {name: 1 + number % FILES for number, name in enumerate(model.tensors)}
    return Job(
        str(model.folder),
        str(tmp_path / "work"),
        REPO,
        endpoint=hub.url,
        file_index=spread,
        stream=STREAM_ONLY,
        workers=2,
    )


def next_key(fault: Mapping[str, object]) -> str:
    """Return the one name in a fault."""
    return next(iter(fault))


class At:
    """Does something when a step begins."""

    def __init__(self, step: str, then: Callable[[], object]) -> None:
        self._step, self._then = step, then
        self.lines: list[str] = []

    def begin(self, step: str, _total_bytes: int) -> None:
        if step == self._step:
            self._then()

    def advance(self, nbytes: int) -> None: ...

    def say(self, line: str) -> None:
        self.lines.append(line)


def run(job: Job, progress: Progress = SILENT) -> Receipt:
    return publish.publish(job, progress=progress)


def moved(hub: Hub, since: int = 0) -> int:
    """Bytes of weights that came in, by any way."""
    return sum(call.received_bytes for call in hub.calls()[since:] if _carries(call.path, call.method))


def _carries(path: str, method: str) -> bool:
    return method in {"POST", "PUT"} and ("/v1/xorbs/" in path or "/_lfs/put/" in path or "/_lfs/part/" in path)


def visible(hub: Hub, revision: str = "main") -> set[str]:
    """What a loader would see."""
    return {path for path in hub.files(REPO, revision) if path != ".gitattributes"}


def published(hub: Hub) -> int:
    """How many commits of ours reached the main branch."""
    return len([call for call in hub.calls("/commit/main", "POST") if call.status in {0, 200}])


def assert_right(hub: Hub, truth: Truth, folder: Path, revision: str = "main") -> None:
    """Download by the real client, and hold every tensor against what the builder knew."""
    api = HfApi(endpoint=hub.url, token=TOKEN)
    there = api.snapshot_download(REPO, revision=revision, local_dir=folder)
    assert compare_with_truth(truth, Path(there)) == ()
    assert {ref for ref in hub.refs(REPO) if "hfdcp" in ref} == set()
    manifest = wire.load_manifest(hub.read(REPO, MANIFEST_PATH, revision))
    files = hub.files(REPO, revision)
    assert {one.path: (one.size, one.sha256) for one in manifest.records} == {
        path: (file.size, file.sha256) for path, file in files.items() if path.endswith(".safetensors")
    }


# ---- how it goes ----------------------------------------------------------------------------------------------------


class TestStreaming:
    def test_nothing_lies_on_a_disk_and_each_byte_is_read_as_often_as_it_must(
        self, hub: Hub, job: Job, model: Truth, mode: str, tmp_path: Path
    ) -> None:
        with faulty_store(f"file://{model.folder}") as source:
            receipt = run(replace(job, source=source.url, **IN_ORDER))
            read = [call for call in source.journal if call.operation == "read" and call.path.endswith(".distcp")]
        total = sum(file.size for path, file in hub.files(REPO).items() if path.endswith(".safetensors"))
        assert 0.95 < sum(call.stop - call.start for call in read) / total / {"xet": 1, "lfs": 2}[mode] < 1.15
        assert 0.95 * total < receipt.moved_bytes < 1.01 * total  # Xet packs them
        assert moved(hub) < 1.01 * total
        kept = [path for path in Path(job.sink).rglob("*") if path.is_file()]
        assert not [path for path in kept if path.suffix == ".safetensors"]
        assert published(hub) == 1
        assert receipt.created
        assert_right(hub, model, tmp_path / "down")

    @pytest.mark.usefixtures("mode")
    def test_the_receipt_the_manifest_and_the_tag_say_what_was_checked(self, hub: Hub, job: Job, api: HfApi) -> None:
        receipt = run(replace(job, tag="v1", verify="sample"))
        manifest = wire.load_manifest(hub.read(REPO, MANIFEST_PATH))
        staged = f"{STAGE_CHECK}{CHECKS['sample']}"
        assert manifest.checks[-1] == staged
        assert receipt.checks == (staged, f"at the commit: {CHECKS['sample']}")
        [tag] = api.list_repo_refs(REPO).tags
        assert (tag.name, tag.target_commit) == ("v1", receipt.commit)
        [call] = hub.calls(r"/tag/", "POST")
        assert call.status == 201

    @pytest.mark.usefixtures("mode")
    def test_what_was_pushed_verifies_by_the_clients_own_means(self, job: Job, api: HfApi, tmp_path: Path) -> None:
        run(job)
        folder = Path(api.snapshot_download(REPO, local_dir=tmp_path / "down"))
        (folder / ".gitattributes").unlink()
        found = api.verify_repo_checksums(REPO, local_dir=folder)
        assert (found.mismatches, found.extra_paths) == ([], [])
        told = api.get_safetensors_metadata(REPO)
        index = json.loads((folder / INDEX_PATH).read_text())
        assert told.weight_map == index["weight_map"]
        assert {name: path for path, file in told.files_metadata.items() for name in file.tensors} == told.weight_map

    @pytest.mark.usefixtures("mode")
    def test_both_keeps_the_files_too(self, hub: Hub, job: Job, model: Truth, tmp_path: Path) -> None:
        with faulty_store(f"file://{model.folder}") as source:
            run(replace(job, source=source.url, stream=STREAM_BOTH, **IN_ORDER))
            read = [call for call in source.journal if call.operation == "read" and call.path.endswith(".distcp")]
        assert compare_with_truth(model, Path(job.sink)) == ()
        total = sum(file.size for path, file in hub.files(REPO).items() if path.endswith(".safetensors"))
        assert sum(call.stop - call.start for call in read) < 1.15 * total
        assert_right(hub, model, tmp_path / "down")

    def test_a_spool_saves_lfs_the_second_pass_and_is_empty_after(
        self, hub: Hub, job: Job, model: Truth, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        with faulty_store(f"file://{model.folder}") as source:
            run(replace(job, source=source.url, spool=str(tmp_path / "spool"), **IN_ORDER))
            read = [call for call in source.journal if call.operation == "read" and call.path.endswith(".distcp")]
        total = sum(file.size for path, file in hub.files(REPO).items() if path.endswith(".safetensors"))
        assert sum(call.stop - call.start for call in read) < 1.15 * total
        assert not [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]
        assert_right(hub, model, tmp_path / "down")

    @pytest.mark.usefixtures("mode")
    def test_an_unchanged_source_is_neither_read_nor_sent_again(
        self, hub: Hub, job: Job, model: Truth, tmp_path: Path
    ) -> None:
        first = run(job)
        before = len(hub.calls())
        with faulty_store(f"file://{model.folder}") as source:
            again = run(replace(job, source=str(model.folder), sink=str(tmp_path / "elsewhere")))
            assert not source.journal
        assert (again.commit, again.unchanged, again.moved_bytes) == (first.commit, True, 0)
        assert moved(hub, before) == 0
        assert not [call for call in hub.calls()[before:] if "/commit/" in call.path]

    @pytest.mark.usefixtures("mode")
    def test_of_a_new_step_only_the_file_of_the_changed_tensor_is_sent(
        self, hub: Hub, job: Job, tmp_path: Path
    ) -> None:
        steps = {f"layers.{number}.weight": torch.randn(300, 200) for number in range(FILES)}
        spread = {name: 1 + number for number, name in enumerate(steps)}
        dcp.save(steps, checkpoint_id=tmp_path / "step-1", no_dist=True)
        steps["layers.3.weight"] = torch.randn(300, 200)
        dcp.save(steps, checkpoint_id=tmp_path / "step-2", no_dist=True)
        asked = replace(job, source=str(tmp_path / "step-1"), file_index=spread)
        run(asked)
        before = len(hub.calls())
        receipt = run(replace(asked, source=str(tmp_path / "step-2"), sink=str(tmp_path / "work-2")))
        one_file = 300 * 200 * 4
        assert 0.8 * one_file <= moved(hub, before) < 1.05 * one_file  # Xet packs them
        assert receipt.uploaded_bytes < 1.2 * one_file
        down = HfApi(endpoint=hub.url, token=TOKEN).snapshot_download(REPO, local_dir=tmp_path / "down")
        index = json.loads((Path(down) / INDEX_PATH).read_text())["weight_map"]
        from safetensors.torch import load_file

        found = {name: load_file(Path(down) / path)[name] for name, path in index.items()}
        assert all(torch.equal(found[name], tensor) for name, tensor in steps.items())


# ---- what goes wrong ------------------------------------------------------------------------------------------------


LIMIT = {"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
PLACES = ["/revision/", "/preupload/", "/branch/", "/commit/hfdcp", "/paths-info/", "/commit/main"]


@pytest.mark.usefixtures("mode")
class TestAnswers:
    @pytest.mark.parametrize("place", PLACES)
    def test_a_limit_is_waited_for_as_its_headers_say(
        self, hub: Hub, job: Job, model: Truth, waits: list[float], place: str, tmp_path: Path
    ) -> None:
        hub.fault(place, status=429, headers=LIMIT, times=2)
        run(job)
        # What the client asks of itself (the preupload of a commit's small files) it also tries again by itself.
        assert waits.count(56) == 2 or place == "/preupload/"
        assert_right(hub, model, tmp_path / "down")

    def test_a_limit_longer_than_our_patience_is_an_error_and_a_rerun_goes_on(
        self, hub: Hub, job: Job, model: Truth, tmp_path: Path
    ) -> None:
        hub.fault("/commit/main", status=429, headers={"RateLimit": '"api";r=0;t=5000'})
        with pytest.raises(RateLimited, match="wait 5000 s"):
            run(job)
        assert visible(hub) == set()
        self._rerun_sends_nothing(hub, job, model, tmp_path)

    @staticmethod
    def _rerun_sends_nothing(hub: Hub, job: Job, model: Truth, tmp_path: Path) -> None:
        hub.forgive()
        before = len(hub.calls())
        run(job)
        assert moved(hub, before) == 0
        assert_right(hub, model, tmp_path / "down")

    def test_a_branch_that_moved_is_a_conflict_and_a_rerun_builds_upon_it(
        self, hub: Hub, job: Job, api: HfApi, model: Truth, tmp_path: Path
    ) -> None:
        def interfere() -> None:
            api.create_commit(REPO, [CommitOperationAdd("theirs.txt", b"x")], commit_message="theirs")

        with pytest.raises(Conflict, match="somebody pushed since"):
            run(job, At("push", interfere))
        assert visible(hub) == {"theirs.txt"}
        self._rerun_sends_nothing(hub, job, model, tmp_path)
        assert "theirs.txt" in visible(hub)

    def test_a_branch_that_moved_is_built_upon_where_that_is_asked_for(
        self, hub: Hub, job: Job, api: HfApi, model: Truth, tmp_path: Path
    ) -> None:
        def interfere() -> None:
            api.create_commit(REPO, [CommitOperationAdd("theirs.txt", b"x")], commit_message="theirs")

        run(replace(job, on_conflict=RETRY), At("push", interfere))
        assert "theirs.txt" in visible(hub)
        assert_right(hub, model, tmp_path / "down")

    def test_weights_that_come_in_meanwhile_are_not_deleted(self, hub: Hub, job: Job, api: HfApi) -> None:
        def interfere() -> None:
            api.create_commit(REPO, [CommitOperationAdd("theirs.safetensors", b"x")], commit_message="theirs")

        with pytest.raises(Conflict, match="hfdcp did not write"):
            run(replace(job, on_conflict=RETRY), At("push", interfere))
        assert visible(hub) == {"theirs.safetensors"}

    @pytest.mark.parametrize("branch", ["hfdcp", "main"])
    @pytest.mark.parametrize("fault", [{"status": 500}, {"after": True}, {"drop_after": 1}], ids=next_key)
    def test_an_unclear_answer_of_a_commit_is_settled_by_content(
        self, hub: Hub, job: Job, model: Truth, branch: str, fault: dict[str, int], tmp_path: Path
    ) -> None:
        hub.fault(f"/commit/{branch}", **fault)
        run(job)
        made = [call.status for call in hub.calls(f"/commit/{branch}", "POST")]
        assert made == ([0] if "after" in fault else [fault.get("status", 0), 200])
        assert_right(hub, model, tmp_path / "down")

    @pytest.mark.parametrize("place", PLACES)
    def test_a_hub_that_fails_for_longer_is_an_error_and_a_rerun_completes_it(
        self, hub: Hub, job: Job, model: Truth, place: str, tmp_path: Path
    ) -> None:
        hub.fault(place, status=503, times=EVER)
        with pytest.raises(HubUnavailable, match="injected"):
            run(job)
        assert REPO not in hub.repositories or visible(hub) == set()
        hub.forgive()
        run(job)
        assert published(hub) == 1
        assert_right(hub, model, tmp_path / "down")

    @pytest.mark.parametrize("skip", range(4, 44, 5))
    @pytest.mark.parametrize("status", [401, 403])
    def test_a_token_that_expires_in_the_middle_is_told_and_a_rerun_completes_it(
        self, hub: Hub, job: Job, model: Truth, waits: list[float], status: int, skip: int, tmp_path: Path
    ) -> None:
        hub.fault(status=status, times=EVER, skip=skip)
        with pytest.raises(HubDenied) as error:
            run(job)
        assert TOKEN not in str(error.value)
        assert waits == []  # a refusal is told at once
        assert REPO not in hub.repositories or not visible(hub) or MANIFEST_PATH in visible(hub)
        hub.forgive()
        run(job)
        assert_right(hub, model, tmp_path / "down")

    def test_a_repository_that_exists_needs_no_right_to_create_one(
        self, hub: Hub, job: Job, api: HfApi, model: Truth, tmp_path: Path
    ) -> None:
        api.create_repo(REPO, private=True)
        hub.fault("/repos/create", status=403, times=EVER)
        run(job)
        assert_right(hub, model, tmp_path / "down")

    def test_a_token_that_may_only_read_is_told_before_a_byte_is_sent(self, hub: Hub, job: Job, api: HfApi) -> None:
        api.create_repo(REPO, private=True)
        hub.fault("/auth-check/write", status=403, times=EVER)
        with pytest.raises(HubDenied, match="cannot write to acme/m"):
            run(job)
        assert moved(hub) == 0

    def test_a_card_that_the_hub_refuses_is_told_before_a_byte_is_sent(
        self, hub: Hub, job: Job, tmp_path: Path
    ) -> None:
        base = tmp_path / "base"
        base.mkdir()
        (base / "config.json").write_text("{}")
        (base / "README.md").write_text("---\nlicense: mit\n---\n# base\n")
        hub.fault("/validate-yaml", status=400, headers={"X-Error-Message": "license must be one of"})
        with pytest.raises(HubRejected, match=r"refuses the README\.md.*license must be one of"):
            run(replace(job, base=str(base), load_check="off"))
        assert moved(hub) == 0
        assert visible(hub) == set()

    def test_a_branch_that_is_not_there_is_made(self, hub: Hub, job: Job, model: Truth, tmp_path: Path) -> None:
        run(replace(job, revision="step-1000"))
        assert visible(hub) == set()
        assert_right(hub, model, tmp_path / "down", "step-1000")

    def test_a_pull_request_leaves_the_branch_alone(
        self, hub: Hub, job: Job, api: HfApi, model: Truth, tmp_path: Path
    ) -> None:
        receipt = run(replace(job, pull_request=True))
        assert visible(hub) == set()
        assert receipt.revision == "refs/pr/1"
        assert_right(hub, model, tmp_path / "pr", "refs/pr/1")
        assert wire.loads("receipt", Receipt, (Path(job.sink) / publish.RECEIPT_PATH).read_bytes()) == receipt
        api.merge_pull_request(REPO, 1)
        assert_right(hub, model, tmp_path / "down")

    @pytest.mark.parametrize("fault", [{"after": True}, {"status": 502}], ids=next_key)
    def test_an_unclear_answer_opens_no_second_pull_request(
        self, hub: Hub, job: Job, api: HfApi, model: Truth, fault: dict[str, int], tmp_path: Path
    ) -> None:
        hub.fault("/commit/main", **fault)
        asked = replace(job, pull_request=True)
        receipt = run(asked)
        assert [one.num for one in api.get_repo_discussions(REPO)] == [1]
        again = run(replace(asked, sink=str(tmp_path / "again")))
        assert (again.revision, again.commit) == (receipt.revision, receipt.commit)
        assert [one.num for one in api.get_repo_discussions(REPO)] == [1]
        assert_right(hub, model, tmp_path / "down", receipt.revision)


class TestTransfers:
    @pytest.mark.parametrize("skip", [0, 3])
    def test_a_connection_that_is_cut_in_a_file_is_taken_up(
        self, hub: Hub, job: Job, model: Truth, mode: str, skip: int, tmp_path: Path
    ) -> None:
        hub.fault(LAST_BYTES[mode], drop_after=50_000, skip=skip)
        run(job)
        assert_right(hub, model, tmp_path / "down")

    @pytest.mark.usefixtures("mode")
    def test_connections_that_are_always_cut_are_an_error_and_a_rerun_sends_the_rest(
        self, hub: Hub, job: Job, model: Truth, tmp_path: Path
    ) -> None:
        hub.fault(BYTES_IN, drop_after=50_000, times=EVER, skip=3)
        with pytest.raises(HubUnavailable):
            run(replace(job, workers=1))
        assert visible(hub) == set()
        hub.forgive()
        before, whole = len(hub.calls()), [call.received_bytes for call in hub.calls(BYTES_IN) if call.status == 200]
        run(job)
        total = sum(file.size for path, file in hub.files(REPO).items() if path.endswith(".safetensors"))
        assert moved(hub, before) <= 1.01 * (total - sum(whole)) + 600_000  # what was under way
        assert_right(hub, model, tmp_path / "down")

    def test_a_xet_storage_that_is_down_leaves_lfs(self, hub: Hub, job: Job, model: Truth, tmp_path: Path) -> None:
        hub.fault("/v1/xorbs/", status=503, times=EVER)
        told = At("", lambda: None)
        run(replace(job, workers=1), told)
        assert sum("now by LFS" in line for line in told.lines) == 1  # the others do not wait for it, too
        assert_right(hub, model, tmp_path / "down")

    def test_a_transfer_that_hangs_is_given_up_and_taken_up(
        self, hub: Hub, job: Job, model: Truth, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for upload in (Repository.xet_upload, Repository.lfs_upload):
            monkeypatch.setitem(upload.__kwdefaults__, "stall_s", 1.0)
        hub.fault(LAST_BYTES[mode], delay_s=3600, skip=1)
        told = At("", lambda: None)
        run(replace(job, workers=1), told)
        assert any("once more" in line for line in told.lines)
        assert_right(hub, model, tmp_path / "down")

    @pytest.mark.usefixtures("mode")
    def test_a_hub_that_hangs_is_unavailable_and_a_rerun_completes_it(
        self, hub: Hub, job: Job, model: Truth, tmp_path: Path
    ) -> None:
        set_client_factory(lambda: httpx2.Client(timeout=0.5, follow_redirects=True))
        try:
            hub.fault("/commit/main", delay_s=3600, times=EVER)
            with pytest.raises(HubUnavailable, match="cannot commit to acme/m@main"):
                run(job)
            hub.forgive()
            assert visible(hub) == set()
        finally:
            set_client_factory(default_client_factory)
        run(job)
        assert_right(hub, model, tmp_path / "down")

    @pytest.mark.usefixtures("mode")
    def test_a_slow_hub_is_waited_for(self, hub: Hub, job: Job, model: Truth, tmp_path: Path) -> None:
        hub.fault(delay_s=0.1, times=EVER)
        run(job)
        assert_right(hub, model, tmp_path / "down")


# ---- what the Hub has is not what was sent --------------------------------------------------------------------------


def flip(hub: Hub, mode: str) -> Callable[[], object]:
    """Damage what the Hub has stored of one file; calling what is returned mends it."""
    folder = hub.root / ("xorb" if mode == "xet" else "lfs")
    path = max(folder.iterdir(), key=lambda one: one.stat().st_size)
    raw = path.read_bytes()
    damaged = bytearray(raw)
    damaged[len(raw) // 2] ^= 1
    path.write_bytes(damaged)
    return lambda: path.write_bytes(raw)


class TestStoredBytes:
    def test_bytes_that_the_storage_damaged_are_found_and_nothing_is_published(
        self, hub: Hub, job: Job, model: Truth, mode: str, tmp_path: Path
    ) -> None:
        mend: list[Callable[[], object]] = []
        asked = replace(job, verify="full")
        with pytest.raises(ValidationError, match="main is untouched"):
            run(asked, At("push", lambda: mend.append(flip(hub, mode))))
        assert visible(hub) == set()
        mend[0]()
        run(asked)
        assert_right(hub, model, tmp_path / "down")

    def test_bytes_that_are_damaged_on_their_way_are_refused(self, tmp_path: Path, job: Job, mode: str) -> None:
        with Hub(tmp_path / "strict", settings=Settings(token=TOKEN, verify_xet=True)) as hub:
            hub.fault(LAST_BYTES[mode], corrupt=True, times=EVER)
            with pytest.raises((HubRejected, HubUnavailable)):
                run(replace(job, endpoint=hub.url))
            assert visible(hub) == set()
            hub.forgive()
            for path in [*(hub.root / "xorb").iterdir(), *(hub.root / "lfs").iterdir()]:
                path.unlink()  # a storage that checks what comes in, as the Hub's does, never had them

    def test_a_hub_that_claims_our_sha256_for_other_bytes_is_found(
        self, hub: Hub, job: Job, model: Truth, mode: str, tmp_path: Path
    ) -> None:
        """By its own address of them, which costs no byte; by LFS there is none, and reading back is what finds it."""
        mend: list[Callable[[], object]] = []

        def lie() -> None:
            if mode == "lfs":
                mend.append(flip(hub, mode))
                return
            repo = hub._state.find(REPO)
            [branch] = [ref for ref in repo.refs if "hfdcp" in ref]
            commit = repo.commits[repo.refs[branch]]
            first, second, *_ = sorted(path for path in commit.tree if path.endswith(".safetensors"))
            true = commit.tree
            told = {**true, first: replace(true[first], xet=true[second].xet)}
            repo.commits[commit.id] = replace(commit, tree=told)
            mend.append(lambda: repo.commits.update({commit.id: commit}))

        asked = replace(job, verify="metadata" if mode == "xet" else "full")
        with pytest.raises(ValidationError, match="Xet hash is" if mode == "xet" else "SHA-256 is"):
            run(asked, At("push", lie))
        assert visible(hub) == set()
        mend[0]()
        run(asked)
        assert_right(hub, model, tmp_path / "down")

    def test_a_published_repository_that_was_damaged_is_found_at_any_later_day(
        self, hub: Hub, job: Job, mode: str
    ) -> None:
        run(job)
        look = Job("", "", REPO, endpoint=hub.url, verify="full")
        mend = flip(hub, mode)
        with pytest.raises(ValidationError, match="is not what its manifest says"):
            publish.validate_again(look)
        publish.validate_again(replace(look, verify="metadata"))  # which asks for no bytes
        mend()
        publish.validate_again(look)


# ---- dying ----------------------------------------------------------------------------------------------------------


KILLS = int(os.environ.get("HFDCP_KILLS", "3"))
"""At how many points a publish is killed, in each mode; `HFDCP_KILLS=30 pytest -k killed` takes minutes."""
MANY = 20


@dataclass(frozen=True)
class Undisturbed:
    """What a publish does that nobody kills."""

    calls: int
    content: Mapping[str, str]


def _environment(hub: Hub, mode: str, folder: Path) -> dict[str, str]:
    off = {"HF_HUB_DISABLE_XET": "1"} if mode == "lfs" else {}
    return {**os.environ, **hub.environment, "HF_XET_CACHE": str(folder / "xet"), "HF_HOME": str(folder / "hf"), **off}


def _start(model: Truth, hub: Hub, mode: str, folder: Path) -> subprocess.Popen[bytes]:
    script = [sys.executable, str(Path(__file__).with_name("streamed.py"))]
    command = [*script, str(model.folder.parent), str(folder / "work"), REPO, str(MANY)]
    return subprocess.Popen(command, env=_environment(hub, mode, folder), stderr=subprocess.PIPE)


def _content(hub: Hub, revision: str = "main") -> dict[str, str]:
    """What a commit holds; of the manifest what does not say when and on which branch it was checked."""
    return {path: file.oid for path, file in hub.files(REPO, revision).items()}


@pytest.fixture(scope="module")
def undisturbed(model: Truth, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    known: dict[str, Undisturbed] = {}

    def measure(mode: str) -> Undisturbed:
        if mode not in known:
            folder = tmp_path_factory.mktemp(mode)
            with Hub(folder / "hub", settings=Settings(token=TOKEN)) as hub:
                hub.fault(delay_s=0.02, times=EVER)
                process = _start(model, hub, mode, folder)
                _, err = process.communicate(timeout=120)
                assert process.returncode == 0, err
                known[mode] = Undisturbed(len(hub.calls()), _content(hub))
        return known[mode]

    return measure


@pytest.mark.parametrize("number", range(KILLS))
def test_a_publish_that_is_killed_goes_on_where_it_was(
    model: Truth, mode: str, number: int, undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    """Killed at a random point; the rerun makes the same commit, and sends nothing that the stage has."""
    by_chance = random.Random(f"{mode} {number}")
    point = (number + by_chance.random()) / KILLS * undisturbed(mode).calls
    with Hub(tmp_path / "hub", settings=Settings(token=TOKEN)) as hub:
        hub.fault(delay_s=0.02, times=EVER)
        first = _start(model, hub, mode, tmp_path)
        while len(hub.calls()) < point and first.poll() is None:
            time.sleep(0.002)
        time.sleep(by_chance.random() * 0.05)
        first.kill()
        first.communicate()
        hub.forgive()
        _wait_until_quiet(hub)
        began = REPO in hub.repositories
        assert not began or not visible(hub) or _content(hub) == undisturbed(mode).content
        branches = [ref for ref in hub.refs(REPO) if "hfdcp" in ref] if began else []
        staged = {path for ref in branches for path in hub.files(REPO, ref) if path.endswith(".safetensors")}
        before = len(hub.calls())
        again = _start(model, hub, mode, tmp_path)
        _, err = again.communicate(timeout=120)
        assert again.returncode == 0, err.decode()
        files = hub.files(REPO)
        weights = {path for path in files if path.endswith(".safetensors")}
        left = sum(files[path].size for path in weights - staged) if not began or not _done(hub, before) else 0
        assert moved(hub, before) <= 1.02 * left + 4096
        assert _content(hub) == undisturbed(mode).content
        assert published(hub) <= 2  # the second one where the first was made, and nobody heard of it
        assert_right(hub, model, tmp_path / "down")


def _wait_until_quiet(hub: Hub) -> None:
    """What a process had sent when it died is still worked on."""
    seen = -1
    while seen != len(hub.calls()):
        seen = len(hub.calls())
        time.sleep(0.3)


def _done(hub: Hub, before: int) -> bool:
    """Whether the first run had published already."""
    return any(call.status == 200 for call in hub.calls()[:before] if "/commit/main" in call.path)


def test_a_stage_that_another_publish_took_away_is_a_conflict_and_a_rerun_sees_what_is_there(
    hub: Hub, job: Job, api: HfApi, model: Truth, tmp_path: Path
) -> None:
    def finish() -> None:
        run(replace(job, sink=str(tmp_path / "another-machine")))

    with pytest.raises(Conflict, match="another publish of the same has ended"):
        run(job, At("validate", finish))
    assert run(job).unchanged
    assert_right(hub, model, tmp_path / "down")


def test_what_another_machine_staged_is_not_sent_again(
    hub: Hub, job: Job, model: Truth, mode: str, waits: list[float], tmp_path: Path
) -> None:
    hub.fault("/commit/main", status=503, times=EVER)
    with pytest.raises(HfdcpError):
        run(job)
    hub.forgive()
    before = len(hub.calls())
    with faulty_store(f"file://{model.folder}") as source:
        run(replace(job, source=str(model.folder), sink=str(tmp_path / "another-machine")))
        assert not source.journal
    assert moved(hub, before) == 0
    assert_right(hub, model, tmp_path / "down")
