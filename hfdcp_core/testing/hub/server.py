"""The Hub as one object: starts and stops, lets faults strike, shows what it holds and what it was asked."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from hfdcp_core.testing.hub.handler import Server
from hfdcp_core.testing.hub.journal import Call, Fault, Journal
from hfdcp_core.testing.hub.routes import Router
from hfdcp_core.testing.hub.state import Settings, State
from hfdcp_core.testing.hub.values import HubFile


class Hub:
    """A Hugging Face Hub on loopback that the real ``huggingface_hub`` client talks to, by LFS and by Xet.

    For tests, the demo and users' own tests; it protects nothing. A Hub on a folder that was used before finds its
    repositories again::

        with Hub(folder) as hub:
            HfApi(endpoint=hub.url, token=hub.token).create_repo("acme/model", private=True)
            hub.fault("/commit/", status=503)
    """

    def __init__(self, root: str | os.PathLike[str], port: int = 0, *, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        """How it behaves."""
        self.root = Path(root)
        """Where it keeps what it holds."""
        self._state = State(self.root, self.settings)
        self._journal = Journal()
        self._server = Server(port, Router(self._state), self._journal)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def token(self) -> str:
        """The token that is accepted."""
        return self.settings.token

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that lead huggingface_hub in another process here."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": self.token}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fault(
        self,
        path: str = ".*",
        *,
        method: str = "*",
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        body: str = '{"error":"injected"}',
        after: bool = False,
        drop_after: int | None = None,
        corrupt: bool = False,
        delay_s: float = 0.0,
        times: int = 1,
        skip: int = 0,
    ) -> None:
        """Let the next requests fail that match; every argument is described in `Fault`."""
        self._journal.arm(
            Fault(
                path=path,
                method=method,
                status=status,
                headers=headers or {},
                body=body,
                after=after,
                drop_after=drop_after,
                corrupt=corrupt,
                delay_s=delay_s,
                times=times,
                skip=skip,
            )
        )

    def forgive(self) -> None:
        """Let no further request fail."""
        self._journal.disarm()

    def calls(self, path: str = ".*", method: str = "*") -> tuple[Call, ...]:
        """Return the requests so far whose path matches a regular expression, oldest first."""
        return self._journal.calls(path, method)

    @property
    def repositories(self) -> tuple[str, ...]:
        """Their names."""
        with self._state.lock:
            return tuple(self._state.repos)

    def files(self, repo: str, revision: str = "main") -> Mapping[str, HubFile]:
        """Return the files of a repository at a revision, by path."""
        with self._state.lock:
            return dict(self._state.resolve(self._state.find(repo), revision).tree)

    def refs(self, repo: str) -> Mapping[str, str]:
        """Return what each branch, tag and pull request of a repository names, by its full name."""
        with self._state.lock:
            return dict(self._state.find(repo).refs)

    def read(self, repo: str, path: str, revision: str = "main") -> bytes:
        """Return the content of a file that is kept as a regular one."""
        return self._state.git_path(self.files(repo, revision)[path].oid).read_bytes()

    def private(self, repo: str) -> bool:
        """Return whether one needs a token to read a repository."""
        return self._state.find(repo).private

    def download(self, repo: str, path: str, folder: str | os.PathLike[str], *, revision: str = "main") -> Path:
        """Fetch a file into a folder by the real client, and return where it lies."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.url, token=self.token)
        return Path(api.hf_hub_download(repo, path, revision=revision, local_dir=Path(folder)))
