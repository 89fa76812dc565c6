"""Write boxes of tensors to their places in files, without a step of Python for each row.

Where a box is one run of bytes in its file it is written by plain writes, straight from the tensor's memory. Any other
box (columns) is put there by strided copies into the mapped file.
"""

from __future__ import annotations

import math
import mmap
import os

import numpy as np
import torch

from hfdcp_core.dcp.orders import Place
from hfdcp_core.dcp.tensors import memory_of, windows_of
from hfdcp_core.plan import row_major
from hfdcp_core.store import os_faults

WINDOW_BYTES = 16 << 20
"""How much of a tensor is copied at a time where its memory cannot be written from directly."""


def write_box(fd: int, place: Place, tensor: torch.Tensor, *, where: str) -> None:
    """Write a box of a tensor to its place in an open file.

    Args:
        fd: The file, open for reading and writing; all of its space is there.
        place: Where the box goes.
        tensor: The box; on any device, of any strides.
        where: What the file is called in messages.

    Raises:
        StorageError: Writing failed.
    """
    with os_faults(f"write {where}"):
        for at, window in windows_of(tensor.detach(), WINDOW_BYTES if _must_be_copied(tensor) else 1 << 62):
            offset = tuple(map(sum, zip(place.at, at, strict=True)))
            _write_window(fd, place, offset, _plain(window))


def _must_be_copied(tensor: torch.Tensor) -> bool:
    return memory_of(tensor) is None or not tensor.is_contiguous()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().resolve_conj().resolve_neg()


def _write_window(fd: int, place: Place, offset: tuple[int, ...], window: torch.Tensor) -> None:
    shape, size = tuple(window.shape), window.element_size()
    strides = row_major(place.whole)
    first = place.start + size * sum(a * b for a, b in zip(offset, strides, strict=True))
    array = memory_of(window)
    if array is None:
        raise TypeError(f"a tensor of {window.dtype} has no plain memory")
    if is_one_run(shape, place.whole):
        _write_all(fd, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, first)
    else:
        last = first + size * sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + size
        with _Mapped(fd, first, last) as (mapped, shift):
            steps = [size * stride for stride in strides]
            np.ndarray(shape, array.dtype, mapped, shift, steps)[...] = array


def is_one_run(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a box of a row-major array is one run of it.

    >>> is_one_run((2, 8), (4, 8)), is_one_run((1, 3), (4, 8)), is_one_run((2, 3), (4, 8))
    (True, True, False)
    """
    cut = [axis for axis, (extent, room) in enumerate(zip(shape, whole, strict=True)) if extent != room]
    return not cut or math.prod(shape[: cut[-1]]) == 1


def _write_all(fd: int, data: memoryview, start: int) -> None:
    while data:
        count = os.pwrite(fd, data, start)
        data, start = data[count:], start + count


class _Mapped:
    """The bytes ``[first, last)`` of a file in memory, and how far into it they begin."""

    def __init__(self, fd: int, first: int, last: int) -> None:
        page = first - first % mmap.ALLOCATIONGRANULARITY
        self._map = mmap.mmap(fd, last - page, offset=page)
        self._shift = first - page

    def __enter__(self) -> tuple[mmap.mmap, int]:
        return self._map, self._shift

    def __exit__(self, *_: object) -> None:
        self._map.close()
