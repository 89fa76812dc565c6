"""torch's tensors as arrays over their memory, and the names of their dtypes."""

from __future__ import annotations

import torch

from hfdcp_core.dtypes import dtype_named
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


def torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape, or an offset, as torch counts it: two F4 elements are one of torch's.

    >>> torch_shape("F4", (3, 8)), torch_shape("F32", (3, 8))
    ((3, 4), (3, 8))
    """
    packed = dtype_named(name).packed
    return (*shape[:-1], shape[-1] // packed) if packed > 1 and shape else shape


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


def empty_like_stored(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a new CPU tensor of a safetensors dtype, of ``shape`` as torch counts it."""
    return torch.empty(shape, dtype=torch_dtype(dtype))


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
