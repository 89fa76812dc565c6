"""The five steps as a Prefect flow on a real server: from a checkpoint that torch wrote to a Hub on loopback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL
from prefect.utilities.callables import parameter_schema

from hfdcp_core.errors import HubDenied, SinkOccupied
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH
from hfdcp_core.publish import Job, Planned, hold
from hfdcp_core.testing.checkpoints import Truth, compare_with_truth
from hfdcp_core.testing.hub import Hub, Settings
from hfdcp_flows.publish import job_of, parameters_of, publish
from hfdcp_tasks.consolidate import consolidate
from hfdcp_tasks.gather import gather
from hfdcp_tasks.push import push
from hfdcp_tasks.reshard import reshard
from hfdcp_tasks.validate import validate

STEPS = {"gather", "reshard", "validate", "push"}
WEIGHTS = {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}


def test_a_checkpoint_goes_through_five_steps_to_the_hub(
    do: Any, job: Callable[..., Job], model: Truth, hub: Hub, tmp_path: Path
) -> None:
    outcome = do(job())
    assert outcome.error is None
    assert compare_with_truth(model, tmp_path / "sink") == ()
    assert hub.files("acme/model").keys() >= WEIGHTS | {INDEX_PATH, MANIFEST_PATH}
    assert hub.private("acme/model")
    assert outcome.flow_run.name == "publish-acme/model"
    assert outcome.flow_run.state_name == "Completed"
    assert outcome.receipt["commit"] in outcome.receipt["url"]
    assert set(outcome.receipt["files"]) == WEIGHTS | {INDEX_PATH, MANIFEST_PATH}


def test_each_output_file_has_a_task_run_that_is_named_after_it(do: Any, job: Callable[..., Job]) -> None:
    outcome = do(job())
    assert dict(outcome.attempts) == dict.fromkeys(STEPS | WEIGHTS, 1)
    assert outcome.named("Completed") == STEPS | WEIGHTS


def test_another_run_finds_everything_done(do: Any, job: Callable[..., Job], tmp_path: Path) -> None:
    do(job())
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "sink").glob("*.safetensors")}
    outcome = do(job())
    assert outcome.receipt["unchanged"]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "sink").glob("*.safetensors")} == written


def test_the_flow_holds_the_sink(prefect_api: None, job: Callable[..., Job]) -> None:
    with hold(job()), pytest.raises(SinkOccupied, match="hfdcp"):
        publish(**parameters_of(job()))


def test_only_small_values_cross_a_border(job: Callable[..., Job], model: Truth) -> None:
    """What a task is handed and what it returns, as another machine would be sent it; 147 tensors, 40 files."""
    asked = job(files=40, file_index=None, max_file_size=50_000)
    planned = reshard_after_gather(asked)
    assert len(planned.files) > 20
    handed = (asked, len(planned.files) - 1, planned.files[-1].path)
    hashes = [consolidate.fn(asked, number, file.path) for number, file in enumerate(planned.files)]
    assert size_of(handed) < 1_000
    assert size_of(planned) < 500 + 100 * len(planned.files)
    assert max(size_of(value) for value in (*hashes, validate.fn(asked))) < 100
    assert size_of(push.fn(asked)) < 1_000 + 50 * len(planned.files)


def reshard_after_gather(asked: Job) -> Planned:
    assert size_of(gather.fn(asked)) < 100
    return reshard.fn(asked)


def size_of(value: object) -> int:
    return len(cloudpickle.dumps(value))


def test_the_parameters_of_a_run_are_small_and_readable(do: Any, job: Callable[..., Job], model: Truth) -> None:
    outcome = do(job(file_index=None, exclude=("*.bias",)))
    assert outcome.flow_run.parameters["source"] == str(model.folder)
    assert outcome.flow_run.parameters["selection"]["exclude"] == ["*.bias"]
    assert len(json.dumps(outcome.flow_run.parameters)) < 2_000


def test_no_secret_is_in_prefects_database(
    do: Any, job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "hf_planted_where_only_the_client_looks"
    with Hub(tmp_path / "guarded", settings=Settings(token=token)) as hub:
        monkeypatch.setenv("HF_TOKEN", token)
        outcome = do(job(endpoint=hub.url))
        assert outcome.error is None
        hub.fault("/commit/", status=401)
        failed = do(job(endpoint=hub.url, repo="acme/other"))
        assert isinstance(failed.error, HubDenied)
    database = Path(PREFECT_SERVER_DATABASE_CONNECTION_URL.value().partition(":///")[2])
    stored = b"".join(path.read_bytes() for path in database.parent.glob(f"{database.name}*"))
    assert b"acme/other" in stored
    assert token.encode() not in stored


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"world_size": 8, "accept_unproved": True, "include": ("a.*", "b"), "exclude": ("c",), "recipe": "none"},
        {"also": ("gs://b/c", "/n1/c"), "latest": True},
        {"config": "gs://b/config.json", "untie": True, "keep_extra": True},
        {"recipe": "torchtitan-llama3", "sizes": {"heads": 4}, "base": "org/m", "card": True, "load_check": "off"},
        {"check_logits": "1,2", "reference": "r", "logits_tolerance": 0.5, "stream": "both"},
        {"file_index": {"a": 1, "b": 2}, "max_file_size": 7, "overwrite": True},
        {"revision": "dev", "endpoint": "http://hub", "message": "Step 7", "public": True, "replace": True},
        {"tag": "v1", "verify": "full", "on_conflict": "retry", "sign": "key.pem", "spool": "/fast", "stream": "both"},
        {"pull_request": True},
        {"memory_bytes": 1 << 30, "workers": 3},
        {"dtype": "bfloat16", "keep_dtype": ("a.*",), "statistics": "full", "fail_on": ("nan", "zero")},
    ],
    ids=[
        "nothing",
        "selection",
        "places",
        "beside",
        "recipe",
        "loading",
        "layout",
        "repository",
        "what is looked at",
        "pull request",
        "resources",
        "numbers",
    ],
)
def test_the_parameters_of_the_flow_say_every_job(options: dict[str, Any]) -> None:
    asked = Job(source="s", sink="t", repo="a/b", **{"stream": "hub", **options})
    stored = json.loads(json.dumps(publish.serialize_parameters(parameters_of(asked))))
    given = publish.validate_parameters(stored)
    groups = [given[name] for name in ("selection", "numbers", "layout", "completion", "repository", "resources")]
    assert job_of(given["source"], given["repo"], given["sink"], groups=groups) == asked


def test_every_field_of_the_form_is_described() -> None:
    schema = parameter_schema(publish).model_dump()
    assert schema["required"] == ["source", "repo", "sink"]
    assert all(described(field, schema) for field in schema["properties"].values())
    groups = schema["definitions"].values()
    fields = [field for group in groups for field in group["properties"].values()]
    unpublished = {"ranks", "shard_dim", "hashing"}  # files for ranks, or that nobody hashed, are never pushed
    assert len(fields) == len(Job.__dataclass_fields__.keys() - unpublished) - len(schema["required"])
    assert all(field["title"] and field.get("description") for field in fields)


def described(field: dict[str, Any], schema: dict[str, Any]) -> bool:
    """A parameter that is a group may leave it to the group."""
    group = schema["definitions"].get(field.get("$ref", "").rpartition("/")[2], {})
    return bool(field.get("description") or group.get("description"))
