"""Calls to the Hub: whose fault is a foreign error, is the call made again, and when does waiting end?

Every foreign error is translated here: an answer by its status, a connection that failed into `HubUnavailable`. A
message of ours never holds a token. The client waits for ever by default, and makes most calls once; here it does not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hfdcp_core.errors import (
    Conflict,
    HubDenied,
    HubError,
    HubRejected,
    HubUnavailable,
    NoSpace,
    RateLimited,
    StorageError,
)
from hfdcp_core.state import Cancellation

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

CONNECT_S, ANSWER_S = 10.0, 300.0
"""How long to wait for a connection, and for the next byte: a commit alone may take the Hub a minute."""
JITTER = 0.25
"""A pause is longer by up to this part of it, so that many pushers do not come back at once."""
UNSAID_WAIT_S = 60.0
"""How long to wait where the Hub asks for it and does not say how long."""
_KINDS: Mapping[int, type[HubError]] = {
    401: HubDenied,
    403: HubDenied,
    408: HubUnavailable,
    409: Conflict,
    412: Conflict,
    429: RateLimited,
}
_ADVICE: Mapping[type[HubError], str] = {
    HubDenied: "check that the token (HF_TOKEN, or `hf auth login`) is valid and may do this",
    Conflict: "somebody pushed since; look at their commit, then push again to build upon it",
    HubUnavailable: "nothing is lost: push again later",
    RateLimited: "push again later",
}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long we go on with a Hub that does not do what it is asked."""

    tries: int = 4
    """How often a call is made that may be made again, and that fails for no fault of ours."""
    pause_s: float = 1.0
    """Seconds before the second try; each further pause is twice as long."""
    quota_s: float = 4000.0
    """Seconds to wait in all where the Hub asks us to: its quota of commits is counted by the hour."""


class Calls:
    """Makes calls to the Hub, one at a time, and translates their errors."""

    def __init__(self, patience: Patience, cancellation: Cancellation) -> None:
        self.patience = patience
        self.cancellation = cancellation
        self.token: str | None = None
        """What never shows in a message; it is set when it is known."""

    def ask(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that may be made again after an unclear answer: it reads, or does what is done already.

        Args:
            what: What cannot be done where it fails.
            call: The call.

        Raises:
            HubError: It failed, as often as patience allows.
            Cancelled: A stop was asked for while waiting.
        """
        pause_s = self.patience.pause_s
        for _ in range(self.patience.tries - 1):
            try:
                return self.make(what, call)
            except HubUnavailable:
                self.cancellation.wait(pause_s * random.uniform(1, 1 + JITTER))  # noqa: S311 - no secret
                pause_s *= 2
        return self.make(what, call)

    def make(self, what: str, call: Callable[[], T]) -> T:
        """Make a call once; where the Hub did not take it but asks to wait, wait and make it then.

        Raises:
            HubUnavailable: There was no clear answer: the call may have been heeded.
            HubError: It failed.
            Cancelled: A stop was asked for while waiting.
        """
        left_s = self.patience.quota_s
        while True:
            try:
                with self.making(what):
                    return call()
            except RateLimited as limited:
                wait_s = UNSAID_WAIT_S if limited.wait_s is None else limited.wait_s + 1
                if wait_s > left_s:
                    raise
                left_s -= wait_s
                self.cancellation.wait(wait_s)

    @contextmanager
    def making(self, what: str) -> Iterator[None]:
        """Translate the errors of a call, and see to it that the call ends."""
        import httpx2

        end_waiting()
        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, RuntimeError, ValueError, KeyError, TypeError) as fault:
            error = translate(fault, what, signed=bool(self.token))
            clean = self.token is None or self.token not in f"{fault!r}"
            safe = type(error)(self._without_token(error.message))
            if isinstance(error, RateLimited) and isinstance(safe, RateLimited):
                safe.wait_s = error.wait_s
            raise safe from (fault if clean else None)

    def _without_token(self, text: str) -> str:
        text = text.replace(self.token, "(token)") if self.token else text
        return re.sub(r"Bearer \S+|\bhf_\w{20,}", "(token)", text)


def translate(fault: Exception, what: str, *, signed: bool) -> HubError | StorageError:
    """Return our error for a foreign one: who is at fault, and would trying again help?"""
    import httpx2
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    foreign: Mapping[type[HubError], tuple[type[Exception], ...]] = {
        HubDenied: (PermissionError, LocalTokenNotFoundError),  # hf_xet's refusals have no errno
        HubRejected: (OfflineModeIsEnabled, FileNotFoundError, ValueError, KeyError, TypeError),
    }
    if isinstance(fault, RepositoryNotFoundError) and not signed:
        return HubDenied(f"{what}: there is no such public repository, and no token for a private one; set HF_TOKEN")
    if isinstance(fault, HfHubHTTPError | httpx2.HTTPStatusError):
        said = getattr(fault, "server_message", None) or fault.response.reason_phrase
        return _by_status(what, fault.response, said)
    if "No space left on device" in str(fault) or "os error 28" in str(fault):
        return NoSpace(f"{what}: {fault}; hf_xet keeps what it knows of uploads where HF_XET_CACHE says")
    if found := re.search(r"HTTP status \w+ error \((\d{3})", str(fault)):
        return _error(_kind(int(found[1])), what, fault)  # hf_xet says it in words only
    if isinstance(fault, OSError) and fault.errno is not None and not isinstance(fault, ConnectionError | TimeoutError):
        return StorageError(f"{what}: {fault}")
    return _error(
        next((kind for kind, kinds in foreign.items() if isinstance(fault, kinds)), HubUnavailable), what, fault
    )


def _by_status(what: str, response: httpx2.Response, said: str) -> HubError:
    status = response.status_code
    kind = _kind(status)
    answer = f"the Hub answered {status}: {' '.join(said.split())}"
    if kind is not RateLimited:
        return _error(kind, what, answer)
    wait_s = _seconds(response.headers)
    error = _error(kind, what, answer if wait_s is None else f"{answer}; it asks to wait {wait_s} s")
    assert isinstance(error, RateLimited)
    error.wait_s = wait_s
    return error


def _kind(status: int) -> type[HubError]:
    return _KINDS.get(status, HubUnavailable if status >= 500 else HubRejected)


def _error(kind: type[HubError], what: str, why: object) -> HubError:
    said = str(why) or type(why).__name__
    return kind("; ".join(part for part in (f"{what}: {said}", _ADVICE.get(kind)) if part))


def _seconds(headers: Mapping[str, str]) -> int | None:
    """Return how long the Hub asks to wait, as ``Retry-After: 30`` or ``RateLimit: "api";r=0;t=30``."""
    found = re.search(r"\bt=(\d+)", headers.get("ratelimit", "")) or re.match(r"(\d+)$", headers.get("retry-after", ""))
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class _Bounded:
    """The caller's own way to make a client, with an end to every wait where it sets none."""

    factory: Callable[[], httpx2.Client]

    def __call__(self) -> httpx2.Client:
        return _bounded(self.factory())


def _bounded(client: httpx2.Client) -> httpx2.Client:
    import httpx2

    if client.timeout == httpx2.Timeout(None):
        client.timeout = httpx2.Timeout(ANSWER_S, connect=CONNECT_S, pool=CONNECT_S)
    return client


def end_waiting() -> None:
    """Give the client of huggingface_hub timeouts, for all that it does in this process.

    `set_client_factory` would close the client under other threads, and there is no way to ask which factory is set.
    """
    from huggingface_hub.utils import _http

    with _http._CLIENT_LOCK:  # noqa: SLF001  # see above
        factory = _http._GLOBAL_CLIENT_FACTORY  # noqa: SLF001
        if not isinstance(factory, _Bounded):
            _http._GLOBAL_CLIENT_FACTORY = _Bounded(factory)  # noqa: SLF001
    _bounded(_http.get_session())
