"""Laws that hold from a catalog to its plan, whatever the checkpoint and whatever is asked of it."""

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core import wire
from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, Catalog, FileStamp, Shard, Span, TensorSpec
from hfdcp_core.dtypes import TABLE
from hfdcp_core.errors import PlanError
from hfdcp_core.layout import Target, lay_out
from hfdcp_core.plan import Plan, Read, reshard, row_major
from hfdcp_core.recipe import define, recipe_named, select
from hfdcp_core.safetensors_file import parse_header

BYTES = [dtype.name for dtype in TABLE if dtype.bits % 8 == 0]


@st.composite
def checkpoints(draw: st.DrawFn) -> Catalog:
    """A complete checkpoint of some ranks: each tensor cut into a grid over them, some boxes held twice."""
    ranks = draw(st.integers(1, 3))
    names = draw(st.lists(st.sampled_from([f"layers.{n}.w" for n in range(6)]), min_size=1, max_size=4, unique=True))
    shards, tensors, nesting = [], {}, {}
    for number, name in enumerate(names):
        path = ("model", f"module.{name}")
        spec = TensorSpec(draw(st.sampled_from(BYTES)), tuple(draw(st.lists(st.integers(0, 4), max_size=3))))
        fqn = ".".join(path)
        tensors[fqn], nesting[fqn] = spec, path
        edges = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in spec.shape]
        for cell in itertools.product(*(itertools.pairwise(axis) for axis in edges)):
            box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            for rank in draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2, unique=True)):
                span = Span(f"__{rank}_0.distcp", 100 * number, 100 * number + 99)
                shards.append(Shard(fqn, spec.dtype, box, span, TORCH_SAVE))
    stamps = tuple(FileStamp(f"__{rank}_0.distcp", 1000, "1") for rank in range(ranks))
    return Catalog("dcp", tensors, tuple(draw(st.permutations(shards))), stamps, nesting=nesting)


def target_of(source: Catalog, max_file_size: int) -> Target:
    return lay_out(define(source, select(source).names, recipe_named("auto")), max_file_size=max_file_size)


def plan_of(source: Catalog, max_file_size: int) -> Plan:
    return reshard(source, target_of(source, max_file_size), window_bytes=64)


SIZES = st.integers(1, 200)


@given(checkpoints(), SIZES)
def test_every_element_of_every_tensor_is_copied_exactly_once(source: Catalog, max_file_size: int) -> None:
    for file in plan_of(source, max_file_size).files:
        copied = [0] * len(file.tensors)
        for copy in file.copies:
            copied[copy.tensor] += copy.box.volume
            assert copy.box.volume > 0
            assert file.shards[copy.read.shard].dtype == file.tensors[copy.tensor][1].dtype
        assert copied == [Box.whole(spec.shape).volume for _, spec in file.tensors]
        boxes = itertools.combinations(file.copies, 2)
        assert all(a.tensor != b.tensor or a.box.intersect(b.box) is None for a, b in boxes)


@given(checkpoints(), SIZES)
def test_a_target_that_keeps_the_boxes_copies_every_shard_whole_and_once(source: Catalog, max_file_size: int) -> None:
    # every copy fills just the box of its shard: where the target's box is the source's, the shard is the copy
    taken = []
    for file in plan_of(source, max_file_size).files:
        for number, copy in enumerate(file.copies):
            shard = file.shards[copy.read.shard]
            assert copy.box == shard.box
            assert copy.read == Read(number, 0, row_major(shard.box.shape))
            taken.append((shard.fqn, shard.box))
    assert sorted(taken, key=str) == sorted({(s.fqn, s.box) for s in source.shards if s.box.volume}, key=str)


@given(checkpoints(), SIZES)
def test_a_file_is_its_header_and_the_spans_of_its_tensors(source: Catalog, max_file_size: int) -> None:
    target = target_of(source, max_file_size)
    plan = reshard(source, target, window_bytes=64)
    for file in plan.files:
        spans = [shard.span for shard in target.catalog.shards if shard.span.path == file.path]
        assert file.size == len(file.header) + sum(span.length for span in spans)
        entries = parse_header(file.header, path=file.path, file_size=file.size).entries
        assert [
            (e.fqn, TensorSpec(e.dtype, e.shape)) for e in sorted(entries, key=lambda e: names(file.tensors, e.fqn))
        ] == [*file.tensors]
    assert plan.total_size == source.nbytes


def names(tensors: tuple[tuple[str, TensorSpec], ...], fqn: str) -> int:
    return [name for name, _ in tensors].index(fqn)


@given(checkpoints(), SIZES)
def test_every_tensor_is_in_one_file_under_its_cleaned_name(source: Catalog, max_file_size: int) -> None:
    held = [fqn for file in plan_of(source, max_file_size).files for fqn, _ in file.tensors]
    assert sorted(held) == sorted(fqn.removeprefix("model.module.") for fqn in source.tensors)


@given(checkpoints(), SIZES, st.randoms())
def test_the_order_of_shards_and_stamps_and_a_rest_on_disk_change_nothing(
    source: Catalog, max_file_size: int, random: Random
) -> None:
    shards, files = list(source.shards), list(source.files)
    random.shuffle(shards)
    random.shuffle(files)
    plan = plan_of(source, max_file_size)
    shuffled = wire.load_catalog(wire.dump_catalog(replace(source, shards=tuple(shards), files=tuple(files))))
    assert plan_of(shuffled, max_file_size) == plan
    assert tuple(wire.load_file_plan(wire.dump_file_plan(file)) for file in plan.files) == plan.files


@given(checkpoints(), st.data())
def test_a_box_that_is_lost_is_named_with_its_tensor(source: Catalog, data: st.DataObject) -> None:
    solid = [shard for shard in source.shards if shard.box.volume]
    if not solid:
        return
    lost = data.draw(st.sampled_from(solid))
    left = tuple(s for s in source.shards if (s.fqn, s.box) != (lost.fqn, lost.box))
    with pytest.raises(PlanError, match="exactly once") as caught:
        plan_of(replace(source, shards=left), 100)
    assert caught.value.problems == (f"{lost.fqn}: no shard holds {lost.box} of {source.tensors[lost.fqn]}",)


@given(checkpoints(), st.data())
def test_a_shard_that_is_shifted_is_refused_by_name(source: Catalog, data: st.DataObject) -> None:
    movable = [
        (shard, axis)
        for shard in source.shards
        for axis, extent in enumerate(source.tensors[shard.fqn].shape)
        if shard.box.volume and shard.box.stop[axis] < extent
    ]
    if not movable:
        return
    shard, axis = data.draw(st.sampled_from(movable))
    offset = (*shard.box.offset[:axis], shard.box.offset[axis] + 1, *shard.box.offset[axis + 1 :])
    shifted = replace(shard, box=Box(offset, shard.box.shape))
    others = tuple(s for s in source.shards if (s.fqn, s.box) != (shard.fqn, shard.box))
    with pytest.raises(PlanError, match="exactly once") as caught:
        plan_of(replace(source, shards=(*others, shifted)), 100)
    assert all(problem.startswith(f"{shard.fqn}: ") for problem in caught.value.problems)
