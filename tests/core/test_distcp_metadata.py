import itertools
import pickle
from pathlib import PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from hfdcp_core.box import Box
from hfdcp_core.catalog import ObjectItem, Shard, Skipped, Span, TensorSpec
from hfdcp_core.distcp_file import DcpMetadata, read_metadata
from hfdcp_core.errors import CorruptFile, SourceError, UnknownFormat

Chunks = list[tuple[tuple[int, ...], tuple[int, ...]]]
HALVES: Chunks = [((0, 0), (2, 3)), ((2, 0), (2, 3))]


def tensor(size: tuple[int, ...], chunks: Chunks, dtype: torch.dtype = torch.float32) -> TensorStorageMetadata:
    listed = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), listed)


def item(
    fqn: str, offset: tuple[int, ...] | None, start: int = 0, path: str = "__0_0.distcp"
) -> tuple[MetadataIndex, _StorageInfo]:
    return MetadataIndex(fqn, None if offset is None else torch.Size(offset)), _StorageInfo(path, start, 10)


def read(metadata: object) -> DcpMetadata:
    return read_metadata(pickle.dumps(metadata), path="dir/.metadata")


def good() -> Metadata:
    """A tensor in two halves, in two files, and an object."""
    stored = [item("w", (0, 0)), item("w", (2, 0), 5, "__1_0.distcp"), item("step", None, 10)]
    return Metadata({"w": tensor((4, 3), HALVES), "step": BytesStorageMetadata()}, {"w": ("w",)}, dict(stored))


def test_boxes_are_joined_with_the_items_that_hold_them() -> None:
    found = read(good())
    assert found.tensors == {"w": TensorSpec("F32", (4, 3))}
    assert found.shards == (
        Shard("w", "F32", Box((0, 0), (2, 3)), Span("__0_0.distcp", 0, 10), "torch_save"),
        Shard("w", "F32", Box((2, 0), (2, 3)), Span("__1_0.distcp", 5, 15), "torch_save"),
    )
    assert found.skipped == (Skipped("step", "not a tensor: a pickled Python object"),)
    assert found.extents == {"__0_0.distcp": 20, "__1_0.distcp": 15}
    assert (found.nesting, found.save_id, found.unsupported) == ({"w": ("w",)}, None, {})


def test_a_chunk_that_no_item_holds_is_a_hole_for_the_plan_to_report() -> None:
    metadata = good()
    del metadata.storage_data[item("w", (2, 0))[0]]
    assert [shard.box for shard in read(metadata).shards] == [Box((0, 0), (2, 3))]


def test_a_tensor_without_chunks_is_kept_without_shards() -> None:
    found = read(Metadata({"w": tensor((4, 3), [])}, None, {}))
    assert (found.tensors, found.shards) == ({"w": TensorSpec("F32", (4, 3))}, ())


def test_chunks_without_elements_give_no_shard_even_at_the_offset_of_one_with_elements() -> None:
    for chunks in (
        [((0, 0), (0, 3)), ((0, 0), (4, 3)), ((4, 0), (0, 3))],
        [((0, 0), (4, 3)), ((0, 0), (0, 3)), ((4, 0), (0, 3))],
    ):
        found = read(Metadata({"w": tensor((4, 3), chunks)}, None, dict([item("w", (0, 0)), item("w", (4, 0), 10)])))
        assert [shard.box for shard in found.shards] == [Box((0, 0), (4, 3))]


def test_the_same_chunk_listed_twice_is_one_box() -> None:
    found = read(
        Metadata({"w": tensor((4, 3), [*HALVES, HALVES[0]])}, None, dict([item("w", (0, 0)), item("w", (2, 0))]))
    )
    assert len(found.shards) == 2


def test_a_scalar_is_one_box_without_dimensions() -> None:
    found = read(Metadata({"s": tensor((), [((), ())])}, None, dict([item("s", ())])))
    assert found.shards[0].box == Box((), ())


def test_packed_elements_are_counted_singly_in_shapes_and_boxes() -> None:
    metadata = Metadata({"q": tensor((4, 3), HALVES, torch.float4_e2m1fn_x2)}, None, dict([item("q", (2, 0))]))
    found = read(metadata)
    assert (found.tensors["q"], found.shards[0].box) == (TensorSpec("F4", (4, 6)), Box((2, 0), (2, 6)))


def test_what_cannot_be_converted_is_listed_and_the_rest_is_read() -> None:
    metadata = good()
    odd = {
        "c": tensor((1,), [((0,), (1,))], torch.complex128),
        "q": tensor((1,), [((0,), (1,))], torch.qint8),
        "i": tensor((1,), [((0,), (1,))], torch.uint3),
        "__metadata__": tensor((1,), [((0,), (1,))]),
        "half \ud800": tensor((1,), [((0,), (1,))]),
        "f4": tensor((), [((), ())], torch.float4_e2m1fn_x2),
        "z": tensor((1,), [((0,), (1,))]),
    }
    metadata.state_dict_metadata |= odd
    metadata.storage_data |= dict(item(name, (0,), 20) for name in odd if name != "f4")
    metadata.planner_data = None
    metadata.storage_data[item("z", (0,))[0]].transform_descriptors = ["stream.zstd/1", "other"]
    found = read(metadata)
    assert found.unsupported == {
        "c": "torch.complex128: safetensors cannot hold it",
        "q": "torch.qint8: safetensors cannot hold it",
        "i": "torch.uint3: it is not in the table of dtypes",
        "__metadata__": "safetensors cannot hold a tensor of that name",
        "half \\ud800": "safetensors cannot hold a tensor of that name",
        "f4": "torch.float4_e2m1fn_x2 without a dimension: its elements are halves of bytes",
        "z": "its items are stored transformed by 'stream.zstd/1', 'other'",
    }
    assert (found.tensors, len(found.shards)) == ({"w": TensorSpec("F32", (4, 3))}, 2)


def test_the_notes_of_a_writer_are_read_and_its_local_path_is_not_kept() -> None:
    metadata = good()
    metadata.storage_meta = StorageMeta(checkpoint_id=PurePosixPath("/home/somebody"), save_id="one")
    found = read(metadata)
    assert found.save_id == "one"
    assert "somebody" not in repr(found)


def test_a_save_without_an_id_has_none() -> None:
    metadata = good()
    metadata.storage_meta = StorageMeta(checkpoint_id="x")
    assert read(metadata).save_id is None


@pytest.mark.parametrize("planner_data", [None, "text", 7], ids=repr)
def test_a_writer_without_a_table_of_paths_gives_no_nesting(planner_data: object) -> None:
    metadata = good()
    metadata.planner_data = planner_data
    assert read(metadata).nesting == {}


def test_numbers_in_a_path_are_written_as_text_and_entries_without_tensor_have_no_path() -> None:
    metadata = good()
    metadata.state_dict_metadata["a.3"] = tensor((1,), [((0,), (1,))])
    metadata.storage_data |= dict([item("a.3", (0,), 20)])
    metadata.planner_data = {"w": ("w",), "step": ("step",), "a.3": ("a", 3)}
    assert read(metadata).nesting == {"w": ("w",), "a.3": ("a", "3")}


def test_the_save_plans_of_megatron_core_are_not_looked_at() -> None:
    metadata = good()
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([1]))
    plan = SavePlan([WriteItem(MetadataIndex("w", torch.Size([0])), WriteItemType.SHARD, tensor_data=data)])
    metadata.__dict__["all_local_plans"] = [plan]
    assert read(metadata).tensors == read(good()).tensors


def test_what_megatron_core_saved_flattened_is_no_tensor_of_its_own_shape() -> None:
    metadata = good()
    metadata.__dict__["mcore_data"] = {
        "w": {"nd_reformulated_orig_global_shape": (2, 6)},
        "step": {"nd_reformulated_orig_global_shape": (1,)},
        "other": {},
    }
    found = read(metadata)
    assert (list(found.unsupported), found.tensors, found.shards) == (["w"], {}, ())
    assert "Megatron-core saved it flattened" in found.unsupported["w"]


OWN_CLASSES = {
    "OLMo-core's storage info": (
        "torch.distributed.checkpoint.filesystem",
        "olmo_core.distributed.checkpoint.filesystem",
        "_StorageInfo",
        "_StorageInfo",
    ),
    "Megatron-core's metadata": (
        "torch.distributed.checkpoint.metadata",
        "megatron.core.dist_checkpointing.strategies.torch",
        "Metadata",
        "MCoreMetadata",
    ),
}


@pytest.mark.parametrize(("theirs", "module", "name", "own"), OWN_CLASSES.values(), ids=OWN_CLASSES)
def test_classes_of_other_frameworks_are_read_by_name(theirs: str, module: str, name: str, own: str) -> None:
    """Without importing them: nobody here has them installed."""
    raw = pickle.dumps(good(), 2)
    assert (before := f"c{theirs}\n{name}\n".encode()) in raw
    assert read_metadata(raw.replace(before, f"c{module}\n{own}\n".encode()), path="x") == read(good())


@pytest.mark.parametrize(
    ("descriptors", "encoding"),
    [(None, "torch_save"), ([], "torch_save"), (["stream.zstd/1"], "torch_save+zstd"), (["stream.xor@lab/1"], None)],
    ids=repr,
)
def test_the_item_of_an_entry_that_is_no_tensor_is_noted_where_it_can_be_read(
    descriptors: list[str] | None, encoding: str | None
) -> None:
    metadata = good()
    metadata.state_dict_metadata["step"] = BytesStorageMetadata()
    metadata.storage_data |= {MetadataIndex("step"): _StorageInfo("__0_0.distcp", 50, 7, descriptors)}
    found = read(metadata)
    assert [entry.name for entry in found.skipped] == ["step"]
    wanted = [ObjectItem("step", Span("__0_0.distcp", 50, 57), encoding)] if encoding else []
    assert list(found.objects) == wanted


def test_an_item_that_zstandard_compressed_has_an_encoding_of_its_own() -> None:
    metadata = good()
    metadata.storage_data[MetadataIndex("w", torch.Size([2, 0]))].transform_descriptors = ["stream.zstd/1"]
    found = read(metadata)
    assert [shard.encoding for shard in found.shards] == ["torch_save", "torch_save+zstd"]
    assert found.unsupported == {}


@pytest.mark.parametrize(
    "descriptors", [["stream.zstd/2"], ["stream.zstd/1", "stream.zstd/1"], ["stream.xor@lab/1"]], ids=repr
)
def test_any_other_transform_is_refused_by_name(descriptors: list[str]) -> None:
    metadata = good()
    metadata.storage_data[MetadataIndex("w", torch.Size([2, 0]))].transform_descriptors = descriptors
    assert read(metadata).unsupported == {
        "w": f"its items are stored transformed by {', '.join(map(repr, descriptors))}"
    }


def test_files_whose_items_have_no_room_for_an_archive_are_listed_with_where_they_should_start() -> None:
    metadata = good()
    for offset, length in (((0, 0), 24), ((2, 0), 24)):
        metadata.storage_data[MetadataIndex("w", torch.Size(offset))].length = length
    assert read(metadata).bare == {"__0_0.distcp": 0, "__1_0.distcp": 5}
    metadata.storage_data[MetadataIndex("w", torch.Size([2, 0]))].length = 25
    assert read(metadata).bare == {"__0_0.distcp": 0}
    assert read(good()).bare == {}


def test_the_last_start_of_an_item_counts_whatever_their_order() -> None:
    metadata = good()
    metadata.storage_data = dict([item("w", (2, 0), 40), item("w", (0, 0), 7)])
    for info in metadata.storage_data.values():
        info.length = 24
    assert read(metadata).bare == {"__0_0.distcp": 40}


def test_fields_in_another_order_or_beside_others_are_found() -> None:
    metadata = good()
    state = dict(reversed(vars(metadata).items()))
    metadata.__dict__.clear()
    metadata.__dict__.update({"new": 1} | state)
    assert read(metadata) == read(good())


def many() -> Metadata:
    """More boxes and items than are looked at together, all alike: they are looked at by columns."""
    tensors = {f"w{number}": tensor((5000 + number, 3), rows(5000)) for number in range(2)}
    stored = (
        item(fqn, offset, 10 * place, f"__{number}_0.distcp")
        for number, fqn in enumerate(tensors)
        for place, (offset, _) in enumerate(rows(5000))
    )
    return Metadata(tensors, None, dict(stored))


def rows(count: int) -> Chunks:
    return [((row, 0), (1, 3)) for row in range(count)]


def test_what_is_looked_at_by_columns_reads_as_what_is_looked_at_one_by_one() -> None:
    by_columns = read(many())
    one_by_one = many()
    for place in (0, 4096, 8192):  # an entry that is no tensor has no place in one
        stored = list(one_by_one.storage_data.items())
        one_by_one.storage_data = dict([*stored[:place], item(f"note{place}", None, 10 * place, "n"), *stored[place:]])
        one_by_one.state_dict_metadata[f"note{place}"] = BytesStorageMetadata()
    assert len(by_columns.shards) == 10_000
    assert by_columns.shards == read(one_by_one).shards
    assert by_columns.extents == {"__0_0.distcp": 50_000, "__1_0.distcp": 50_000}


def test_a_box_that_two_items_claim_is_found_among_many() -> None:
    metadata = many()
    metadata.storage_data = [*itertools.chain.from_iterable(metadata.storage_data.items()), *item("w1", (7, 0))]
    with pytest.raises(CorruptFile, match=r"'w1': two items at \[7, 0\]"):
        read(metadata)


def test_two_boxes_at_one_place_are_found_among_many() -> None:
    metadata = many()
    metadata.state_dict_metadata["w0"].chunks.append(ChunkStorageMetadata(torch.Size((7, 0)), torch.Size((2, 3))))
    with pytest.raises(CorruptFile, match=r"'w0': two chunks at one offset, \[7:8, 0:3\] and \[7:9, 0:3\]"):
        read(metadata)


def test_very_many_different_boxes_are_read_though_not_all_are_remembered() -> None:
    found = read(Metadata({"w": tensor((40_000, 3), rows(40_000))}, None, dict([item("w", (39_999, 0))])))
    assert [shard.box for shard in found.shards] == [Box((39_999, 0), (1, 3))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("w.chunks[5].offsets = (True, 0)", r"'w0': a chunk's offsets: expected counts, found \[True, 0\]"),
        ("w.chunks[5].sizes = (9999, 3)", r"a chunk of sizes \[9999, 3\] at \[5, 0\] is outside of its shape"),
        ("info.offset = -1", "an item's offset: expected a count, found -1"),
        ("info.__dict__.pop('length')", "an item's length: expected a count, found nothing"),
        ("put(index, 'offset', (0.0, 0))", r"an item's place in its tensor: expected counts, found \[0.0, 0\]"),
    ],
)
def test_one_that_is_not_like_the_many_others_is_named(change: str, message: str) -> None:
    metadata = many()
    index, info = next(iter(metadata.storage_data.items()))
    names = {"w": metadata.state_dict_metadata["w0"], "index": index, "info": info, "put": object.__setattr__}
    exec(change, names)
    with pytest.raises(CorruptFile, match=message):
        read(metadata)


def test_fields_in_another_order_are_found_in_every_record() -> None:
    metadata = many()
    for info in metadata.storage_data.values():
        state = dict(reversed(vars(info).items()))
        info.__dict__.clear()
        info.__dict__.update(state)
    assert read(metadata) == read(many())


@pytest.mark.parametrize("version", ["1.0.0", "1.7", None], ids=repr)
def test_versions_of_the_known_format_are_read(version: str | None) -> None:
    metadata = good()
    metadata.version = version
    assert read(metadata) == read(good())


def test_a_later_version_of_the_format_is_not_guessed_at() -> None:
    metadata = good()
    metadata.version = "2.0.0"
    with pytest.raises(
        UnknownFormat, match=r"dir/.metadata: version '2.0.0' of the format; this hfdcp reads version 1"
    ):
        read(metadata)


def broken(change: str) -> Metadata:
    """The good one after a change, given as a statement about its parts."""
    metadata = good()
    w = metadata.state_dict_metadata["w"]
    index, info = next(iter(metadata.storage_data.items()))
    names = {"m": metadata, "w": w, "chunk": w.chunks[0], "index": index, "info": info, "put": object.__setattr__}
    exec(change, names | {"torch": torch, "item": item, "tensor": tensor, "StorageMeta": StorageMeta})
    return metadata


BROKEN = {
    "m.state_dict_metadata = 3": "state_dict_metadata: expected a list or dictionary, found 3",
    "del m.state_dict_metadata": "state_dict_metadata: expected a list or dictionary, found nothing",
    "m.state_dict_metadata = {1: w}": "state_dict_metadata: a key: expected text, found 1",
    "m.state_dict_metadata['v'] = 'x'": "'v': expected a TensorStorageMetadata, found 'x'",
    "m.state_dict_metadata['v'] = None": "'v': expected a TensorStorageMetadata, found nothing",
    "m.state_dict_metadata['v'] = chunk": "'v': expected a TensorStorageMetadata, found a ChunkStorageMetadata",
    "m.state_dict_metadata = [w]": "state_dict_metadata: a dictionary has a key without a value",
    "m.state_dict_metadata = [('a', w, w)]": "state_dict_metadata: too many values",
    "m.state_dict_metadata = ['w', w, 'w', w]": "state_dict_metadata: 'w' stands there twice",
    "put(w, 'size', None)": "'w': size: expected at most 64 counts, found nothing",
    "put(w, 'size', [4, 3])": "'w': size: expected at most 64 counts, found a list",
    "put(w, 'size', (1,) * 65)": r"'w': size: expected at most 64 counts, found \[1, 1",
    "put(w, 'size', (4, -3))": r"'w': size: expected counts, found \[4, -3\]",
    "put(w, 'size', (4, True))": r"'w': size: expected counts, found \[4, True\]",
    "put(w, 'size', (4, 3.0))": r"'w': size: expected counts, found \[4, 3.0\]",
    "put(w, 'size', (4, 2**63))": "'w': size: expected counts",
    "put(w, 'size', (4, '3'))": "'w': size: expected counts, found a tuple",
    "put(w, 'size', (4,))": "'w': a chunk of sizes .* is outside",
    "put(w, 'chunks', None)": "'w': chunks: expected a list or dictionary, found nothing",
    "put(w, 'chunks', [b'x'])": "'w': expected a ChunkStorageMetadata, found a bytes",
    "put(w, 'properties', None)": "'w': properties: expected a dtype, found nothing",
    "put(w.properties, 'dtype', 'float32')": "'w': properties: expected a dtype, found 'float32'",
    "put(chunk, 'offsets', None)": "'w': a chunk's offsets: expected at most 64 counts, found nothing",
    "put(chunk, 'sizes', 'x' * 1000)": r"'w': a chunk's sizes: .* found 'x{200}'… \(1000 characters\)",
    "put(chunk, 'sizes', (2,))": r"'w': a chunk of sizes \[2\] at \[0, 0\] is outside of its shape \[4, 3\]",
    "put(chunk, 'sizes', (2, 4))": r"'w': a chunk of sizes \[2, 4\] at \[0, 0\] is outside of its shape \[4, 3\]",
    "put(chunk, 'offsets', (2, 0)); put(chunk, 'sizes', (1, 3))": "'w': two chunks at one offset, .2:3, 0:3. and",
    "chunk.__dict__ = {}": "'w': the ChunkStorageMetadata has no state with named fields",
    "m.storage_data = None": "storage_data: expected a list or dictionary, found nothing",
    "m.storage_data = {'w': info}": "expected a MetadataIndex, found 'w'",
    "m.storage_data[index] = None": "'w': expected a _StorageInfo, found nothing",
    "m.storage_data.update([item('v', (0,))])": "'v': an item of it is stored, but state_dict",
    "m.storage_data.update([item('w', (1, 0))])": r"'w': an item at \[1, 0\], where the tensor has no chunk",
    "m.storage_data.update([item('w', (0,))])": r"'w': an item at \[0\], where the tensor has no chunk",
    "m.storage_data = [*item('w', (0, 0)), *item('w', (0, 0))]": r"'w': two items at \[0, 0\]",
    "m.storage_data = [*item('step', None), *item('step', None)]": "'step': two items of it",
    "put(index, 'offset', None)": "'w': an item's place in its tensor: expected at most 64 counts, found nothing",
    "put(index, 'fqn', 3)": "storage_data: a key's fqn: expected text, found 3",
    "info.relative_path = None": "'w': relative_path: expected text, found nothing",
    "info.relative_path = ''": "'w': relative_path: '' is no path inside the checkpoint",
    "info.relative_path = '/etc/passwd'": "'/etc/passwd' is no path inside",
    "info.relative_path = '../x'": "'../x' is no path inside",
    "info.relative_path = 'a/../x'": "'a/../x' is no path inside",
    "info.relative_path = 'a//x'": "'a//x' is no path inside",
    "info.relative_path = './x'": "'./x' is no path inside",
    "info.relative_path = 'x\\0'": "is no path inside",
    "info.relative_path = 'x\\ud800'": "is no path inside",
    "info.offset = -1": "'w': an item's offset: expected a count, found -1",
    "info.length = 1.5": "'w': an item's length: expected a count, found 1.5",
    "info.length = 2**63": "'w': an item's length: expected a count",
    "info.transform_descriptors = 'zstd'": "'w': transform_descriptors: expected a list or dictionary, found 'zstd'",
    "info.transform_descriptors = [1]": "'w': transform_descriptors: expected text, found 1",
    "m.planner_data = {'w': 'w'}": "planner_data: 'w': expected a path of names and numbers, found 'w'",
    "m.planner_data = {'w': ('a', None)}": "planner_data: 'w': expected a path of names and numbers, found a tuple",
    "m.planner_data = {3: ()}": "planner_data: a key: expected text, found 3",
    "m.storage_meta = 'x'": "expected a StorageMeta, found 'x'",
    "m.storage_meta = StorageMeta(save_id=7)": "storage_meta: save_id: expected text, found 7",
    "m.version = 1": "version: expected text, found 1",
    "m.__dict__ = {str(n): n for n in range(65)}": "the Metadata has no state with named fields",
}


@pytest.mark.parametrize(("change", "message"), BROKEN.items(), ids=BROKEN)
def test_a_field_that_is_missing_ill_typed_or_contradicts_another_is_named(change: str, message: str) -> None:
    with pytest.raises(CorruptFile, match=message) as caught:
        read(broken(change))
    assert str(caught.value).startswith("dir/.metadata: ")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "pickled", [None, 1, "x", [good()], TensorProperties(torch.float32)], ids=lambda value: type(value).__name__
)
def test_another_thing_than_metadata_is_refused(pickled: object) -> None:
    with pytest.raises(SourceError, match="expected a Metadata, found"):
        read(pickled)


def test_a_record_whose_state_is_no_dictionary_is_refused() -> None:
    with pytest.raises(CorruptFile, match="the Metadata has no state with named fields"):
        read_metadata(b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81K\x01b.", path="x")
    with pytest.raises(CorruptFile, match="the Metadata has no state with named fields"):
        read_metadata(b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.", path="x")
    with pytest.raises(CorruptFile, match="a field's name: expected text, found 1"):
        read_metadata(b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(K\x01K\x02ub.", path="x")


def test_a_small_file_whose_tensors_share_a_long_list_does_not_keep_us_busy() -> None:
    shared = tensor((4, 3), HALVES)
    shared.chunks.extend(shared.chunks * 2000)
    with pytest.raises(CorruptFile, match="they describe more than the file can hold"):
        read(Metadata({f"w{number}": shared for number in range(1000)}, None, {}))


def test_a_small_file_whose_names_share_a_long_path_does_not_keep_us_busy() -> None:
    path = ("a",) * 20_000
    metadata = good()
    metadata.planner_data = {f"w{number}": path for number in range(1000)}
    with pytest.raises(CorruptFile, match="spells another name"):
        read(metadata)


def test_a_box_of_a_tensor_that_the_table_calls_no_tensor_is_refused() -> None:
    metadata = good()
    metadata.state_dict_metadata["w"] = BytesStorageMetadata()
    with pytest.raises(CorruptFile, match="a box of a tensor, but state_dict_metadata says that it is none"):
        read(metadata)
