"""From any source to any layout and back, bit for bit; and whatever is damaged, the right bytes or an error.

Sources are cut and written by `hfdcp_core.testing.tilings` (thousands of examples), a few by torch's own writers.
``pytest tests/core/test_round_trips.py --hypothesis-profile=deep`` tries more than 10,000 examples.

What nothing in a source can show, and what the laws therefore leave out, exactly:

- raw safetensors carry no checksum: a flipped bit in the *data* of one gives that very bit flipped. Once written it is
  found by `publish.validate_again`;
- torch's sharded safetensors state neither *whole shapes* nor which tensors there are: where the last box of a tensor
  becomes a copy of another one, by its offset or as a copy of another file under its name, that is a replica, and the
  tensor ends before it, or is not there at all;
- a tensor *without elements* has no bytes: its dtype and extents are what ``.metadata`` or the header says;
- nothing checks *names* that are spelled once: in the ``.metadata`` of one process, or in the header of a safetensors
  file that no index names. A flipped bit in one gives the right values under another name.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from hfdcp_core import publish
from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import TABLE, dtype_named, size_in_bytes
from hfdcp_core.errors import HfdcpError, ValidationError
from hfdcp_core.job import MEMORY_AT_START, SMALLEST_WINDOW, Job
from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH
from hfdcp_core.plan import BUFFERS, SCRATCH
from hfdcp_core.store import open_store
from hfdcp_core.testing import tilings
from hfdcp_core.testing.tilings import Files, Placed, Whole

DTYPES = [row.name for row in TABLE]
TORCH_DTYPES = [row.name for row in TABLE if row.torch]
NAMES = ["layers.0.weight", "layers.1.weight", "layers.10.bias", "norm", "a/b", "gewöhnlich", "x" * 80]


def examples(count: int) -> settings:
    """Try ``count`` examples with the default profile, and as many times more as another one asks for."""
    return settings(
        max_examples=max(1, count * settings.default.max_examples // 100),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# ---- sources --------------------------------------------------------------------------------------------------------


@dataclass
class Saved:
    """A checkpoint that was saved, and what it must give."""

    truth: dict[str, Whole]
    files: Files
    metadata: Metadata | None = None
    options: dict[str, int] = field(default_factory=dict)

    def at(self, base: str) -> Job:
        """Store it, and return a job upon it."""
        store = open_store(f"{base}/ckpt")
        files = {**self.files, ".metadata": tilings.pickled(self.metadata)} if self.metadata else self.files
        for path, data in files.items():
            store.put(path, data)
        return Job(f"{base}/ckpt", f"{base}/out", recipe="none", include=("*",), workers=1, **self.options)


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[str]) -> dict[str, Whole]:
    """Some tensors of some dtypes and shapes; one in some examples is larger than the smallest window."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    large = draw(st.integers(0, 12)) == 12
    return {name: draw(whole(dtypes, large=large and not number)) for number, name in enumerate(names)}


@st.composite
def whole(draw: st.DrawFn, dtypes: Sequence[str], *, large: bool) -> Whole:
    """One tensor, of random bytes or of zeros."""
    dtype = draw(st.sampled_from(dtypes))
    extents = [draw(st.integers(1, 40)), 4099] if large else draw(st.lists(st.integers(0, 5), max_size=4))
    elements, _ = tilings.unit(dtype)
    if elements > 1:
        extents = [*(extents or [1])[:-1], (extents or [1])[-1] * elements]
    nbytes = size_in_bytes(dtype, tuple(extents))
    seed = draw(st.integers(0, 2**32 - 1))
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, nbytes, np.uint8).tobytes()
    return Whole(TensorSpec(dtype, tuple(extents)), data if seed else bytes(nbytes))


Cells = list[tuple[tuple[int, int], ...]]


def cut(draw: st.DrawFn, spec: TensorSpec) -> list[Box]:
    """Cut a tensor into boxes, some of which may be empty."""
    elements, _ = tilings.unit(spec.dtype)
    units = (*spec.shape[:-1], spec.shape[-1] // elements) if spec.shape else ()
    way = draw(st.sampled_from([grid, mesh, split]))
    cells = way(draw, units) if units else [()]
    return [_box(cell, elements) for cell in cells]


def _box(cell: tuple[tuple[int, int], ...], elements: int) -> Box:
    steps = [1] * len(cell)
    if steps:
        steps[-1] = elements
    pairs = [(start * step, (stop - start) * step) for (start, stop), step in zip(cell, steps, strict=True)]
    return Box(tuple(start for start, _ in pairs), tuple(extent for _, extent in pairs))


def grid(draw: st.DrawFn, extents: tuple[int, ...]) -> Cells:
    """Cut at any places; a place that is drawn twice gives empty boxes."""
    edges = [sorted([0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))]) for extent in extents]
    return list(itertools.product(*map(itertools.pairwise, edges)))


def mesh(draw: st.DrawFn, extents: tuple[int, ...]) -> Cells:
    """Cut as torch does over a mesh: equal parts, the last ones smaller or empty."""
    edges = []
    for extent in extents:
        ranks = draw(st.integers(1, 3))
        step = -(-extent // ranks)
        edges.append([min(rank * step, extent) for rank in range(ranks)] + [extent])
    return list(itertools.product(*map(itertools.pairwise, edges)))


def split(draw: st.DrawFn, extents: tuple[int, ...]) -> Cells:
    """Cut in two again and again, each part by itself: no grid."""
    cells: Cells = [tuple((0, extent) for extent in extents)]
    for _ in range(draw(st.integers(0, 4))):
        cell = cells.pop(draw(st.integers(0, len(cells) - 1)))
        axis = draw(st.integers(0, len(extents) - 1))
        start, stop = cell[axis]
        middle = draw(st.integers(start, stop))
        cells += [(*cell[:axis], part, *cell[axis + 1 :]) for part in ((start, middle), (middle, stop))]
    return cells


STYLES: list[tilings.Style] = ["plain", "plain", "plain", "plain", "permuted", "view", "zstd"]


def placed(draw: st.DrawFn, whole_tensors: Mapping[str, Whole], ranks: int, copies: int) -> list[Placed]:
    """Give every box to a rank, some to several."""
    places = []
    for fqn, one in whole_tensors.items():
        style = draw(st.sampled_from(STYLES))
        for box in cut(draw, one.spec):
            holders = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=copies, unique=True))
            places += [Placed(fqn, box, rank, style) for rank in holders]
    return draw(st.permutations(places))


@st.composite
def distributed(draw: st.DrawFn) -> Saved:
    """What ``dcp.save`` leaves."""
    truth = draw(tensors(TORCH_DTYPES))
    objects = {"epoch": 3, "note": ["text"]} if draw(st.booleans()) else {}
    metadata, files = tilings.distcp(truth, placed(draw, truth, draw(st.integers(1, 3)), 2), objects)
    return Saved(truth, files, metadata)


@st.composite
def sharded(draw: st.DrawFn) -> Saved:
    """What ``HuggingFaceStorageWriter(save_distributed=True)`` leaves."""
    truth, ranks = draw(tensors(DTYPES)), draw(st.integers(1, 3))
    files = tilings.sharded(truth, placed(draw, truth, ranks, 2), ranks)
    return Saved(truth, files, options={"world_size": ranks})


@st.composite
def repository(draw: st.DrawFn) -> Saved:
    """A plain Hugging Face folder, with its index or without."""
    truth = draw(tensors(DTYPES))
    order = draw(st.permutations(list(truth)))
    count = draw(st.integers(1, len(order)))
    files = tilings.plain(truth, {fqn: number % count + 1 for number, fqn in enumerate(order)})
    if draw(st.booleans()):
        del files[INDEX_PATH]
    return Saved(truth, files)


SOURCES = {"dcp": distributed(), "dcp-safetensors": sharded(), "safetensors": repository()}


# ---- runs -----------------------------------------------------------------------------------------------------------

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for all examples; each makes one of its own in it and removes it."""
    return tmp_path_factory.mktemp("round-trips")


@contextmanager
def place(home: Path, protocol: str) -> Iterator[str]:
    """Give a new folder on disk or in memory, for one example."""
    name = f"example-{next(NUMBERS)}"
    try:
        yield f"memory://{name}" if protocol == "memory" else str(home / name)
    finally:
        shutil.rmtree(home / name, ignore_errors=True)
        fsspec.filesystem("memory").store.clear()


PROTOCOLS = st.sampled_from(["file", "memory"])


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[str, int]:
    """File sizes, workers and windows."""
    workers = draw(st.integers(1, 2))
    window = SMALLEST_WINDOW * draw(st.integers(1, 3))
    return {
        "workers": workers,
        "memory_bytes": MEMORY_AT_START + window * workers * (BUFFERS + SCRATCH),
        "max_file_size": draw(st.sampled_from([1, 40, 200, 1000, 10**9])),
    }


def written(url: str) -> Files:
    """Return the files that a loader could see."""
    store = open_store(url)
    return {file.path: store.read(file.path, 0, file.size) for file in store.list().files}


def held(files: Files) -> dict[str, Whole]:
    """Return the tensors in files."""
    found = [tilings.read_safetensors(raw) for path, raw in files.items() if path.endswith(".safetensors")]
    assert sum(map(len, found)) == len({fqn for part in found for fqn in part})
    return {fqn: one for part in found for fqn, one in part.items()}


def outcome(job: Job, truth: Mapping[str, Whole]) -> dict[str, Whole] | HfdcpError:
    """Consolidate; after an error nothing may lie there that could be taken for a result."""
    try:
        publish.make(job)
    except HfdcpError as error:
        left = seen(job.sink)
        assert not left.keys() & {INDEX_PATH, MANIFEST_PATH}
        for fqn, one in held(left).items():
            assert wrong({fqn: truth[fqn]}, {fqn: one}) == [], "an unverified file under a final name"
        return error
    files = written(job.sink)
    assert MANIFEST_PATH in files
    return held(files)


def differences(truth: Mapping[str, Whole], found: Mapping[str, Whole]) -> list[str]:
    """Return the names of tensors that are not what they were."""
    return sorted(fqn for fqn in truth.keys() | found.keys() if truth.get(fqn) != found.get(fqn))


def wrong(truth: Mapping[str, Whole], found: Mapping[str, Whole]) -> list[str]:
    """Return the same after damage, when nothing can tell what a tensor without elements was."""
    return [fqn for fqn in differences(truth, found) if _bytes(truth, fqn) != b"" or _bytes(found, fqn) != b""]


def _bytes(tensors: Mapping[str, Whole], fqn: str) -> bytes | None:
    return tensors[fqn].data if fqn in tensors else None


def seen(url: str) -> Files:
    """Return the files in a folder that may not be there."""
    try:
        return written(url)
    except HfdcpError:
        return {}


# ---- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@examples(25)
@given(data=st.data())
def test_every_source_gives_the_truth_directly_and_by_way_of_any_ranks(
    source: st.SearchStrategy[Saved], data: st.DataObject, home: Path
) -> None:
    saved, options = data.draw(source), data.draw(settings_of_a_run())
    axes = max([1, *(len(whole.spec.shape) for whole in saved.truth.values())])
    ranks, dim = data.draw(st.integers(1, 4)), data.draw(st.integers(-axes, axes - 1))
    with place(home, data.draw(PROTOCOLS)) as base:
        job = replace(saved.at(base), **options)
        manifest = publish.make(job)
        assert differences(saved.truth, held(written(job.sink))) == []
        assert publish.validate_again(job) == manifest
        for_ranks = replace(job, sink=f"{base}/ranks", ranks=ranks, shard_dim=dim)
        publish.make(for_ranks)
        again = replace(job, source=f"{base}/ranks", sink=f"{base}/again", world_size=None)
        assert publish.make(again).unproved is None
        ours, theirs = written(job.sink), written(again.sink)
        assert differences(saved.truth, held(theirs)) == []
        if len(manifest.records) == 1:  # several files are packed in the order of the source, which ranks do not keep
            assert ours["model.safetensors"] == theirs["model.safetensors"]


# ---- torch's own writers --------------------------------------------------------------------------------------------


def live(truth: Mapping[str, Whole]) -> dict[str, torch.Tensor]:
    """Return the tensors as torch has them."""
    found = {}
    for fqn, one in truth.items():
        row = dtype_named(one.spec.dtype)
        shape = (*one.spec.shape[:-1], one.spec.shape[-1] // row.packed) if one.spec.shape else ()
        dtype = getattr(torch, str(row.torch))
        flat = torch.frombuffer(bytearray(one.data), dtype=torch.uint8).view(dtype) if one.data else None
        found[fqn] = torch.empty(shape, dtype=dtype) if flat is None else flat.reshape(shape)
    return found


WRITERS: dict[str, Callable[[str], object]] = {
    "FileSystemWriter": dcp.FileSystemWriter,
    "HuggingFaceStorageWriter": dcp.HuggingFaceStorageWriter,
    "HuggingFaceStorageWriter, sharded": lambda path: dcp.HuggingFaceStorageWriter(path, save_distributed=True),
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@examples(8)
@given(truth=tensors(TORCH_DTYPES), options=settings_of_a_run())
def test_what_torch_writes_gives_the_truth(
    writer: Callable[[str], object], truth: dict[str, Whole], options: dict[str, int], home: Path
) -> None:
    with place(home, "file") as base:
        dcp.save(live(truth), storage_writer=writer(f"{base}/ckpt"), no_dist=True)
        job = Job(f"{base}/ckpt", f"{base}/out", recipe="none", world_size=1, **options)
        found = outcome(job, truth)
        assert not isinstance(found, HfdcpError)
        assert differences(truth, found) == []


# ---- damage: pieces of a distributed checkpoint ---------------------------------------------------------------------

Damage = Callable[[Metadata, Files, st.DrawFn], object]


def a_tensor(metadata: Metadata, draw: st.DrawFn) -> tuple[str, TensorStorageMetadata]:
    """Choose a tensor."""
    entries = metadata.state_dict_metadata.items()
    return draw(st.sampled_from([(fqn, entry) for fqn, entry in entries if isinstance(entry, TensorStorageMetadata)]))


def an_item(metadata: Metadata, draw: st.DrawFn) -> MetadataIndex:
    """Choose an item of a tensor."""
    return draw(st.sampled_from([index for index in metadata.storage_data if index.offset is not None]))


def other_numbers(numbers: Sequence[int], draw: st.DrawFn) -> torch.Size:
    """Change one of some numbers."""
    if not numbers:
        return torch.Size([1])
    axis = draw(st.integers(0, len(numbers) - 1))
    return torch.Size(
        [*numbers[:axis], max(0, numbers[axis] + draw(st.sampled_from([-1, 1, 2]))), *numbers[axis + 1 :]]
    )


def lose_a_box(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    chunks = a_tensor(metadata, draw)[1].chunks
    return chunks.pop(draw(st.integers(0, len(chunks) - 1)))


def lose_an_item(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    return metadata.storage_data.pop(an_item(metadata, draw))


def lose_box_and_item(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    index = an_item(metadata, draw)
    entry = metadata.state_dict_metadata[index.fqn]
    entry.chunks[:] = [chunk for chunk in entry.chunks if chunk.offsets != index.offset]
    return metadata.storage_data.pop(index)


def lose_an_entry(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    return metadata.state_dict_metadata.pop(a_tensor(metadata, draw)[0])


def lose_all_items_of_a_tensor(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    fqn, _ = a_tensor(metadata, draw)
    for index in [index for index in metadata.storage_data if index.fqn == fqn]:
        del metadata.storage_data[index]
    return fqn


def move_a_box(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    chunk = draw(st.sampled_from(a_tensor(metadata, draw)[1].chunks))
    chunk.offsets = other_numbers(chunk.offsets, draw)
    return chunk


def move_an_item(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    index = an_item(metadata, draw)
    moved = MetadataIndex(index.fqn, other_numbers(index.offset, draw))
    metadata.storage_data[moved] = metadata.storage_data.pop(index)
    return moved


def move_box_and_item(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    index = an_item(metadata, draw)
    offset = other_numbers(index.offset, draw)
    for chunk in metadata.state_dict_metadata[index.fqn].chunks:
        if chunk.offsets == index.offset:
            chunk.offsets = offset
    stored = metadata.storage_data.pop(index)
    metadata.storage_data.setdefault(MetadataIndex(index.fqn, offset), stored)
    return index, offset


def resize_a_box(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    chunk = draw(st.sampled_from(a_tensor(metadata, draw)[1].chunks))
    chunk.sizes = other_numbers(chunk.sizes, draw)
    return chunk


def add_a_box(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    fqn, entry = a_tensor(metadata, draw)
    chunk = draw(st.sampled_from(entry.chunks))
    added = ChunkStorageMetadata(other_numbers(chunk.offsets, draw), chunk.sizes)
    entry.chunks.append(added)
    metadata.storage_data.setdefault(MetadataIndex(fqn, added.offsets), metadata.storage_data[an_item(metadata, draw)])
    return added


def reshape_a_tensor(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    _, entry = a_tensor(metadata, draw)
    turned = torch.Size(draw(st.permutations(entry.size)))
    entry.size = other_numbers(entry.size, draw) if turned == entry.size else turned
    return entry


def retype_a_tensor(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    _, entry = a_tensor(metadata, draw)
    others = [getattr(torch, str(dtype_named(name).torch)) for name in TORCH_DTYPES]
    entry.properties.dtype = draw(st.sampled_from([dtype for dtype in others if dtype != entry.properties.dtype]))
    return entry


def call_a_tensor_an_object(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    fqn, _ = a_tensor(metadata, draw)
    metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
    return fqn


def take_the_bytes_of_another_item(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    index, other = an_item(metadata, draw), an_item(metadata, draw)
    metadata.storage_data[index] = metadata.storage_data[other]
    return index, other


def take_another_file(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    index = an_item(metadata, draw)
    stored = metadata.storage_data[index]
    metadata.storage_data[index] = replace(stored, relative_path=draw(st.sampled_from([*files, "../x", "/x", "y"])))
    return index


def take_other_bytes(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    index = an_item(metadata, draw)
    stored = metadata.storage_data[index]
    step = draw(st.sampled_from([-64, -1, 1, 64]))
    start, length = draw(st.sampled_from([(step, 0), (0, step), (step, -step)]))
    metadata.storage_data[index] = replace(
        stored, offset=max(0, stored.offset + start), length=max(0, stored.length + length)
    )
    return index, start, length


def put_another_item(metadata: Metadata, files: Files, draw: st.DrawFn) -> object:
    """Replace an item by one of another dtype or shape, and state where it and the items behind it lie now."""
    index = an_item(metadata, draw)
    stored = metadata.storage_data[index]
    raw = files[stored.relative_path]
    entry = metadata.state_dict_metadata[index.fqn]
    sizes = next(tuple(chunk.sizes) for chunk in entry.chunks if chunk.offsets == index.offset)
    own = str(entry.properties.dtype).removeprefix("torch.")
    other = draw(st.sampled_from([name for name in TORCH_DTYPES if dtype_named(name).torch != own and name != "F4"]))
    dtype, shape = draw(st.sampled_from([(other, sizes), ("F32", (*sizes, 1)), ("U8", (1, *sizes))]))
    item = tilings.item(Whole(TensorSpec(dtype, shape), bytes(size_in_bytes(dtype, shape))), Box.whole(shape))
    files[stored.relative_path] = raw[: stored.offset] + item + raw[stored.offset + stored.length :]
    for key, info in metadata.storage_data.items():
        if info.relative_path == stored.relative_path and info.offset > stored.offset:
            metadata.storage_data[key] = replace(info, offset=info.offset + len(item) - stored.length)
    metadata.storage_data[index] = replace(stored, length=len(item))
    return index, dtype, shape


PIECES: list[Damage] = [
    lose_a_box,
    lose_an_item,
    lose_box_and_item,
    lose_an_entry,
    lose_all_items_of_a_tensor,
    move_a_box,
    move_an_item,
    move_box_and_item,
    resize_a_box,
    add_a_box,
    reshape_a_tensor,
    retype_a_tensor,
    call_a_tensor_an_object,
    take_the_bytes_of_another_item,
    take_another_file,
    take_other_bytes,
    put_another_item,
]


@pytest.mark.parametrize("damage", PIECES, ids=lambda damage: damage.__name__)
@examples(6)
@given(saved=distributed(), protocol=PROTOCOLS, data=st.data())
def test_a_damaged_piece_of_a_distributed_checkpoint_is_refused_or_changes_nothing(
    damage: Damage, saved: Saved, protocol: str, data: st.DataObject, home: Path
) -> None:
    assert saved.metadata
    note(damage(saved.metadata, saved.files, data.draw))
    with place(home, protocol) as base:
        found = outcome(saved.at(base), saved.truth)
        assert isinstance(found, HfdcpError) or wrong(saved.truth, found) == []


# ---- damage: files --------------------------------------------------------------------------------------------------


def lose_a_file(files: Files, draw: st.DrawFn) -> None:
    del files[draw(st.sampled_from(sorted(files)))]


def cut_a_file_short(files: Files, draw: st.DrawFn) -> None:
    path = draw(st.sampled_from(sorted(files)))
    files[path] = files[path][: draw(st.integers(0, max(0, len(files[path]) - 1)))]


def lengthen_a_file(files: Files, draw: st.DrawFn) -> None:
    files[draw(st.sampled_from(sorted(files)))] += draw(st.binary(min_size=1, max_size=100))


def lose_bytes_inside(files: Files, draw: st.DrawFn) -> None:
    path = draw(st.sampled_from(sorted(files)))
    start = draw(st.integers(0, max(0, len(files[path]) - 1)))
    files[path] = files[path][:start] + files[path][start + draw(st.integers(1, 64)) :]


def put_one_file_in_place_of_another(files: Files, draw: st.DrawFn) -> None:
    path, other = draw(st.sampled_from(sorted(files))), draw(st.sampled_from(sorted(files)))
    files[path] = files[other]


FILE_DAMAGES = [lose_a_file, cut_a_file_short, lengthen_a_file, lose_bytes_inside, put_one_file_in_place_of_another]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("damage", FILE_DAMAGES, ids=lambda damage: damage.__name__)
@examples(6)
@given(protocol=PROTOCOLS, data=st.data())
def test_a_damaged_file_is_refused_or_changes_nothing(
    damage: Callable[[Files, st.DrawFn], None],
    source: st.SearchStrategy[Saved],
    protocol: str,
    data: st.DataObject,
    home: Path,
) -> None:
    saved = data.draw(source)
    if saved.metadata:
        saved = replace(saved, files={**saved.files, ".metadata": tilings.pickled(saved.metadata)}, metadata=None)
    damage(saved.files, data.draw)
    with place(home, protocol) as base:
        found = outcome(saved.at(base), saved.truth)
        if not isinstance(found, HfdcpError):
            copied = saved.options and damage is put_one_file_in_place_of_another
            left = {fqn: one for fqn, one in saved.truth.items() if fqn in found}
            assert wrong(saved.truth, found) == [] or (copied and right_but_for_an_end(left, found))


# ---- damage: one bit ------------------------------------------------------------------------------------------------


def flipped(raw: bytes, bit: int) -> bytes:
    """Flip one bit."""
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def any_bit(start: int, stop: int, draw: st.DrawFn) -> int:
    """Choose a bit of the bytes ``[start, stop)``, each as likely as another."""
    return Random(draw(st.integers(0, 2**32 - 1))).randrange(start * 8, stop * 8)


def data_start(raw: bytes) -> int:
    """Return where the data of a safetensors file begin."""
    return 8 + int.from_bytes(raw[:8], "little")


@examples(60)
@given(saved=distributed(), protocol=PROTOCOLS, data=st.data())
def test_a_bit_of_an_item_is_found_or_changes_nothing(
    saved: Saved, protocol: str, data: st.DataObject, home: Path
) -> None:
    path = data.draw(st.sampled_from(sorted(saved.files)))
    bit = any_bit(0, len(saved.files[path]), data.draw)
    note(f"{path}: bit {bit}")
    saved.files[path] = flipped(saved.files[path], bit)
    with place(home, protocol) as base:
        found = outcome(saved.at(base), saved.truth)
        assert isinstance(found, HfdcpError) or wrong(saved.truth, found) == []


@examples(80)
@given(saved=distributed(), protocol=PROTOCOLS, data=st.data())
def test_a_bit_of_the_metadata_is_found_or_changes_a_name(
    saved: Saved, protocol: str, data: st.DataObject, home: Path
) -> None:
    assert saved.metadata
    raw = tilings.pickled(saved.metadata)
    bit = any_bit(0, len(raw), data.draw)
    note(f".metadata: bit {bit}, {raw[bit // 8 - 12 : bit // 8]!r} {raw[bit // 8 : bit // 8 + 12]!r}")
    saved = replace(saved, files={**saved.files, ".metadata": flipped(raw, bit)}, metadata=None)
    with place(home, protocol) as base:
        found = outcome(saved.at(base), saved.truth)
        assert isinstance(found, HfdcpError) or right_but_for_a_name(saved.truth, found)


def right_but_for_a_name(truth: Mapping[str, Whole], found: Mapping[str, Whole]) -> bool:
    """Whether all tensors are there, one at most under another name."""
    lost = [fqn for fqn in wrong(truth, found) if fqn in truth]
    new = [fqn for fqn in wrong(truth, found) if fqn not in truth]
    renamed = all(_bytes(truth, was) == _bytes(found, now) for was, now in zip(lost, new, strict=False))
    return len(lost) == len(new) <= 1 and not set(lost) & found.keys() and renamed


def right_but_for_an_end(truth: Mapping[str, Whole], found: Mapping[str, Whole]) -> bool:
    """Whether all tensors are there, whole or without their last boxes."""
    return truth.keys() == found.keys() and all(
        truth[fqn].spec.dtype == one.spec.dtype and truth[fqn].part(Box.whole(one.spec.shape)) == one.data
        for fqn, one in found.items()
        if fqn in wrong(truth, found)
    )


HEADED = {"dcp-safetensors": sharded(), "safetensors": repository()}


@pytest.mark.parametrize("source", HEADED.values(), ids=HEADED)
@examples(60)
@given(protocol=PROTOCOLS, data=st.data())
def test_a_bit_of_a_header_or_index_is_found_or_changes_a_name_that_no_index_names(
    source: st.SearchStrategy[Saved], protocol: str, data: st.DataObject, home: Path
) -> None:
    saved = data.draw(source)
    path = data.draw(st.sampled_from(sorted(saved.files)))
    raw = saved.files[path]
    bit = any_bit(0, len(raw) if path == INDEX_PATH else data_start(raw), data.draw)
    note(f"{path}: bit {bit}, {raw[max(0, bit // 8 - 12) : bit // 8]!r} {raw[bit // 8 : bit // 8 + 12]!r}")
    saved.files[path] = flipped(raw, bit)
    named = saved.options or INDEX_PATH in saved.files
    with place(home, protocol) as base:
        found = outcome(saved.at(base), saved.truth)
        if not isinstance(found, HfdcpError):
            right = wrong(saved.truth, found) == []
            shorter = saved.options and right_but_for_an_end(saved.truth, found)
            assert right or shorter or (not named and right_but_for_a_name(saved.truth, found))


@pytest.mark.parametrize("source", HEADED.values(), ids=HEADED)
@examples(15)
@given(protocol=PROTOCOLS, data=st.data())
def test_a_bit_of_raw_data_stays_the_one_bit_that_it_is(
    source: st.SearchStrategy[Saved], protocol: str, data: st.DataObject, home: Path
) -> None:
    saved = data.draw(source)
    heavy = [path for path, raw in sorted(saved.files.items()) if path != INDEX_PATH and data_start(raw) < len(raw)]
    if not heavy:
        return
    path = data.draw(st.sampled_from(heavy))
    raw = saved.files[path]
    saved.files[path] = flipped(raw, any_bit(data_start(raw), len(raw), data.draw))
    with place(home, protocol) as base:
        job = saved.at(base)
        try:
            publish.make(job)
        except HfdcpError:
            assert not seen(job.sink).keys() & {INDEX_PATH, MANIFEST_PATH}
            return  # two ranks hold that box, and now they differ
        found = held(written(job.sink))
        assert {fqn: one.spec for fqn, one in found.items()} == {fqn: one.spec for fqn, one in saved.truth.items()}
        [fqn] = differences(saved.truth, found)
        assert int.from_bytes(saved.truth[fqn].data, "big").bit_count() - (
            int.from_bytes(found[fqn].data, "big").bit_count()
        ) in {-1, 1}
        assert sum((a ^ b).bit_count() for a, b in zip(saved.truth[fqn].data, found[fqn].data, strict=True)) == 1


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@examples(15)
@given(options=settings_of_a_run(), ranks=st.integers(0, 2), protocol=PROTOCOLS, data=st.data())
def test_any_bit_that_flips_after_writing_is_found(
    source: st.SearchStrategy[Saved],
    options: dict[str, int],
    ranks: int,
    protocol: str,
    data: st.DataObject,
    home: Path,
) -> None:
    saved = data.draw(source)
    with place(home, protocol) as base:
        job = replace(saved.at(base), ranks=ranks, **options)
        publish.make(job)
        files = written(job.sink)
        path = data.draw(st.sampled_from(sorted(files.keys() - {MANIFEST_PATH})))
        open_store(job.sink).put(path, flipped(files[path], any_bit(0, len(files[path]), data.draw)))
        with pytest.raises(ValidationError, match=r"is not what its manifest says"):
            publish.validate_again(replace(job, source=""))


# ---- what these laws found ------------------------------------------------------------------------------------------


def test_columns_of_packed_kinds_are_told_from_each_other(home: Path) -> None:
    truth = {
        "w": Whole(TensorSpec("F4", (2, 8)), bytes(range(8))),
        "v": Whole(TensorSpec("F6_E2M3", (2, 8)), bytes(range(12))),
    }
    halves = [Placed(fqn, Box((0, 4 * rank), (2, 4)), rank) for rank in (0, 1) for fqn in truth]
    saved = Saved(truth, tilings.sharded(truth, halves, 2), options={"world_size": 2})
    with place(home, "memory") as base:
        job = saved.at(base)
        publish.make(replace(job, sink=f"{base}/ranks", ranks=3, shard_dim=-1))
        for source in (f"{base}/ckpt", f"{base}/ranks"):
            found = outcome(replace(job, source=source, overwrite=True), truth)
            assert found == truth


def test_a_written_header_that_a_bit_made_unreadable_is_told_with_the_file(home: Path) -> None:
    truth = {"w": Whole(TensorSpec("U64", (1,)), bytes(8))}
    with place(home, "memory") as base:
        job = Saved(truth, tilings.plain(truth, {"w": 1})).at(base)
        publish.make(job)
        raw = written(job.sink)["model.safetensors"]
        open_store(job.sink).put("model.safetensors", raw.replace(b'"U64"', b'"W64"'))
        with pytest.raises(ValidationError) as caught:
            publish.validate_again(replace(job, source=""))
        assert "unknown dtype 'W64'" in caught.value.problems[0]
