"""The command line, run as a person or a script runs it: as a process of its own, on checkpoints that torch wrote."""

import json
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hfdcp_core.crew import usable_processors
from hfdcp_core.errors import HfdcpError, SourceError
from hfdcp_core.gather import gather
from hfdcp_core.store import LocalStore, open_store
from hfdcp_core.testing.checkpoints import Truth, compare_with_truth, write_checkpoint
from hfdcp_core.testing.demo import write_demo_checkpoint
from hfdcp_core.testing.hub import Hub
from hfdcp_flows import cli

HFDCP = [sys.executable, "-m", "hfdcp_flows.start"]
NOBODY = 65534


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, object]:
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


def hfdcp(*args: str | Path, environment: Mapping[str, str] | None = None, **how: object) -> Done:
    command = [*HFDCP, *map(str, args)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=env, **how)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A training state: model, optimizer, scheduler, dataloader, saved by four ranks; 20 MB are weights."""
    return write_demo_checkpoint(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="session")
def safetensors(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """What torch's own Hugging Face writer leaves: nothing in it states a global shape."""
    return write_checkpoint("hf_pair", tmp_path_factory.mktemp("cli-safetensors"))


@pytest.fixture
def checkpoint(truth: Truth, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(truth.folder, tmp_path / "ckpt"))


@pytest.fixture
def sink(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as hub:
        yield hub


def published_names(folder: Path) -> list[str]:
    """What a loader, or a later step, would take for a finished output."""
    if not folder.exists():
        return []
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if name.endswith((".safetensors", ".index.json", "hfdcp-manifest.json"))]


# ---- what works -----------------------------------------------------------------------------------------------------


def test_consolidate_writes_the_weights_bit_for_bit_and_says_what_it_left_out(truth: Truth, sink: Path) -> None:
    done = hfdcp("consolidate", truth.folder, sink, "--max-file-size", "8MB")
    assert (done.status, compare_with_truth(truth, sink)) == (0, ())
    assert f"{sink}: complete and checked: {len(truth.cleaned)} tensors in " in done.out
    assert "optimizer state (optim." in done.err
    assert "consolidate: " in done.err
    assert {"hfdcp-manifest.json", "model.safetensors.index.json"} <= set(published_names(sink))


def test_one_file_is_named_model_and_has_no_index(truth: Truth, sink: Path) -> None:
    assert hfdcp("consolidate", truth.folder, sink).status == 0
    assert published_names(sink) == ["hfdcp-manifest.json", "model.safetensors"]


def test_include_everything_and_recipe_none_keep_every_tensor_as_it_was_saved(truth: Truth, sink: Path) -> None:
    done = hfdcp("consolidate", truth.folder, sink, "--include", "*", "--recipe", "none")
    assert (done.status, compare_with_truth(truth, sink, names=truth.tensors)) == (0, ())


def test_inspect_shows_what_lies_there(truth: Truth) -> None:
    done = hfdcp("inspect", truth.folder)
    assert done.status == 0
    assert done.out.startswith(f"{truth.folder}: dcp, ")
    assert "left out " in done.out
    assert "PROBLEM" not in done.out


def test_inspect_gives_a_document_with_every_tensor(truth: Truth) -> None:
    document = hfdcp("inspect", truth.folder, "--json").document
    assert (document["command"], document["format"], document["problems"]) == ("inspect", "dcp", [])
    wanted = document["wanted"]
    assert isinstance(wanted, list)
    assert {row["fqn"]: tuple(row["spec"]["shape"]) for row in wanted} == {
        name: tensor.shape for name, tensor in truth.cleaned.items()
    }


def test_inspect_draws_a_tensor_and_reads_all_there_is_if_asked(truth: Truth) -> None:
    name = next(name for name, tensor in truth.cleaned.items() if len(tensor.shape) == 2)
    done = hfdcp("inspect", truth.folder, "--tensor", name, "--deep")
    assert done.status == 0, done.err
    assert "│aaaa" in done.out
    assert re.search(r"  a  \[0:\d+, 0:384\]  rank (\d): __\1_0\.distcp\[\d+:\d+\]  ", done.out)
    assert "from end to end: nothing is damaged" in done.out
    assert "gather: " in done.err


def test_files_for_ranks_are_written_and_read_back(truth: Truth, sink: Path, tmp_path: Path) -> None:
    done = hfdcp("consolidate", truth.folder, tmp_path / "ranks", "--ranks", "3")
    assert done.status == 0, done.err
    assert "in 3 files for 3 ranks, cut along dimension 0" in done.out
    assert hfdcp("consolidate", tmp_path / "ranks", sink).status == 0
    assert compare_with_truth(truth, sink) == ()


def test_plan_shows_the_files_and_writes_nothing(truth: Truth, sink: Path) -> None:
    done = hfdcp("plan", truth.folder, sink, "--max-file-size", "8MB")
    assert done.status == 0
    assert "model-00001-of-" in done.out
    assert "would write" in done.out
    assert not sink.exists()


def test_plan_gives_a_document_with_sizes_and_peak_memory(truth: Truth) -> None:
    document = hfdcp("plan", truth.folder, "--json", "--quiet").document
    plan = document["plan"]
    assert isinstance(plan, dict)
    assert [file["path"] for file in plan["files"]] == ["model.safetensors"]
    assert plan["peak_bytes"] < 256 << 20


def test_quiet_says_nothing_but_the_result(truth: Truth, sink: Path) -> None:
    done = hfdcp("consolidate", truth.folder, sink, "--quiet")
    assert (done.status, done.err) == (0, "")


def test_a_file_index_decides_which_tensor_lies_where(truth: Truth, sink: Path, tmp_path: Path) -> None:
    numbers = {name: 1 + position % 2 for position, name in enumerate(truth.cleaned)}
    (tmp_path / "index.json").write_text(json.dumps(numbers))
    assert hfdcp("consolidate", truth.folder, sink, "--file-index", tmp_path / "index.json").status == 0
    weight_map = json.loads((sink / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map == {name: f"model-0000{number}-of-00002.safetensors" for name, number in numbers.items()}


def test_a_second_run_does_not_write_again(truth: Truth, sink: Path) -> None:
    assert hfdcp("consolidate", truth.folder, sink).status == 0
    before = (sink / "model.safetensors").stat()
    assert hfdcp("consolidate", truth.folder, sink).status == 0
    after = (sink / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_validate_finds_an_output_whole_and_a_flipped_byte_in_it(truth: Truth, sink: Path) -> None:
    hfdcp("consolidate", truth.folder, sink)
    done = hfdcp("validate", sink, "--source", truth.folder)
    assert (done.status, "every byte is what was written" in done.out) == (0, True)
    flip_a_byte(sink / "model.safetensors", -1)
    done = hfdcp("validate", sink)
    assert done.status == 7
    assert "model.safetensors" in done.err
    assert "SHA-256" in done.err


def test_push_makes_one_commit_and_a_second_push_none(truth: Truth, sink: Path, hub: Hub) -> None:
    hfdcp("consolidate", truth.folder, sink)
    done = hfdcp("push", sink, "acme/model", "--message", "Step 1000", "--json", environment=hub.environment)
    assert done.status == 0, done.err
    receipt = done.document["receipt"]
    assert isinstance(receipt, dict)
    assert (receipt["repo"], receipt["created"], receipt["unchanged"]) == ("acme/model", True, False)
    assert hub.private("acme/model")
    assert {"model.safetensors", "hfdcp-manifest.json"} <= set(hub.files("acme/model"))
    again = hfdcp("push", sink, "acme/model", environment=hub.environment)
    assert (again.status, "already holds exactly this" in again.out) == (0, True)
    compared = hfdcp("validate", sink, "--repo", "acme/model", environment=hub.environment)
    assert compared.status == 0, compared.err


def test_publish_without_a_sink_cleans_up_its_work_folder(truth: Truth, hub: Hub, tmp_path: Path) -> None:
    environment = {**hub.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = hfdcp("publish", truth.folder, "acme/model", "--direct", environment=environment)
    assert done.status == 0, done.err
    assert "optimizer state" in done.err
    assert not list((tmp_path / "cache" / "hfdcp").rglob("*.safetensors"))
    hub.download("acme/model", "model.safetensors", tmp_path / "back")
    assert compare_with_truth(truth, tmp_path / "back" / "model.safetensors") == ()


def test_a_publish_that_fails_keeps_its_work_and_goes_on_from_there(truth: Truth, hub: Hub, tmp_path: Path) -> None:
    environment = {**hub.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["publish", truth.folder, "acme/model", "--direct"]
    hub.fault("/commit/main", status=401)
    done = hfdcp(*command, environment=environment)
    assert done.status == 6
    assert "the same command goes on from there" in done.err
    (kept,) = (tmp_path / "cache" / "hfdcp").rglob("hfdcp-manifest.json")
    assert str(kept.parent) in done.err
    sent = len(hub.calls("/v1/xorbs/", "POST"))
    again = hfdcp(*command, environment=environment)
    assert again.status == 0
    assert "acme/model has 1 of 1 files already" in again.err
    assert (len(hub.calls("/v1/xorbs/", "POST")), kept.exists()) == (sent, False)


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip_a_byte(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def no_checkpoint(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    (checkpoint / "notes.txt").write_text("nothing to see")


def no_folder(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


def metadata_absent(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def metadata_truncated(checkpoint: Path) -> None:
    raw = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(raw[: len(raw) // 2])


class Caller:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was-here",)


def metadata_calls_something(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Caller()))


def largest(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def file_missing(checkpoint: Path) -> None:
    largest(checkpoint).unlink()


def file_short(checkpoint: Path) -> None:
    os.truncate(largest(checkpoint), largest(checkpoint).stat().st_size // 2)


def byte_flipped(checkpoint: Path) -> None:
    """Damage one byte of a weight, which only reading it can show."""
    shards = [shard for shard in gather(LocalStore(checkpoint)).shards if shard.fqn.startswith("model.")]
    span = max((shard.span for shard in shards), key=lambda span: span.length)
    flip_a_byte(checkpoint / span.path, (span.start + span.stop) // 2)


BAD = {
    "not-a-checkpoint": (no_checkpoint, 3, "UnknownFormat", "no checkpoint"),
    "no-folder": (no_folder, 5, "StorageNotFound", "ckpt"),
    "metadata-absent": (metadata_absent, 3, "IncompleteCheckpoint", ".metadata"),
    "metadata-truncated": (metadata_truncated, 3, "CorruptFile", ".metadata"),
    "metadata-calls-something": (metadata_calls_something, 3, "UnsafePickle", "system"),
    "distcp-missing": (file_missing, 3, "IncompleteCheckpoint", ".distcp"),
    "distcp-short": (file_short, 3, "CorruptFile", ".distcp"),
    "distcp-flipped-byte": (byte_flipped, 3, "CorruptFile", "CRC-32"),
}


@pytest.mark.parametrize(("damage", "status", "fault", "words"), BAD.values(), ids=BAD)
def test_a_damaged_source_ends_in_one_message_and_nothing_that_looks_finished(
    checkpoint: Path, sink: Path, damage: object, status: int, fault: str, words: str
) -> None:
    assert callable(damage)
    damage(checkpoint)
    done = hfdcp("consolidate", checkpoint, sink, "--json", "--quiet", cwd=checkpoint.parent)
    error = done.document["error"]
    assert isinstance(error, dict)
    assert (done.status, error["class"], error["exit_status"]) == (status, fault, status)
    assert words in " ".join([error["message"], *error["problems"]])
    assert done.err == ""
    assert published_names(sink) == []
    assert not (checkpoint.parent / "was-here").exists()


def test_damage_is_told_to_a_person_without_a_traceback(checkpoint: Path, sink: Path) -> None:
    missing = largest(checkpoint)
    missing.unlink()
    done = hfdcp("consolidate", checkpoint, sink)
    assert (done.status, done.out) == (3, "")
    assert done.err.startswith("hfdcp: ")
    assert missing.name in done.err
    assert "Traceback" not in done.err


def test_inspect_tells_what_only_reading_shows_and_ends_with_the_status_of_the_source(checkpoint: Path) -> None:
    byte_flipped(checkpoint)
    assert hfdcp("inspect", checkpoint).status == 0
    done = hfdcp("inspect", checkpoint, "--deep", "--json", "--quiet")
    assert (done.status, done.document["exit_status"], done.err) == (3, 3, "")
    problems = done.document["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 1
    assert "CRC-32" in problems[0]


def test_inspect_has_one_place_for_problems_whatever_it_ran_into(checkpoint: Path) -> None:
    file_missing(checkpoint)
    document = hfdcp("inspect", checkpoint, "--json").document
    assert document["exit_status"] == 3
    assert "distcp" in str(document["problems"])


def test_of_many_problems_inspect_tells_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    fault = SourceError("files are absent", [f"rank {rank}" for rank in range(50)])
    cli.refuse(fault, as_json=False, every=True)
    assert len(capsys.readouterr().err.splitlines()) == 51
    cli.refuse(fault, as_json=False)
    assert "and 30 more" in capsys.readouterr().err


def test_a_sink_that_holds_another_model_is_left_alone_unless_overwrite_is_given(truth: Truth, sink: Path) -> None:
    sink.mkdir()
    (sink / "model.safetensors").write_bytes(b"somebody else's")
    done = hfdcp("consolidate", truth.folder, sink)
    assert (done.status, "--overwrite" in done.err) == (4, True)
    assert (sink / "model.safetensors").read_bytes() == b"somebody else's"
    assert published_names(sink) == ["model.safetensors"]
    assert hfdcp("consolidate", truth.folder, sink, "--overwrite").status == 0
    assert compare_with_truth(truth, sink) == ()


def test_the_second_writer_of_a_sink_is_refused(truth: Truth, sink: Path) -> None:
    with open_store(sink).hold(".hfdcp/lock", "a test"):
        done = hfdcp("consolidate", truth.folder, sink)
    assert (done.status, published_names(sink)) == (4, [])
    assert "a test" in done.err


def test_a_wish_that_cannot_be_met_names_every_problem(truth: Truth, sink: Path) -> None:
    done = hfdcp("consolidate", truth.folder, sink, "--exclude", "nothing.*", "--exclude", "neither.*")
    assert done.status == 4
    assert "'nothing.*'" in done.err
    assert "'neither.*'" in done.err
    assert published_names(sink) == []


def test_completeness_that_nothing_proves_is_refused_until_the_user_speaks(safetensors: Truth, sink: Path) -> None:
    done = hfdcp("consolidate", safetensors.folder, sink)
    assert (done.status, published_names(sink)) == (3, [])
    assert "--world-size" in done.err
    assert "--accept-unproved" in done.err
    done = hfdcp("consolidate", safetensors.folder, sink, "--world-size", "2")
    assert (done.status, compare_with_truth(safetensors, sink)) == (0, ())


def test_what_was_accepted_unproved_stands_in_the_manifest(safetensors: Truth, sink: Path) -> None:
    done = hfdcp("consolidate", safetensors.folder, sink, "--accept-unproved", "--json")
    assert done.status == 0
    manifest = done.document["manifest"]
    assert isinstance(manifest, dict)
    assert manifest["unproved"]


def test_a_full_disk_is_a_storage_error_and_leaves_nothing_that_looks_finished(truth: Truth, tmp_path: Path) -> None:
    """In a file system of 64 KiB where we may mount one, else with a limit on the size of a file."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)]
    script = f"{' '.join(mount)} && touch {small}/mounted && {' '.join(HFDCP)} consolidate $0 {small}/out; "
    script += f"status=$?; ls -a {small}/out 2>/dev/null; exit $status"
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    probe = subprocess.run([*alone, "sh", "-c", " ".join(mount)], capture_output=True, check=False)
    if probe.returncode == 0:
        done = subprocess.run([*alone, "sh", "-c", script, truth.folder], capture_output=True, text=True, check=False)
    else:
        limited = f"ulimit -f 8; exec {' '.join(HFDCP)} consolidate $0 {small}/out"
        done = subprocess.run(["sh", "-c", limited, truth.folder], capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert not [name for name in done.stdout.split() if name.endswith((".safetensors", ".json"))]
    assert published_names(small / "out") == []


AS_NOBODY = f"""
import os, sys
from hfdcp_flows.cli import main
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everyone can enter: pytest's own is its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="hfdcp-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_no_permission_is_a_storage_error_that_names_the_place(truth: Truth, open_folder: Path) -> None:
    shutil.copytree(truth.folder, open_folder / "ckpt")
    (open_folder / "closed").mkdir(mode=0o555)
    command = [sys.executable, "-c", AS_NOBODY, "consolidate", open_folder / "ckpt", open_folder / "closed" / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert str(open_folder / "closed") in done.stderr
    assert "Traceback" not in done.stderr
    (open_folder / "ckpt" / ".metadata").chmod(0)
    command = [sys.executable, "-c", AS_NOBODY, "inspect", open_folder / "ckpt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert ".metadata" in done.stderr


# ---- interrupted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_ends_with_130_and_the_next_one_goes_on(truth: Truth, sink: Path, name: str) -> None:
    command = ["consolidate", str(truth.folder), str(sink), "--max-file-size", "100KB", "--workers", "1"]
    process = subprocess.Popen([*HFDCP, *command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (finished := published_names(sink)) and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.Signals[name])
    _, err = process.communicate(timeout=60)
    assert finished, err
    assert process.returncode == 130
    assert "run the same command again" in err
    assert "Traceback" not in err
    left = published_names(sink)
    assert "hfdcp-manifest.json" not in left
    assert "model.safetensors.index.json" not in left
    before = {name: (sink / name).stat().st_mtime_ns for name in left}
    assert hfdcp(*command).status == 0
    assert {name: (sink / name).stat().st_mtime_ns for name in left} == before
    assert compare_with_truth(truth, sink) == ()


def test_an_interruption_while_modules_are_imported_is_one_too(truth: Truth) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hfdcp_flows.start", "plan", truth.folder], stderr=subprocess.PIPE
    )
    while b"numpy" not in (Path("/proc") / str(process.pid) / "maps").read_bytes():
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"interrupted" in err
    assert b"Traceback" not in err


# ---- what a command line is -----------------------------------------------------------------------------------------


def test_wrong_usage_is_status_2_with_the_right_usage_beside_it() -> None:
    done = hfdcp("consolidate", "only-one")
    assert done.status == 2
    assert "usage: hfdcp consolidate" in done.err
    assert "required: SINK" in done.err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "an output (SINK), or a repository (--repo)"),
        (("out", "--public-key", "k.pub"), "say which (--repo)"),
        (("--repo", "me/7b", "--source", "ckpt"), "name it (SINK)"),
        (("--repo", "me/7b", "--check-logits", "1,2"), "name it (SINK)"),
    ],
    ids=["nothing", "a key for nothing", "a source for nothing", "nothing to run"],
)
def test_a_validation_of_nothing_is_wrong_usage(given: tuple[str, ...], says: str) -> None:
    done = hfdcp("validate", *given)
    assert (done.status, says in done.err) == (2, True), done.err


def test_wrong_usage_is_a_document_too() -> None:
    done = hfdcp("plan", "somewhere", "--memory", "1KB", "--json")
    assert done.status == 2
    error = done.document["error"]
    assert isinstance(error, dict)
    assert error["class"] == "UsageError"
    assert done.err == ""


def test_the_storage_library_does_not_log_into_our_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path), "--quiet"]) == 3
    assert not logging.getLogger("gcsfs").isEnabledFor(logging.ERROR)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_debug_shows_the_traceback_of_an_error(tmp_path: Path) -> None:
    done = hfdcp("inspect", tmp_path, "--debug")
    assert done.status == 3
    assert "Traceback" in done.err


def test_a_fault_of_our_own_is_one_line_and_the_way_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.refuse(ZeroDivisionError("division by zero"), as_json=False) == 1
    err = capsys.readouterr().err
    assert err == (
        "hfdcp: unexpected ZeroDivisionError: division by zero\n"
        "this is a fault of hfdcp; --debug shows where it happened\n"
    )


@pytest.mark.parametrize("fault", HfdcpError.__subclasses__(), ids=lambda fault: fault.__name__)
def test_every_kind_of_fault_has_its_status_and_names_its_problems(
    capsys: pytest.CaptureFixture[str], fault: type[HfdcpError]
) -> None:
    assert cli.refuse(fault("it failed", ["a: why"]), as_json=False) == fault.exit_status
    assert capsys.readouterr().err == "hfdcp: it failed\n  - a: why\n"


def test_nobody_who_reads_is_no_fault(truth: Truth) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*HFDCP, "inspect", str(truth.folder)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


STARTED = """
import os, sys
from hfdcp_flows import start
sys.argv = ["hfdcp", "--version"]
try:
    start.main()
except SystemExit:
    print(len(os.listdir("/proc/self/task")), os.environ.get(start.ONE_BLAS_THREAD), "numpy" in sys.modules)
"""


@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("2", min(2, usable_processors()))])
def test_no_thread_is_started_for_arithmetic_that_nobody_does(given: str | None, threads: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    if given:
        environment["OPENBLAS_NUM_THREADS"] = given
    command = [sys.executable, "-c", STARTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == f"{threads} {given} True"


LIGHT = {
    "help": ["--help"],
    "inspect": ["inspect", "{ckpt}"],
    "plan": ["plan", "{ckpt}", "--json"],
    "consolidate": ["consolidate", "{ckpt}", "{sink}", "--quiet"],
}


@pytest.mark.parametrize("command", LIGHT.values(), ids=LIGHT)
def test_a_command_imports_nothing_heavy_that_it_does_not_need(truth: Truth, sink: Path, command: list[str]) -> None:
    given = [part.format(ckpt=truth.folder, sink=sink) for part in command]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hfdcp_flows.start", *given],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "hfdcp_flows.commands" in imported
    assert not imported & {"torch", "prefect", "transformers", "huggingface_hub", "hf_xet", "rich", "fsspec", "yaml"}
