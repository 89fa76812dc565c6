"""A Google Cloud Storage and an S3 on loopback, and the storage options that lead there."""

from collections.abc import Iterator

import pytest

from hfdcp_core.store import configure
from hfdcp_core.testing.gcs_server import GcsServer
from hfdcp_core.testing.servers import Server, s3_server


@pytest.fixture(scope="session")
def gcs_process() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def gcs(gcs_process: GcsServer) -> Iterator[GcsServer]:
    """Empty, and nothing goes wrong yet."""
    configure("gs", gcs_process.options)
    gcs_process.empty()
    yield gcs_process
    gcs_process.empty()
    configure("gs", {})


@pytest.fixture(scope="session")
def s3_process() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: Server) -> Iterator[Server]:
    configure("s3", s3_process.options)
    yield s3_process
    configure("s3", {})
