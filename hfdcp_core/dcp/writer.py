"""torch's `HuggingFaceStorageWriter` on any storage: one pass, every element once, and all of it at once.

Where whole tensors are asked for (consolidation, or a save that is not distributed), all ranks' plans are known before
any data move. So the first rank lays out the final files, and every rank writes its own boxes straight into them: there
is no stage of shards, no second pass, and no rank ever holds a whole tensor. The files have temporary names until all
ranks have written; an index and, last of all, a manifest say that the output is complete. A rank that fails leaves an
older checkpoint in the folder as it was.

Ranks write to one file where all of them run on one machine and save to its disk. On any other storage but a disk each
file is made by one rank, to which the others hand over what they have, piece by piece. On a disk that several machines
see, without collectives, and where ranks do not reach one another, they write shards below the output, and those are
consolidated and removed when all are there; the log says so.

What a rank raises comes out of ``dcp.save`` on every rank as ``CheckpointException`` of
`torch.distributed.checkpoint.api` (a ``BaseException``): its text has our message, and ``failures`` our error by rank.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hfdcp_core.consolidate import Creator
from hfdcp_core.dcp.agreement import Leader
from hfdcp_core.dcp.caching import in_full
from hfdcp_core.dcp.consolidation import consolidate_safetensors_files
from hfdcp_core.dcp.hand_over import HandOver, Tensors, lead
from hfdcp_core.dcp.orders import (
    Boxes,
    Key,
    Order,
    Share,
    boxes_of,
    in_one_piece,
    is_tensor,
    key_of,
    sharded_target,
    whole_target,
)
from hfdcp_core.dcp.output import Made, SharedOutput, make_own_files, write_shared
from hfdcp_core.dcp.peers import Peer
from hfdcp_core.dcp.ranks import Ranks, leave_gently
from hfdcp_core.dcp.shares import shared_out
from hfdcp_core.dcp.together import Together, complete, withdraw
from hfdcp_core.errors import HfdcpError, PlanError, StorageError, UsageError
from hfdcp_core.layout import Target, is_shard_name
from hfdcp_core.manifest import INDEX_PATH, FileRecord, Manifest
from hfdcp_core.store import LocalStore, Sink, open_store

_LOG = logging.getLogger(__name__)
SHARDED = "sharded"
"""Folder of the shards that are consolidated afterwards."""
MAX_FILE_SIZE = 5_000_000_000
"""Tensor bytes in one file at most, where no mapping is given."""
Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a box was written; the first three are torch's own."""

    relative_path: str
    """Name of the file."""
    offset: int
    """First byte of the tensor in it."""
    length: int
    """Bytes of the box."""
    made: Made | None = None
    """The file, said once by the rank that made it alone."""


class HuggingFaceStorageWriter(FileSystemWriter):
    """Writes a state dict as safetensors files, whole or sharded, to any storage that fsspec knows.

    A drop-in for the class of the same name in `torch.distributed.checkpoint` (2.13).
    """

    def __init__(
        self,
        path: Path,
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        *,
        token: str | None = None,
        save_sharded: bool | None = None,
        consolidated_output_path: Path | None = None,
        storage_options: Mapping[str, object] | None = None,
        max_file_size: int = MAX_FILE_SIZE,
        hash: Literal["now", "later"] = "now",
    ) -> None:
        """Say where and how to save; nothing is written yet.

        Args:
            path: The folder: a local path or any URL that fsspec knows.
            fqn_to_index_mapping: Number of the file, from 1, for every tensor. Without it, whole tensors fill up files
                of ``max_file_size`` in turn, and each rank's shards are one file.
            thread_count: Kept for torch's sake.
            save_distributed: Whether every rank has a part of the state dict. Where several ranks save, what each has
                is written in any case.
            enable_consolidation: Whether a distributed save writes whole tensors instead of each rank's shards.
            thread_count_consolidation: Files that are consolidated at once, where shards are.
            token: Token of the Hub, for ``hf://`` (older torch had it).
            save_sharded: What older torch called ``save_distributed``.
            consolidated_output_path: Folder of the whole tensors, where it is another one (older torch).
            storage_options: Options of the path's filesystem.
            max_file_size: Tensor bytes in one file at most, where no mapping is given; a larger tensor has its own.
            hash: When files that all ranks wrote are hashed: ``now``, by reading them back once, or ``later``; then
                there is no manifest, until somebody makes one.

        Raises:
            UsageError: The path is empty or lost a slash, its protocol is not installed, or another argument
                cannot be.
        """
        if hash not in ("now", "later"):
            raise UsageError(f"hash={hash!r}: it is 'now' or 'later'")
        if max_file_size < 1:
            raise UsageError(f"max_file_size={max_file_size}: it is a number of bytes, at least 1")
        odd = [f"{name}: file {file!r}" for name, file in (fqn_to_index_mapping or {}).items() if type(file) is not int]
        UsageError.raise_for("fqn_to_index_mapping gives each tensor the number of its file, from 1", odd)
        self.rank, self.use_collectives = None, True  # torch before 2.9 tells neither
        super().__init__(path=".", thread_count=thread_count, **_as_safetensors())
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.save_distributed = save_distributed if save_sharded is None else save_sharded
        self.enable_consolidation = enable_consolidation or consolidated_output_path is not None
        self.thread_count_consolidation = thread_count_consolidation
        self.max_file_size, self.hash = max_file_size, hash
        self.consolidated_output_path: str | None = None
        self._options = {**(storage_options or {}), **({"token": token} if token else {})}
        self._apart = None if consolidated_output_path is None else os.fspath(consolidated_output_path)
        self._place(path)
        self._shared: SharedOutput | None = None
        self._hand_over: HandOver | None = None
        self._leader: Leader | None = None
        self._former: frozenset[str] = frozenset()
        self._held: Together | None = None
        self._target: Target | None = None

    def _place(self, path: Path) -> None:
        """Take a folder for the output, and for the shards on the way to it."""
        open_store(path, storage_options=self._options)
        self.path: Any = path
        if self.enable_consolidation:
            self.consolidated_output_path = self._apart or os.fspath(path)
            self.path = os.fspath(path) if self._apart else f"{os.fspath(path).rstrip('/')}/{SHARDED}"

    @property
    def _whole(self) -> bool:
        return self.enable_consolidation or not self.save_distributed

    def _sink(self, *, staged: bool = False) -> Sink:
        """Return the store of the output, or of shards that are yet to be consolidated."""
        output = os.fspath(self.consolidated_output_path or self.path)
        url = self._staging(output) if staged else output
        return open_store(url, storage_options=self._options)

    def _staging(self, output: str) -> str:
        return os.fspath(self.path) if self.enable_consolidation else f"{output.rstrip('/')}/{SHARDED}"

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Turn to another folder where one is named; what an earlier save left unfinished is given up."""
        super().reset(None)
        self._give_up()
        self._listen_no_more()
        if checkpoint_id and os.fspath(checkpoint_id) != os.fspath(self.path):
            self._place(checkpoint_id)

    def _give_up(self) -> None:
        for unfinished in (self._shared, self._held):
            if unfinished is not None:
                unfinished.abort()
        if self._leader is not None:
            self._leader.close()
        self._shared = self._held = self._target = self._leader = None

    def _listen_no_more(self) -> None:
        hand_over, self._hand_over = self._hand_over, None
        if hand_over is not None:
            hand_over.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether a path or URL can be written to at all."""
        try:
            open_store(checkpoint_id)
        except HfdcpError:
            return False
        return True

    # ---- planning ---------------------------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Say on which machine this rank runs, and where others reach it if it may have to hand something over."""
        leave_gently()
        self._listen_no_more()
        many = self.use_collectives and dist.is_initialized() and dist.get_world_size() > 1
        if many and self._whole and not isinstance(self._sink(), LocalStore):
            with suppress(OSError):
                self._hand_over = HandOver()
                weakref.finalize(self, self._hand_over.close)
        return replace(plan, storage_data=self._hand_over.peer if self._hand_over else Peer(platform.node()))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay out the files, and tell every rank what it writes.

        Raises:
            PlanError: The ranks together do not have every element once, the mapping does not fit, there is no tensor,
                or there are some that safetensors cannot hold.
            NoSpace: The disk cannot hold the output.
        """
        self._give_up()
        plans = in_full(plans)
        ranks = [boxes_of(plan) for plan in plans]
        PlanError.raise_for(
            f"{self.path}: no tensor is to be saved, and an older checkpoint would give way to nothing",
            [] if any(boxes.keys for boxes in ranks) else ["the state dicts of all ranks hold none"],
        )
        skipped = sorted({item.index.fqn for plan in plans for item in plan.items if not is_tensor(item)})
        if skipped:
            _LOG.warning("%s: no tensors, so not in the weights: %s", self.path, ", ".join(skipped))
        orders = self._orders(ranks, [plan.storage_data for plan in plans])
        self._sink().sweep()  # what a save that failed has left
        return [replace(plan, storage_data=order) for plan, order in zip(plans, orders, strict=True)]

    def _orders(self, ranks: Sequence[Boxes], peers: Sequence[Peer]) -> list[Order]:
        """Lay out the files, in the best way that there is."""
        near = isinstance(self._sink(), LocalStore) and {peer.host for peer in peers} == {platform.node()}
        world = len(ranks) if self.use_collectives or not dist.is_initialized() else dist.get_world_size()
        together = len(ranks) == world
        if self._whole and together:
            target, orders = whole_target(
                ranks, mapping=self.fqn_to_index_mapping, max_file_size=self.max_file_size, save=self.save_id
            )
            if world == 1 and in_one_piece(orders[0]):
                self._target, self._held = target, Together(self._sink())
                return orders
            if near and isinstance(sink := self._sink(), LocalStore):
                self._target, self._shared = target, SharedOutput(sink, target)
                return [self._shared.shared(order) for order in orders]
            if handed := self._handed(ranks, peers, target, orders):
                return handed
        if self._whole:
            _LOG.warning("%s: the ranks write shards first, to be consolidated when all are there", self.path)
        self._target, orders = sharded_target(
            ranks,
            first=0 if together else self.rank or 0,
            world=world,
            mapping=None if self._whole else self.fqn_to_index_mapping,
            save=self.save_id if together else "",
        )
        return [replace(order, staged=self._whole, leave=near and together) for order in orders]

    def _handed(
        self, ranks: Sequence[Boxes], peers: Sequence[Peer], target: Target, orders: Sequence[Order]
    ) -> list[Order] | None:
        """Let each file be made by one rank; None where ranks cannot hand anything over."""
        if self._hand_over is None or len(ranks) == 1:
            return None
        sink = self._sink()

        def before_go() -> None:
            self._former = withdraw(sink)

        try:
            self._leader, handed = lead(peers, shared_out(ranks, target, orders), before_go)
        except StorageError as error:
            _LOG.warning("%s: the ranks cannot hand over to one another: %s", self.path, error)
            return None
        self._target = target
        return handed

    # ---- writing ----------------------------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes.

        Raises:
            StorageError: Writing failed.
        """
        order: Order = plan.storage_data
        items = [item for item in plan.items if is_tensor(item)]

        def resolve() -> Tensors:
            return {key_of(item): _tensor(planner, item) for item in items}

        made: list[Made] = []
        if order.share is not None:
            tensors = self._make_share(order.share, resolve)
            return _done(_results(items, order, tensors, made))
        self._listen_no_more()
        tensors = resolve()
        if any(file.shared for file in order.files):
            write_shared(order, tensors)
        else:
            sink: Creator = self._held or self._sink(staged=order.staged)
            made = make_own_files(sink, order, tensors, leave=order.leave)
        return _done(_results(items, order, tensors, made))

    def _make_share(
        self, share: Share, tensors: Callable[[], Mapping[Key, torch.Tensor]]
    ) -> Mapping[Key, torch.Tensor]:
        hand_over, self._hand_over = self._hand_over, None
        if hand_over is None:
            raise PlanError("this rank planned to hand over its tensors, but not with this writer")
        return hand_over.make(share, tensors, self._sink())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Let everything appear, with an index and a manifest; called on the first rank, when all have written.

        Raises:
            HfdcpError: Hashing, consolidating or writing failed.
        """
        del metadata  # its storage data would name temporary places
        made = [result.storage_data.made for some in results for result in some if result.storage_data.made]
        try:
            if self._leader is not None:
                self._appear_handed(self._leader.records)
            elif self._held is not None or self._shared is not None:
                self._appear_whole(made)
            elif self._whole:
                self._consolidate(made)
            else:
                self._appear_sharded(made)
        finally:
            self._give_up()

    def _appear_whole(self, made: Sequence[Made]) -> None:
        records = [each.record for each in made]
        if self._shared is not None:
            records = self._shared.records() if self.hash == "now" else records
            self._shared.settle()
        sink, files = self._sink(), self._shared or self._held
        former = withdraw(sink)
        if files is not None and self._target is not None:
            files.commit()
            manifest = _manifest(self._target, records, self.save_id)
            complete(sink, manifest if records else None, self._target.index or b"", former)

    def _appear_handed(self, records: Sequence[FileRecord]) -> None:
        """Name the files that ranks made, which are all there; what named an older output is gone already."""
        sink = self._sink()
        found = sink.stamps(record.path for record in records)
        unseen = [
            record.path for record in records if record.path not in found or found[record.path].size != record.size
        ]
        StorageError.raise_for(f"{sink.url}: rank 0 does not see what other ranks wrote", unseen)
        if self._target is not None:
            manifest = _manifest(self._target, records, self.save_id)
            complete(sink, manifest, self._target.index or b"", self._former)

    def _appear_sharded(self, made: Sequence[Made]) -> None:
        sink = self._sink()
        former = withdraw(sink)
        self._adopt(sink, made)
        if self.use_collectives:
            written = {each.record.path for each in made}
            stale = {stamp.path for stamp in sink.list().files if is_shard_name(stamp.path)} | former
            for path in sorted(stale - written):
                sink.delete(path)

    def _consolidate(self, made: Sequence[Made]) -> None:
        """Make whole tensors of the shards that all ranks have written, and remove those."""
        staged, ranks = self._sink(staged=True), Ranks(alone=self.use_collectives)

        def consolidate() -> None:
            if self.rank in (None, 0) or self.use_collectives:
                consolidate_safetensors_files(
                    staged.url,
                    self._sink().url,
                    self.fqn_to_index_mapping,
                    self.thread_count_consolidation,
                    storage_options=self._options,
                    max_file_size=self.max_file_size,
                )
                for stamp in staged.list().files:
                    staged.delete(stamp.path)

        ranks.own(lambda: self._adopt(staged, made))
        ranks.own(consolidate)

    @staticmethod
    def _adopt(sink: Sink, made: Sequence[Made]) -> None:
        left = {each.left: each.record.path for each in made if each.left}
        if left and isinstance(sink, LocalStore):
            sink.adopt(left)

    @property
    def metadata_path(self) -> str:
        """Name of the index."""
        return INDEX_PATH


def _as_safetensors() -> dict[str, Any]:
    """Tell torch's own class which format it is for; before 2.8 it knows but one."""
    formats = getattr(filesystem, "SerializationFormat", None)
    return {"serialization_format": formats.SAFETENSORS} if formats else {}


def _done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    done: Future[list[WriteResult]] = Future()
    done.set_result(results)
    return done


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise PlanError(f"{item.index.fqn}: planned as a tensor, the planner gives {type(data).__name__}")
    return data.detach()


def _results(
    items: Sequence[WriteItem], order: Order, tensors: Mapping[Key, torch.Tensor], made: Sequence[Made]
) -> list[WriteResult]:
    """Say where each box is; the files that this rank made are told with the first ones."""
    results = []
    files = iter(made)
    for item in items:
        key = key_of(item)
        place, nbytes = order.places[key], tensors[key].nbytes
        stored = Stored(order.files[place.file].path, place.start, nbytes, next(files, None))
        results.append(WriteResult(item.index, nbytes, stored))
    return results


def _manifest(target: Target, records: Sequence[FileRecord], save: str) -> Manifest:
    index = target.index or b""
    digest = hashlib.sha256(save.encode())
    for file in target.files:
        digest.update(file.header)
    return Manifest(
        plan_digest=digest.hexdigest(),
        source_digest=hashlib.sha256(save.encode()).hexdigest(),
        source_format="live",
        records=tuple(records),
        extra_files=(FileRecord(INDEX_PATH, len(index), hashlib.sha256(index).hexdigest()),),
        total_size=target.total_size,
    )
