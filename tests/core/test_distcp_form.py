"""What was learned of one item holds for those like it, and for no other."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hfdcp_core.distcp_file import TorchItem, read_item
from hfdcp_core.distcp_form import MOST_LENGTHS, MOST_OF_ONE_LENGTH, Form, Known
from hfdcp_core.distcp_zip import Item
from hfdcp_core.errors import HfdcpError


def archive(value: torch.Tensor) -> bytes:
    """Return what torch makes of a tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def opened(raw: bytes, known: Known[TorchItem]) -> TorchItem:
    return read_item(lambda start, stop: raw[start:stop], len(raw), where="the item", known=known)


def outcome(raw: bytes, known: Known[TorchItem]) -> TorchItem | str:
    """Return what an item turns out to be, or what is said of it."""
    try:
        return opened(raw, known)
    except HfdcpError as error:
        return f"{type(error).__name__}: {error}"


class Counting(Known[TorchItem]):
    """Counts the items that had to be opened."""

    def __init__(self) -> None:
        """Count from 0."""
        super().__init__()
        self.opened = 0

    def remember(self, item: Item, form: Form, meaning: TorchItem) -> None:
        """Count one."""
        self.opened += 1
        super().remember(item, form, meaning)


def test_of_a_thousand_items_of_one_kind_one_is_opened() -> None:
    known = Counting()
    for number in range(1000):
        value = torch.full((3, 2), float(number))
        item = opened(archive(value), known)
        assert item.crc32 == zlib.crc32(value.numpy().tobytes())
    assert known.opened == 1


@pytest.mark.parametrize("size", [6, 1 << 15], ids=["read whole", "read at its ends"])
def test_whichever_byte_is_damaged_an_item_like_a_known_one_is_seen_as_if_it_were_the_first(size: int) -> None:
    known: Known[TorchItem] = Known()
    opened(archive(torch.zeros(size)), known)
    raw = archive(torch.arange(size, dtype=torch.float32))
    positions = [at for at in range(len(raw)) if at < 900 or at > len(raw) - 900]
    for at in positions:
        damaged = bytearray(raw)
        damaged[at] ^= 0x55
        assert outcome(bytes(damaged), known) == outcome(bytes(damaged), Known()), f"byte {at}"


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "dtype": lambda: torch.zeros(2, 3, dtype=torch.int32),
    "shape": lambda: torch.zeros(3, 2),
    "strides": lambda: torch.zeros(3, 2).t(),
    "offset": lambda: torch.zeros(9)[3:].reshape(2, 3),
    "storage larger than the tensor": lambda: torch.zeros(9)[:6].reshape(2, 3),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_items_of_another_kind_are_not_taken_for_those_that_are_known(make: Callable[[], torch.Tensor]) -> None:
    known: Known[TorchItem] = Known()
    opened(archive(torch.ones(2, 3)), known)
    raw = archive(make())
    assert opened(raw, known) == opened(raw, Known())


def test_a_writer_that_computes_no_checksums_is_told_from_one_that_does() -> None:
    known = Counting()
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        without = [archive(torch.full((4,), value)) for value in (1.0, 2.0)]
    finally:
        torch.serialization.set_crc32_options(before)
    assert [opened(raw, known).crc32 for raw in without] == [None, None]
    assert opened(archive(torch.ones(4)), known).crc32 == zlib.crc32(torch.ones(4).numpy().tobytes())


def test_the_memory_for_forms_is_bounded_and_what_was_forgotten_is_learned_again() -> None:
    known = Counting()
    raws = [archive(torch.zeros(size, dtype=torch.uint8)) for size in range(1, 64 * MOST_LENGTHS + 99, 64)]
    for raw in [*raws, *raws]:
        assert opened(raw, known) == opened(raw, Known())
    assert known.opened >= len(raws)
    alike = [archive(torch.zeros(rows, 840 // rows)) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 20)]
    assert len({len(raw) for raw in alike}) < len(alike) > MOST_OF_ONE_LENGTH
    for raw in [*alike, *alike]:
        assert opened(raw, known) == opened(raw, Known())


def test_a_form_with_much_beside_the_payload_is_not_kept(tmp_path: Path) -> None:
    known = Counting()
    path = tmp_path / ("n" * 240)  # stands in front of the name of every record
    torch.save(torch.ones(3), path)
    assert opened(path.read_bytes(), known) == opened(path.read_bytes(), known)
    assert known.opened == 0
