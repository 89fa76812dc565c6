"""Writing to S3: parts of one upload, of which nothing shows before the end, and nothing passes for other bytes."""

import os
import secrets
import time
from collections.abc import Iterator

import boto3
import pytest

from hfdcp_core.errors import StorageError, StorageNotFound, ValidationError
from hfdcp_core.store import configure, open_store
from hfdcp_core.testing.losing_proxy import HELD_AT_MOST_S, LosingProxy, ProxyFault
from hfdcp_core.testing.servers import Server

PART = 16 << 20
DATA = os.urandom(1 << 20) * (2 * (PART >> 20)) + b"the rest"
PARTS, WHOLE = "partNumber=", "uploadId="


@pytest.fixture
def proxy(s3: Server) -> Iterator[LosingProxy]:
    """Stand before the storage, which is reached through it only."""
    with LosingProxy(s3.url) as proxy:
        configure("s3", {**s3.options, "endpoint_url": proxy.url})
        yield proxy
        assert proxy.waiting == []


@pytest.fixture
def place(s3: Server) -> str:
    return f"{s3.bucket}/{secrets.token_hex(6)}"


def send(place: str, data: bytes = DATA, *, step: int = 3_000_000, announced: int | None = None) -> None:
    upload = open_store(f"s3://{place}").create("f", len(data) if announced is None else announced)
    try:
        for start in range(0, len(data), step):
            upload.write(memoryview(data)[start : start + step])
        upload.commit()
    finally:
        upload.abort()


def content(place: str) -> bytes:
    store = open_store(f"s3://{place}")
    return store.read("f", 0, store.stat("f").size)


def client(s3: Server):
    return boto3.client(
        "s3", endpoint_url=s3.url, aws_access_key_id="key-of-nobody", aws_secret_access_key="secret-of-nobody",
        region_name="us-east-1",
    )  # fmt: skip


def left_over(s3: Server) -> list[str]:
    """Return the keys of uploads that were begun and neither completed nor aborted."""
    return [upload["Key"] for upload in client(s3).list_multipart_uploads(Bucket=s3.bucket).get("Uploads", [])]


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, len(DATA)])
def test_a_file_of_any_size_arrives_in_as_many_parts_as_it_needs(proxy: LosingProxy, place: str, size: int) -> None:
    send(place, DATA[:size])
    assert content(place) == DATA[:size]
    assert len(proxy.asked("PUT", PARTS)) == (-(-size // PART) if size > PART else 0)


@pytest.mark.parametrize("deed", ["dropped", "lost", "status"])
@pytest.mark.parametrize("skip", [0, 2])
def test_a_part_that_fails_for_a_moment_is_sent_again(proxy: LosingProxy, place: str, deed, skip: int) -> None:
    proxy.fault(ProxyFault("PUT", PARTS, deed, skip=skip))
    send(place)
    assert content(place) == DATA
    assert len(proxy.asked("PUT", PARTS)) == 4


@pytest.mark.parametrize("deed", ["dropped", "lost", "status"])
def test_a_completion_that_fails_or_is_not_heard_of_is_done_once(
    proxy: LosingProxy, s3: Server, place: str, deed
) -> None:
    proxy.fault(ProxyFault("POST", WHOLE, deed))
    send(place)
    assert content(place) == DATA
    assert left_over(s3) == []


def test_an_object_of_somebody_else_does_not_pass_for_a_lost_completion(
    proxy: LosingProxy, s3: Server, place: str
) -> None:
    upload = open_store(f"s3://{place}").create("f", len(DATA))
    upload.write(memoryview(DATA))
    [begun] = proxy.asked("PUT", "partNumber=1")
    other = bytes(len(DATA))
    send(place, other)
    identity = begun.partition("uploadId=")[2].partition("&")[0]
    bucket, _, folder = place.partition("/")
    client(s3).abort_multipart_upload(Bucket=bucket, Key=f"{folder}/f", UploadId=identity)
    with pytest.raises(StorageError, match="cannot write"):
        upload.commit()
    upload.abort()
    assert content(place) == other


def test_more_or_fewer_bytes_than_announced_never_show(proxy: LosingProxy, s3: Server, place: str) -> None:
    for announced in (len(DATA) - 1, len(DATA) + 1):
        with pytest.raises(ValidationError, match="announced"):
            send(place, announced=announced)
    with pytest.raises(StorageNotFound):
        open_store(f"s3://{place}").list()
    assert left_over(s3) == []
    assert proxy.asked("POST", WHOLE) == []


def test_filling_goes_on_while_a_part_is_sent(proxy: LosingProxy, place: str) -> None:
    proxy.fault(ProxyFault("PUT", PARTS, "held"))
    upload = open_store(f"s3://{place}").create("f", len(DATA))
    start = time.monotonic()
    upload.write(memoryview(DATA)[: 2 * PART - 1])
    assert time.monotonic() - start < HELD_AT_MOST_S / 2  # and the first part is held as long as nobody lets it go
    proxy.release()
    upload.write(memoryview(DATA)[2 * PART - 1 :])
    upload.commit()
    assert content(place) == DATA
