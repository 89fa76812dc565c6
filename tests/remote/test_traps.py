"""What object storages and their libraries do that nobody expects, and that it does no harm here."""

import gc
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hfdcp_core.errors import StorageError
from hfdcp_core.fsspec_store import PIECE_BYTES, PIECES_AT_ONCE, FsspecStore
from hfdcp_core.fsspec_upload import MovedUpload, UploadTarget
from hfdcp_core.gcs_layout import settled
from hfdcp_core.gcs_upload import GcsUpload
from hfdcp_core.storage_options import merged_options
from hfdcp_core.store import open_store
from hfdcp_core.testing.gcs_server import BUCKET, GcsFault, GcsServer
from hfdcp_core.testing.servers import Server

URL = f"gs://{BUCKET}/place"
LARGE = os.urandom(1 << 20) * (3 * PIECE_BYTES >> 20) + b"end"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


# ---- a bucket's layout ----------------------------------------------------------------------------------------------

PROBING = """
import sys, json, gcsfs
from hfdcp_core.store import open_store
assert gcsfs.GCSFileSystem.__name__ == "ExtendedGcsFileSystem"
store = open_store(sys.argv[1], storage_options=json.loads(sys.argv[2]))
store.put("f", b"abc")
print(store.read("f", 0, 3), store.list().files[0].size)
"""


def test_an_emulator_is_not_asked_for_a_layout_though_gcsfs_is_imported_already(gcs: GcsServer) -> None:
    import json

    done = subprocess.run(
        [sys.executable, "-c", PROBING, URL, json.dumps(gcs.options)],
        env={**os.environ, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "true"},
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("b'abc' 3\n", "")


class Asking:
    """Stands for the filesystem of gcsfs that asks for layouts, without a network."""

    storage_options = {"token": "anon", "project": "test"}  # noqa: RUF012 - fsspec's own name and kind

    def __init__(self, answer: str, where: str) -> None:
        self.asked = 0
        self._answer, self._location = answer, where

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    def _sync_lookup_bucket_type(self, _bucket: str) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(name=self._answer)


@pytest.mark.parametrize(
    ("answer", "where", "keeps", "asked"),
    [
        ("HIERARCHICAL", "https://storage.googleapis.com", True, 1),
        ("UNKNOWN", "https://storage.googleapis.com", False, 1),
        ("UNKNOWN", "http://127.0.0.1:1", False, 0),
    ],
    ids=["it answers", "it does not", "an emulator"],
)
def test_a_bucket_is_asked_once_for_its_layout(answer: str, where: str, keeps: bool, asked: int) -> None:
    fs = Asking(answer, where)
    chosen = [settled(fs, "bucket/place") for _ in range(3)]
    assert chosen[0] is chosen[1] is chosen[2]
    assert (chosen[0] is fs) is keeps
    assert fs.asked == asked


# ---- reading --------------------------------------------------------------------------------------------------------


def test_a_large_read_has_several_ranges_in_flight_and_no_more_than_that(gcs: GcsServer) -> None:
    store = open_store(URL)
    store.put("f", LARGE)
    gcs.forget()
    gcs.fault(GcsFault("GET", "alt=media", "hold", together=4, times=4))
    assert store.read("f", 0, len(LARGE)) == LARGE
    assert gcs.most_at_once == 4 <= PIECES_AT_ONCE
    assert [each.sent for each in gcs.asked("GET", "alt=media")].count(PIECE_BYTES) == 3


@pytest.mark.parametrize("deed", ["status", "reset", "truncate"])
def test_a_range_that_fails_is_asked_for_again_alone(gcs: GcsServer, deed) -> None:
    store = open_store(URL)
    store.put("f", LARGE)
    gcs.forget()
    gcs.fault(GcsFault("GET", "alt=media", deed, skip=1))
    assert store.read("f", 0, len(LARGE)) == LARGE
    assert len(gcs.asked("GET", "alt=media")) == 5


def test_a_request_may_take_long_as_long_as_bytes_come() -> None:
    patience = merged_options("gs", {}, {})["requests_timeout"]
    assert patience.total is None  # type: ignore[attr-defined]  # aiohttp's own limit is 300 s, and is never retried
    assert patience.sock_read == 60  # type: ignore[attr-defined]
    assert merged_options("s3", {}, {})["config_kwargs"] == {"max_pool_connections": 32, "read_timeout": 60}


def test_what_others_write_to_gcs_is_seen_at_once(gcs: GcsServer) -> None:
    store = open_store(URL)
    store.put("f", b"old")
    assert [stamp.size for stamp in store.list().files] == [3]
    gcs.put("place/g", b"new")
    assert [stamp.path for stamp in store.list().files] == ["f", "g"]
    del gcs.buckets.objects[BUCKET]["place/f"]
    assert [stamp.path for stamp in store.list().files] == ["g"]
    assert store.stamps(["f", "g"]).keys() == {"g"}


def test_what_others_write_to_s3_is_seen_at_once(s3: Server) -> None:
    store = open_store(f"s3://{s3.bucket}/seen")
    store.put("f", b"old")
    assert [stamp.size for stamp in store.list().files] == [3]
    client(s3).put_object(Bucket=s3.bucket, Key="seen/f", Body=b"newer")
    assert store.stat("f").size == store.list().files[0].size == 5


def test_stamps_of_many_files_are_one_listing(gcs: GcsServer) -> None:
    store = open_store(URL)
    for number in range(20):
        store.put(f"sub/{number}", b"x" * number)
    gcs.forget()
    found = store.stamps([f"sub/{number}" for number in range(20)] + ["sub/absent", "none/a", "none/b"])
    assert [found[f"sub/{number}"].size for number in range(20)] == list(range(20))
    assert len(found) == 20
    assert len(gcs.journal) <= 4
    gcs.forget()
    assert store.stamps(["sub/7"]) == {"sub/7": found["sub/7"]}
    assert len(gcs.journal) == 1


# ---- writing --------------------------------------------------------------------------------------------------------


def test_chunks_begin_on_a_page(gcs: GcsServer) -> None:
    upload = open_store(URL).create("f", 40 << 20)
    assert isinstance(upload, GcsUpload)
    addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in upload._buffers]
    upload.abort()
    assert len(addresses) == 2
    assert not any(address % 4096 for address in addresses)


def test_a_lease_whose_reply_was_lost_is_ours(gcs: GcsServer) -> None:
    gcs.fault(GcsFault("POST", "ifGenerationMatch=0", "lost"))
    with open_store(URL).hold(".hfdcp/lock", "note"):
        assert gcs.names() == ["place/.hfdcp/lock"]
    assert not gcs.names()


def test_a_removal_whose_reply_was_lost_is_done(gcs: GcsServer) -> None:
    store = open_store(URL)
    store.put("f", b"x")
    gcs.fault(GcsFault("DELETE", "place", "lost"))
    store.delete("f")
    assert not gcs.names()


def test_a_move_whose_reply_was_lost_is_done_and_nothing_is_told_to_be_absent(gcs: GcsServer) -> None:
    store = open_store(URL)
    assert isinstance(store, FsspecStore)
    gcs.fault(GcsFault("POST", "moveTo", "lost"))
    upload = MovedUpload(UploadTarget(store._fs, f"{BUCKET}/place/f", 3, f"{URL}/f", ()))
    upload.write(memoryview(b"abc"))
    upload.commit()
    upload.abort()
    assert gcs.names() == ["place/f"]
    assert gcs.content("place/f") == b"abc"


def test_a_move_that_cannot_be_done_leaves_nothing(gcs: GcsServer) -> None:
    store = open_store(URL)
    assert isinstance(store, FsspecStore)
    gcs.fault(GcsFault("POST", "moveTo|rewriteTo", "status", status=403, times=9))
    upload = MovedUpload(UploadTarget(store._fs, f"{BUCKET}/place/f", 3, f"{URL}/f", ()))
    upload.write(memoryview(b"abc"))
    with pytest.raises(StorageError, match="cannot write"):
        upload.commit()
    upload.abort()
    assert not gcs.names()


def client(s3: Server):
    import boto3

    return boto3.client(
        "s3", endpoint_url=s3.url, aws_access_key_id="key-of-nobody", aws_secret_access_key="secret-of-nobody",
        region_name="us-east-1",
    )  # fmt: skip


@pytest.mark.parametrize("size", [5, 40 << 20], ids=["small", "several parts"])
def test_an_upload_to_s3_that_is_dropped_shows_nothing_and_leaves_no_parts(s3: Server, size: int) -> None:
    upload = open_store(f"s3://{s3.bucket}/dropped").create("f", size)
    upload.write(memoryview(bytes(size)))
    upload.abort()
    del upload
    gc.collect()
    found = client(s3)
    assert "Contents" not in found.list_objects_v2(Bucket=s3.bucket, Prefix="dropped")
    assert "Uploads" not in found.list_multipart_uploads(Bucket=s3.bucket)


def test_an_upload_to_s3_of_several_parts_arrives(s3: Server) -> None:
    store = open_store(f"s3://{s3.bucket}/arrived")
    data = os.urandom(1 << 20) * 33 + b"end"
    store.put("f", data)
    assert store.read_whole("f") == data
