"""Tensor values that come from a name alone, and the record of what was made.

The bytes of a tensor exist, whole and hashed, before torch sees them and before anything is sharded; so the truth
depends on no sharding, saving or reading code. Runs in the rank processes, which alone import torch.
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
import numpy.typing as npt
import torch

from hfdcp_core.dtypes import TABLE, Dtype, dtype_of_torch, size_in_bytes
from hfdcp_core.testing._truth import TruthTensor

BLOCK = 1 << 17
"""Random 64-bit words that are drawn once for a tensor; larger tensors repeat them, mixed with the block's number."""
_MIX = 0x9E3779B97F4A7C15
DTYPES = {row.name: getattr(torch, row.torch) for row in TABLE if row.torch and hasattr(torch, row.torch)}
"""Every dtype that both safetensors and this torch have."""


def words(name: str, count: int) -> npt.NDArray[np.uint64]:
    """Return ``count`` 64-bit words that depend on ``name`` and on nothing else, at the speed of memory."""
    seed = zlib.crc32(name.encode())
    base = np.random.SFC64(seed).random_raw(min(count, BLOCK))
    out = np.empty(count, np.uint64)
    for number, start in enumerate(range(0, count, BLOCK)):
        part = out[start : start + BLOCK]
        np.bitwise_xor(base[: part.size], np.uint64(number * _MIX % 2**64), out=part)
    return out


def finite_mask(dtype: Dtype) -> int:
    """Return the bits of a 64-bit word that may be set, so that every float in it is finite and every bool is one.

    >>> from hfdcp_core.dtypes import dtype_named
    >>> hex(finite_mask(dtype_named("BF16"))), hex(finite_mask(dtype_named("BOOL")))
    ('0xbfffbfffbfffbfff', '0x101010101010101')
    """
    if dtype.name == "BOOL":
        return 0x0101010101010101
    bits = 32 if dtype.name == "C64" else dtype.bits
    if bits < 8 or not (dtype.floating or dtype.name == "C64"):
        return 2**64 - 1
    top_of_exponent = sum(1 << (bits - 2 + shift) for shift in range(0, 64, bits))
    return (2**64 - 1) & ~top_of_exponent


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor that ``name`` stands for, the same in every process and every run."""
    row = dtype_of_torch(str(dtype).removeprefix("torch."))
    nbytes = size_in_bytes(row.name, logical_shape(shape, row))
    data = words(name, -(-nbytes // 8))
    data &= np.uint64(finite_mask(row))
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data.view(np.uint8)[:nbytes]).view(dtype).reshape(shape)


def logical_shape(shape: tuple[int, ...], row: Dtype) -> tuple[int, ...]:
    """Return the shape as safetensors counts it: torch counts bytes in the last dimension of packed kinds."""
    return (*shape[:-1], shape[-1] * row.packed) if shape else shape


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the row-major little-endian bytes of a whole tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def describe(tensor: torch.Tensor) -> TruthTensor:
    """Return what is true of a whole tensor."""
    row = dtype_of_torch(str(tensor.dtype).removeprefix("torch."))
    digest = hashlib.sha256(raw_bytes(tensor)).hexdigest()
    return TruthTensor(row.name, logical_shape(tuple(tensor.shape), row), digest)


class Recorder:
    """Makes whole tensors and notes what is true of them."""

    def __init__(self) -> None:
        """Begin with nothing recorded."""
        self.tensors: dict[str, TruthTensor] = {}

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the tensor that ``name`` stands for and record it under that name."""
        return self.record(name, whole(name, shape, dtype))

    def record(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Record a whole tensor that the checkpoint will hold as ``name``, and return it."""
        self.tensors[name] = describe(tensor)
        return tensor

    def fill(self, module: torch.nn.Module, prefix: str = "") -> None:
        """Give every parameter and buffer of a module, not yet sharded, the values of its name."""
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(self.make(prefix + name, tuple(tensor.shape), tensor.dtype))
