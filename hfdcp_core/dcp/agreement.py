"""What the ranks of a save agree on while they make its files: when all are whole, or what went wrong on the first.

The first rank leads. It holds a line to every rank, itself too, from the plan on. A rank says that it begins, and that
its files are whole, with their records. When all are, the leader takes away what names an older output, and says go:
only then do files appear. The first fault, or the first line that ends before, is told to all, and nothing appears.

Nobody waits for a collective meanwhile, so a slow storage runs into no timeout of the process group, and a rank that is
killed is noticed at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from hfdcp_core import wire
from hfdcp_core.dcp.peers import LINE, Address, Line, Message, Peer, connect, unreached
from hfdcp_core.dcp.pieces import heard, told
from hfdcp_core.errors import HfdcpError, StorageError
from hfdcp_core.manifest import FileRecord
from hfdcp_core.state import Cancellation

BEGIN_S = 120.0
"""How long the leader waits for every rank to begin, from when it begins itself."""
TRIALS_S = 90.0
"""How long it waits for the ranks to try whether they reach one another."""
FAREWELL_S = 5.0
"""How long a rank that fails waits until the leader has heard why."""
_TRIALS_AT_ONCE = 32


class Member:
    """One rank's side."""

    def __init__(self) -> None:
        """Wait to be called by the leader."""
        self._change = threading.Condition()
        self._line: Line | None = None
        self._begun = self._go = False
        self._fault: HfdcpError | None = None
        self._rank = self._failed_rank = -1
        self._stop: Callable[[HfdcpError], None] | None = None
        self.cancellation = Cancellation()
        """Set where a rank failed."""

    def attend(self, sock: socket.socket) -> None:
        """Listen to the leader, who called, for as long as the line lasts."""
        line = Line(sock, self._hear, lambda reason: self._lost(line, reason))
        with self._change:
            self._line = line
        line.listen()

    def begin(self, rank: int) -> None:
        """Say that this rank begins.

        Raises:
            HfdcpError: Another one failed already.
        """
        with self._change:
            self._begun, self._rank = True, rank
            if self._fault:
                raise self._fault
            if not self._line:
                raise StorageError("rank 0 ended, or cannot be reached any more, before this rank began")
        self._say({"say": "begun"})

    def on_fault(self, stop: Callable[[HfdcpError], None]) -> None:
        """Let something be called, perhaps in another thread, when a rank fails."""
        with self._change:
            self._stop, fault = stop, self._fault
        if fault:
            stop(fault)

    def made(self, records: Sequence[FileRecord]) -> None:
        """Say that this rank's files are whole, and wait until all ranks' are.

        Raises:
            HfdcpError: A rank failed; the same on all of them.
        """
        self._say({"say": "made", "records": [wire.encode(record) for record in records]})
        with self._change:
            self._change.wait_for(lambda: self._go or self._fault)
            if self._fault:
                raise self._fault

    def tell(self, fault: BaseException) -> None:
        """Say that this rank failed."""
        self._say({"say": "failed", **told(fault)})

    def fail(self, fault: BaseException) -> BaseException:
        """Say that this rank failed, and return what was the first fault: another rank's, or this one."""
        self.tell(fault)
        with self._change:
            self._change.wait_for(lambda: self._fault, FAREWELL_S if self._line and not self._go else 0)
            own = self._failed_rank == self._rank or not isinstance(fault, Exception)
            return fault if own else self._fault or fault

    def done(self) -> None:
        """Say nothing more."""
        with self._change:
            line, self._line = self._line, None
        if line:
            line.done()

    def _say(self, message: Message) -> None:
        with self._change:
            line = self._line
        if line:
            line.say(message)

    def _hear(self, message: Message) -> None:
        match message["say"]:
            case "go":
                with self._change:
                    self._go = True
                    self._change.notify_all()
            case "failed":
                self._fail(heard(message), message["rank"])
            case "try":
                self._say({"say": "tried", "problems": _try_all([Address(**each) for each in message["peers"]])})

    def _lost(self, line: Line, reason: str) -> None:
        with self._change:
            if line is not self._line:
                return
            if not self._begun:  # the leader may call again, by another way
                self._line = None
                return
        self._fail(_ended(0, reason), -1)

    def _fail(self, fault: HfdcpError, rank: int) -> None:
        with self._change:
            if self._fault or self._go:
                return
            self._fault, self._failed_rank, stop = fault, rank, self._stop
            self._change.notify_all()
        self.cancellation.cancel()
        if stop:
            stop(fault)


def _try_all(peers: Sequence[Address]) -> list[str]:
    with ThreadPoolExecutor(_TRIALS_AT_ONCE, "hfdcp-try") as pool:
        return [problem for problem in pool.map(unreached, peers) if problem]


class Leader:
    """The first rank's side."""

    def __init__(self, addresses: Sequence[Address], before_go: Callable[[], None]) -> None:
        """Call every rank.

        Args:
            addresses: Where each rank listens.
            before_go: Done when all is made, before anything appears.

        Raises:
            StorageError: A rank cannot be reached.
        """
        self._change = threading.Condition()
        self._before_go = before_go
        self._begun: set[int] = set()
        self._made: dict[int, Sequence[FileRecord]] = {}
        self._tried: dict[int, Sequence[str]] = {}
        self._went = self._failed = False
        self._deadline: threading.Timer | None = None
        self._lines = {rank: self._line(rank, sock) for rank, sock in enumerate(_call_all(addresses))}
        for line in self._lines.values():
            threading.Thread(target=line.listen, name="hfdcp-line", daemon=True).start()

    def _line(self, rank: int, sock: socket.socket) -> Line:
        return Line(sock, lambda message: self._hear(rank, message), lambda reason: self._fail(_ended(rank, reason)))

    def try_ways(self, wanted: Mapping[int, Collection[Address]]) -> None:
        """Let ranks try whether they reach others.

        Raises:
            StorageError: One does not.
        """
        with self._change:
            self._tried.clear()
        for rank, addresses in wanted.items():
            self._lines[rank].say({"say": "try", "peers": [asdict(address) for address in addresses]})
        with self._change:
            self._change.wait_for(lambda: self._failed or self._tried.keys() >= wanted.keys(), TRIALS_S)
            silent = sorted(wanted.keys() - self._tried.keys())
            problems = [f"rank {rank} does not reach {p}" for rank in sorted(self._tried) for p in self._tried[rank]]
        StorageError.raise_for(
            "ranks do not reach one another", [*problems, *(f"rank {rank} does not answer" for rank in silent)]
        )

    @property
    def records(self) -> list[FileRecord]:
        """What all ranks made."""
        with self._change:
            return sorted((record for made in self._made.values() for record in made), key=lambda record: record.path)

    def close(self) -> None:
        """Lead no more; a save that is not finished fails."""
        if self._deadline:
            self._deadline.cancel()
        for line in self._lines.values():
            line.done()

    def _hear(self, rank: int, message: Message) -> None:
        match message["say"]:
            case "tried":
                with self._change:
                    self._tried[rank] = message["problems"]
                    self._change.notify_all()
            case "begun":
                self._hear_begun(rank)
            case "made":
                self._hear_made(rank, [wire.decode_as(FileRecord, record) for record in message["records"]])
            case "failed":
                self._fail(heard(message), rank)

    def _hear_begun(self, rank: int) -> None:
        with self._change:
            self._begun.add(rank)
            if self._deadline is None:
                self._deadline = threading.Timer(BEGIN_S, self._require_begun)
                self._deadline.daemon = True
                self._deadline.start()
            if len(self._begun) == len(self._lines):
                self._deadline.cancel()

    def _require_begun(self) -> None:
        with self._change:
            missing = sorted(self._lines.keys() - self._begun)
        if missing:
            who = ", ".join(map(str, missing))
            self._fail(StorageError(f"rank {who} did not begin to save within {BEGIN_S:.0f} s"))

    def _hear_made(self, rank: int, records: Sequence[FileRecord]) -> None:
        with self._change:
            self._made[rank] = records
            all_made = len(self._made) == len(self._lines)
        if all_made:  # in a thread of its own: the line must go on to beat
            threading.Thread(target=self._let_go, name="hfdcp-go", daemon=True).start()

    def _let_go(self) -> None:
        try:
            self._before_go()
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks must hear of it
            self._fail(heard(told(error)))
            return
        with self._change:
            self._went = not self._failed
        if self._went:
            self._tell({"say": "go"})

    def _fail(self, fault: HfdcpError, rank: int = -1) -> None:
        """Tell all ranks of the first fault, and which rank it was that said so."""
        with self._change:
            if self._failed or self._went:
                return
            self._failed = True
            self._change.notify_all()
        said = fault if rank < 0 else fault.within(f"rank {rank}")
        self._tell({"say": "failed", "rank": rank, **told(said)})

    def _tell(self, message: Message) -> None:
        for line in self._lines.values():
            line.say(message)


def _ended(rank: int, reason: str) -> HfdcpError:
    return StorageError(f"rank {rank} ended, or cannot be reached any more, while all ranks were saving: {reason}")


def _call_all(addresses: Sequence[Address]) -> list[socket.socket]:
    """Connect to every rank, or to none.

    Raises:
        StorageError: One cannot be reached.
    """
    with ThreadPoolExecutor(_TRIALS_AT_ONCE, "hfdcp-call") as pool:
        answers = list(pool.map(_call, addresses))
    problems = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, OSError)]
    sockets = [answer for answer in answers if isinstance(answer, socket.socket)]
    if problems:
        for sock in sockets:
            sock.close()
    StorageError.raise_for("ranks cannot be reached", problems)
    return sockets


def _call(address: Address) -> socket.socket | OSError:
    try:
        return connect(address, LINE)
    except OSError as error:
        return error


def address_of(rank: int, peer: Peer, *, near: bool) -> Address:
    """Return where a rank listens, on its own machine or on the way to others.

    Raises:
        StorageError: It does not.
    """
    address = peer.near if near else peer.far
    if address is None:
        where = "on loopback" if near else "for other machines"
        raise StorageError(f"rank {rank} on {peer.host} does not listen {where}")
    return address
