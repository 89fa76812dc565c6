"""Writing to Google Cloud Storage: what goes wrong on the way never shows, and never passes for the right bytes."""

import base64
import gc
import logging
import os
import signal
import subprocess
import sys

import pytest
from awscrt import checksums
from fsspec.implementations.memory import MemoryFileSystem

from hfdcp_core.errors import StorageDenied, StorageError, StorageNotFound, ValidationError
from hfdcp_core.fsspec_store import FsspecStore
from hfdcp_core.fsspec_upload import CommittedUpload, UploadTarget
from hfdcp_core.gcs_upload import CHUNK_BYTES, can_stream
from hfdcp_core.store import open_store
from hfdcp_core.testing.gcs_server import BUCKET, GcsFault, GcsServer

URL = f"gs://{BUCKET}/place"
DATA = os.urandom(1 << 20) * (2 * (CHUNK_BYTES >> 20)) + b"the rest"
CHUNK = "upload_id="


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Gcsfs logs what it could not do as an error, with a traceback, also where that is dealt with."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def send(data: bytes = DATA, *, step: int = 3_000_000) -> None:
    upload = open_store(URL).create("f", len(data))
    try:
        for start in range(0, len(data), step):
            upload.write(memoryview(data)[start : start + step])
        upload.commit()
    finally:
        upload.abort()


def crc_of(data: bytes) -> str:
    return base64.b64encode(checksums.crc32c(data).to_bytes(4, "big")).decode()


@pytest.mark.parametrize(
    "size",
    [0, 1, 256 << 10, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, len(DATA)],
)
def test_a_file_of_any_size_arrives_in_chunks_of_one_upload(gcs: GcsServer, size: int) -> None:
    send(DATA[:size])
    assert gcs.content("place/f") == DATA[:size]
    assert len(gcs.asked("POST", "name=")) == 1
    assert [each.received for each in gcs.asked("POST", CHUNK)] == [
        min(CHUNK_BYTES, size - start) for start in range(0, max(size, 1), CHUNK_BYTES)
    ]


@pytest.mark.parametrize(
    ("deed", "skip"),
    [("status", 0), ("reset", 1), ("lost", 0), ("lost", 1), ("lost", 2)],
    ids=["503", "dropped before", "reply of the first lost", "reply of a later one lost", "last reply lost"],
)
def test_a_chunk_that_fails_for_a_moment_is_sent_again_and_counts_once(gcs: GcsServer, deed, skip: int) -> None:
    gcs.fault(GcsFault("POST", CHUNK, deed, skip=skip))
    send()
    assert gcs.content("place/f") == DATA


def test_what_the_storage_did_not_keep_of_a_chunk_is_sent_again(gcs: GcsServer) -> None:
    gcs.fault(GcsFault("POST", CHUNK, "shortfall"))
    send()
    assert gcs.content("place/f") == DATA


def test_a_chunk_whose_reply_takes_too_long_is_sent_again(gcs: GcsServer) -> None:
    import aiohttp

    gcs.fault(GcsFault("POST", CHUNK, "silence"))
    store = open_store(URL, storage_options={"requests_timeout": aiohttp.ClientTimeout(total=0.5)})
    store.put("f", b"small")
    assert gcs.content("place/f") == b"small"


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_bytes_that_were_damaged_on_their_way_are_removed_and_told(gcs: GcsServer, skip: int) -> None:
    gcs.fault(GcsFault("POST", CHUNK, "corrupt", skip=skip))
    with pytest.raises(StorageError, match=rf"{URL}/f: sent {len(DATA)} bytes .* damaged on their way") as told:
        send()
    assert told.value.retryable
    assert crc_of(DATA) in str(told.value)
    assert not gcs.names()


@pytest.mark.parametrize("status", [403, 410])
def test_an_upload_that_is_refused_leaves_the_older_file(gcs: GcsServer, status: int) -> None:
    open_store(URL).put("f", b"old")
    gcs.fault(GcsFault("POST", CHUNK, "status", status=status, skip=1, times=9))
    with pytest.raises(StorageDenied if status == 403 else StorageError, match=f"cannot write {URL}/f"):
        send()
    assert gcs.content("place/f") == b"old"
    assert gcs.unfinished == 0


def test_an_upload_that_is_given_up_is_deleted(gcs: GcsServer) -> None:
    upload = open_store(URL).create("f", len(DATA))
    upload.write(memoryview(DATA)[: CHUNK_BYTES + 5])
    assert gcs.unfinished == 1
    upload.abort()
    upload.abort()
    del upload
    gc.collect()
    assert gcs.unfinished == 0
    assert not gcs.names()


def test_all_bytes_may_be_sent_before_the_commit_but_nothing_shows(gcs: GcsServer) -> None:
    upload = open_store(URL).create("f", 2 * CHUNK_BYTES)
    upload.write(memoryview(DATA)[: 2 * CHUNK_BYTES])
    with pytest.raises(StorageNotFound):
        open_store(URL).stat("f")
    upload.commit()
    assert gcs.content("place/f") == DATA[: 2 * CHUNK_BYTES]


@pytest.mark.parametrize("sent", [CHUNK_BYTES, len(DATA) + 3], ids=["too little", "too much"])
def test_another_number_of_bytes_than_announced_is_not_published(gcs: GcsServer, sent: int) -> None:
    upload = open_store(URL).create("f", len(DATA))
    upload.write(memoryview(DATA + b"abc")[:sent])
    with pytest.raises(ValidationError, match=f"{sent} were written"):
        upload.commit()
    upload.abort()
    assert not gcs.names()


def test_an_error_in_the_middle_of_a_file_publishes_nothing_even_to_the_collector(gcs: GcsServer) -> None:
    def fail() -> None:
        upload = open_store(URL).create("f", len(DATA))
        upload.write(memoryview(DATA)[: CHUNK_BYTES + 5])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    gc.collect()
    assert not gcs.names()


KILLED = """
import os, signal, sys
from hfdcp_core.store import configure, open_store
configure("gs", {"token": "anon", "project": "test", "endpoint_url": sys.argv[1]})
upload = open_store(sys.argv[2]).create("f", 64 << 20)
upload.write(memoryview(bytes(40 << 20)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_that_is_killed_leaves_nothing_to_be_seen(gcs: GcsServer) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, gcs.url, URL], check=False)
    assert done.returncode == -signal.SIGKILL
    assert gcs.asked("POST", CHUNK)
    assert not gcs.names()


def test_where_gcsfs_lacks_a_name_that_is_not_promised_the_usual_way_is_chosen(gcs: GcsServer) -> None:
    from gcsfs.core import GCSFileSystem

    class Without(GCSFileSystem):  # type: ignore[misc]  # gcsfs has no types
        @property
        def _call(self) -> None:
            raise AttributeError

    fs = Without(**gcs.options, skip_instance_cache=True)
    assert not can_stream(fs, f"{BUCKET}/place/f")
    assert not can_stream(MemoryFileSystem(), f"{BUCKET}/place/f")
    assert can_stream(GCSFileSystem(**gcs.options), f"{BUCKET}/place/f")


@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # gcsfs' own files send raw bytes
@pytest.mark.parametrize("commit", [False, True])
def test_the_usual_way_discards_what_is_given_up(gcs: GcsServer, commit: bool) -> None:
    store = open_store(URL)
    assert isinstance(store, FsspecStore)
    upload = CommittedUpload(UploadTarget(store._fs, f"{BUCKET}/place/f", len(DATA), f"{URL}/f", ()))
    upload.write(memoryview(DATA))
    if commit:
        upload.commit()
    upload.abort()
    del upload
    gc.collect()
    assert gcs.content("place/f") == (DATA if commit else None)
    assert gcs.unfinished == 0
