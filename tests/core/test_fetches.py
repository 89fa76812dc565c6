"""Which ranges are fetched: what a file needs, once, in few requests, and never more at once than the budget."""

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.box import Box
from hfdcp_core.catalog import RAW, TORCH_SAVE, TORCH_SAVE_ZSTD, Catalog, Shard, Span, TensorSpec
from hfdcp_core.fetches import END_BYTES, FETCH_BYTES, GAP_BYTES, Fetch, fetches_of, joined
from hfdcp_core.layout import lay_out
from hfdcp_core.manifest import Numerics
from hfdcp_core.plan import Copy, FilePlan, Read, reshard, row_major
from hfdcp_core.quantization import settle
from hfdcp_core.recipe import Definition
from hfdcp_core.windows import Copies, view_of, windows

MIB = 1 << 20
BUDGET = 96 * MIB
WINDOW = 4 * MIB
AROUND = 1200
"""Bytes of a ``torch.save`` item beside its payload."""


@dataclass
class Draft:
    """A file plan in the making; each tensor is of bytes."""

    tensors: list[tuple[str, TensorSpec]]
    shards: list[Shard]
    copies: list[Copy]
    ends: dict[str, int]

    def tensor(self, *shape: int) -> int:
        self.tensors.append((f"t{len(self.tensors):05d}", TensorSpec("U8", shape)))
        return len(self.tensors) - 1

    def shard(self, tensor: int, box: Box, *, path: str = "a", encoding: str = RAW, gap: int = 0, order=(), of=None):
        """Let a shard hold a box, behind what the file holds already; or let the box be a part of the shard ``of``."""
        whole = of or box
        length = whole.volume + (AROUND if encoding == TORCH_SAVE else 0)
        start = self.ends.get(path, 0) + gap
        self.ends[path] = start + length
        inside = box.relative_to(whole).offset
        strides = row_major(whole.shape)
        steps = tuple(reversed(strides)) if order else strides
        first = sum(a * b for a, b in zip(inside, strides, strict=True))
        self.copies.append(Copy(tensor, box, Read(len(self.shards), first, steps)))
        name = self.tensors[tensor][0]
        self.shards.append(Shard(name, "U8", whole, Span(path, start, start + length), encoding=encoding))

    def plan(self, window_bytes: int = WINDOW) -> FilePlan:
        size = sum(spec.nbytes for _, spec in self.tensors)
        return FilePlan("out", b"", size, tuple(self.tensors), tuple(self.shards), tuple(self.copies), (), window_bytes)

    def fetches(self, *, budget_bytes: int = BUDGET, window_bytes: int = WINDOW) -> tuple[Fetch, ...]:
        return fetches_of(self.plan(window_bytes), budget_bytes=budget_bytes)


@pytest.fixture
def draft() -> Draft:
    return Draft([], [], [], {})


def spans(fetches: tuple[Fetch, ...]) -> list[tuple[str, int, int]]:
    return [(fetch.path, fetch.start, fetch.stop) for fetch in fetches]


def test_a_large_tensor_is_fetched_in_pieces_each_for_the_windows_that_take_from_it(draft: Draft) -> None:
    draft.shard(draft.tensor(20, MIB), Box.whole((20, MIB)))
    assert draft.fetches() == (
        Fetch("a", 0, 8 * MIB, 0, 1),
        Fetch("a", 8 * MIB, 16 * MIB, 2, 3),
        Fetch("a", 16 * MIB, 20 * MIB, 4, 4),
    )


def test_columns_share_half_of_the_budget(draft: Draft) -> None:
    tensor = draft.tensor(64, 16 * MIB)
    for number in range(16):
        draft.shard(tensor, Box((0, number * MIB), (64, MIB)), path=f"rank{number}")
    fetches = draft.fetches()
    assert {fetch.nbytes for fetch in fetches} == {3 * MIB, MIB}
    assert sum(fetch.nbytes for fetch in fetches) == 64 * 16 * MIB
    for window in range(256):
        assert sum(fetch.nbytes for fetch in fetches if fetch.first <= window <= fetch.last) <= BUDGET // 2


@pytest.mark.parametrize("encoding", [RAW, TORCH_SAVE])
def test_a_thousand_small_items_are_few_fetches_in_whatever_order_they_are_wanted(draft: Draft, encoding: str) -> None:
    tensors = [draft.tensor(4, 1000) for _ in range(1000)]
    for number in range(1000):
        draft.shard(tensors[number * 7 % 1000], Box.whole((4, 1000)), encoding=encoding, gap=64)
    fetches = draft.fetches()
    assert len(fetches) == 1
    assert fetches[0].stop == draft.ends["a"]


def test_small_items_that_are_wanted_much_later_are_left_for_later(draft: Draft) -> None:
    tensors = [draft.tensor(1, 512 << 10) for _ in range(200)]
    for number in range(200):
        draft.shard(tensors[number // 2 + number % 2 * 100], Box.whole((1, 512 << 10)))
    fetches = draft.fetches()
    assert sum(fetch.nbytes for fetch in fetches) == 200 * (512 << 10)
    assert len(fetches) == 200  # neighbours in the file are wanted 50 MiB apart


def test_an_item_is_fetched_with_its_ends(draft: Draft) -> None:
    draft.shard(draft.tensor(1, 100_000), Box.whole((1, 100_000)), encoding=TORCH_SAVE)
    assert spans(draft.fetches()) == [("a", 0, 100_000 + AROUND)]


def test_the_tail_of_an_item_in_several_pieces_is_fetched_first(draft: Draft) -> None:
    draft.shard(draft.tensor(20, MIB), Box.whole((20, MIB)), encoding=TORCH_SAVE)
    stop = 20 * MIB + AROUND
    fetches = draft.fetches()
    assert Fetch("a", stop - END_BYTES, stop, 0, 0) in fetches
    assert Fetch("a", 0, 4 * MIB + AROUND, 0, 0) in fetches
    assert max(fetch.stop for fetch in fetches) == stop
    assert sum(fetch.nbytes for fetch in fetches) < 1.001 * stop


@pytest.mark.parametrize(("rows", "expected"), [(80, 2), (1, 1)], ids=["large", "opened whole"])
def test_of_an_item_that_is_needed_in_part_both_ends_are_fetched_too(draft: Draft, rows: int, expected: int) -> None:
    of = Box.whole((2 * rows, 30_000))
    tensor = draft.tensor(rows, 30_000)
    draft.shard(tensor, Box.whole((rows, 30_000)), encoding=TORCH_SAVE, of=of)
    draft.copies[0] = replace(draft.copies[0], read=Read(0, rows * 30_000, (30_000, 1)))
    draft.shards.append(replace(draft.shards[0], span=Span("b", 0, 5)))  # one that nothing is taken of
    wanted = spans(draft.fetches())
    assert len(wanted) == expected
    assert wanted[0][1] == 0
    assert wanted[-1][2] == draft.shards[0].span.stop


def test_a_gap_is_read_where_it_is_short_and_little_of_all(draft: Draft) -> None:
    for number in range(5):
        draft.shard(draft.tensor(1, MIB), Box.whole((1, MIB)), gap=GAP_BYTES if number < 4 else GAP_BYTES + 1)
    assert [stop - start for _, start, stop in spans(draft.fetches())] == [7 * MIB, MIB]


def test_gaps_are_not_read_when_they_add_up(draft: Draft) -> None:
    for _ in range(100):
        draft.shard(draft.tensor(1, 100_000), Box.whole((1, 100_000)), gap=MIB - 1)
    fetches = draft.fetches()
    assert sum(fetch.nbytes for fetch in fetches) <= 100 * 100_000 + 4 * MIB
    assert len(fetches) == 96


@pytest.mark.parametrize("case", ["transposed", "sparse", "a large storage", "a long stream"])
def test_what_is_read_against_its_order_is_left(draft: Draft, case: str) -> None:
    box = Box.whole((3000, 3000) if case == "transposed" else (300, 300))  # which takes more than one window
    tensor = draft.tensor(*box.shape)
    if case == "sparse":
        draft.shard(tensor, box, of=Box.whole((300, 9000)))
    else:
        draft.shard(tensor, box, order=case == "transposed", encoding=RAW if case == "transposed" else TORCH_SAVE)
    if case == "a large storage":
        draft.shards[0] = replace(draft.shards[0], span=Span("a", 0, 10 * MIB))
    if case == "a long stream":
        draft.shards[0] = replace(draft.shards[0], span=Span("a", 0, 10 * MIB), encoding=TORCH_SAVE_ZSTD)
    assert draft.fetches() == ()


def test_a_short_stream_is_fetched_whole_for_all_windows(draft: Draft) -> None:
    draft.shard(draft.tensor(10, MIB), Box.whole((10, MIB)))
    draft.shards[0] = replace(draft.shards[0], span=Span("a", 5, 1005), encoding=TORCH_SAVE_ZSTD)
    assert draft.fetches() == (Fetch("a", 5, 1005, 0, 2),)


def test_what_two_tensors_take_of_one_place_is_fetched_for_each(draft: Draft) -> None:
    first, _, second = draft.tensor(4, MIB), draft.tensor(0, 5), draft.tensor(4, MIB)
    draft.shard(first, Box.whole((4, MIB)))
    draft.shard(second, Box.whole((4, MIB)))
    draft.shards[1] = replace(draft.shards[1], span=draft.shards[0].span)
    assert draft.fetches() == (Fetch("a", 0, 4 * MIB, 0, 1),)


def test_a_tensor_that_nothing_fills_takes_nothing(draft: Draft) -> None:
    draft.tensor(3, 3)
    assert draft.fetches() == ()


@settings(deadline=None)  # it counts every byte
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    window_bytes=st.integers(1, 200),
    budget_bytes=st.integers(64, 2000),
)
def test_every_needed_byte_is_in_a_fetch_while_its_window_is_filled_and_hardly_any_other_is(
    sizes: list[tuple[int, int]], order, window_bytes: int, budget_bytes: int
) -> None:
    draft = Draft([], [], [], {})
    tensors = [draft.tensor(*shape) for shape in sizes]
    order.shuffle(tensors)
    for number in tensors:
        rows, columns = sizes[number]
        for half in range(2) if columns % 2 == 0 else ():
            draft.shard(number, Box((0, half * columns // 2), (rows, columns // 2)), path=f"f{half}")
        if columns % 2:
            draft.shard(number, Box.whole((rows, columns)), path="f0", gap=number % 3)
    fetches = draft.fetches(budget_bytes=budget_bytes, window_bytes=window_bytes)
    needed = sum(rows * columns for rows, columns in sizes)
    read = {(fetch.path, byte) for fetch in fetches for byte in range(fetch.start, fetch.stop)}
    assert {(s.span.path, byte) for s in draft.shards for byte in range(s.span.start, s.span.stop)} <= read
    assert sum(fetch.nbytes for fetch in fetches) == len(read) <= needed + max(budget_bytes // 8, needed // 100)
    assert [fetch.first for fetch in fetches] == sorted(fetch.first for fetch in fetches)
    copies = Copies(draft.plan(window_bytes))
    for number, window in enumerate(windows((spec for _, spec in draft.tensors), window_bytes)):
        alive = [fetch for fetch in fetches if fetch.first <= number <= fetch.last]
        for copy, box, shared in (met for piece in window for met in copies.meeting(piece)):
            shard = draft.shards[copy.read.shard]
            part = view_of(copy, shard).part(shared.relative_to(box).offset, shared.shape)
            start, path = shard.span.start + part.offset, shard.span.path
            assert [f for f in alive if f.path == path and f.start <= start and start + part.reach <= f.stop]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60), st.integers(0, 30)), max_size=30),
    st.integers(8, 400),
)
def test_joining_keeps_every_part_in_one_fetch_and_for_as_long(
    drawn: list[tuple[int, int, int]], budget_bytes: int
) -> None:
    parts = sorted(
        (Fetch("a" if at % 2 else "b", at, at + size, first, first + at % 4) for at, size, first in drawn),
        key=lambda part: part.first,
    )
    fetches = joined(parts, budget_bytes=budget_bytes)
    assert len(fetches) <= len(parts)
    for part in parts:
        assert any(
            (part.path == fetch.path and fetch.start <= part.start and part.stop <= fetch.stop)
            and (fetch.first <= part.first and part.last <= fetch.last)
            for fetch in fetches
        )
    assert all(fetch.nbytes <= max(budget_bytes // 2, 60) for fetch in fetches)
    assert FETCH_BYTES == 8 * MIB


@pytest.mark.parametrize("window_bytes", [512, 4096, 1 << 20])
@pytest.mark.parametrize("asked", [Numerics("F16"), Numerics(dequantize=True)], ids=["cast", "dequantise"])
def test_what_numbers_are_made_from_is_fetched_once(asked: Numerics, window_bytes: int) -> None:
    """Numbers and scales lie in files of their own, and one fetch may be smaller than what is held of an operand."""
    dtype = "F8_E4M3" if asked.dequantize else "F32"
    specs = {"w": TensorSpec(dtype, (96, 80)), "w_scale": TensorSpec("F32", (96, 1)), "one": TensorSpec("BF16", ())}
    shards = tuple(Shard(n, s.dtype, Box.whole(s.shape), Span(n, 0, s.nbytes)) for n, s in specs.items())
    settled = settle([Definition(name, spec, name) for name, spec in specs.items()], asked)
    target = lay_out(settled.definitions, max_file_size=1 << 30)
    [plan] = reshard(Catalog("safetensors", specs, shards), target, window_bytes=window_bytes).files
    fetches = fetches_of(plan, budget_bytes=1 << 20)
    assert sum(fetch.nbytes for fetch in fetches) == sum(spec.nbytes for spec in specs.values())
    for name, spec in specs.items():
        covered = sorted((fetch.start, fetch.stop) for fetch in fetches if fetch.path == name)
        assert covered[0][0] == 0
        assert covered[-1][1] == spec.nbytes
        assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))
