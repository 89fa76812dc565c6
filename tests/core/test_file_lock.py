"""Locks that die with their holder, and file systems that have none."""

import subprocess
import sys
from pathlib import Path

import pytest

from hfdcp_core.errors import SinkOccupied
from hfdcp_core.file_lock import described_holder, has_locks, locked

# A filter in the kernel that lets flock fail as it does on a file system that was mounted without locks.
WITHOUT_LOCKS = """
import ctypes, errno, platform, struct
number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
program = Program(len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
import os, sys
from pathlib import Path
from hfdcp_core.errors import SinkOccupied
from hfdcp_core.file_lock import has_locks
from hfdcp_core.local_store import LocalStore
root = Path(sys.argv[1])
store, other = LocalStore(root), LocalStore(root)
print(has_locks(root))
store.put("f", b"content")
print(store.read("f", 0, 7).decode())
with store.hold("lock", "the first"):
    try:
        other.hold("lock", "the second").__enter__()
    except SinkOccupied as error:
        print(error)
with other.hold("lock", "the second"):
    print(sorted(os.listdir(root)))
upload = store.create("g", 5)
other.sweep()
upload.write(memoryview(b"12345"))
upload.commit()
print(sorted(os.listdir(root)))
"""


def test_without_locks_a_lease_holds_and_sweep_leaves_what_it_cannot_tell(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", WITHOUT_LOCKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    has, content, refused, held, left = done.stdout.splitlines()
    assert (has, content) == ("False", "content")
    assert refused.startswith(f"{tmp_path}/lock is held by process ")
    assert "(the first)" in refused
    assert (held, left) == ("['f', 'lock']", "['f', 'g']")


def test_files_can_be_locked_here(tmp_path: Path) -> None:
    assert has_locks(tmp_path)


def test_a_lock_is_free_again_when_its_context_ends(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            locked(tmp_path / "lock", "mine"),
            pytest.raises(SinkOccupied, match="mine"),
            locked(tmp_path / "lock", "another"),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"pid": 1}'], ids=repr)
def test_a_holder_that_has_written_nothing_useful_is_still_described(raw: bytes) -> None:
    assert described_holder(raw) == "another process that has just begun"
