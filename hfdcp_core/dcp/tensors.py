"""torch's tensors as arrays over their memory, and the names of their dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hfdcp_core.dtypes import dtype_named, dtype_of_torch
from hfdcp_core.errors import UnknownDtype
from hfdcp_core.read import Array


def torch_dtype(name: str) -> torch.dtype:
    """Return what torch calls a dtype of safetensors.

    Raises:
        UnknownDtype: This torch has no such dtype.

    >>> torch_dtype("BF16")
    torch.bfloat16
    """
    attribute = dtype_named(name).torch
    found = getattr(torch, attribute, None) if attribute else None
    if not isinstance(found, torch.dtype):
        raise UnknownDtype(f"{name}: torch {torch.__version__} has no such dtype")
    return found


def stored_name(dtype: torch.dtype) -> str:
    """Return what safetensors calls a dtype of torch.

    Raises:
        UnknownDtype: safetensors cannot hold it.

    >>> stored_name(torch.bfloat16)
    'BF16'
    """
    return dtype_of_torch(str(dtype).removeprefix("torch.")).name


def torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape, or an offset, as torch counts it: two F4 elements are one of torch's.

    >>> torch_shape("F4", (3, 8)), torch_shape("F32", (3, 8))
    ((3, 4), (3, 8))
    """
    packed = dtype_named(name).packed
    return (*shape[:-1], shape[-1] // packed) if packed > 1 and shape else shape


def logical_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape, or an offset, that torch counts, in the elements of safetensors.

    >>> logical_shape("F4", (3, 4)), logical_shape("F32", (3, 4))
    ((3, 8), (3, 4))
    """
    packed = dtype_named(name).packed
    return (*shape[:-1], shape[-1] * packed) if packed > 1 and shape else shape


def memory_of(tensor: torch.Tensor) -> Array | None:
    """Return an array of unsigned integers over a tensor's own memory, or None where there is none to write into.

    That is so for a tensor on another device, and for one that resolves its elements when they are asked for
    (conjugated, negated). Strides of the tensor are those of the array.
    """
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not plain or tensor.is_conj() or tensor.is_neg():
        return None
    size = tensor.element_size()
    unit = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
    if unit is None:
        return None
    array: Array = tensor.detach().view(unit).numpy().view(f"u{size}")
    return array


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as row-major bytes: its own memory where that is so already, else a copy.

    >>> len(bytes_of(torch.zeros(4, 6).t()[:1, :1]))
    4
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # reshape would keep the odd stride of a single element
    return flat.view(torch.uint8).numpy().data


def windows_of(tensor: torch.Tensor, most_bytes: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut a tensor into boxes of at most ``most_bytes`` (but at least one element), in row-major order.

    Yields:
        Where each box starts, and the box, as a view.

    >>> [(at, tuple(part.shape)) for at, part in windows_of(torch.zeros(3, 2), 16)]
    [((0, 0), (2, 2)), ((2, 0), (1, 2))]
    """
    if tensor.nbytes <= most_bytes or not tensor.dim():
        if tensor.numel():
            yield (0,) * tensor.dim(), tensor
        return
    row = tensor[0].nbytes
    if row > most_bytes:
        for index in range(len(tensor)):
            for at, part in windows_of(tensor[index], most_bytes):
                yield (index, *at), part.unsqueeze(0)
        return
    step = most_bytes // row
    for start in range(0, len(tensor), step):
        yield (start, *(0 for _ in tensor.shape[1:])), tensor[start : start + step]


def keeps_values(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every value of one dtype is one of the other, so that a copy between them loses nothing.

    >>> keeps_values(torch.bfloat16, torch.float32), keeps_values(torch.float32, torch.bfloat16)
    (True, False)
    """
    if stored == wanted:
        return True
    if stored.is_complex or wanted.is_complex:
        return wanted.is_complex and (stored.is_complex or stored.is_floating_point) and _finer(stored, wanted)
    if stored.is_floating_point != wanted.is_floating_point:
        return False
    return _finer(stored, wanted)


def _finer(stored: torch.dtype, wanted: torch.dtype) -> bool:
    if stored.is_floating_point or stored.is_complex:
        ours, theirs = torch.finfo(stored), torch.finfo(wanted)
        return theirs.eps <= ours.eps and theirs.max >= ours.max and theirs.smallest_normal <= ours.smallest_normal
    if torch.bool in (stored, wanted):
        return stored == torch.bool
    low, high = torch.iinfo(stored), torch.iinfo(wanted)
    return high.min <= low.min and high.max >= low.max
