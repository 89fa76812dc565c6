"""torch's `HuggingFaceStorageReader` on any storage: only the bytes that a rank needs, and never a wrong one.

Where torch's own reader opens every file and takes whatever it finds, this one gathers a catalog first: holes,
overlaps, duplicates, stray files and headers that contradict the index are errors before a tensor is touched. A file
that an index leaves out is left out.

How an error surfaces. ``dcp.load`` calls `read_metadata` and `read_data` inside its own collective step, and raises
``torch.distributed.checkpoint.api.CheckpointException`` (a ``BaseException``) for what comes out of them. For
`read_data` its text has our message, and ``failures`` our error for each rank. An error of `read_metadata` is logged
by torch, which then complains of having no metadata: our message is in that text.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, Catalog, Shard
from hfdcp_core.dcp.made import Made
from hfdcp_core.dcp.measured import SMALL_BYTES, WASTE, MeasuredSource, Range, ReadReport, joined
from hfdcp_core.dcp.metadata import StoredShard, metadata_of
from hfdcp_core.dcp.ranks import Ranks, leave_gently
from hfdcp_core.dcp.shard_file import ShardFile, read_box, view_of
from hfdcp_core.dcp.tensors import keeps_values, memory_of
from hfdcp_core.errors import HfdcpError, PlanError, UsageError
from hfdcp_core.gather import gather
from hfdcp_core.job import Job
from hfdcp_core.store import Source, open_store
from hfdcp_core.windows import Lattice

_LOG = logging.getLogger(__name__)
THREADS = 8
"""Requests that are read at once where the caller does not say."""
MEMORY_BYTES = 256 << 20
"""Bytes that are read at once and do not lie in their tensors yet, where the caller does not say."""
SCALES = ("_scale_inv", "_scale")
"""What is added to a weight's name for the scale that it is worth nothing without."""

Cast = Literal["exact", "any", "never"]
"""Which changes of dtype are made: those that lose nothing, all, or none."""


class HuggingFaceStorageReader(FileSystemReader):
    """Reads a checkpoint of safetensors files, whole or sharded, from any storage that fsspec knows.

    A drop-in for the class of the same name in `torch.distributed.checkpoint` (2.13). It reads DCP's own format
    (``.metadata`` and ``.distcp`` files) as well.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 0,
        token: str | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
        strict: bool = True,
        cast: Cast = "exact",
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        memory_bytes: int = MEMORY_BYTES,
        recipe: str = "none",
        config: str = "",
    ) -> None:
        """Name a checkpoint; nothing is read yet.

        Args:
            path: Its folder: a local path or any URL that fsspec knows (``gs://``, ``s3://``, ``hf://org/repo@rev`` …).
            thread_count: Requests that are read at once; 0 for 8.
            token: Token of the Hub, for ``hf://`` (older torch had it); better set in the environment.
            storage_options: Options of the path's filesystem.
            strict: Whether holes and overlaps are errors. Where not, what is missing is left as it is in the tensors.
            cast: Which changes of dtype are made on the way into a tensor: ``exact`` for those that keep every value
                (bfloat16 to float32), ``any``, or ``never``.
            world_size: How many ranks saved it, where nothing in it states the shapes of its tensors (what torch's own
                writer leaves with ``save_distributed=True``): with it, the loss of any rank's file is an error.
            process_group: Where given, its first rank reads the metadata and shares it; all of them must call.
            memory_bytes: How much may be read at once on the way into tensors that it cannot be read into directly.
            recipe: By which names and shapes the tensors are asked for, as ``hfdcp consolidate --recipe`` knows them:
                with ``inverse:torchtitan-llama3`` a model of torchtitan is loaded from a repository of the Hub.
            config: The model's ``config.json``, where a recipe needs sizes and none lies beside the weights.

        Raises:
            UsageError: The path is empty or lost a slash, or its protocol is not installed.
        """
        options = {**(storage_options or {}), **({"token": token} if token else {})}
        if cast not in ("exact", "any", "never"):
            raise UsageError(f"cast={cast!r}: it is 'exact', 'any' or 'never'")
        self._opened: Source | None = open_store(path, storage_options=options)
        super().__init__(path=".")
        self.path = path
        self.thread_count = thread_count
        self.strict, self.cast, self.world_size = strict, cast, world_size
        self._options, self._group = options, process_group
        self._recipe = Job(str(path), "", recipe=recipe, config=config)
        self._by_recipe: Made | None = None
        self._memory_bytes, self._budget = memory_bytes, _Budget(memory_bytes)
        self._measured: MeasuredSource | None = None
        self.report: ReadReport | None = None
        """What the last load read on this rank; the log has it too, at the level INFO."""

    def __getstate__(self) -> dict[str, object]:
        """Leave behind what is open: another process opens it again."""
        return {**self.__dict__, "_opened": None, "_measured": None, "_budget": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what `__getstate__` left."""
        self.__dict__.update(state)
        self._budget = _Budget(self._memory_bytes)

    @property
    def _source(self) -> Source:
        if self._opened is None:
            self._opened = open_store(self.path, storage_options=self._options)
        return self._opened

    @property
    def _data(self) -> Source:
        """The store where tensors are read from, which counts."""
        return self._measured or self._source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read, and turn to another checkpoint where one is named."""
        super().reset(None)
        if checkpoint_id:
            self.path, self._opened = checkpoint_id, None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path or URL can be read from at all."""
        try:
            open_store(checkpoint_id)
        except HfdcpError:
            return False
        return True

    def read_metadata(self) -> Metadata:
        """List the tensors of the checkpoint and the chunks they lie in.

        Raises:
            SourceError: There is no checkpoint, or it is damaged or not complete.
            PlanError: The chunks of a tensor leave a hole or meet; ``problems`` has all of them.
            StorageError: Reading failed.
        """
        catalog = self._catalog() if self._group is None else self._shared_catalog(self._group)
        self._by_recipe = None
        if self._recipe.recipe != "none":
            self._by_recipe = Made.of(catalog, self._source, self._recipe)
            catalog = self._by_recipe.catalog
        if catalog.unproved:
            _LOG.warning("%s: it cannot be shown that every shard is there: %s", self._source.url, catalog.unproved)
        metadata = self._metadata_of(catalog)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _catalog(self) -> Catalog:
        return gather(self._source, world_size=self.world_size)

    def _shared_catalog(self, group: dist.ProcessGroup) -> Catalog:
        """Let the first rank of a group read, and the others hear of it when it has done so, however long it takes."""
        ranks = Ranks(group)
        shared: list[Any] = [ranks.own(lambda: self._catalog() if ranks.rank == 0 else None)]
        dist.broadcast_object_list(shared, src=dist.get_global_rank(group, 0), group=group)
        found: Catalog = shared[0]
        return found

    def _metadata_of(self, catalog: Catalog) -> Metadata:
        """Translate the catalog; subclasses restate what they make otherwise."""
        return metadata_of(catalog, self._source.url, strict=self.strict)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a rank's plan asks for into its tensors; the first error ends it.

        Raises:
            SourceError: A file is damaged, or not what the metadata say.
            PlanError: A tensor is of a dtype that the stored values would be changed for.
            StorageError: Reading failed.
        """
        leave_gently()
        files: dict[str, list[Shard]] = defaultdict(list)
        for stored in self.storage_data.values():
            files[stored.relative_path].append(stored.shard)
        self._refuse_casts(plan, planner)
        measured = self._measured = MeasuredSource(self._source)
        opened = {path: ShardFile(measured, shards) for path, shards in files.items()}

        def read(request: ReadItem) -> None:
            stored: StoredShard = self.storage_data[request.storage_index]
            self._process_read_request(opened[stored.relative_path], request, planner)

        def read_joined(whole: Range, requests: list[ReadItem]) -> None:
            # half of it for what a request makes of its part on the way into a tensor of another dtype
            with self._budget.taken(2 * whole.nbytes), measured.holding(whole):
                for request in requests:
                    read(request)

        together, apart = self._neighbours(plan.items)
        with ThreadPoolExecutor(self.thread_count or THREADS, "hfdcp-read") as pool:
            futures = [pool.submit(read_joined, whole, requests) for whole, requests in together]
            futures += [pool.submit(read, request) for request in sorted(apart, key=self._place)]
            for future in futures:
                future.result()
        wanted = sum(map(self._wanted_bytes, plan.items))
        self.report = ReadReport(measured.ranges, measured.nbytes, wanted)
        _LOG.info("%s: read %s", self._source.url, self.report)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _neighbours(self, items: list[ReadItem]) -> tuple[list[tuple[Range, list[ReadItem]]], list[ReadItem]]:
        """Part requests into those that one range of a remote file serves together, and the others."""
        looked = [(number, self._range_of(request)) for number, request in enumerate(items) if self._source.remote]
        known = [(number, found) for number, found in looked if found is not None]
        numbers, small = [], []
        for number, found in known:
            if found.nbytes < SMALL_BYTES:
                numbers.append(number)
                small.append(found)
        spare = sum(found.nbytes for _, found in known) // WASTE
        wholes = joined(small, spare_bytes=spare)
        together = [(whole, [numbers[at] for at in held]) for whole, held in wholes if len(held) > 1]
        served = {number for _, held in together for number in held}
        apart = [request for number, request in enumerate(items) if number not in served]
        return [(whole, [items[number] for number in held]) for whole, held in together], apart

    def _range_of(self, request: ReadItem) -> Range | None:
        """Say where a request's bytes lie; None where only reading tells, or where there are none."""
        shard: Shard = self.storage_data[request.storage_index].shard
        if shard.encoding != RAW or 0 in request.lengths:
            return None
        view = view_of(shard, Box(tuple(request.storage_offsets), tuple(request.lengths)))
        itemsize = Lattice.of(shard.dtype, shard.box.shape).itemsize
        start = shard.span.start + view.offset * itemsize
        return Range(shard.span.path, start, start + view.reach * itemsize)

    def _wanted_bytes(self, request: ReadItem) -> int:
        dtype: torch.dtype = self.storage_data[request.storage_index].dtype
        return math.prod(request.lengths) * dtype.itemsize

    def _place(self, request: ReadItem) -> tuple[str, int]:
        shard = self.storage_data[request.storage_index].shard
        return shard.span.path, shard.span.start

    def _process_read_request(self, f: ShardFile, req: ReadItem, planner: LoadPlanner) -> None:
        """Read one request into its tensor. Subclasses may override it: ``f`` is like what ``safe_open`` returns."""
        if self._by_recipe is not None and req.storage_index.fqn in self._by_recipe.arranged:
            self._put_together(req, planner, self._by_recipe)
            return
        del f  # a file may hold several boxes of one tensor; the request says which
        shard: Shard = self.storage_data[req.storage_index].shard
        box = Box(tuple(req.storage_offsets), tuple(req.lengths))
        target = planner.resolve_tensor(req).detach()
        stored: torch.dtype = self.storage_data[req.storage_index].dtype
        if tuple(target.size()) != box.shape:
            raise PlanError(f"{shard}: asked for {box}, the tensor to fill has shape {list(target.size())}")
        if target.dtype == stored and memory_of(target) is not None:
            read_box(self._data, shard, box, target)
        else:
            with self._budget.taken(box.volume * stored.itemsize):
                tensor = torch.empty(box.shape, dtype=stored)
                read_box(self._data, shard, box, tensor)
                target.copy_(tensor)
        planner.commit_tensor(req, target)

    def _put_together(self, req: ReadItem, planner: LoadPlanner, made: Made) -> None:
        """Put a box of a tensor together, as the recipe says."""
        box = Box(tuple(req.storage_offsets), tuple(req.lengths))
        target = planner.resolve_tensor(req).detach()
        stored: torch.dtype = self.storage_data[req.storage_index].dtype
        memory = memory_of(target) if target.dtype == stored else None
        if memory is not None and memory.flags.c_contiguous:
            made.read_into(req.storage_index.fqn, box, self._data, memory)
        else:
            with self._budget.taken(box.volume * stored.itemsize):
                tensor = torch.empty(box.shape, dtype=stored)
                room = memory_of(tensor)
                assert room is not None  # it is ours, and dense
                made.read_into(req.storage_index.fqn, box, self._data, room)
                target.copy_(tensor)
        planner.commit_tensor(req, target)

    def _refuse_casts(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Refuse what would change values without anybody having asked, before a byte is read."""
        names = {index.fqn for index in self.storage_data}
        problems = {}
        for request in plan.items:
            stored: torch.dtype = self.storage_data[request.storage_index].dtype
            name, wanted = request.storage_index.fqn, planner.resolve_tensor(request).dtype
            if wanted == stored or name in problems:
                continue
            scale = next((name + end for end in SCALES if name + end in names), None)
            if scale and stored.itemsize == 1 and stored.is_floating_point:
                problems[name] = f"{name}: {stored} scaled by {scale}; QuantizedHuggingFaceStorageReader applies it"
            elif self.cast == "never" or (self.cast == "exact" and not keeps_values(stored, wanted)):
                problems[name] = f"{name}: stored as {stored}, to be read into {wanted}"
        PlanError.raise_for(
            f"{self._source.url}: values would be changed on the way; cast='any' allows it", problems.values()
        )


class _Budget:
    """Bytes that may be held at once; more than all of them are taken alone. Who holds some may take on."""

    def __init__(self, nbytes: int) -> None:
        self._most, self._free = max(nbytes, 1), max(nbytes, 1)
        self._change = threading.Condition()
        self._mine = threading.local()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        if getattr(self._mine, "holds", False):  # to wait for more here could be to wait for oneself
            yield
            return
        share = min(nbytes, self._most)
        with self._change:
            self._change.wait_for(lambda: self._free >= share)
            self._free -= share
        self._mine.holds = True
        try:
            yield
        finally:
            self._mine.holds = False
            with self._change:
                self._free += share
                self._change.notify_all()
