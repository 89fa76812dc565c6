"""The fault tree: the class of an error answers "would trying again help?".

::

    HfdcpError                                            status  again?
    ├── UsageError       the request makes no sense          2     never
    ├── SourceError      what we were given is wrong         3     never
    │   ├── UnknownFormat          no checkpoint that we know lies there
    │   ├── IncompleteCheckpoint   a file, or a part of a tensor, that it names is absent
    │   ├── CorruptFile            bytes that contradict themselves or their checksum
    │   ├── UnsafePickle           a pickle that names something we will not call
    │   ├── UnknownDtype           a dtype that is not in the table
    │   └── SourceChanged          a file is not the one that was gathered
    ├── PlanError        what was asked cannot be            4     never
    │   └── SinkOccupied           the sink holds something else, or is in use
    ├── StorageError     the world failed                    5     yes
    │   ├── StorageNotFound                                        never
    │   ├── StorageDenied                                          never
    │   └── NoSpace                                                never
    ├── HubError         the Hub refused or failed           6     never, but:
    │   ├── RateLimited                                            yes
    │   ├── HubUnavailable                                         yes
    │   ├── Conflict               somebody else pushed            never (a policy decides)
    │   ├── HubDenied                                              never
    │   └── HubRejected                                            never
    ├── ValidationError  what was written is not what was meant  7  never, and nothing is published
    └── Cancelled        somebody asked us to stop         130     never

A message says what, where (URL, file, tensor, box, byte), expected, found, and what to do next. Problems are
collected and raised once, as ``problems``. Foreign errors are translated at the door they come through.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

SHOWN_PROBLEMS = 20
"""How many problems a message spells out; ``problems`` always holds all of them."""


class HfdcpError(Exception):
    r"""Any fault that hfdcp tells apart.

    >>> str(PlanError("cannot reshard", ["a: hole at [0:2]", "b: unknown name"]))
    'cannot reshard\n  - a: hole at [0:2]\n  - b: unknown name'
    >>> PlanError.exit_status, StorageError.retryable, NoSpace.retryable
    (4, True, False)
    """

    exit_status: ClassVar[int] = 1
    """The status with which the command line ends."""
    retryable: ClassVar[bool] = False
    """Whether the same call may succeed when it is made again."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        """Keep the message and every single problem behind it."""
        self.message = message
        self.problems = tuple(problems)
        super().__init__(message, self.problems)

    def __str__(self) -> str:
        """Give the message, then a line for each problem."""
        lines = [f"  - {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            lines.append(f"  - … and {len(self.problems) - SHOWN_PROBLEMS} more")
        return "\n".join([self.message, *lines])

    @classmethod
    def raise_for(cls, message: str, problems: Iterable[str]) -> None:
        """Raise one error for all ``problems``; do nothing where there are none."""
        if found := tuple(problems):
            raise cls(message, found)

    def within(self, where: str) -> Self:
        """Return the same error with ``where`` in front of its message."""
        return type(self)(f"{where}: {self.message}", self.problems)


class UsageError(HfdcpError):
    """The request makes no sense, whatever the checkpoint."""

    exit_status = 2


class SourceError(HfdcpError):
    """What we were given is wrong."""

    exit_status = 3


class UnknownFormat(SourceError):
    """No checkpoint of a kind that we know lies there."""


class IncompleteCheckpoint(SourceError):
    """A file or a part of a tensor that the checkpoint names is absent, or its completeness cannot be shown."""


class CorruptFile(SourceError):
    """The bytes of a file contradict themselves, their checksum or what is said of them elsewhere."""


class UnsafePickle(SourceError):
    """A pickle names something that we will neither import nor call."""


class UnknownDtype(SourceError):
    """A dtype that is not in the table of `hfdcp_core.dtypes`."""


class SourceChanged(SourceError):
    """A file of the source is not the one that was gathered."""


class PlanError(HfdcpError):
    """What was asked cannot be made from what is there."""

    exit_status = 4


class SinkOccupied(PlanError):
    """The sink holds another output, or another process is writing to it."""


class StorageError(HfdcpError):
    """The storage failed; its own error is the cause."""

    exit_status = 5
    retryable = True


class StorageNotFound(StorageError):
    """There is nothing at that path."""

    retryable = False


class StorageDenied(StorageError):
    """We may not read or write there."""

    retryable = False


class NoSpace(StorageError):
    """The storage is full."""

    retryable = False


class HubError(HfdcpError):
    """The Hub refused or failed."""

    exit_status = 6


class RateLimited(HubError):
    """The Hub asks us to wait."""

    retryable = True
    wait_s: float | None = None
    """How long it asks us to wait, where it says so."""


class HubUnavailable(HubError):
    """The Hub, or the way to it, is down."""

    retryable = True


class Conflict(HubError):
    """The repository is not in the state that we built upon."""


class HubDenied(HubError):
    """The token is absent, wrong, or may not do this."""


class HubRejected(HubError):
    """The Hub does not take what we sent."""


class ValidationError(HfdcpError):
    """What was written is not what was meant."""

    exit_status = 7


class Cancelled(HfdcpError):
    """Somebody asked us to stop."""

    exit_status = 130
