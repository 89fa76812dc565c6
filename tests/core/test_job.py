"""What is asked: small, plain, and refused where it cannot be."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.errors import UsageError, ValidationError
from hfdcp_core.job import (
    AHEAD_MEMORY,
    LARGEST_WINDOW,
    REMOTE_AT_START,
    REMOTE_MEMORY,
    SMALLEST_WINDOW,
    UPLOAD_MEMORY,
    USUAL_MEMORY,
    Job,
)
from hfdcp_core.plan import BUFFERS, SCRATCH

JOB = Job("/steps/1", "/out")
TEXT = st.text(max_size=6)
JOBS = st.builds(
    Job,
    source=TEXT,
    sink=TEXT,
    repo=st.sampled_from(["", "acme/m", "m"]),
    include=st.lists(TEXT, max_size=3).map(tuple),
    exclude=st.lists(TEXT, max_size=3).map(tuple),
    recipe=TEXT,
    max_file_size=st.integers(1),
    file_index=st.none() | st.dictionaries(TEXT, st.integers(), max_size=3),
    memory_bytes=st.integers(),
    workers=st.integers(0, 99),
    overwrite=st.booleans(),
    world_size=st.none() | st.integers(1),
    accept_unproved=st.booleans(),
)


@given(JOBS)
def test_a_job_comes_back_from_its_json(job: Job) -> None:
    assert Job.from_json(job.to_json()) == job


BROKEN = {
    "no JSON": "{",
    "too deep": "[" * 100_000,
    "no object": "[]",
    "a field of another type": JOB.to_json().replace('"auto"', "1"),
    "a field too many": JOB.to_json().replace("{", '{"extra": 1, ', 1),
    "numbers that mean nothing": JOB.to_json().replace('"workers": 0', '"workers": -1'),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match=r"not a job|not a Job"):
        Job.from_json(text)


@pytest.mark.parametrize("name", list(json.loads(JOB.to_json())))
def test_a_job_without_one_of_its_fields_is_refused_by_the_fields_name(name: str) -> None:
    fields = json.loads(JOB.to_json())
    del fields[name]
    with pytest.raises(ValidationError, match=f"does not have exactly its fields: {name}"):
        Job.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    "numbers", [{"max_file_size": 0}, {"workers": -1}, {"world_size": 0}], ids=["file size", "workers", "ranks"]
)
def test_numbers_that_mean_nothing_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="are positive"):
        replace(JOB, **numbers)  # type: ignore[arg-type]


@given(
    st.integers(1, 64 << 30),
    st.integers(1, 128),
    st.sampled_from(["/s", "gs://b/s"]),
    st.sampled_from(["t", "s3://b/t"]),
)
def test_all_that_is_in_flight_keeps_within_the_memory_or_the_job_says_how_much_it_takes(
    memory_bytes: int, workers: int, source: str, sink: str
) -> None:
    job = replace(JOB, memory_bytes=memory_bytes, workers=workers, source=source, sink=sink)
    try:
        window = job.window_bytes
    except UsageError as error:
        least = int(str(error).split("at least ")[1].split()[0]) << 20
        assert least > memory_bytes
        assert replace(job, memory_bytes=least).window_bytes >= SMALLEST_WINDOW
        with pytest.raises(UsageError, match="too little"):
            _ = replace(job, memory_bytes=least - (1 << 20)).window_bytes
        return
    assert job.start_bytes + (window * (BUFFERS + SCRATCH) + job.remote_file_bytes) * workers <= memory_bytes
    assert SMALLEST_WINDOW <= window <= LARGEST_WINDOW
    assert window % SMALLEST_WINDOW == 0


def test_more_memory_than_is_of_use_is_left() -> None:
    assert replace(JOB, memory_bytes=1 << 40, workers=1).window_bytes == LARGEST_WINDOW


def test_files_are_made_one_for_each_core_that_we_may_use_unless_asked() -> None:
    assert JOB.files_at_once == len(os.sched_getaffinity(0))
    assert replace(JOB, workers=7).files_at_once == 7


REMOTE = replace(JOB, source="gs://bucket/step", sink="gs://bucket/model")


def test_a_remote_storage_takes_more_memory_unless_it_is_said_how_much() -> None:
    assert (JOB.budget_bytes, REMOTE.budget_bytes) == (USUAL_MEMORY, REMOTE_MEMORY)
    assert replace(REMOTE, memory_bytes=5 << 30).budget_bytes == 5 << 30
    assert REMOTE.start_bytes == JOB.start_bytes + REMOTE_AT_START
    assert REMOTE.remote_file_bytes == AHEAD_MEMORY + UPLOAD_MEMORY
    assert replace(REMOTE, sink="out").remote_file_bytes == AHEAD_MEMORY
    assert replace(REMOTE, source="in", also=("s3://b",)).remote_file_bytes == AHEAD_MEMORY + UPLOAD_MEMORY
    assert replace(REMOTE, source="in").remote_file_bytes == UPLOAD_MEMORY


def test_no_more_files_are_made_at_once_than_the_memory_is_enough_for() -> None:
    assert replace(REMOTE, memory_bytes=500 << 20).files_at_once == 1
    assert replace(REMOTE, memory_bytes=500 << 20).window_bytes == LARGEST_WINDOW
    assert replace(REMOTE, memory_bytes=1 << 50).files_at_once == JOB.files_at_once
    with pytest.raises(UsageError, match="at least"):
        _ = replace(REMOTE, memory_bytes=500 << 20, workers=9).window_bytes


def test_where_the_system_does_not_say_what_we_may_use_every_core_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS has none
    assert JOB.files_at_once == os.cpu_count()


@pytest.mark.parametrize("repo", ["a/b/c", "../x/y", "acme/m n", "acme/", "/m", ".", "acme/modèle"])
def test_what_names_no_repository_is_a_wrong_request(repo: str) -> None:
    with pytest.raises(UsageError, match="names no repository"):
        Job(source="s", sink="t", repo=repo)


@pytest.mark.parametrize("repo", ["acme/llama-3.1_8b", "llama", "a/B.c"])
def test_names_of_repositories_are_taken(repo: str) -> None:
    assert Job(source="s", sink="t", repo=repo).repo == repo
