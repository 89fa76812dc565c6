"""The boxes of a rank as one run of bytes, of which any part can be asked for; nothing is copied beforehand.

Boxes that follow one another in a final file do so in the run, so that one request fetches many small ones. A box whose
memory is row-major and on this machine gives its own memory; of any other (on a device, transposed, conjugated) only
the part that is asked for is copied.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from hfdcp_core.box import boxes_of_run
from hfdcp_core.dcp.orders import HandedBox, Key
from hfdcp_core.dcp.tensors import bytes_of, memory_of
from hfdcp_core.errors import PlanError

COPIED_BYTES = 4 << 20
"""How much is copied at a time, at most, of a box that does not give its own memory."""


class BoxRun:
    """What one rank hands over."""

    def __init__(self, boxes: Sequence[HandedBox], tensors: Mapping[Key, torch.Tensor]) -> None:
        """Take the boxes that were planned, and the tensors that they are.

        Raises:
            PlanError: A tensor is not the one that was planned.
        """
        PlanError.raise_for(
            "the planner gives other tensors than it planned",
            [
                f"{box.key[0]}: {list(found.shape)}, {found.nbytes} bytes; planned: {list(box.shape)}, {box.nbytes}"
                for box in boxes
                if (found := tensors[box.key]).nbytes != box.nbytes or tuple(found.shape) != box.shape
            ],
        )
        self._starts = [box.start for box in boxes]
        self._tensors = [tensors[box.key].detach() for box in boxes]
        self.size = boxes[-1].start + boxes[-1].nbytes if boxes else 0
        """Bytes of the whole run."""

    def parts(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes ``[start, stop)`` in order, in parts.

        Raises:
            PlanError: They are not all in the run.
        """
        if not 0 <= start <= stop <= self.size:
            raise PlanError(f"bytes [{start}, {stop}) were asked for of {self.size} that this rank has")
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first, tensor = self._starts[number], self._tensors[number]
            end = min(stop, first + tensor.nbytes)
            yield from _bytes_between(tensor, start - first, end - first)
            start, number = end, number + 1

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from ``start`` on."""
        for part in self.parts(start, start + len(buffer)):
            np.copyto(np.frombuffer(buffer[: len(part)], np.uint8), np.frombuffer(part, np.uint8))
            buffer = buffer[len(part) :]


def _bytes_between(tensor: torch.Tensor, start: int, stop: int) -> Iterator[memoryview]:
    array = memory_of(tensor)
    if array is not None and tensor.is_contiguous():
        yield array.reshape(-1).view(np.uint8).data[start:stop]
        return
    size = tensor.element_size()
    step, last = max(1, COPIED_BYTES // size), -(-stop // size)
    for first in range(start // size, last, step):
        end = min(first + step, last)
        data = memoryview(_copied(tensor, first, end))
        yield data[max(start - first * size, 0) : min(stop, end * size) - first * size]


def _copied(tensor: torch.Tensor, first: int, stop: int) -> bytearray:
    """Return the elements ``[first, stop)`` of a tensor, counted in row-major order."""
    data = bytearray()
    for offset, shape in boxes_of_run(tuple(tensor.shape), first, stop):
        data += bytes_of(tensor[tuple(slice(at, at + extent) for at, extent in zip(offset, shape, strict=True))])
    return data
