"""The pool of open files."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hfdcp_core.descriptors import MOST_OPEN, DescriptorPool, affordable


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for index in range(5):
        (tmp_path / f"f{index}").write_bytes(bytes([index]))
    return [str(tmp_path / f"f{index}") for index in range(5)]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_descriptor_in_use_is_never_closed(files: list[str]) -> None:
    pool = DescriptorPool(1)
    lent = [pool.borrow(path) for path in files]
    assert [os.pread(file.fd, 1, 0) for file in lent] == [bytes([index]) for index in range(5)]
    for path, file in zip(files, lent, strict=True):
        pool.give_back(path, file)
    assert [is_open(file.fd) for file in lent] == [False] * 4 + [True]


def test_a_file_stays_open_between_loans_and_the_one_used_longest_ago_goes_first(files: list[str]) -> None:
    pool = DescriptorPool(2)
    fds = {}
    for path in (files[0], files[1], files[0], files[2]):
        file = pool.borrow(path)
        fds.setdefault(path, file.fd)
        assert fds[path] == file.fd
        pool.give_back(path, file)
    assert is_open(fds[files[0]])
    assert pool.borrow(files[0]).fd == fds[files[0]]


def test_a_replaced_file_is_opened_anew_while_the_old_one_is_in_use(files: list[str]) -> None:
    pool = DescriptorPool(4)
    old = pool.borrow(files[0])
    Path(files[1]).replace(files[0])
    new = pool.borrow(files[0])
    assert (os.pread(old.fd, 1, 0), os.pread(new.fd, 1, 0)) == (b"\0", b"\1")
    pool.give_back(files[0], old)
    pool.give_back(files[0], new)
    assert (is_open(old.fd), is_open(new.fd)) == (False, True)


def test_a_dropped_file_is_closed_when_nobody_uses_it(files: list[str]) -> None:
    pool = DescriptorPool(4)
    used, idle = pool.borrow(files[0]), pool.borrow(files[1])
    pool.give_back(files[1], idle)
    for path in files[:3]:
        pool.drop(path)
    assert (is_open(used.fd), is_open(idle.fd)) == (True, False)
    pool.give_back(files[0], used)
    assert not is_open(used.fd)


def test_a_pool_that_is_gone_leaves_nothing_open(files: list[str]) -> None:
    pool = DescriptorPool(4)
    file = pool.borrow(files[0])
    pool.give_back(files[0], file)
    del pool
    assert not is_open(file.fd)


EXHAUSTED = """
import os, resource, sys
from hfdcp_core.descriptors import DescriptorPool
pool = DescriptorPool(64)
for path in sys.argv[1:-1]:
    pool.give_back(path, pool.borrow(path))
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
file = pool.borrow(sys.argv[-1])
print(os.pread(file.fd, 1, 0))
"""


def test_idle_files_make_room_when_the_process_may_open_no_more(files: list[str]) -> None:
    command = [sys.executable, "-c", EXHAUSTED, *files]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "b'\\x04'\n"


def test_a_pool_takes_an_eighth_of_what_the_process_may_open() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert affordable() == min(MOST_OPEN, soft // 8)
