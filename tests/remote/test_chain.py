"""The whole chain from one object storage to the same one: few requests, nothing read twice, nothing staged."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from hfdcp_core import publish
from hfdcp_core.errors import StorageDenied
from hfdcp_core.job import Job
from hfdcp_core.store import Sink, configure, open_store
from hfdcp_core.testing.gcs_server import BUCKET, GcsFault, GcsServer
from hfdcp_core.testing.servers import Server

SECRET = "hunter2-planted-in-the-options"
MODEL = {
    **{f"layers.{number}.norm": torch.full((100 + number,), float(number)) for number in range(300)},
    **{f"layers.{number}.weight": torch.randn(700, 1000) for number in range(4)},
}
SOURCE, SINK = f"gs://{BUCKET}/step-1", f"gs://{BUCKET}/model"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """What torch writes of the model, by name."""
    folder = tmp_path_factory.mktemp("saved")
    dcp.save(dict(MODEL), checkpoint_id=folder, no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def put(url: str, saved: Mapping[str, bytes]) -> Sink:
    store = open_store(url)
    for name, data in saved.items():
        store.put(name, data)
    return store


def tensors_in(sink: Sink) -> Mapping[str, torch.Tensor]:
    names = [stamp.path for stamp in sink.list().files if stamp.path.endswith(".safetensors")]
    return {key: value for name in names for key, value in safetensors.torch.load(sink.read_whole(name)).items()}


def assert_whole(sink: Sink) -> None:
    found = tensors_in(sink)
    assert found.keys() == MODEL.keys()
    assert all(torch.equal(found[name], MODEL[name]) for name in MODEL)


def test_few_requests_carry_a_checkpoint_of_many_small_items(gcs: GcsServer, saved: Mapping[str, bytes]) -> None:
    put(SOURCE, saved)
    gcs.forget()
    publish.make(Job(source=SOURCE, sink=SINK))
    assert_whole(open_store(SINK))
    ranges = gcs.asked("GET", "step-1.*alt=media")
    needed = sum(map(len, saved.values()))
    assert len(ranges) <= 5
    assert sum(each.sent for each in ranges) <= 1.02 * needed
    assert len(gcs.asked("GET", "prefix=step-1")) <= 5
    assert len(gcs.journal) <= 70


def test_several_output_files_together_read_hardly_more_than_the_checkpoint(
    gcs: GcsServer, saved: Mapping[str, bytes]
) -> None:
    put(SOURCE, saved)
    gcs.forget()
    publish.make(Job(source=SOURCE, sink=SINK, max_file_size=3_000_000))
    assert_whole(open_store(SINK))
    sent = sum(each.sent for each in gcs.asked("GET", "step-1.*alt=media"))
    assert sent <= 1.02 * sum(map(len, saved.values()))


def test_requests_of_gathering_and_checking_do_not_grow_with_the_number_of_files_beyond_their_heads(
    gcs: GcsServer,
) -> None:
    from hfdcp_core.testing.in_memory import Piece, rank_files

    ranks = [{"w": Piece.of(torch.full((4, 8), float(r)).numpy(), at=(4 * r, 0))} for r in range(40)]
    put(SOURCE, rank_files(*ranks))
    gcs.forget()
    publish.make(Job(source=SOURCE, sink=SINK, world_size=40))
    assert len(gcs.asked("GET", r"step-1.*alt=media")) <= 2 * 40
    asked_for_itself = {each.path for each in gcs.asked("GET", "step-1%2F") if "alt=media" not in each.path}
    assert len(asked_for_itself) <= 1  # whether there is a config
    assert len(gcs.asked("GET", "prefix=step-1")) <= 6


def test_an_object_that_is_replaced_meanwhile_is_noticed(gcs: GcsServer, saved: Mapping[str, bytes]) -> None:
    source = put(SOURCE, saved)
    job = Job(source=SOURCE, sink=SINK)
    publish.gather(job)
    publish.reshard(job)
    source.put("__0_0.distcp", saved["__0_0.distcp"])
    with pytest.raises(Exception, match=r"changed since it was gathered(.|\n)*__0_0.distcp"):
        publish.consolidate_all(job)
    assert not [name for name in gcs.names() if name.endswith(".safetensors")]


def test_s3_to_s3(s3: Server, saved: Mapping[str, bytes]) -> None:
    put(f"s3://{s3.bucket}/step-1", saved)
    publish.make(Job(source=f"s3://{s3.bucket}/step-1", sink=f"s3://{s3.bucket}/model", max_file_size=3_000_000))
    assert_whole(open_store(f"s3://{s3.bucket}/model"))


# ---- other processes ------------------------------------------------------------------------------------------------

WATCHED = """
import os, sys
written = set()
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        mode, flags = arguments[1] or "", arguments[2] or 0
        if set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.add(os.fsdecode(arguments[0]))
from hfdcp_flows.cli import main
sys.addaudithook(watch)
status = main(sys.argv[1:])
print(chr(10).join(sorted(name for name in written if name != os.devnull)))
sys.exit(status)
"""


def environment(gcs: GcsServer, folder: Path) -> dict[str, str]:
    places = {name: str(folder) for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    return {**os.environ, **places, "FSSPEC_GS": json.dumps(gcs.options), "PYTHONDONTWRITEBYTECODE": "1"}


def test_nothing_is_staged_on_this_machine(gcs: GcsServer, saved: Mapping[str, bytes], tmp_path: Path) -> None:
    put(SOURCE, saved)
    command = [sys.executable, "-c", WATCHED, "consolidate", "--quiet", "--max-file-size", "3MB", SOURCE, SINK]
    done = subprocess.run(
        command, env=environment(gcs, tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert_whole(open_store(SINK))
    written = [line for line in done.stdout.splitlines() if line.startswith("/")]
    files = [name for name in gcs.names() if name.endswith(".safetensors")]
    # Of each file written, one of the same header and size but without data is shown to safetensors' own reader.
    assert len([name for name in written if name.endswith(".safetensors")]) == len(files)
    # Python looks once whether the temporary folder can be written to, and names the folder when it makes those files.
    others = [name for name in written if not name.endswith(".safetensors") and name != str(tmp_path)]
    assert [name for name in others if not re.fullmatch(rf"{tmp_path}/[a-z0-9_]{{8}}", name)] == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_killed_goes_on_with_the_files_that_are_missing(
    gcs: GcsServer, saved: Mapping[str, bytes], tmp_path: Path
) -> None:
    put(SOURCE, saved)
    gcs.fault(GcsFault("POST", "name=model/model-00003", "silence", times=9))
    options = ["--quiet", "--workers", "1", "--max-file-size", "3MB"]
    command = [sys.executable, "-m", "hfdcp_flows.start", "consolidate", *options, SOURCE, SINK]
    with subprocess.Popen(command, env=environment(gcs, tmp_path), stderr=subprocess.PIPE) as run:
        while not [name for name in gcs.names() if "records/model-00002" in name]:
            assert run.poll() is None, run.stderr and run.stderr.read()
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
    assert "model/model.safetensors.index.json" not in gcs.names()
    gcs.forget()
    publish.make(Job(source=SOURCE, sink=SINK, workers=1, max_file_size=3_000_000))
    assert_whole(open_store(SINK))
    begun = [each.path for each in gcs.asked("POST", r"name=model/model-0.*safetensors&")]
    assert [path[path.index("0000") : path.index("-of")] for path in begun] == ["00003", "00004", "00005"]


FORKED = """
import json, os, sys
from hfdcp_core.store import configure, open_store
configure("gs", json.loads(sys.argv[1]))
assert open_store(sys.argv[2]).read("f", 0, 3) == b"abc"
child = os.fork()
if not child:
    os._exit(0 if open_store(sys.argv[2]).read("f", 1, 3) == b"bc" else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_opens_its_own_connections(gcs: GcsServer) -> None:
    open_store(SINK).put("f", b"abc")
    subprocess.run([sys.executable, "-c", FORKED, json.dumps(gcs.options), SINK], check=True, timeout=60)


# ---- secrets --------------------------------------------------------------------------------------------------------


def test_options_never_reach_an_object_a_log_or_an_error(
    gcs: GcsServer, saved: Mapping[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    configure("gs", {**gcs.options, "session_kwargs": {"headers": {"X-Key": SECRET}}, "project": SECRET})
    put(SOURCE, saved)
    with caplog.at_level(logging.INFO):
        publish.make(Job(source=SOURCE, sink=SINK))
        gcs.fault(GcsFault("GET", "step-1", "status", status=403, times=99))
        with pytest.raises(StorageDenied) as denied:
            publish.make(Job(source=SOURCE, sink=f"{SINK}-2"))
    assert SECRET not in f"{denied.value} {denied.value!r} {caplog.text}"
    assert not [name for name in gcs.names() if SECRET.encode() in (gcs.content(name) or b"")]


def test_keys_of_s3_never_reach_an_object_a_log_or_an_error(
    s3: Server, saved: Mapping[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    configure("s3", {**s3.options, "key": SECRET, "secret": SECRET})
    put(f"s3://{s3.bucket}/step-2", saved)
    sink = f"s3://{s3.bucket}/model-2"
    with caplog.at_level(logging.INFO):
        publish.make(Job(source=f"s3://{s3.bucket}/step-2", sink=sink))
        with pytest.raises(Exception, match="cannot") as told:
            open_store("s3://no-such-bucket/x").put("f", b"x")
    assert SECRET not in f"{told.value} {told.value!r} {caplog.text}"
    store = open_store(sink)
    documents = [*store.list().files, *store.list(".hfdcp").files, *store.list(".hfdcp/records").files]
    assert len(documents) > 5
    assert not [stamp.path for stamp in documents if SECRET.encode() in store.read_whole(stamp.path)]
