"""Pushing from the command line, as a person does it: what is asked for, what is said, and how one stops it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from huggingface_hub import CommitOperationAdd, HfApi

from hfdcp_core.testing.checkpoints import Truth, compare_with_truth, write_model
from hfdcp_core.testing.hub import EVER, Hub

HFDCP = [sys.executable, "-m", "hfdcp_flows.start"]
REPO = "acme/m"
WAYS = {"xet": {"HF_HUB_DISABLE_XET": "0"}, "lfs": {"HF_HUB_DISABLE_XET": "1"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A checkpoint of 3 MB that torch wrote."""
    return write_model(tmp_path_factory.mktemp("model"), total_bytes=3_000_000, ranks=2)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> Mapping[str, str]:
    own = {"XDG_CACHE_HOME": f"{tmp_path}/cache", "HF_HOME": f"{tmp_path}/hf", "HF_XET_CACHE": f"{tmp_path}/xet"}
    return {**os.environ, **hub.environment, **own}


def hfdcp(environment: Mapping[str, str], *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HFDCP, *map(str, args)], check=False, capture_output=True, text=True, timeout=120, env=environment
    )


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_signed_and_tagged_publish_is_validated_without_local_files(
    model: Truth, hub: Hub, environment: Mapping[str, str], way: Mapping[str, str], tmp_path: Path
) -> None:
    env = {**environment, **way}
    private, public = keys(tmp_path, "signer")
    _, other = keys(tmp_path, "other")
    given = ["--direct", "--max-file-size", "1MB", "--tag", "v1", "--sign", str(private), "--verify", "sample"]
    done = hfdcp(env, "publish", model.folder, REPO, *given)
    assert done.returncode == 0, done.stderr
    assert "tagged v1" in done.stdout
    assert "checked on the Hub's staging branch" in done.stdout
    assert "MB/s" in done.stderr  # what was hashed and sent of each file
    look = hfdcp(env, "validate", "--repo", f"{REPO}@v1", "--verify", "full", "--public-key", public)
    assert look.returncode == 0, look.stderr
    assert "every byte was read back" in look.stdout
    wrong = hfdcp(env, "validate", "--repo", REPO, "--public-key", other)
    assert (wrong.returncode, "not signed with the key" in wrong.stderr) == (7, True)
    again = hfdcp(env, "publish", model.folder, REPO, *given)
    assert (again.returncode, "already holds exactly this" in again.stdout) == (0, True), again.stderr


def test_a_sink_keeps_a_copy_of_what_is_streamed(
    model: Truth, environment: Mapping[str, str], hub: Hub, tmp_path: Path
) -> None:
    done = hfdcp(environment, "publish", model.folder, REPO, "--direct", "--sink", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert compare_with_truth(model, tmp_path / "out") == ()
    assert hfdcp(environment, "validate", tmp_path / "out", "--repo", REPO).returncode == 0


def test_weights_of_somebody_else_are_replaced_only_if_that_is_asked_for(
    model: Truth, environment: Mapping[str, str], hub: Hub, api: HfApi
) -> None:
    api.create_repo(REPO, private=True)
    api.create_commit(REPO, [CommitOperationAdd("pytorch.safetensors", b"x")], commit_message="theirs")
    command = ["publish", model.folder, REPO, "--direct"]
    done = hfdcp(environment, *command)
    assert (done.returncode, "pytorch.safetensors" in done.stderr, "--replace" in done.stderr) == (6, True, True)
    done = hfdcp(environment, *command, "--replace")
    assert done.returncode == 0, done.stderr
    assert "pytorch.safetensors" not in hub.files(REPO)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--sign", "absent.pem"], "no private key in PEM"),
        (["--pr", "--revision", "dev"], "leave --revision out"),
        (["--pr", "--tag", "v1"], "--pr and --tag"),
        (["--tag", "two words"], "'two words' is no name of a branch or tag"),
        (["--revision", "a..b"], "'a..b' is no name of a branch or tag"),
        (["--revision", "dev/"], "'dev/' is no name of a branch or tag"),
        (["--verify", "some"], "invalid choice: 'some'"),
        (["--on-conflict", "force"], "invalid choice: 'force'"),
        (["--memory", "200MiB"], "too little"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_usage_is_told_before_a_byte_is_sent(
    model: Truth, environment: Mapping[str, str], hub: Hub, given: list[str], says: str
) -> None:
    done = hfdcp(environment, "publish", model.folder, REPO, "--direct", *given)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert not hub.calls("/v1/xorbs/|/commit/")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_stop_is_heeded_while_the_hub_hangs(
    model: Truth, hub: Hub, environment: Mapping[str, str], way: Mapping[str, str], tmp_path: Path
) -> None:
    hub.fault("/v1/xorbs/|/_lfs/put/", delay_s=3600, times=EVER)
    env = {**environment, **way}
    command = ["publish", str(model.folder), REPO, "--direct", "--max-file-size", "1MB"]
    process = subprocess.Popen([*HFDCP, *command], env=env, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not hub.calls("/xet-write-token/|/objects/batch") and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert time.monotonic() - began < 10
    hub.forgive()
    again = hfdcp(env, *command)
    assert again.returncode == 0, again.stderr
    back = HfApi(endpoint=hub.url, token=hub.token).snapshot_download(REPO, local_dir=tmp_path / "down")
    assert compare_with_truth(model, Path(back)) == ()


def test_a_published_repository_that_lost_a_file_is_found(
    model: Truth, environment: Mapping[str, str], hub: Hub, api: HfApi
) -> None:
    assert hfdcp(environment, "publish", model.folder, REPO, "--direct", "--max-file-size", "1MB").returncode == 0
    [lost, *_] = sorted(path for path in hub.files(REPO) if path.endswith(".safetensors"))
    api.delete_file(lost, REPO)
    done = hfdcp(environment, "validate", "--repo", REPO)
    assert (done.returncode, f"{lost}: not there" in done.stderr) == (7, True), done.stderr
    absent = hfdcp(environment, "validate", "--repo", "acme/absent")
    assert (absent.returncode, "no repository acme/absent" in absent.stderr) == (6, True), absent.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a small disk of one's own takes Linux' namespaces")
def test_a_full_disk_for_the_cache_is_told_and_a_rerun_completes_it(
    model: Truth, environment: Mapping[str, str], hub: Hub, tmp_path: Path
) -> None:
    cache = tmp_path / "xet"
    cache.mkdir()
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    script = f'mount -t tmpfs -o size=16k none "{cache}" && exec "$@"'
    command = [*HFDCP, "publish", str(model.folder), REPO, "--direct"]
    done = subprocess.run(
        [*own, "sh", "-c", script, "sh", *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert (done.returncode, "No space left on device" in done.stderr) == (5, True), done.stderr
    assert "HF_XET_CACHE" in done.stderr
    assert set(hub.files(REPO)) == {".gitattributes"}
    again = hfdcp(environment, "publish", model.folder, REPO, "--direct")
    assert again.returncode == 0, again.stderr
