"""One file plan becomes one file: windows, copies through views, checks, and nothing visible when anything is wrong."""

from __future__ import annotations

import hashlib
import itertools
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.box import Box
from hfdcp_core.catalog import FileStamp, Shard, Span, TensorSpec
from hfdcp_core.consolidate import Terms, consolidate
from hfdcp_core.crew import Crew
from hfdcp_core.errors import Cancelled, CorruptFile, PlanError, SourceChanged, StorageNotFound
from hfdcp_core.ops import EMPTY_DIGEST, digest_text, extend_digest
from hfdcp_core.plan import Copy, FilePlan, Read, row_major
from hfdcp_core.state import Cancellation
from hfdcp_core.store import Sink, open_store
from hfdcp_core.windows import Lattice, lattice_box, windows

DTYPES = {"U8": np.uint8, "I16": np.int16, "F32": np.float32, "C64": np.complex64}


def fresh() -> Sink:
    """Return an empty store in memory."""
    return open_store(f"memory://{uuid.uuid4().hex}")


def values(dtype: str, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Return an array of random bytes."""
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize)
    return np.frombuffer(raw, DTYPES[dtype]).reshape(shape)


def cut(draw: st.DrawFn, box: Box) -> list[Box]:
    """Cut a box into random parts."""
    axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
    if not axes or draw(st.integers(0, 3)) == 0:
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.shape[axis] - 1))
    low = Box(box.offset, (*box.shape[:axis], at, *box.shape[axis + 1 :]))
    start = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
    high = Box(start, (*box.shape[:axis], box.shape[axis] - at, *box.shape[axis + 1 :]))
    return [*cut(draw, low), *cut(draw, high)]


@st.composite
def cut_tensors(draw: st.DrawFn) -> list[tuple[np.ndarray, str, list[Box]]]:
    """Draw a few tensors, each cut into boxes."""
    tensors = []
    for seed in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        boxes = [box for box in cut(draw, Box.whole(shape)) if box.volume]
        tensors.append((values(dtype, shape, seed), dtype, boxes))
    return tensors


def plan_for(
    sink: Sink, tensors: Sequence[tuple[np.ndarray, str, list[Box]]], *, window_bytes: int, order: Sequence[int] = ()
) -> FilePlan:
    """Store every box of every tensor as raw bytes, transposed by ``order`` where that is given, and plan the join."""
    shards, copies, parts, size = [], [], [], 0
    for number, (array, dtype, boxes) in enumerate(tensors):
        for box in boxes:
            part = array[(*map(slice, box.offset, box.stop), ...)]
            axes = tuple(order) if len(order) == part.ndim else tuple(range(part.ndim))
            stored = np.ascontiguousarray(part.transpose(axes)).reshape(tuple(part.shape[axis] for axis in axes))
            steps = dict(zip(axes, row_major(stored.shape), strict=True))
            raw = stored.tobytes()
            span = Span("parts.bin", size, size + len(raw))
            copies.append(Copy(number, box, Read(len(shards), 0, tuple(steps[axis] for axis in range(part.ndim)))))
            shards.append(Shard(f"t{number}", dtype, Box.whole(stored.shape), span))
            parts.append(raw)
            size += len(raw)
    sink.put("parts.bin", b"".join(parts))
    header = b"#" * 16
    specs = tuple((f"t{n}", TensorSpec(dtype, array.shape)) for n, (array, dtype, _) in enumerate(tensors))
    total = len(header) + sum(spec.nbytes for _, spec in specs)
    stamps = (sink.stat("parts.bin"),)
    return FilePlan("out.safetensors", header, total, specs, tuple(shards), tuple(copies), stamps, window_bytes)


@given(
    tensors=cut_tensors(),
    window_bytes=st.integers(1, 300),
    order=st.permutations(range(3)),
    processors=st.sampled_from([1, 8]),
)
@settings(max_examples=150, deadline=None)
def test_however_tensors_are_cut_stored_and_windowed_and_whoever_helps_the_file_holds_their_bytes(
    tensors: list[tuple[np.ndarray, str, list[Box]]], window_bytes: int, order: list[int], processors: int
) -> None:
    sink = fresh()
    plan = plan_for(sink, tensors, window_bytes=window_bytes, order=order)
    record = consolidate(plan, sink, sink, terms=Terms(crew=Crew(processors)))
    written = sink.read("out.safetensors", 0, plan.size)
    assert written == plan.header + b"".join(array.tobytes() for array, _, _ in tensors)
    assert record.sha256 == hashlib.sha256(written).hexdigest()
    assert record.size == len(written) == sink.stat("out.safetensors").size
    for number, (array, _, _) in enumerate(tensors):
        assert record.tensors[f"t{number}"] == digest_text(extend_digest(EMPTY_DIGEST, memoryview(array.tobytes())))


def test_a_scalar_is_written_and_not_left_at_zero() -> None:
    sink = fresh()
    plan = plan_for(sink, [(np.array(3.5, np.float32), "F32", [Box((), ())])], window_bytes=1 << 16)
    consolidate(plan, sink, sink)
    assert sink.read("out.safetensors", 16, 20) == np.float32(3.5).tobytes()


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=4).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from(["U8", "F32", "F4", "F6_E2M3"]),
    window_bytes=st.integers(1, 64),
)
def test_windows_cut_a_file_into_consecutive_boxes(
    shapes: list[tuple[int, ...]], dtype: str, window_bytes: int
) -> None:
    packed = dtype.startswith(("F4", "F6"))
    specs = [
        TensorSpec(dtype, (*shape[:-1], shape[-1] * 4) if shape else (4,)) if packed else TensorSpec(dtype, shape)
        for shape in shapes
    ]
    pieces = [piece for window in windows(specs, window_bytes) for piece in window]
    for number, spec in enumerate(specs):
        lattice = Lattice.of(spec.dtype, spec.shape)
        numbers = np.arange(math.prod(lattice.shape)).reshape(lattice.shape)
        mine = [piece for piece in pieces if piece.tensor == number]
        seen = [numbers[(*map(slice, p.box.offset, p.box.stop), ...)].reshape(-1) for p in mine]
        assert list(itertools.chain.from_iterable(part.tolist() for part in seen)) == list(range(numbers.size))
        assert sum(piece.nbytes for piece in mine) == spec.nbytes
    for window in windows(specs, window_bytes):
        assert len(window) == 1 or sum(piece.nbytes for piece in window) <= window_bytes


def test_sub_byte_boxes_are_addressed_by_the_byte() -> None:
    assert lattice_box("F4", Box((2, 4), (3, 8)), (8, 16)) == Box((2, 2), (3, 4))
    assert lattice_box("F32", Box((2, 4), (3, 8)), (8, 16)) == Box((2, 4), (3, 8))


def test_sub_byte_tensors_are_joined_from_column_shards() -> None:
    sink = fresh()
    raw = np.random.default_rng(0).integers(0, 256, (6, 8), np.uint8)  # F4 of shape (6, 16)
    sink.put("a", np.ascontiguousarray(raw[:, :3]).tobytes())
    sink.put("b", np.ascontiguousarray(raw[:, 3:]).tobytes())
    shards = (
        Shard("w", "F4", Box((0, 0), (6, 6)), Span("a", 0, 18)),
        Shard("w", "F4", Box((0, 6), (6, 10)), Span("b", 0, 30)),
    )
    copies = tuple(Copy(0, s.box, Read(n, 0, row_major(s.box.shape))) for n, s in enumerate(shards))
    plan = FilePlan("out", b"", 48, (("w", TensorSpec("F4", (6, 16))),), shards, copies, (), 10)
    consolidate(plan, sink, sink)
    assert sink.read("out", 0, 48) == raw.tobytes()


def test_a_view_of_sub_byte_elements_that_would_split_bytes_is_refused() -> None:
    sink = fresh()
    sink.put("a", bytes(8))
    shard = Shard("w", "F4", Box((0, 0), (4, 4)), Span("a", 0, 8))
    plan = FilePlan(
        "out", b"", 8, (("w", TensorSpec("F4", (4, 4))),), (shard,), (Copy(0, shard.box, Read(0, 0, (1, 4))),), (), 64
    )
    with pytest.raises(PlanError, match="only be copied as it lies"):
        consolidate(plan, sink, sink)
    with pytest.raises(StorageNotFound):
        sink.stat("out")


def one_tensor(sink: Sink, window_bytes: int = 1 << 10) -> FilePlan:
    """Plan a tensor of a few windows, in two shards."""
    boxes = [Box((0, 0), (40, 16)), Box((40, 0), (24, 16))]
    return plan_for(sink, [(values("F32", (64, 16)), "F32", boxes)], window_bytes=window_bytes)


def test_a_plan_that_leaves_elements_unfilled_is_refused_while_it_runs() -> None:
    sink = fresh()
    plan = one_tensor(sink)
    holed = FilePlan(
        plan.path, plan.header, plan.size, plan.tensors, plan.shards, plan.copies[1:], plan.stamps, plan.window_bytes
    )
    with pytest.raises(PlanError, match="unfilled"):
        consolidate(holed, sink, sink)
    with pytest.raises(StorageNotFound):
        sink.stat(plan.path)


@pytest.mark.parametrize("change", ["other content", "gone"])
def test_a_source_that_changed_since_it_was_gathered_is_refused(change: str) -> None:
    sink = fresh()
    plan = one_tensor(sink)
    if change == "gone":
        sink.delete("parts.bin")
    else:
        sink.put("parts.bin", bytes(sink.stat("parts.bin").size))
    with pytest.raises(SourceChanged, match=r"changed since it was gathered(.|\n)*parts\.bin"):
        consolidate(plan, sink, sink)
    with pytest.raises(StorageNotFound):
        sink.stat(plan.path)


class Replacing:
    """A source that is replaced while it is read."""

    def __init__(self, store: Sink) -> None:
        """Wrap a store."""
        self._store = store
        self.url = store.url
        self.remote = store.remote
        self.list, self.read = store.list, store.read
        self._reads = 0

    def stat(self, path: str) -> FileStamp:
        """Say another state after the first read."""
        found = self._store.stat(path)
        return FileStamp(path, found.size, found.tag + "'") if self._reads else found

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Say what `stat` says."""
        return {path: self.stat(path) for path in paths}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Count a read."""
        self._reads += 1
        self._store.read_into(path, start, buffer)


def test_a_source_that_changes_while_it_is_read_is_noticed_before_the_file_appears() -> None:
    sink = fresh()
    plan = one_tensor(sink)
    with pytest.raises(SourceChanged):
        consolidate(plan, Replacing(sink), sink)
    with pytest.raises(StorageNotFound):
        sink.stat(plan.path)


def test_a_source_that_ends_early_leaves_nothing() -> None:
    sink = fresh()
    plan = one_tensor(sink)
    sink.put("parts.bin", sink.read("parts.bin", 0, 1000))
    unstamped = FilePlan(
        plan.path, plan.header, plan.size, plan.tensors, plan.shards, plan.copies, (), plan.window_bytes
    )
    with pytest.raises(CorruptFile):
        consolidate(unstamped, sink, sink)
    assert [stamp.path for stamp in sink.list().files] == ["parts.bin"]


class CountingDown:
    """A progress that asks for a stop after some windows."""

    def __init__(self, wish: Cancellation, after: int) -> None:
        """Ask through ``wish``."""
        self.wish, self.left = wish, after
        self.done = 0

    def begin(self, step: str, total_bytes: int) -> None:
        """Ignore steps."""

    def advance(self, nbytes: int) -> None:
        """Count a window."""
        self.done += nbytes
        self.left -= 1
        if self.left == 0:
            self.wish.cancel()

    def say(self, line: str) -> None:
        """Ignore lines."""


def test_a_wish_to_stop_is_heeded_between_windows_and_leaves_nothing() -> None:
    sink = fresh()
    plan = one_tensor(sink, window_bytes=512)
    wish = Cancellation()
    progress = CountingDown(wish, after=2)
    with pytest.raises(Cancelled):
        consolidate(plan, sink, sink, progress=progress, terms=Terms(cancellation=wish))
    assert progress.done == 1024
    with pytest.raises(StorageNotFound):
        sink.stat(plan.path)


def test_without_hashing_the_bytes_are_the_same_and_the_sources_own_checksums_are_still_held() -> None:
    sink = fresh()
    plan = one_tensor(sink)
    hashed = consolidate(plan, sink, sink)
    written = sink.read(plan.path, 0, plan.size)
    unhashed = consolidate(plan, sink, sink, terms=Terms(hashing=False))
    assert sink.read(plan.path, 0, plan.size) == written
    assert (unhashed.sha256, unhashed.tensors) == ("", dict.fromkeys(hashed.tensors, ""))
    assert (unhashed.size, unhashed.source) == (hashed.size, hashed.source)


class Stopping:
    """A source that wishes for a stop at some read, and counts all reads."""

    def __init__(self, source: Sink, wish: Cancellation, at: int) -> None:
        """Read from ``source``."""
        self._source, self._wish, self._at = source, wish, at
        self.reads = 0
        self.url, self.remote = source.url, False
        self.stamps = source.stamps
        self.stat = source.stat
        self.list = source.list

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Read, and count."""
        self.reads += 1
        if self.reads == self._at:
            self._wish.cancel()
        self._source.read_into(path, start, buffer)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Read, and count."""
        data = bytearray(stop - start)
        self.read_into(path, start, memoryview(data))
        return bytes(data)


def many_small_tensors(sink: Sink, count: int, boxes: list[Box]) -> FilePlan:
    """Return a plan of very many tensors that all fit into one window."""
    return plan_for(sink, [(values("U8", (2, 2), seed), "U8", boxes) for seed in range(count)], window_bytes=1 << 20)


def test_a_wish_to_stop_is_heeded_between_the_tensors_of_a_window() -> None:
    sink, wish = fresh(), Cancellation()
    source = Stopping(sink, wish, at=10)
    plan = many_small_tensors(sink, 500, [Box((0, 0), (2, 1)), Box((0, 1), (2, 1))])  # columns: each is read alone
    with pytest.raises(Cancelled):
        consolidate(plan, source, sink, terms=Terms(cancellation=wish))
    assert source.reads == 10


@pytest.mark.parametrize(
    ("count", "nbytes", "apart"),
    [(500, 3, 1), (5, 100 << 10, 3)],  # what is read together to be put apart is copied, so it is not much
)
def test_small_tensors_that_lie_one_behind_the_other_are_read_at_once(count: int, nbytes: int, apart: int) -> None:
    sink, wish = fresh(), Cancellation()
    source = Stopping(sink, wish, at=-1)
    arrays = [values("U8", (nbytes,), seed) for seed in range(count)]
    plan = plan_for(sink, [(array, "U8", [Box.whole((nbytes,))]) for array in arrays], window_bytes=1 << 20)
    record = consolidate(plan, source, sink, terms=Terms(cancellation=wish))
    assert source.reads == 1
    assert record.source.unchecked == count
    assert sink.read(plan.path, len(plan.header), plan.size) == b"".join(array.tobytes() for array in arrays)
    turned = replace(plan, shards=plan.shards[::-1])  # nothing lies behind its neighbour
    consolidate(turned, source, sink, terms=Terms(cancellation=wish))
    assert source.reads == 1 + apart
    assert sink.read(plan.path, len(plan.header), plan.size) == b"".join(array.tobytes() for array in arrays[::-1])


def test_progress_hears_of_every_byte_of_data() -> None:
    sink = fresh()
    plan = one_tensor(sink)
    progress = CountingDown(Cancellation(), after=-1)
    consolidate(plan, sink, sink, progress=progress)
    assert progress.done == plan.size - len(plan.header)
