"""Several places are read as one: the copies that count are whole, and copies that differ are never guessed among."""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save
from torch.distributed.checkpoint.filesystem import SerializationFormat

from hfdcp_core.catalog import Catalog, Span
from hfdcp_core.consolidate import Nowhere, consolidate
from hfdcp_core.copies import NOT_READ, mend
from hfdcp_core.copies import settle as settle_all
from hfdcp_core.distcp_file import read_metadata
from hfdcp_core.errors import CorruptFile, IncompleteCheckpoint, StorageNotFound
from hfdcp_core.examine import examine, examine_copies
from hfdcp_core.gather import gather
from hfdcp_core.layout import lay_out, lay_out_for_ranks
from hfdcp_core.manifest import FileRecord
from hfdcp_core.plan import reshard
from hfdcp_core.recipe import define, recipe_named
from hfdcp_core.store import Sink, Source, open_store
from hfdcp_core.union import Below, Union, below

DISTCP, OTHER = "__0_0.distcp", "__1_0.distcp"
SHARD = "shard-0000{}-model-00001-of-00001.safetensors"
Files = Mapping[str, bytes]


def place(files: Files) -> Sink:
    """Return a store in memory with these files."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for path, raw in files.items():
        store.put(path, raw)
    return store


def union(*places: Files) -> Union:
    return Union([place(files) for files in places])


def settle(joined: Union) -> Union:
    return settle_all(joined).union


def saved(folder: Path, fill: float) -> Files:
    """Return the files of a checkpoint of two tensors, one of them in a transposed layout, and an object."""
    state = {"w": torch.full((64, 32), fill), "t": torch.full((8, 4), fill).t(), "epoch": "first"}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Heard:
    """Progress that keeps what was said, and how much was done."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done = 0

    def begin(self, step: str, total_bytes: int) -> None:
        """Hear nothing new."""

    def advance(self, nbytes: int) -> None:
        self.done += nbytes

    def say(self, line: str) -> None:
        self.said.append(line)


class Counting(Below):
    """A source that counts how often a byte is read."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, "")
        self._prefix = ""
        self._reads: list[tuple[str, int, int]] = []

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self._reads.append((path, start, start + len(buffer)))
        super().read_into(path, start, buffer)

    def read(self, path: str, start: int, stop: int) -> bytes:
        self._reads.append((path, start, stop))
        return super().read(path, start, stop)

    def times(self, path: str, at: int) -> int:
        return sum(name == path and start <= at < stop for name, start, stop in self._reads)


def consolidated(catalog: Catalog, source: Source, part: int | None = None) -> tuple[FileRecord, Heard]:
    """Make a file of all tensors, or that of one of two ranks, and keep what was hashed and said."""
    definitions = define(catalog, tuple(sorted(catalog.tensors)), recipe_named("none"))
    whole = lay_out(definitions, max_file_size=1 << 30)
    target = whole if part is None else lay_out_for_ranks(definitions, ranks=2, dim=0)
    file = reshard(catalog, target, window_bytes=1 << 12).files[part or 0]
    heard = Heard()
    record = consolidate(file, source, Nowhere(), progress=heard)
    assert heard.done == file.size - len(file.header)
    return record, heard


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return saved(tmp_path_factory.mktemp("one"), 1.0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The next step of the same run: every file as long as before."""
    return saved(tmp_path_factory.mktemp("two"), 2.0)


@pytest.fixture(scope="module")
def as_safetensors(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A checkpoint whose .distcp file ends with a safetensors file, so that no item says where a tensor lies."""
    folder = tmp_path_factory.mktemp("safetensors")
    writer = dcp.FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": torch.ones(64, 32), "b": torch.ones(5)}, storage_writer=writer, no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def without_checksums(tmp_path_factory: pytest.TempPathFactory) -> Files:
    torch.serialization.set_crc32_options(False)
    try:
        return saved(tmp_path_factory.mktemp("unchecked"), 1.0)
    finally:
        torch.serialization.set_crc32_options(True)


@functools.cache  # safetensors writes the metadata in any order, so two calls may give other bytes
def shard(rank: int, fill: float = 0.0, rows: int = 2) -> bytes:
    """Return one rank's file of torch's safetensors writer."""
    sharding = json.dumps({"w": {"saved_offsets": [2 * rank, 0]}})
    return save({"w": np.full((rows, 3), fill, np.float32)}, {"DCP_SHARDING_INFO": sharding, "format": "pt"})


def payload(files: Files, fqn: str) -> tuple[int, int]:
    """Return where the item of a tensor lies in the one file."""
    found = read_metadata(files[".metadata"], path="x")
    span = next(shard.span for shard in found.shards if shard.fqn == fqn)
    return span.start, span.stop


def span_of(files: Files, fqn: str) -> str:
    start, stop = payload(files, fqn)
    return f"{DISTCP}[{start}:{stop}]"


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


# ---- as a source ----


def test_each_file_is_listed_once_and_read_from_the_place_that_has_it() -> None:
    joined = union({"a": b"12", "x/c": b"5"}, {"a": b"99", "b": b"34", "x/d": b"6"})
    listing = joined.list()
    assert ([stamp.path for stamp in listing.files], listing.folders) == (["a", "b"], ("x",))
    assert [stamp.path for stamp in joined.list("x").files] == ["x/c", "x/d"]
    assert (joined.read("a", 0, 2), joined.read("b", 1, 2)) == (b"12", b"4")
    buffer = bytearray(1)
    joined.read_into("x/d", 0, memoryview(buffer))
    assert buffer == b"6"
    assert joined.stat("b").size == 2
    assert (joined.holder("a"), joined.holder("b")) == (0, 1)


def test_a_choice_of_places_goes_before_their_order() -> None:
    places = [place({"a": b"12"}), place({"a": b"345"})]
    joined = Union(places, {"a": 1})
    assert (joined.read("a", 0, 3), joined.stat("a").size, joined.list().files[0].size) == (b"345", 3, 3)


def test_what_is_in_no_place_is_not_found() -> None:
    joined = union({"a": b"1"}, {"b": b"1"})
    for look in (joined.stat, joined.holder, joined.list):
        with pytest.raises(StorageNotFound):
            look("nowhere")


def test_a_union_names_all_its_places() -> None:
    assert Union([open_store("/n0/c"), open_store("/n1/c")]).url == "{/n0/c,/n1/c}"


def test_a_folder_of_a_source_is_a_source() -> None:
    store = place({"step-1/a": b"12", "step-1/x/b": b"34", "other": b"5"})
    inner = below(store, "step-1")
    assert isinstance(inner, Below)
    assert inner.url == f"{store.url}/step-1"
    assert ([stamp.path for stamp in inner.list().files], inner.list().folders) == (["a"], ("x",))
    assert [stamp.path for stamp in inner.list("x").files] == ["x/b"]
    assert inner.stat("a").path == "a"
    buffer = bytearray(1)
    inner.read_into("a", 1, memoryview(buffer))
    assert buffer == b"2"
    assert (inner.read("a", 0, 2), inner.stat("x/b").size) == (b"12", 2)
    assert below(store, "") is store


# ---- distributed checkpoints ----


def test_files_of_one_save_in_several_places_are_one_checkpoint(one: Files) -> None:
    """verl 2402: each node kept its own ranks' files only."""
    joined = settle(union({".metadata": one[".metadata"]}, {DISTCP: one[DISTCP]}))
    assert set(gather(joined).tensors) == {"w", "t"}
    assert (joined.holder(".metadata"), joined.holder(DISTCP)) == (0, 1)


def test_a_file_that_is_nowhere_is_listed_by_rank(one: Files) -> None:
    with pytest.raises(IncompleteCheckpoint, match="names files that are not there") as caught:
        gather(settle(union({".metadata": one[".metadata"]}, {OTHER: b"of nobody"})))
    assert caught.value.problems == (f"rank 0: {DISTCP}",)


@pytest.mark.parametrize("cut_first", [True, False])
def test_the_copy_that_is_as_long_as_stated_is_read(one: Files, cut_first: bool) -> None:
    """A copy to another bucket that was interrupted, and taken up elsewhere."""
    cut = {**one, DISTCP: one[DISTCP][:-1000]}
    settled = settle_all(union(cut, one) if cut_first else union(one, cut))
    joined, (bad, good) = settled.union, [settled.union.places[n].url for n in ((0, 1) if cut_first else (1, 0))]
    size = len(one[DISTCP])
    assert settled.said == (f"{bad}/{DISTCP}: {size - 1000} bytes, expected {size}; taken from {good}",)
    assert joined.stat(DISTCP).size == len(one[DISTCP])
    assert set(gather(joined).tensors) == {"w", "t"}


def test_where_no_copy_is_whole_the_longest_is_complained_of(one: Files) -> None:
    with pytest.raises(CorruptFile, match="cut short") as caught:
        gather(settle(union({**one, DISTCP: one[DISTCP][:10]}, {DISTCP: one[DISTCP][:-1]})))
    assert f"{len(one[DISTCP]) - 1} bytes" in caught.value.problems[0]


def test_equal_copies_are_one_file(one: Files) -> None:
    joined = settle(union(one, one))
    assert joined.holder(DISTCP) == 0


def test_two_metadata_files_are_two_checkpoints_and_both_are_named(one: Files, two: Files) -> None:
    joined = union(one, {".metadata": two[".metadata"]})
    with pytest.raises(CorruptFile, match="say different things") as caught:
        settle(joined)
    assert all(each.url in caught.value.problems[0] for each in joined.places)


def test_a_stale_file_of_the_same_length_is_refused_wherever_it_stands(one: Files, two: Files) -> None:
    assert len(one[DISTCP]) == len(two[DISTCP])
    for places in [(one, {DISTCP: two[DISTCP]}), ({DISTCP: two[DISTCP]}, one)]:
        joined = union(*places)
        with pytest.raises(CorruptFile, match="of another save") as caught:
            settle(joined)
        assert all(each.url in caught.value.problems[0] for each in joined.places)


@pytest.fixture(params=["payload", "directory"])
def damaged(request: pytest.FixtureRequest, one: Files) -> bytes:
    """A copy of the right length, of which the item of ``w`` is damaged: in its elements, or where it is described."""
    start, stop = payload(one, "w")
    return flipped(one[DISTCP], (start + stop) // 2 if request.param == "payload" else stop - 20)


@pytest.mark.parametrize("place_of_sound", [0, 1, 2])
def test_each_item_is_taken_from_where_it_is_sound(one: Files, damaged: bytes, place_of_sound: int) -> None:
    copies: list[Files] = [{".metadata": one[".metadata"], DISTCP: damaged} for _ in range(3)]
    copies[place_of_sound] = one
    settled = settle_all(union(*copies))
    catalog = gather(settled.union)
    record, heard = consolidated(catalog, settled.union)
    original = place(one)
    assert record == replace(consolidated(gather(original), original)[0], source=record.source)
    assert record.source.mended == ((span_of(one, "w"),) if place_of_sound else ())
    assert record.source.verified == 2
    places = [each.url for each in settled.union.places]
    what = f"w[0:64, 0:32] in {span_of(one, 'w')} is damaged; taken from {places[place_of_sound]}"
    said = [line for line in (*settled.said, *heard.said) if NOT_READ not in line]
    assert said == [f"{url}: {what}" for url in places[:place_of_sound]]
    reopened = Union(settled.union.places, {DISTCP: settled.union.holder(DISTCP)}, settled.union.elsewhere)
    assert consolidated(catalog, reopened)[0] == record


def test_every_copy_may_be_damaged_in_an_item_of_its_own(one: Files) -> None:
    middles = [sum(payload(one, name)) // 2 for name in ("w", "t")]
    copies = [{**one, DISTCP: flipped(one[DISTCP], at)} for at in middles]
    settled = settle_all(union(*copies))
    catalog = gather(settled.union)
    assert len(examine(catalog, settled.union)) == 1
    mended = mend(settled.union, catalog.shards)
    assert mended is not None
    assert examine(catalog, mended.union) == ()
    whole = mended.union.read(DISTCP, 0, len(one[DISTCP]))  # one read across both places
    assert whole == one[DISTCP]
    assert mend(mended.union, catalog.shards) is None


def test_an_item_that_is_damaged_everywhere_is_reported_with_its_place(one: Files) -> None:
    start, stop = payload(one, "w")
    copies = [{**one, DISTCP: flipped(one[DISTCP], (start + stop) // 2 + n)} for n in (0, 1)]
    joined = settle(union(*copies))
    [problem] = examine(gather(joined), joined)
    assert problem.startswith(f"{joined.places[0].url}: w[0:64, 0:32]")
    every = examine_copies(gather(joined), joined)
    assert [problem.partition(": w")[0] for problem in every.problems] == [each.url for each in joined.places]
    assert every.said == ()
    with pytest.raises(CorruptFile, match=f"^{re.escape(joined.places[0].url)}: w"):
        consolidated(gather(joined), joined)


def test_a_stale_copy_is_refused_though_another_copy_is_damaged(one: Files, two: Files, damaged: bytes) -> None:
    with pytest.raises(CorruptFile, match="of another save"):
        settle(union(one, {DISTCP: damaged}, {DISTCP: two[DISTCP]}))


def test_examining_every_copy_says_which_is_damaged_and_where_a_whole_one_is(one: Files, damaged: bytes) -> None:
    joined = settle(union(one, {DISTCP: damaged}))
    every = examine_copies(gather(joined), joined)
    first, second = (each.url for each in joined.places)
    assert every.problems == ()
    [line] = every.said
    assert line.startswith(f"{second}: w[0:64, 0:32]")
    assert line.endswith(f"; whole in {first}")


def epoch(files: Files) -> Span:
    objects = read_metadata(files[".metadata"], path="x").objects
    return next(entry.span for entry in objects if entry.name == "epoch")


@pytest.mark.parametrize("damaged_first", [True, False])
def test_an_object_is_taken_from_where_its_records_have_the_checksums_that_they_state(
    one: Files, damaged_first: bool
) -> None:
    start = epoch(one).start
    bad = {**one, DISTCP: flipped(one[DISTCP], one[DISTCP].index(b"first", start))}
    settled = settle_all(union(bad, one) if damaged_first else union(one, bad))
    assert settled.union.read(DISTCP, 0, len(one[DISTCP])) == one[DISTCP]
    assert any("is damaged; taken from" in line for line in settled.said) is damaged_first


def test_an_object_that_differs_where_no_checksum_tells_is_refused(one: Files) -> None:
    span = epoch(one)
    torn = [flipped(one[DISTCP], span.stop - at) for at in (20, 22)]  # both archives are without an end
    with pytest.raises(CorruptFile, match="where no checksum tells"):
        settle(union({**one, DISTCP: torn[0]}, {DISTCP: torn[1]}))


def test_what_is_taken_in_parts_is_held_against_the_checksum_of_the_whole_first(one: Files, damaged: bytes) -> None:
    joined, original = settle(union({**one, DISTCP: damaged}, one)), place(one)
    for part in (0, 1):
        made, _ = consolidated(gather(joined), joined, part=part)
        sound, _ = consolidated(gather(original), original, part=part)
        assert made.tensors == sound.tensors
        assert made.source.mended == (span_of(one, "w"),)


def test_bytes_are_read_once_where_all_is_well(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(512, 512)}, checkpoint_id=tmp_path, no_dist=True)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    places = [Counting(place(files)) for _ in range(2)]
    joined = settle(Union(places))
    consolidated(gather(joined), joined)
    middle = sum(payload(files, "w")) // 2
    assert [each.times(DISTCP, middle) for each in places] == [1, 0]


def test_without_checksums_the_bytes_are_compared(without_checksums: Files) -> None:
    files = without_checksums
    start, stop = payload(files, "w")
    assert settle(union(files, files)).holder(DISTCP) == 0
    with pytest.raises(CorruptFile, match="of another save"):
        settle(union(files, {DISTCP: flipped(files[DISTCP], (start + stop) // 2)}))


def test_safetensors_inside_of_distcp_files_are_compared_as_a_whole(as_safetensors: Files) -> None:
    files = as_safetensors
    assert settle(union(files, files)).holder(DISTCP) == 0
    assert settle(union({**files, DISTCP: files[DISTCP][:-9]}, files)).holder(DISTCP) == 1
    with pytest.raises(CorruptFile, match="of another save"):
        settle(union(files, {DISTCP: flipped(files[DISTCP], len(files[DISTCP]) - 5)}))


def test_files_that_the_metadata_does_not_name_may_differ(one: Files) -> None:
    settle(union({**one, OTHER: b"old", "notes.txt": b"1"}, {OTHER: b"older", "notes.txt": b"22"}))


@pytest.mark.parametrize("other", [b"short", b"of another length"])
def test_without_metadata_nothing_tells_which_copy_counts(other: bytes) -> None:
    with pytest.raises(CorruptFile, match="or cut short"):
        settle(union({DISTCP: b"these"}, {DISTCP: other}))
    assert settle(union({DISTCP: b"these"}, {DISTCP: b"these"})).holder(DISTCP) == 0


def test_metadata_of_single_ranks_must_agree_too() -> None:
    settle(union({"__0.metadata": b"a"}, {"__1.metadata": b"b"}))
    with pytest.raises(CorruptFile, match=r"__0\.metadata"):
        settle(union({"__0.metadata": b"a"}, {"__0.metadata": b"b"}))


# ---- safetensors ----


def test_sharded_safetensors_in_several_places_are_one_checkpoint() -> None:
    joined = settle(union({SHARD.format(1): shard(0)}, {SHARD.format(2): shard(1)}))
    catalog = gather(joined, world_size=2)
    assert (catalog.tensors["w"].shape, catalog.unproved) == ((4, 3), None)


def test_of_safetensors_copies_the_one_counts_that_is_as_long_as_its_header_says() -> None:
    whole = {SHARD.format(1): shard(0)}
    for cut in (shard(0)[:-4], shard(0)[:20], b"", b"\xff" * 64):
        joined = settle(union({SHARD.format(1): cut}, whole))
        assert joined.holder(SHARD.format(1)) == 1


def test_where_no_safetensors_copy_is_whole_the_longest_is_complained_of() -> None:
    joined = settle(union({SHARD.format(1): shard(0)[:-8]}, {SHARD.format(1): shard(0)[:-4]}))
    assert joined.holder(SHARD.format(1)) == 1
    with pytest.raises(CorruptFile):
        gather(joined)


def test_safetensors_copies_must_be_equal() -> None:
    name = SHARD.format(1)
    assert settle(union({name: shard(0)}, {name: shard(0)})).holder(name) == 0
    for other in (shard(0, fill=1.0), shard(0, rows=1)):
        with pytest.raises(CorruptFile, match="of another save") as caught:
            settle(union({name: shard(0)}, {name: other}))
        assert name in caught.value.problems[0]


def test_indexes_must_agree() -> None:
    name = "model.safetensors.index.json"
    with pytest.raises(CorruptFile, match="say different things"):
        settle(union({name: b"{}"}, {name: b"{ }"}))
