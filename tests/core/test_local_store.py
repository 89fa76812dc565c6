"""What is particular to the machine's own file system: full disks, rights, and processes that die."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hfdcp_core.errors import NoSpace, SinkOccupied, StorageDenied, StorageNotFound
from hfdcp_core.local_store import LocalStore


def run_python(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    """Run a script to its end in a process of its own, and return what it printed."""
    command = [*prefix, sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def killed_while(script: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    """Give a process that has run a script and waits; it is killed at the end."""
    waiting = script + "\nprint('ready', flush=True)\nsys.stdin.read()"
    preamble = "import sys\nfrom hfdcp_core.local_store import LocalStore\nstore = LocalStore(sys.argv[1])\n"
    command = [sys.executable, "-c", preamble + waiting, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def children(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FULL_DISK = """
import resource, subprocess, sys
from hfdcp_core.errors import NoSpace
from hfdcp_core.local_store import LocalStore
if sys.argv[2] == "own-mounts":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", sys.argv[1]], check=True)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
store = LocalStore(sys.argv[1])
store.put("small", b"x")
for attempt in (lambda: store.create("f", 4 << 20), lambda: store.put("f", bytes(4 << 20))):
    try:
        attempt()
    except NoSpace as error:
        print(error)
print([file.path for file in store.list().files], __import__("os").listdir(sys.argv[1]))
"""


def own_mounts() -> tuple[str, ...]:
    """Return what gives a process mounts of its own, where this machine allows it."""
    prefix = ("unshare", "--mount")
    allowed = shutil.which("unshare") and subprocess.run([*prefix, "true"], check=False).returncode == 0
    return prefix if allowed else ()


def test_a_full_disk_is_known_before_a_byte_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    prefix = own_mounts()
    told = run_python(FULL_DISK, tmp_path, "own-mounts" if prefix else "limit", prefix=prefix)
    *errors, left = told.splitlines()
    assert len(errors) == 2
    for error in errors:
        assert error.startswith(f"cannot write {tmp_path}/f (4194304 bytes): ")
        assert error.endswith("; free some space or choose another place")
    assert left == "['small'] ['small']"


def test_a_file_larger_than_the_file_system_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match="cannot write"):
        LocalStore(tmp_path).create("f", 1 << 62)
    assert children(tmp_path) == []


RIGHTS = """
import os, sys
from hfdcp_core.errors import StorageDenied
from hfdcp_core.local_store import LocalStore
store = LocalStore(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
calls = {
    "read": lambda: store.read("secret", 0, 1),
    "list": lambda: store.list("closed"),
    "put": lambda: store.put("f", b"x"),
    "create": lambda: store.create("new/f", 1),
    "delete": lambda: store.delete("secret"),
    "hold": lambda: store.hold("lock", "note").__enter__(),
}
for name, call in calls.items():
    try:
        call()
    except StorageDenied as error:
        print(name, type(error.__cause__).__name__, "check permissions" in str(error))
"""


def test_what_we_have_no_right_to_is_denied() -> None:
    root = Path(tempfile.mkdtemp())  # pytest's own folders cannot even be entered by another user
    try:
        (root / "secret").write_bytes(b"x")
        (root / "closed").mkdir()
        (root / "secret").chmod(0)
        (root / "closed").chmod(0)
        root.chmod(0o555)
        told = run_python(RIGHTS, root).splitlines()
    finally:
        root.chmod(0o755)
        (root / "closed").chmod(0o755)
        shutil.rmtree(root)
    assert told == [f"{name} PermissionError True" for name in ("read", "list", "put", "create", "delete", "hold")]


def test_a_place_where_nobody_can_write_is_denied() -> None:
    store = LocalStore("/sys")  # read-only in a container; elsewhere not even root may make files there
    with pytest.raises(StorageDenied, match="cannot write /sys/hfdcp-test"):
        store.put("hfdcp-test", b"x")


DESCRIPTORS = """
import os, resource, sys
from concurrent.futures import ThreadPoolExecutor
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from hfdcp_core.local_store import LocalStore
store = LocalStore(sys.argv[1])
names = [f"f{index}" for index in range(2000)]
for name in names:
    with open(f"{sys.argv[1]}/{name}", "w") as file:
        file.write(name)
with ThreadPoolExecutor(16) as threads:
    found = list(threads.map(lambda name: store.read(name, 0, len(name)), names * 2))
assert found == [name.encode() for name in names * 2]
print(len(os.listdir("/proc/self/fd")))
"""


def test_two_thousand_files_are_read_with_few_descriptors(tmp_path: Path) -> None:
    assert int(run_python(DESCRIPTORS, tmp_path)) < 64


def test_a_writer_that_was_killed_leaves_nothing_visible_and_sweep_clears_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    script = "for path in ('f', '.hfdcp/f'):\n    u = store.create(path, 10)\n    u.write(memoryview(b'12345'))"
    with killed_while(script, tmp_path):
        assert store.list().files == ()
        store.sweep()
        assert len(children(tmp_path)) == 2, "a living writer's file stays"
    store.sweep()
    assert children(tmp_path) == [".hfdcp"]
    assert children(tmp_path / ".hfdcp") == []


def test_sweep_leaves_what_is_not_ours(tmp_path: Path) -> None:
    for name in (".hidden", "x.hfdcp-tmp-1", ".other.tmp-123"):
        (tmp_path / name).write_bytes(b"x")
    LocalStore(tmp_path).sweep()
    assert children(tmp_path) == [".hidden", ".other.tmp-123", "x.hfdcp-tmp-1"]


def test_a_holder_is_named_and_what_it_held_is_free_when_it_is_killed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with killed_while("held = store.hold('lock', 'a long run')\nheld.__enter__()", tmp_path) as process:
        named = rf"lock is held by process {process.pid} on {socket.gethostname()} since .*\(a long run\)"
        with pytest.raises(SinkOccupied, match=named):
            store.hold("lock", "mine").__enter__()
    with store.hold("lock", "mine"):
        pass


def test_a_lock_file_of_a_dead_process_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b'{"pid": 1}')
    with LocalStore(tmp_path).hold("lock", "mine"):
        pass
    assert children(tmp_path) == []


def test_an_older_file_gives_its_space_back_though_it_was_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("f", b"old")
    store.read("f", 0, 3)
    store.put("f", b"new")
    held = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in held if str(path).startswith(str(tmp_path))]


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new")
    store.sweep()
    store.delete("f")
    assert store.free_bytes() > 0
    with pytest.raises(StorageNotFound):
        store.list()
    assert children(tmp_path) == []


def test_links_are_followed_as_a_hub_cache_needs_it(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"content")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "f").symlink_to("../blob")
    (tmp_path / "snapshot" / "dangling").symlink_to("../absent")
    store = LocalStore(tmp_path / "snapshot")
    assert [(file.path, file.size) for file in store.list().files] == [("f", 7)]
    assert store.read("f", 0, 7) == b"content"
    with pytest.raises(StorageNotFound):
        store.stat("dangling")


def test_devices_and_pipes_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    store = LocalStore(tmp_path)
    assert store.list().files == ()
    for call in (lambda: store.stat("pipe"), lambda: store.read("pipe", 0, 1)):
        with pytest.raises(StorageNotFound, match="it is not a regular file"):
            call()


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "f" / "below").mkdir(parents=True)
    with pytest.raises(StorageDenied, match="cannot write"):
        LocalStore(tmp_path).put("f", b"x")
    assert children(tmp_path) == ["f"]


def test_a_name_of_the_greatest_length_can_be_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("x" * 255, b"x")
    with pytest.raises(StorageDenied):
        store.put("x" * 256, b"x")
    assert children(tmp_path) == ["x" * 255]


def test_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LocalStore("~/x").url == f"{tmp_path}/x"


def test_a_store_may_be_the_root_of_the_file_system(tmp_path: Path) -> None:
    LocalStore("/").put(f"{tmp_path}/f"[1:], b"x")
    assert (tmp_path / "f").read_bytes() == b"x"
