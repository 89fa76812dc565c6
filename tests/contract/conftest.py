"""Object storages on loopback that the contract is held against."""

from collections.abc import Iterator

import pytest

from hfdcp_core.testing.gcs_server import GcsServer
from hfdcp_core.testing.servers import Server, fake_gcs_server, s3_server


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[Server]:
    with fake_gcs_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        yield server
