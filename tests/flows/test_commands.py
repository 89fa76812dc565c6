"""What a command line asks of the core, as values."""

import pytest

from hfdcp_core.errors import UsageError
from hfdcp_core.job import Job
from hfdcp_flows.arguments import parse
from hfdcp_flows.commands import heeds_a_wish, job_of, protocol_of, storage_options


def options_of(*argv: str) -> dict[str, object]:
    args = parse(["consolidate", *argv])
    return dict(storage_options(args, Job(source=args.source, sink=args.sink)))


def test_every_option_of_a_job_reaches_it() -> None:
    given = "publish a me/b --sink c --include x --exclude y --recipe none --world-size 4 --accept-unproved"
    given += " --also d --also e --latest"
    given += " --max-file-size 1GB --memory 1GiB --workers 3 --overwrite --revision dev --message hello"
    given += " --public --replace --tag v1 --verify sample --on-conflict retry --spool f --sign k.pem"
    given += " --config m/config.json --untie --keep-extra --stats full --fail-on nan,zero"
    given += " --size heads=4 --size layers=2 --base org/m --card --load-check require"
    given += " --check-logits 1,2 --reference r --logits-tolerance 1e-5"
    assert job_of(parse(given.split())) == Job(
        source="a",
        sink="c",
        repo="me/b",
        revision="dev",
        also=("d", "e"),
        latest=True,
        include=("x",),
        exclude=("y",),
        recipe="none",
        max_file_size=10**9,
        memory_bytes=1 << 30,
        workers=3,
        overwrite=True,
        world_size=4,
        accept_unproved=True,
        public=True,
        replace=True,
        tag="v1",
        verify="sample",
        on_conflict="retry",
        spool="f",
        sign="k.pem",
        message="hello",
        config="m/config.json",
        untie=True,
        keep_extra=True,
        statistics="full",
        fail_on=("nan", "zero"),
        sizes={"heads": 4, "layers": 2},
        base="org/m",
        card=True,
        load_check="require",
        check_logits="1,2",
        reference="r",
        logits_tolerance=1e-5,
    )


@pytest.mark.parametrize("command", ["push a me/b", "validate a"])
def test_what_was_made_may_be_refused_later(command: str) -> None:
    assert job_of(parse(f"{command} --fail-on inf".split())).fail_on == ("inf",)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("--stats some", "invalid choice: 'some'"),
        ("--fail-on nan,,inf", "'' is none of nan, inf, zero"),
        ("--fail-on NaN,big", "'big' is none of nan, inf, zero"),
        ("--fail-on inf --stats none", "needs statistics"),
    ],
)
def test_statistics_that_make_no_sense_are_wrong_usage(given: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        job_of(parse(f"consolidate a b {given}".split()))


@pytest.mark.parametrize(
    ("given", "dim"), [("--ranks 4", 0), ("--ranks 4 --shard-dim 1", 1), ("--ranks 4 --shard-dim -1", -1)]
)
@pytest.mark.parametrize("command", ["plan a", "consolidate a b"])
def test_files_for_ranks_may_be_asked_for(command: str, given: str, dim: int) -> None:
    job = job_of(parse(f"{command} {given}".split()))
    assert (job.ranks, job.shard_dim) == (4, dim)


def test_how_to_cut_without_for_whom_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="for how many"):
        job_of(parse(["plan", "a", "--shard-dim", "0"]))


@pytest.mark.parametrize("command", ["consolidate a b", "publish a me/b --sink b", "inspect a", "plan a b"])
def test_options_that_are_not_given_are_those_of_a_job(command: str) -> None:
    job = job_of(parse(command.split()))
    assert job == Job(source="a", sink=job.sink, repo=job.repo)


def test_too_little_memory_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UsageError, match="too little"):
        job_of(parse(["plan", "does-not-exist", "--memory", "1MiB"]))


ANON = '{"token": "anon"}'


def test_storage_options_hold_for_both_ends() -> None:
    assert options_of("gs://a", "s3://b", "--storage-options", ANON) == {
        "gs": {"token": "anon"},
        "s3": {"token": "anon"},
    }


def test_an_end_of_its_own_has_options_of_its_own_over_the_common_ones() -> None:
    given = ["--storage-options", '{"a": 1, "b": 1}', "--sink-options", '{"b": 2}']
    assert options_of("gs://a", "s3://b", *given) == {"gs": {"a": 1, "b": 1}, "s3": {"a": 1, "b": 2}}


def test_options_of_the_source_hold_for_its_further_places_too() -> None:
    args = parse(["consolidate", "a", "b", "--also", "s3://c", "--source-options", ANON])
    job = Job(source="a", sink="b", also=("s3://c",))
    assert storage_options(args, job) == {"s3": {"token": "anon"}}


def test_a_config_elsewhere_has_the_common_options() -> None:
    args = parse(["consolidate", "a", "b", "--config", "gs://c/m", "--storage-options", ANON])
    assert storage_options(args, job_of(parse(["plan", "a", "--config", "gs://c/m"]))) == {"gs": {"token": "anon"}}


def test_a_local_end_needs_none() -> None:
    assert options_of("gs://a", "out", "--storage-options", ANON) == {"gs": {"token": "anon"}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a", "b", "--storage-options", ANON], "nothing lies in a remote storage"),
        (["a", "gs://b", "--source-options", ANON], "the source 'a' is not a URL of a remote storage"),
        (["gs://a", "file:///b", "--sink-options", ANON], "the sink 'file:///b' is not"),
        (["gs://a", "gs://b", "--source-options", ANON, "--sink-options", '{"token": "x"}'], "both gs://"),
    ],
)
def test_options_that_cannot_be_heeded_are_refused_without_repeating_them(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        options_of(*argv)
    assert "anon" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "protocol"),
    [("a/b", ""), ("/a", ""), ("file:///a", ""), ("s3://a/b", "s3"), ("simplecache::gs://a", "gs"), ("c:/a", "")],
)
def test_the_protocol_of_a_url(url: str, protocol: str) -> None:
    assert protocol_of(url) == protocol


@pytest.mark.parametrize(
    ("command", "heeds"),
    [("consolidate a b", True), ("publish a b --direct", True), ("publish a b", False), ("push a b", True)],
)
def test_a_wish_to_stop_is_heeded_by_what_moves_bytes_itself(command: str, heeds: bool) -> None:
    assert heeds_a_wish(parse(command.split())) is heeds
