"""Where a publish without a sink keeps its output."""

from pathlib import Path

import pytest

from hfdcp_core.job import Job
from hfdcp_core.state import SILENT
from hfdcp_flows.work_folder import cache_home, folder_of, work_folder


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Job(source="gs://bucket/step-1", sink="", repo="me/7b")


class Heard:
    """Progress that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, step: str, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_it_is_gone_after_success_with_what_earlier_plans_left(job: Job) -> None:
    stale = folder_of(job) / "earlier"
    stale.mkdir(parents=True)
    with work_folder(job, "d" * 64, SILENT) as work:
        assert Path(work).is_dir()
    assert not folder_of(job).exists()


def test_it_stays_after_a_failure_is_named_and_is_found_again(job: Job) -> None:
    heard = Heard()

    def fail() -> None:
        with work_folder(job, "d" * 64, heard) as work:
            (Path(work) / "done").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    (line,) = heard.lines
    with work_folder(job, "d" * 64, SILENT) as work:
        assert (Path(work) / "done").exists()
        assert work in line


def test_another_plan_of_the_same_source_has_a_folder_of_its_own(job: Job) -> None:
    with work_folder(job, "d" * 64, SILENT) as one, work_folder(job, "e" * 64, SILENT) as other:
        assert one != other


@pytest.mark.parametrize("change", [{"source": "gs://bucket/step-2"}, {"repo": "me/8b"}, {"revision": "next"}], ids=str)
def test_another_source_or_repository_has_another_folder(job: Job, change: dict[str, str]) -> None:
    assert folder_of(job) != folder_of(Job(**{"source": job.source, "sink": "", "repo": job.repo} | change))


def test_a_relative_source_is_meant_from_the_current_folder(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_of(Job(source="ckpt", sink="")) == folder_of(Job(source=str(tmp_path / "ckpt"), sink=""))


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_a_cache_home_that_the_specification_does_not_allow_is_ignored(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_home() == Path.home() / ".cache"
