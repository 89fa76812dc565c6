"""The lock for storages that have none."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from hfdcp_core.errors import SinkOccupied, StorageError, StorageNotFound
from hfdcp_core.fsspec_store import FsspecStore
from hfdcp_core.lease import Lease, hold_lease
from hfdcp_core.store import open_store
from hfdcp_core.testing.faulty import FOREIGN_ERRORS, Fault, faulty_store


@pytest.fixture
def store() -> FsspecStore:
    store = open_store(f"memory://test-lease-{secrets.token_hex(8)}")
    assert isinstance(store, FsspecStore)
    return store


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def left_by(**changes: object) -> Lease:
    return replace(Lease.of_this_process("left behind", 1000.0), **changes)


def test_a_lease_survives_its_json() -> None:
    lease = Lease.of_this_process("note", 10.0)
    assert Lease.from_json(lease.to_json()) == lease
    assert lease.host == socket.gethostname()


@pytest.mark.parametrize(
    "change",
    [{"host": "elsewhere"}, {"pids": "pid:[1]"}, {"pid": os.getppid()}, {"pid": 1}],
    ids=["other host", "other container", "living process", "first process"],
)
def test_a_lease_that_may_be_alive_is_respected_and_its_holder_named(
    store: FsspecStore, change: dict[str, object]
) -> None:
    left = left_by(**change)
    store.put("lock", left.to_json())
    named = rf"{store.url}/lock is held by process {left.pid} on {left.host} \(left behind\); its lease runs out in"
    with pytest.raises(SinkOccupied, match=named):
        hold_lease(store, "lock", "mine").__enter__()
    assert store.read_whole("lock") == left.to_json()


def test_a_lease_that_has_run_out_is_taken_over(store: FsspecStore) -> None:
    store.put("lock", left_by(host="elsewhere", expires_at=time.time() - 1).to_json())
    with hold_lease(store, "lock", "mine"):
        assert json.loads(store.read_whole("lock"))["note"] == "mine"
    with pytest.raises(StorageNotFound):
        store.stat("lock")


def test_a_lease_of_a_dead_process_of_this_machine_is_taken_over(store: FsspecStore, dead_pid: int) -> None:
    store.put("lock", left_by(pid=dead_pid).to_json())
    with hold_lease(store, "lock", "mine"):
        pass


def test_a_lease_of_an_earlier_process_with_our_number_is_taken_over(store: FsspecStore) -> None:
    store.put("lock", left_by(owner="a container that was started anew").to_json())
    with hold_lease(store, "lock", "mine"):
        pass


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b"\xff", b'"x"'], ids=repr)
def test_what_is_no_lease_holds_nothing(store: FsspecStore, raw: bytes) -> None:
    store.put("lock", raw)
    with hold_lease(store, "lock", "mine"):
        pass


class Renewed:
    """A store in memory that tells when a lease was written again."""

    url = "test://store"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.renewed = threading.Semaphore(0)
        self.failures: list[Exception] = []

    def create_new(self, path: str, data: bytes) -> bool:
        return self.files.setdefault(path, data) is data

    def read_whole(self, path: str) -> bytes:
        if path not in self.files:
            raise StorageNotFound(path)
        return self.files[path]

    def put(self, path: str, data: bytes) -> None:
        if self.failures:
            self.renewed.release()
            raise self.failures.pop()
        self.files[path] = data
        self.renewed.release()

    def delete(self, path: str) -> None:
        self.files.pop(path, None)


def test_a_lease_is_renewed_while_it_is_held_even_after_a_failure() -> None:
    store = Renewed()
    store.failures = [StorageError("down for a moment")]
    with hold_lease(store, "lock", "mine", lasts_s=0.2):
        first = Lease.from_json(store.read_whole("lock"))
        for _ in range(3):
            assert store.renewed.acquire(timeout=30)
        later = Lease.from_json(store.read_whole("lock"))
        assert later.expires_at > first.expires_at
        assert replace(later, expires_at=0) == replace(first, expires_at=0)
    assert store.files == {}


def test_whose_lease_was_taken_over_is_told_and_leaves_the_others_alone() -> None:
    store = Renewed()
    theirs = left_by(owner="theirs", host="elsewhere").to_json()
    others = set(threading.enumerate())

    def lose() -> None:
        with hold_lease(store, "lock", "mine", lasts_s=0.2):
            store.files["lock"] = theirs
            for renewal in set(threading.enumerate()) - others:
                renewal.join(30)

    with pytest.raises(SinkOccupied, match="was taken over by another process"):
        lose()
    assert store.files == {"lock": theirs}


def test_a_lock_whose_reply_was_lost_is_still_ours() -> None:
    with faulty_store(f"memory://test-lease-{secrets.token_hex(8)}") as faults:
        store = open_store(faults.url)
        assert isinstance(store, FsspecStore)
        faults.add(Fault("create", path="^lock$", error=FileExistsError("made by the first try"), lost=True))
        with hold_lease(store, "lock", "mine"):
            assert Lease.from_json(store.read_whole("lock")).note == "mine"
        assert [call.outcome for call in faults.journal if call.operation == "create"][-1] == "FileExistsError"


def test_a_storage_that_is_down_is_no_reason_to_believe_that_nobody_holds() -> None:
    with faulty_store(f"memory://test-lease-{secrets.token_hex(8)}") as faults:
        store = open_store(faults.url)
        store.put("x", b"")
        faults.add(Fault("create", path="^lock$", error=FOREIGN_ERRORS[StorageError]))
        with pytest.raises(StorageError, match="cannot create"):
            store.hold("lock", "mine").__enter__()


def test_a_lease_that_cannot_be_removed_is_no_failure_and_holds_nobody_up() -> None:
    with faulty_store(f"memory://test-lease-{secrets.token_hex(8)}") as faults:
        store = open_store(faults.url)
        faults.add(Fault("delete", path="^lock$", error=FOREIGN_ERRORS[StorageError]))
        with store.hold("lock", "mine"):
            pass
        assert store.stat("lock").size > 0
        with store.hold("lock", "mine again"):
            pass


def test_a_second_process_is_refused(tmp_path: object) -> None:
    script = (
        "import sys; from fsspec.implementations.local import LocalFileSystem as L\n"
        "from hfdcp_core.fsspec_store import FsspecStore\n"
        "held = FsspecStore(L(), sys.argv[1]).hold('lock', 'theirs'); held.__enter__()\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    from fsspec.implementations.local import LocalFileSystem

    store = FsspecStore(LocalFileSystem(), str(tmp_path))
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        named = rf"held by process {process.pid} on {socket.gethostname()} \(theirs\)"
        with pytest.raises(SinkOccupied, match=named):
            store.hold("lock", "mine").__enter__()
        process.kill()
    with store.hold("lock", "mine"):
        pass
