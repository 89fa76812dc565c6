"""What ranks hand over to one another in one process: pieces, whom a rank answers, and what is told when one fails."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import fsspec
import pytest
import torch

from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dcp.agreement import Leader, Member
from hfdcp_core.dcp.box_run import BoxRun
from hfdcp_core.dcp.hand_over import HandOver, lead
from hfdcp_core.dcp.orders import Boxes, HandedBox, Order, whole_target
from hfdcp_core.dcp.peers import PIECES, Address, Line, Listener, Peer, connect, unreached
from hfdcp_core.dcp.pieces import PIECE_BYTES, Giver, PeerSource, heard, told
from hfdcp_core.dcp.shares import balanced, shared_out
from hfdcp_core.dcp.tensors import bytes_of
from hfdcp_core.errors import CorruptFile, HfdcpError, NoSpace, PlanError, StorageError, StorageNotFound
from hfdcp_core.plan import FilePlan
from hfdcp_core.store import open_store

FIRST_ROWS, LAST_ROWS = torch.arange(12.0).reshape(3, 4), torch.arange(12.0, 20.0).reshape(2, 4)


def run_of(*tensors: torch.Tensor) -> BoxRun:
    """Put tensors in a row."""
    boxes, start = [], 0
    for number, tensor in enumerate(tensors):
        boxes.append(HandedBox((f"t{number}", ()), tuple(tensor.shape), start, tensor.nbytes))
        start += tensor.nbytes
    return BoxRun(boxes, {(f"t{number}", ()): tensor for number, tensor in enumerate(tensors)})


KINDS = {
    "plain": torch.arange(24, dtype=torch.int16).reshape(4, 6),
    "scalar": torch.tensor(2.5),
    "turned": torch.arange(24.0).reshape(4, 6).t(),
    "every second": torch.arange(48, dtype=torch.uint8).reshape(4, 12)[:, ::2],
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "bool": torch.arange(7) % 2 == 0,
    "fp8": torch.arange(8.0).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("tensor", KINDS.values(), ids=KINDS)
def test_any_part_of_a_run_is_what_lies_there(tensor: torch.Tensor) -> None:
    before, behind = torch.arange(5, dtype=torch.uint8), torch.arange(3.0)
    run = run_of(before, tensor, behind)
    whole = b"".join(bytes_of(each).tobytes() for each in (before, tensor, behind))
    assert run.size == len(whole)
    for start in range(0, len(whole), 3):
        for stop in (start, start + 1, start + 7, len(whole)):
            if stop <= len(whole):
                assert b"".join(run.parts(start, stop)) == whole[start:stop]
    buffer = bytearray(len(whole) - 2)
    run.read_into(1, memoryview(buffer))
    assert bytes(buffer) == whole[1:-1]


def test_a_box_that_is_copied_comes_in_parts() -> None:
    turned = torch.arange(3_000_000, dtype=torch.int32).reshape(1000, 3000).t()
    parts = list(run_of(turned).parts(2, turned.nbytes - 2))
    assert len(parts) == 3
    assert b"".join(parts) == bytes_of(turned).tobytes()[2:-2]


def test_a_run_refuses_what_it_has_not_and_tensors_that_were_not_planned() -> None:
    with pytest.raises(PlanError, match=r"bytes \[40, 49\) were asked for of 48"):
        list(run_of(FIRST_ROWS).parts(40, 49))
    with pytest.raises(PlanError, match="other tensors than it planned") as caught:
        BoxRun([HandedBox(("w", ()), (3, 4), 0, 48)], {("w", ()): FIRST_ROWS.double()})
    assert caught.value.problems == ("w: [3, 4], 96 bytes; planned: [3, 4], 48",)
    assert run_of().size == 0


# ---- pieces ---------------------------------------------------------------------------------------------------------


class Given:
    """One rank that gives, and what it reports."""

    def __init__(self, stack: ExitStack) -> None:
        self.faults: list[BaseException] = []
        self.giver = Giver(self.faults.append)
        self.listener = Listener(lambda _, sock: self.giver.serve(sock))
        stack.callback(self.listener.close)
        assert self.listener.peer.near is not None
        self.address = self.listener.peer.near


@pytest.fixture
def given() -> Iterator[Given]:
    with ExitStack() as stack:
        yield Given(stack)


def source_of(given: Given, own: BoxRun | None = None) -> PeerSource:
    """Be rank 0, and read of rank 1."""
    return PeerSource(0, own or run_of(), [replace(given.address, port=1), given.address])


def test_pieces_of_another_rank_and_of_ones_own_are_read_alike(given: Given) -> None:
    large = torch.arange(PIECE_BYTES // 2, dtype=torch.int32)
    given.giver.give(run_of(large))
    with closing(source_of(given, run_of(large + 1))) as source:
        assert source.read("rank 1", 4, 12) == bytes_of(large[1:3]).tobytes()
        assert source.read("rank 0", 4, 12) == bytes_of(large[2:4]).tobytes()
        assert source.read("rank 1", 0, large.nbytes) == bytes_of(large).tobytes()
        assert (source.remote, source.stamps(["rank 1"]), source.url) == (True, {}, "the ranks of the save")
        with pytest.raises(StorageNotFound, match="no folders"):
            source.list()
        with pytest.raises(StorageNotFound, match="no stamp"):
            source.stat("rank 1")
    with pytest.raises(StorageError, match=r"rank 1 is gone.*given up"):
        source.read("rank 1", 0, 4)


def test_many_threads_read_at_once(given: Given) -> None:
    numbers = torch.arange(100_000, dtype=torch.int32)
    given.giver.give(run_of(numbers))
    found: list[bytes] = [b""] * 8
    with closing(source_of(given)) as source:

        def read(turn: int) -> None:
            found[turn] = source.read("rank 1", 4 * turn, 4 * turn + 200_000)

        threads = [threading.Thread(target=read, args=(turn,)) for turn in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    whole = bytes_of(numbers).tobytes()
    assert found == [whole[4 * turn : 4 * turn + 200_000] for turn in range(8)]


def test_who_asks_too_early_waits(given: Given) -> None:
    later = threading.Timer(0.05, given.giver.give, [run_of(FIRST_ROWS)])
    later.start()
    with closing(source_of(given)) as source:
        assert source.read("rank 1", 0, 48) == bytes_of(FIRST_ROWS).tobytes()
    later.join()


def test_a_rank_that_failed_says_why(given: Given) -> None:
    given.giver.refuse(CorruptFile("the tensor is damaged", ["w"]))
    with (
        closing(source_of(given)) as source,
        pytest.raises(CorruptFile, match="rank 1: the tensor is damaged") as caught,
    ):
        source.read("rank 1", 0, 4)
    assert caught.value.problems == ("w",)


def test_what_a_rank_cannot_give_ends_the_connection_and_is_reported(given: Given) -> None:
    given.giver.give(run_of(FIRST_ROWS))
    with closing(source_of(given)) as source, pytest.raises(StorageError, match="rank 1 is gone"):
        source.read("rank 1", 40, 60)
    assert [type(fault) for fault in given.faults] == [PlanError]


def test_a_piece_that_is_damaged_on_its_way_is_refused() -> None:
    def lie(_: bytes, sock: socket.socket) -> None:
        sock.recv(12)
        sock.sendall(b"\0\4\0\0\0" + b"abcd" + b"\0\0\0\0")

    with closing(Listener(lie)) as liar:
        assert liar.peer.near is not None
        source = PeerSource(0, run_of(), [liar.peer.near, liar.peer.near])
        with closing(source), pytest.raises(StorageError, match="rank 1: a piece of 4 bytes was damaged"):
            source.read("rank 1", 0, 4)


def test_whoever_waits_for_a_piece_is_woken_when_the_save_is_given_up(given: Given) -> None:
    source = source_of(given)  # which has nothing to give yet
    later = threading.Timer(0.1, source.close)
    later.start()
    with pytest.raises(StorageError, match="rank 1 is gone"):
        source.read("rank 1", 0, 4)
    later.join()


def test_faults_travel_as_what_they_are() -> None:
    assert isinstance(heard(told(NoSpace("full"))), NoSpace)
    assert str(heard(told(OSError("odd")))) == "OSError: odd"
    assert type(heard({"kind": "system", "message": "m", "problems": []})) is HfdcpError
    assert type(heard({"kind": "SHOWN_PROBLEMS", "message": "m", "problems": []})) is HfdcpError


# ---- who is answered ------------------------------------------------------------------------------------------------


def test_only_who_knows_the_token_is_answered(given: Given) -> None:
    assert unreached(given.address) is None
    stranger = replace(given.address, token="0" * 32)
    assert "closed at once" in str(unreached(stranger))
    assert "efused" in str(unreached(replace(given.address, port=1)))
    with pytest.raises(ConnectionError):
        connect(stranger, PIECES)
    given.listener.close()
    given.listener.close()
    assert unreached(given.address) is not None


def test_somebody_else_who_listens_there_is_not_taken_for_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            sock, _ = other.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"HTTP/1.1 400")

        thread = threading.Thread(target=answer)
        thread.start()
        assert "somebody else" in str(unreached(Address("127.0.0.1", other.getsockname()[1], "0" * 32)))
        thread.join()


def test_a_line_tells_of_its_loss_but_not_when_it_was_done() -> None:
    for is_done in (True, False):
        one, other = socket.socketpair()
        lost: list[str] = []
        messages: list[object] = []
        line = Line(one, messages.append, lost.append)
        thread = threading.Thread(target=line.listen)
        thread.start()
        far = Line(other, lambda _: None, lambda _: None)
        far.say({"say": "x" * 100_000})
        if is_done:
            line.done()
        far.done()
        threading.Thread(target=far.listen).start()
        thread.join()
        assert messages == [{"say": "x" * 100_000}]
        assert lost == ([] if is_done else ["the connection ended"])


# ---- agreement ------------------------------------------------------------------------------------------------------


class Ranks:
    """Several ranks in one process, each with a member, and one leader."""

    def __init__(self, stack: ExitStack, count: int = 2, before_go: Sequence[Exception] = ()) -> None:
        self.members = [Member() for _ in range(count)]
        self.listeners = [Listener(lambda _, sock, m=member: m.attend(sock)) for member in self.members]  # type: ignore[misc]
        addresses = [listener.peer.near for listener in self.listeners]
        self.went = 0

        def before() -> None:
            self.went += 1
            for fault in before_go:
                raise fault

        self.leader = Leader([address for address in addresses if address], before)
        stack.callback(self.leader.close)
        for each in self.listeners:
            stack.callback(each.close)
        for member in self.members:
            stack.callback(member.done)
        self.leader.try_ways({rank: [] for rank in range(count)})  # every line is answered

    def all(self, *work: object) -> list[BaseException | None]:
        """Let every rank do something at once, and return what each raised."""
        raised: list[BaseException | None] = [None] * len(work)

        def run(rank: int) -> None:
            try:
                self.members[rank].begin(rank)
                work[rank]()  # type: ignore[operator]
            except Exception as error:  # noqa: BLE001 - it is what the test looks at
                raised[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return raised


def test_all_go_when_all_is_made() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack)
        assert ranks.all(*(lambda m=member: m.made([]) for member in ranks.members)) == [None, None]
        assert (ranks.went, ranks.leader.records) == (1, [])


def test_the_first_fault_is_told_to_all() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack)
        own = OSError("gone")
        told_to_last: list[BaseException] = []
        stopped: list[str] = []
        ranks.members[0].on_fault(lambda fault: stopped.append(str(fault)))

        def fail() -> None:
            told_to_last.append(ranks.members[1].fail(own))

        raised = ranks.all(lambda: ranks.members[0].made([]), fail)
        assert str(raised[0]) == "rank 1: OSError: gone"
        assert (raised[1], told_to_last, stopped, ranks.went) == (None, [own], ["rank 1: OSError: gone"], 0)
        with pytest.raises(HfdcpError, match="rank 1: OSError: gone"):
            ranks.members[0].begin(0)
        ranks.members[0].on_fault(lambda _: stopped.append("again"))
        assert stopped[-1] == "again"
        assert str(ranks.members[0].fail(ValueError("later"))) == "rank 1: OSError: gone"


def test_where_the_older_output_cannot_be_withdrawn_nothing_appears() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, before_go=[StorageError("cannot delete")])
        raised = ranks.all(*(lambda m=member: m.made([]) for member in ranks.members))
        assert [str(error) for error in raised] == ["cannot delete"] * 2


def test_a_rank_that_ends_is_a_fault_of_all_others() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, 3)
        raised = ranks.all(*(lambda m=member: m.made([]) for member in ranks.members[:2]), ranks.members[2].done)
        assert [str(error).partition(",")[0] for error in raised] == ["rank 2 ended", "rank 2 ended", "None"]


def test_a_leader_that_ends_is_a_fault_of_all_others() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack)
        raised = ranks.all(lambda: ranks.members[0].made([]), ranks.leader.close)
        assert str(raised[0]).startswith("rank 0 ended, or cannot be reached any more")


def test_a_rank_that_nobody_called_does_not_begin() -> None:
    with pytest.raises(StorageError, match="before this rank began"):
        Member().begin(0)


def test_ranks_that_do_not_reach_one_another_are_named() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack)
        wall = Address("127.0.0.1", 1, "0" * 32)
        with pytest.raises(StorageError) as caught:
            ranks.leader.try_ways({1: [wall]})
        (problem,) = caught.value.problems
        assert problem.startswith("rank 1 does not reach 127.0.0.1:1")
        with pytest.raises(StorageError, match="cannot be reached") as caught:
            Leader([wall], lambda: None)
        assert caught.value.problems[0].startswith("rank 0: ")


# ---- who makes what -------------------------------------------------------------------------------------------------


def test_files_are_shared_out_by_their_bytes() -> None:
    plans = [FilePlan(str(size), b"", size, (), (), (), (), 1) for size in (5, 9, 4, 1, 8)]
    shares = balanced(plans, 3)
    assert [sum(plan.size for plan in share) for share in shares] == [9, 9, 9]


def test_two_ranks_in_one_process_make_a_checkpoint_in_memory() -> None:
    """``memory://`` is a storage of one process only, so both ranks are threads here."""
    spec = {"w": TensorSpec("F32", (5, 4))}
    ranks = [Boxes(spec, (("w", (0, 0)),), ((3, 4),)), Boxes(spec, (("w", (3, 0)),), ((2, 4),))]
    target, orders = whole_target(ranks, mapping=None, max_file_size=1 << 20, save="s")
    assert Box.whole((5, 4)).volume == 20
    hand_overs = [HandOver(), HandOver()]
    leader, handed = lead([each.peer for each in hand_overs], shared_out(ranks, target, orders), lambda: None)
    tensors = [{("w", (0, 0)): FIRST_ROWS}, {("w", (3, 0)): LAST_ROWS}]
    sink = open_store("memory://hand-over-test")
    try:
        threads = [threading.Thread(target=_make, args=(hand_overs[n], handed[n], tensors[n], sink)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        leader.close()
        (record,) = leader.records
        raw = sink.read(record.path, 0, record.size)
        length = int.from_bytes(raw[:8], "little")
        assert json.loads(raw[8 : 8 + length])["w"]["shape"] == [5, 4]
        assert raw[8 + length :] == bytes_of(torch.cat([FIRST_ROWS, LAST_ROWS])).tobytes()
    finally:
        fsspec.filesystem("memory").rm("/hand-over-test", recursive=True)


def _make(hand_over: HandOver, order: Order, tensors: object, sink: object) -> None:
    assert order.share is not None
    hand_over.make(order.share, lambda: tensors, sink)  # type: ignore[arg-type,return-value]


def test_ranks_of_several_machines_need_an_address_for_others() -> None:
    hand_over = HandOver()
    with closing(hand_over):
        here = replace(hand_over.peer, far=None)
        with pytest.raises(StorageError, match=r"rank 0 on .* does not listen for other machines"):
            lead([here, replace(here, host="another")], [Order(), Order()], lambda: None)
        with pytest.raises(StorageError, match=r"rank 1 on .* does not listen on loopback; rank 0"):
            lead([here, Peer(here.host)], [Order(), Order()], lambda: None)


def test_a_listener_can_be_closed_while_somebody_connects() -> None:
    """A connection that comes at that very moment must not end the listening before it is told to end."""
    listener = Listener(lambda _, __: None)
    address, wake = listener.peer.near, listener._wake
    assert address is not None

    class Late:
        """Who is to wake the listener, and comes late."""

        def sendall(self, data: bytes) -> None:
            with closing(socket.create_connection((address.host, address.port))):
                listener._thread.join(0.2)
            wake.sendall(data)

        def close(self) -> None:
            wake.close()

    listener._wake = Late()  # type: ignore[assignment]
    listener.close()
    assert not listener._thread.is_alive()
