"""Whose fault a foreign error is, and what a message may say of it."""

import errno
import os

import aiohttp
import gcsfs.retry
import google.auth.exceptions
import pytest
import requests
from fsspec.exceptions import FSTimeoutError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from hfdcp_core.errors import NoSpace, StorageDenied, StorageError, StorageNotFound, UsageError
from hfdcp_core.store_base import (
    foreign_faults,
    http_status,
    kind_of_foreign_error,
    kind_of_os_error,
    os_faults,
    refuse_mangled_url,
    without_secrets,
)


class ClientError(Exception):
    """Carries what botocore's error of this name carries."""

    def __init__(self, status: int) -> None:
        self.response = {"Error": {"Code": "Some"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        super().__init__("An error occurred")


class NoCredentialsError(Exception):
    """Named as botocore's."""


def answered(status: int) -> requests.HTTPError:
    reply = requests.Response()
    reply.status_code = status
    return requests.HTTPError("refused", response=reply)


def gcs(status: int) -> gcsfs.retry.HttpError:
    return gcsfs.retry.HttpError({"code": status, "message": "of Google"})


def aio(status: int) -> aiohttp.ClientResponseError:
    url = URL("https://storage.googleapis.com/bucket/x?upload_id=1")
    asked = aiohttp.RequestInfo(url, "GET", CIMultiDictProxy(CIMultiDict()), url)
    return aiohttp.ClientResponseError(asked, (), status=status)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, StorageNotFound),
        (errno.ENOTDIR, StorageNotFound),
        (errno.ELOOP, StorageNotFound),
        (errno.EACCES, StorageDenied),
        (errno.EPERM, StorageDenied),
        (errno.EROFS, StorageDenied),
        (errno.EISDIR, StorageDenied),
        (errno.ENAMETOOLONG, StorageDenied),
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EFBIG, NoSpace),
        (errno.EIO, StorageError),
        (errno.ESTALE, StorageError),
        (errno.EMFILE, StorageError),
        (errno.ETIMEDOUT, StorageError),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else value.__name__,
)
def test_an_error_of_the_operating_system_has_a_class_by_its_number(number: int, kind: type[StorageError]) -> None:
    error = OSError(number, os.strerror(number))
    assert kind_of_os_error(error) is kind_of_foreign_error(error) is kind
    with pytest.raises(kind, match=rf"^cannot read f: {os.strerror(number)}") as raised, os_faults("read f"):
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error
    assert raised.value.retryable == (kind is StorageError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (gcs(401), StorageDenied),
        (gcs(403), StorageDenied),
        (gcs(404), StorageNotFound),
        (gcs(412), StorageDenied),
        (gcs(408), StorageError),
        (gcs(410), StorageError),
        (gcs(416), StorageError),
        (gcs(429), StorageError),
        (gcs(503), StorageError),
        (OSError("Forbidden: https://storage.googleapis.com/x"), StorageDenied),
        (ValueError("Bad Request: https://storage.googleapis.com/x"), StorageError),
        (google.auth.exceptions.DefaultCredentialsError("none"), StorageDenied),
        (google.auth.exceptions.RefreshError("expired"), StorageDenied),
        (google.auth.exceptions.TransportError("unreachable"), StorageError),
        (aio(403), StorageDenied),
        (aio(500), StorageError),
        (aiohttp.ServerDisconnectedError(), StorageError),
        (answered(401), StorageDenied),
        (answered(507), NoSpace),
        (answered(502), StorageError),
        (requests.ConnectionError("refused"), StorageError),
        (ClientError(403), StorageDenied),
        (ClientError(404), StorageNotFound),
        (ClientError(503), StorageError),
        (NoCredentialsError("Unable to locate credentials"), StorageDenied),
        (FSTimeoutError(), StorageError),
        (TimeoutError(), StorageError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), StorageError),
        (FileNotFoundError("bucket/x"), StorageNotFound),
        (PermissionError("Access Denied"), StorageDenied),
        (FileExistsError("bucket/x"), StorageDenied),
        (RuntimeError("what we have never seen"), StorageError),
    ],
    ids=lambda value: "" if isinstance(value, type) else type(value).__name__,
)
def test_an_error_of_a_storage_library_has_a_class(error: Exception, kind: type[StorageError]) -> None:
    assert kind_of_foreign_error(error) is kind
    with pytest.raises(kind, match=r"^cannot list x: ") as raised, foreign_faults("list x", ()):
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "status"),
    [(gcs(503), 503), (aio(403), 403), (answered(404), 404), (ClientError(500), 500), (ValueError("x"), None)],
    ids=lambda value: str(value) if isinstance(value, int) else type(value).__name__,
)
def test_the_status_of_an_answer_is_found_and_told(error: Exception, status: int | None) -> None:
    assert http_status(error) == status
    with pytest.raises(StorageError) as raised, foreign_faults("list x", ()):
        raise error
    assert (f"HTTP {status}, " in str(raised.value)) == (status is not None)


def test_our_own_errors_pass_untouched() -> None:
    mine = StorageNotFound("mine")
    with pytest.raises(StorageNotFound) as raised, foreign_faults("list x", ()):
        raise mine
    assert raised.value is mine


def test_an_interruption_is_no_fault_of_a_storage() -> None:
    with pytest.raises(KeyboardInterrupt), foreign_faults("list x", ()):
        raise KeyboardInterrupt


def test_a_long_complaint_is_cut() -> None:
    with pytest.raises(StorageError) as raised, foreign_faults("list x", ()):
        raise RuntimeError("<html>" + "x" * 10_000)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/x", "https://***@host/x"),
        ("GET http://host/x?X-Amz-Signature=abc&y=1 failed", "GET http://host/x failed"),
        ("Authorization: Bearer ya29.abc", "Authorization: Bearer ***"),
        ("token=abc, then", "token=***, then"),
        ("key AKIA1234 and AKIA12345", "key *** and ***"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_no_secret_stays_in_a_text(text: str, shown: str) -> None:
    assert without_secrets(text, ["AKIA1234", "AKIA12345"]) == shown


@pytest.mark.parametrize("url", ["/gs:/x", "gs://x", "a/gs:/x", "x:/y", "folder", "C:/x", "./s3:", "zip::x"])
def test_what_only_looks_like_a_mangled_url_is_taken(url: str) -> None:
    refuse_mangled_url(url)


@pytest.mark.parametrize("url", ["s3:/b/k", "s3:", "s3:b/k"])
def test_a_mangled_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=rf"'{url}' is neither a path nor a URL: write s3:// .*: \./{url}\)"):
        refuse_mangled_url(url)


def test_where_nobody_answers_it_is_said_what_to_look_at() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    said = r"Connection refused; check the address and the network$"
    with pytest.raises(StorageError, match=said) as raised, foreign_faults("list https://host", ()):
        raise refused
    assert raised.value.retryable


def test_what_a_kind_of_storage_does_not_offer_is_refused_and_not_tried_again() -> None:
    said = r"cannot create x: NotImplementedError: .*this kind of storage cannot do that, choose another one"
    with pytest.raises(StorageDenied, match=said) as raised, foreign_faults("create x", ()):
        raise NotImplementedError
    assert not raised.value.retryable
