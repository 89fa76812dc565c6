"""The storage that fails as it is told."""

import secrets
import threading
from collections.abc import Iterator

import pytest

from hfdcp_core.errors import StorageDenied, StorageError, UsageError
from hfdcp_core.store import open_store
from hfdcp_core.testing.faulty import FOREVER, Call, Fault, Faults, faulty_store

DENIED = PermissionError("denied")


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faulty_store(f"memory://test-faulty-{secrets.token_hex(8)}") as faults:
        for name in ("a", "b", "sub/a"):
            open_store(faults.url).put(name, b"0123456789")
        faults.clear()
        yield faults


def outcomes(faults: Faults, path: str, calls: int) -> list[bool]:
    """Tell of each of some reads of a file whether it succeeded."""
    store, told = open_store(faults.url), []
    for _ in range(calls):
        try:
            told.append(store.read(path, 0, 4) == b"0123")
        except StorageDenied:
            told.append(False)
    return told


@pytest.mark.parametrize(
    ("nth", "times", "expected"),
    [
        (1, 1, [False, True, True, True]),
        (2, 1, [True, False, True, True]),
        (2, 2, [True, False, False, True]),
        (3, FOREVER, [True, True, False, False]),
    ],
)
def test_a_fault_meets_just_the_calls_it_is_told_to(faults: Faults, nth: int, times: int, expected: list[bool]) -> None:
    faults.add(Fault("read", nth=nth, times=times, error=DENIED))
    assert outcomes(faults, "a", 4) == expected


def test_a_fault_meets_only_paths_that_fit(faults: Faults) -> None:
    faults.add(Fault("read", "^a$", times=FOREVER, error=DENIED))
    assert [outcomes(faults, path, 1) for path in ("a", "b", "sub/a")] == [[False], [True], [True]]


def test_two_faults_count_by_themselves(faults: Faults) -> None:
    faults.add(Fault("read", "a", error=DENIED))
    faults.add(Fault("read", "a", nth=2, error=DENIED))
    assert outcomes(faults, "a", 4) == [False, True, False, True]


def test_every_thread_of_the_process_meets_the_faults(faults: Faults) -> None:
    faults.add(Fault("read", times=2, error=DENIED))
    told: list[bool] = []
    threads = [threading.Thread(target=lambda: told.extend(outcomes(faults, "a", 1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [False, False, True, True]


def test_the_journal_tells_every_call_and_how_it_ended(faults: Faults) -> None:
    store = open_store(faults.url)
    faults.add(Fault("read", error=DENIED))
    with pytest.raises(StorageDenied):
        store.read("a", 2, 5)
    store.read("a", 2, 5)
    store.stat("sub/a")
    store.list("sub")
    store.delete("b")
    store.put("c", b"xyz")
    probe = [call for call in faults.journal if ".hfdcp-tmp-" in call.path]
    assert [call for call in faults.journal if call not in probe] == [
        Call("read", "a", 2, 5, "PermissionError"),
        Call("read", "a", 2, 5),
        Call("stat", "sub/a"),
        Call("list", "sub"),
        Call("delete", "b"),
        Call("create", "c"),
        Call("write", "c", 0, 3),
        Call("commit", "c", 0, 3),
        Call("stat", "c"),
    ]
    assert (faults.attempts("read"), faults.attempts("read", "^b"), faults.attempts("write", "c")) == (2, 0, 1)


def test_a_flipped_byte_is_flipped_wherever_a_read_begins(faults: Faults) -> None:
    store = open_store(faults.url)
    faults.add(Fault("read", flip=3, times=FOREVER))
    flipped = bytes([b"3"[0] ^ 0xFF])
    assert store.read("a", 0, 10) == b"012" + flipped + b"456789"
    assert store.read("a", 3, 4) == flipped
    assert store.read("a", 4, 10) == b"456789"


def test_a_flip_waits_for_a_read_that_covers_it(faults: Faults) -> None:
    store = open_store(faults.url)
    faults.add(Fault("read", "a", flip=3))
    assert store.read("a", 4, 10) == b"456789"
    assert store.read("a", 0, 10) != b"0123456789"
    assert store.read("a", 0, 10) == b"0123456789"


def test_a_lost_reply_comes_after_the_deed(faults: Faults) -> None:
    store = open_store(faults.url)
    faults.add(Fault("commit", error=ConnectionResetError("reset"), lost=True))
    with pytest.raises(StorageError, match="reset"):
        store.put("c", b"x")
    assert store.read("c", 0, 1) == b"x"


def test_something_can_be_called_before_an_operation(faults: Faults) -> None:
    met = []
    faults.add(Fault("read", "a", nth=2, then=lambda: met.append(faults.attempts("read")), delay_s=0.001))
    assert outcomes(faults, "a", 3) == [True, True, True]
    assert met == [1]


def test_errors_can_be_made_anew_for_each_call(faults: Faults) -> None:
    faults.add(Fault("read", times=2, error=lambda: PermissionError("anew")))
    assert outcomes(faults, "a", 3) == [False, False, True]


def test_a_cleared_store_is_a_good_one(faults: Faults) -> None:
    faults.add(Fault("read", times=FOREVER, error=DENIED))
    faults.clear()
    assert faults.journal == ()
    assert outcomes(faults, "a", 1) == [True]


def test_a_file_can_be_read_through_a_file_object(faults: Faults) -> None:
    import fsspec

    with fsspec.open(f"{faults.url}/a", "rb") as file:
        assert file.read() == b"0123456789"
    with fsspec.open(f"{faults.url}/new", "wb") as file:
        file.write(b"x")
    assert open_store(faults.url).read("new", 0, 1) == b"x"


def test_a_faulty_store_is_gone_when_its_context_ends() -> None:
    with faulty_store("memory://test-faulty-gone") as faults:
        store = open_store(faults.url)
    with pytest.raises(StorageError, match="there is no faulty store"):
        store.list()


def test_a_target_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="Protocol not known"), faulty_store("nope://x"):
        pass
    with pytest.raises(UsageError):
        open_store("nope://x")
