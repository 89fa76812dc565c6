"""The files of a save while they are written: made by one rank each, or shared by all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from hfdcp_core.catalog import Catalog, Span
from hfdcp_core.consolidate import Creator, Nowhere, consolidate
from hfdcp_core.dcp.box_writer import write_box
from hfdcp_core.dcp.orders import Key, Order, OrderedFile
from hfdcp_core.dcp.tensors import bytes_of, windows_of
from hfdcp_core.errors import PlanError, StorageNotFound
from hfdcp_core.layout import Target
from hfdcp_core.manifest import FileRecord
from hfdcp_core.ops import EMPTY_DIGEST, digest_text, extend_digest
from hfdcp_core.plan import reshard
from hfdcp_core.store import LocalStore, commit_all, os_faults

WINDOW_BYTES = 4 << 20
"""How much of a tensor is hashed and written at a time, or of a file when it is read back."""
Tensors = Mapping[Key, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Made:
    """A file that one rank made."""

    record: FileRecord
    """What was written."""
    left: str = ""
    """Where it lies until the first rank lets it appear; empty where it has appeared."""


def make_file(sink: Creator, file: OrderedFile, boxes: Iterable[tuple[str, torch.Tensor]], *, leave: bool) -> Made:
    """Write a file in order, hashing on the way.

    Args:
        sink: Where it goes.
        file: The file.
        boxes: Name and content of each tensor in it, in the order of the data.
        leave: Whether it is left under its temporary name, where the sink is on this machine's disk.

    Raises:
        StorageError: Writing failed; nothing appears.
    """
    whole, digests = hashlib.sha256(), {}
    upload = sink.create(file.path, file.size)
    try:
        header = memoryview(file.header)
        whole.update(header)
        upload.write(header)
        for name, tensor in boxes:
            digest = EMPTY_DIGEST
            for _, window in windows_of(tensor, WINDOW_BYTES):
                data = bytes_of(window)
                whole.update(data)
                digest = extend_digest(digest, data)
                upload.write(data)
            digests[name] = digest_text(digest)
        record = FileRecord(file.path, file.size, whole.hexdigest(), digests)
        if leave and (keep := getattr(upload, "leave", None)):
            return Made(record, keep())
        upload.commit()
    except BaseException:
        upload.abort()
        raise
    return Made(record)


def make_own_files(sink: Creator, order: Order, tensors: Tensors, *, leave: bool) -> list[Made]:
    """Make the files of which this rank has every byte."""
    held: list[list[tuple[int, Key]]] = [[] for _ in order.files]
    for key, place in order.places.items():
        held[place.file].append((place.start, key))
    return [
        make_file(sink, file, ((key[0], tensors[key]) for _, key in sorted(inside)), leave=leave)
        for file, inside in zip(order.files, held, strict=True)
    ]


class SharedOutput:
    """Files of whole tensors on this machine's disk that all ranks write to."""

    def __init__(self, sink: LocalStore, target: Target) -> None:
        """Make the files under temporary names: all of their space, and their headers.

        Raises:
            NoSpace: They do not fit.
        """
        self._sink, self._target = sink, target
        with ExitStack() as undo:
            self._uploads = {}
            for file in target.files:
                upload = sink.create(file.path, file.size)
                undo.callback(upload.abort)
                upload.extend()
                upload.write(memoryview(file.header))
                self._uploads[file.path] = upload
            undo.pop_all()

    def shared(self, order: Order) -> Order:
        """Tell a rank where the files lie for now."""
        files = (replace(file, shared=str(self._uploads[file.path].temporary)) for file in order.files)
        return replace(order, files=tuple(files))

    def records(self) -> list[FileRecord]:
        """Read all files back, once, for what a manifest says of them."""
        names = {path: upload.temporary.name for path, upload in self._uploads.items()}
        moved = (
            replace(shard, span=Span(names[shard.span.path], shard.span.start, shard.span.stop))
            for shard in self._target.catalog.shards
        )
        catalog = Catalog("safetensors", self._target.catalog.tensors, tuple(moved))
        plan = reshard(catalog, self._target, window_bytes=WINDOW_BYTES)
        return [consolidate(file, self._sink, Nowhere()) for file in plan.files]

    def settle(self) -> None:
        """Make durable what all ranks wrote, which takes long."""
        for upload in self._uploads.values():
            upload.written_elsewhere()
            upload.settle()

    def commit(self) -> None:
        """Let the files appear."""
        commit_all(self._uploads.values())

    def abort(self) -> None:
        """Remove what did not appear."""
        for upload in self._uploads.values():
            upload.abort()


def write_shared(order: Order, tensors: Tensors) -> None:
    """Write this rank's boxes to their places in the files that all ranks share; committing makes them durable.

    Raises:
        StorageNotFound: This rank does not see the files that the first rank made.
        StorageError: Writing failed.
    """
    with ExitStack() as opened:
        fds: dict[int, int] = {}
        for key, place in order.places.items():
            file = order.files[place.file]
            if place.file not in fds:
                fds[place.file] = _open(file)
                opened.callback(os.close, fds[place.file])
            if tuple(tensors[key].shape) != place.shape:
                raise PlanError(
                    f"{key[0]}: the planner gave {list(tensors[key].shape)}, planned was {list(place.shape)}"
                )
            write_box(fds[place.file], place, tensors[key], where=file.path)


def _open(file: OrderedFile) -> int:
    try:
        with os_faults(f"open {file.path}"):
            return os.open(file.shared, os.O_RDWR | os.O_CLOEXEC)
    except StorageNotFound as error:
        raise StorageNotFound(f"{file.shared} is not to be seen here: the ranks do not share one folder") from error
