"""Files of whole tensors on a storage that ranks cannot write to together: one rank makes each, the others hand over.

While a save is planned each rank begins to listen (`hfdcp_core.dcp.peers`), and the first one calls them all, so it is
known before any data move whether that works. Then every rank gives pieces of what it has, and makes its own files by
plain consolidating: the other ranks are the store that is read from (`hfdcp_core.dcp.pieces`), and the file is streamed
into the storage window by window. So no rank holds a whole tensor, every byte is written once, and nothing appears
before all files of all ranks are whole (`hfdcp_core.dcp.agreement`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from hfdcp_core.consolidate import Terms, consolidate
from hfdcp_core.dcp.agreement import Leader, Member, address_of
from hfdcp_core.dcp.box_run import BoxRun
from hfdcp_core.dcp.orders import Key, Order, Share
from hfdcp_core.dcp.peers import LINE, PIECES, Address, Listener, Peer
from hfdcp_core.dcp.pieces import Giver, PeerSource
from hfdcp_core.dcp.together import Together
from hfdcp_core.errors import HfdcpError, StorageError
from hfdcp_core.store import Sink

Tensors = Mapping[Key, torch.Tensor]


class HandOver:
    """What one rank does for the others during one save; made when it plans, and closed when all is done."""

    def __init__(self) -> None:
        """Begin to listen.

        Raises:
            OSError: That is not possible here.
        """
        self._member = Member()
        self._giver = Giver(self._member.tell)
        self._listener = Listener(self._serve)
        self.peer = self._listener.peer
        """What this rank puts into its plan."""

    def _serve(self, purpose: bytes, sock: socket.socket) -> None:
        if purpose == LINE:
            self._member.attend(sock)
        elif purpose == PIECES:
            self._giver.serve(sock)

    def make(self, share: Share, tensors: Callable[[], Tensors], sink: Sink) -> Tensors:
        """Hand over this rank's boxes, make its files, and let them appear when all ranks' are whole.

        Args:
            share: This rank's part.
            tensors: Gives the boxes.
            sink: Where the files go.

        Returns:
            The boxes.

        Raises:
            HfdcpError: What failed first, on any rank; nothing appears.
        """
        held = Together(sink)
        source: PeerSource | None = None
        try:
            self._member.begin(share.rank)
            found = tensors()
            run = BoxRun(share.boxes, found)
            source = PeerSource(share.rank, run, share.addresses)
            self._member.on_fault(partial(self._stop, source))
            self._giver.give(run)
            terms = Terms(cancellation=self._member.cancellation)
            self._member.made([consolidate(plan, source, held, terms=terms) for plan in share.plans])
            held.commit()
        except BaseException as error:
            held.abort()
            first = self._member.fail(error)
            self._giver.refuse(first)
            if first is error:
                raise
            raise first from error
        finally:
            if source:
                source.close()
            self.close()
        return found

    def _stop(self, source: PeerSource, fault: HfdcpError) -> None:
        self._giver.refuse(fault)
        source.close()

    def close(self) -> None:
        """Hand over nothing more."""
        self._member.done()
        self._listener.close()


def lead(peers: Sequence[Peer], orders: Sequence[Order], before_go: Callable[[], None]) -> tuple[Leader, list[Order]]:
    """Call all ranks, and see that whoever makes a file reaches all others.

    Args:
        peers: What each rank says of itself.
        orders: What each is to do.
        before_go: Done when all is made, before anything appears.

    Returns:
        The leader, and the orders with where each rank listens.

    Raises:
        StorageError: Ranks do not reach one another.
    """
    one_machine = len({peer.host for peer in peers}) == 1
    problems: list[str] = []
    for near in (True, False) if one_machine else (False,):
        try:
            addresses = tuple(address_of(rank, peer, near=near) for rank, peer in enumerate(peers))
            leader = _leader(addresses, orders, before_go)
        except StorageError as error:
            problems.append(str(error))
            continue
        return leader, [_with_addresses(order, addresses) for order in orders]
    raise StorageError("; ".join(problems))


def _leader(addresses: tuple[Address, ...], orders: Sequence[Order], before_go: Callable[[], None]) -> Leader:
    leader = Leader(addresses, before_go)
    try:
        makers = [order.share.rank for order in orders if order.share and order.share.plans]
        leader.try_ways({rank: [*addresses[:rank], *addresses[rank + 1 :]] for rank in makers})
    except BaseException:
        leader.close()
        raise
    return leader


def _with_addresses(order: Order, addresses: tuple[Address, ...]) -> Order:
    return replace(order, share=order.share and replace(order.share, addresses=addresses))
