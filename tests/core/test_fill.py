"""Small items that lie side by side are read at once, and are what they are where each is opened alone."""

from __future__ import annotations

import io
import math
import uuid
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hfdcp_core import fill
from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, Shard, Span, TensorSpec
from hfdcp_core.consolidate import consolidate
from hfdcp_core.errors import HfdcpError
from hfdcp_core.manifest import SourceCheck
from hfdcp_core.plan import Copy, FilePlan, Read, row_major
from hfdcp_core.store import Sink, open_store
from hfdcp_core.windows import Strung, strung_shards


def saved(tensor: torch.Tensor) -> bytes:
    """Return what torch makes of a tensor."""
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def planned(items: Sequence[bytes], rows: Sequence[int], width: int = 5, *, each: int = 1) -> FilePlan:
    """Plan tensors of F32, each of so many items one above the other; all items lie one behind the other in a file."""
    shards, copies, shapes = [], [], []
    start = 0
    for number, (raw, extent) in enumerate(zip(items, rows, strict=True)):
        if number % each == 0:
            shapes.append(0)
        box = Box((shapes[-1], 0), (extent, width))
        shapes[-1] += extent
        shards.append(Shard(f"t{len(shapes)}", "F32", box, Span("items", start, start + len(raw)), TORCH_SAVE))
        copies.append(Copy(len(shapes) - 1, box, Read(number, 0, row_major(box.shape))))
        start += len(raw)
    specs = tuple((f"t{n + 1}", TensorSpec("F32", (extent, width))) for n, extent in enumerate(shapes))
    size = sum(spec.nbytes for _, spec in specs)
    return FilePlan("out.safetensors", b"", size, specs, tuple(shards), tuple(copies), (), 1 << 20)


def holding(items: Sequence[bytes]) -> Sink:
    """Return a store that holds the items."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.put("items", b"".join(items))
    return store


class Counting:
    """A source on this machine that counts reads."""

    def __init__(self, source: Sink) -> None:
        """Read from ``source``."""
        self._source = source
        self.reads = 0
        self.url, self.remote = source.url, False
        self.stamps, self.stat, self.list = source.stamps, source.stat, source.list

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Read, and count."""
        self.reads += 1
        self._source.read_into(path, start, buffer)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Read, and count."""
        self.reads += 1
        return self._source.read(path, start, stop)


@pytest.mark.parametrize("turned", [False, True], ids=["in their order", "the other way round"])
def test_items_of_very_many_rows_are_read_in_a_few_calls_and_each_is_held_against_its_checksum(turned: bool) -> None:
    values = [torch.full((2, 5), float(number)) for number in range(300)]
    items = [saved(value) for value in values]
    plan = planned(items, [2] * 300, each=3)
    source = Counting(holding(items[::-1] if turned else items))
    if turned:
        spans = [shard.span for shard in plan.shards[::-1]]
        shards = tuple(replace(shard, span=span) for shard, span in zip(plan.shards, spans, strict=True))
        plan = replace(plan, shards=shards)
    sink = open_store(f"memory://{uuid.uuid4().hex}")
    record = consolidate(plan, source, sink)
    assert record.source == SourceCheck(verified=300)
    assert source.reads < 10
    assert sink.read(plan.path, 0, plan.size) == b"".join(value.numpy().tobytes() for value in values)


def test_among_neighbours_those_of_another_form_are_opened_as_ever() -> None:
    values = [torch.arange(10.0).reshape(2, 5) + number for number in range(6)]
    items = [saved(value) for value in values]
    items[1] = saved(values[1].t().contiguous().t())  # its bytes lie in another order
    items[3] = saved(torch.cat([values[3], values[3]])[2:])  # a part of a larger storage
    unchecked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    items[4] = saved(values[4])
    torch.serialization.set_crc32_options(unchecked)
    sink = open_store(f"memory://{uuid.uuid4().hex}")
    for _ in range(2):  # when the forms are known, too
        plan = planned(items, [2] * 6)
        record = consolidate(plan, Counting(holding(items)), sink)
        assert record.source == SourceCheck(verified=5, unchecked=1)
        assert sink.read(plan.path, 0, plan.size) == b"".join(value.numpy().tobytes() for value in values)


def outcome(items: Sequence[bytes], plan: FilePlan) -> str:
    """Return what comes of a consolidation: the bytes, or what is said."""
    sink = open_store(f"memory://{uuid.uuid4().hex}")
    source = Counting(holding(items))
    try:
        record = consolidate(plan, source, sink)
    except HfdcpError as error:
        return f"{type(error).__name__}: {error}".replace(source.url, "source")
    return f"{record.source} {sink.read(plan.path, 0, plan.size).hex()}"


def test_whatever_is_damaged_is_told_as_where_each_item_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [saved(torch.arange(10.0).reshape(2, 5) * number) for number in range(3)]
    plan, length = planned(items, [2] * 3), len(items[1])
    cases = [[items[0], items[1][:at] + bytes([items[1][at] ^ 0x55]) + items[1][at + 1 :], items[2]]
             for at in range(0, length, 7)]  # fmt: skip
    cases += [items[:1], [items[0], items[1][: length // 2]], [items[0], items[2], items[1]]]
    together = [outcome(damaged, plan) for damaged in cases]
    monkeypatch.setattr(fill, "SMALL_BYTES", 0)
    assert together == [outcome(damaged, plan) for damaged in cases]
    told = [text for text in together if text.startswith("CorruptFile")]
    assert len(told) > length // 20
    assert any("CRC-32 of the data" in text for text in told)


SHAPE = (4, 3)
WHOLE = Shard("w", "F32", Box.whole(SHAPE), Span("a", 0, 48))


def plan_of(shards: Sequence[Shard], spec: TensorSpec, copies: Sequence[Copy] | None = None) -> FilePlan:
    """Return a plan of one tensor, which copies each shard whole unless it is told otherwise."""
    whole = [Copy(0, shard.box, Read(n, 0, row_major(shard.box.shape))) for n, shard in enumerate(shards)]
    return FilePlan("out", b"", 0, (("w", spec),), tuple(shards), tuple(whole if copies is None else copies), (), 64)


def rows(start: int, count: int, *, nbytes: int | None = None, dtype: str = "F32") -> Shard:
    """Return a shard of some rows."""
    box = Box((start, 0), (count, 3))
    size = math.prod(box.shape) * 4 if nbytes is None else nbytes
    return Shard("w", dtype, box, Span("a", start * 12, start * 12 + size))


@pytest.mark.parametrize(
    ("shards", "spec", "copies"),
    [
        ([rows(0, 2)], TensorSpec("F32", SHAPE), None),
        ([rows(2, 2), rows(0, 2)], TensorSpec("F32", SHAPE), None),
        ([rows(0, 2), rows(1, 3)], TensorSpec("F32", SHAPE), None),
        ([rows(0, 4, nbytes=50)], TensorSpec("F32", SHAPE), None),
        ([rows(0, 4, dtype="I32")], TensorSpec("F32", SHAPE), None),
        ([WHOLE], TensorSpec("F32", SHAPE), [Copy(0, Box((0, 0), (2, 3)), Read(0, 0, (3, 1)))]),
        ([WHOLE], TensorSpec("F32", SHAPE), [Copy(0, Box.whole(SHAPE), Read(0, 0, (1, 4)))]),
        ([replace(WHOLE, encoding=TORCH_SAVE, span=Span("a", 0, 9000))], TensorSpec("F32", SHAPE), None),
        ([Shard("w", "F32", Box((0, 0), (4, 2)), Span("a", 0, 32))], TensorSpec("F32", SHAPE), None),
        (
            [Shard("w", "F4", Box((n, 0), (2, 2)), Span("a", n, n + 2)) for n in (0, 2)],
            TensorSpec("F4", (4, 2)),
            None,
        ),
    ],
    ids=[
        "incomplete", "in another order", "overlapping", "longer than its box", "another dtype", "a part of a shard",
        "transposed", "large archive", "columns", "packed",
    ],
)  # fmt: skip
def test_a_tensor_of_anything_else_than_whole_shards_in_a_row_is_read_as_boxes(
    shards: list[Shard], spec: TensorSpec, copies: list[Copy] | None
) -> None:
    assert strung_shards(plan_of(shards, spec, copies), most=8000) == {}


def test_whole_shards_in_a_row_are_found() -> None:
    two = [rows(0, 1), rows(1, 3)]
    assert strung_shards(plan_of(two, TensorSpec("F32", SHAPE)), most=0) == {
        0: Strung(((two[0], 12), (two[1], 36)), 48)
    }
    scalar = Shard("w", "F32", Box((), ()), Span("a", 0, 4))
    assert strung_shards(plan_of([scalar], TensorSpec("F32", ())), most=0) == {0: Strung(((scalar, 4),), 4)}
    packed = Shard("w", "F4", Box.whole((3, 2)), Span("a", 0, 3))
    assert strung_shards(plan_of([packed], TensorSpec("F4", (3, 2))), most=0) == {0: Strung(((packed, 3),), 3)}
    operand = [Copy(1, WHOLE.box, Read(0, 0, (3, 1)))]
    assert strung_shards(plan_of([WHOLE], TensorSpec("F32", SHAPE), operand), most=0) == {}
