"""The one table of dtypes: safetensors name, bits, torch name.

safetensors names are used everywhere inside; torch names are met in DCP metadata only. An unknown name is an error,
never a guess. Source of the names and bits: the ``Dtype`` enum of safetensors 0.8 and torch 2.13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdcp_core.errors import UnknownDtype


@dataclass(frozen=True, slots=True)
class Dtype:
    """How one kind of element lies in bytes."""

    name: str
    """What safetensors calls it."""
    bits: int
    """Bits of one element; below 8 for packed kinds."""
    torch: str | None = None
    """The attribute of ``torch``, or None where torch has none."""
    floating: bool = False
    """Whether NaN, Inf and a cast to another floating dtype make sense."""
    packed: int = 1
    """Logical elements in one torch element: 2 for ``float4_e2m1fn_x2``, whose last dimension counts bytes."""


TABLE = (
    Dtype("F64", 64, "float64", floating=True),
    Dtype("F32", 32, "float32", floating=True),
    Dtype("F16", 16, "float16", floating=True),
    Dtype("BF16", 16, "bfloat16", floating=True),
    Dtype("F8_E4M3", 8, "float8_e4m3fn", floating=True),
    Dtype("F8_E5M2", 8, "float8_e5m2", floating=True),
    Dtype("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", floating=True),
    Dtype("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", floating=True),
    Dtype("F8_E8M0", 8, "float8_e8m0fnu", floating=True),
    Dtype("F6_E2M3", 6, floating=True),
    Dtype("F6_E3M2", 6, floating=True),
    Dtype("F4", 4, "float4_e2m1fn_x2", floating=True, packed=2),
    Dtype("C64", 64, "complex64"),
    Dtype("I64", 64, "int64"),
    Dtype("I32", 32, "int32"),
    Dtype("I16", 16, "int16"),
    Dtype("I8", 8, "int8"),
    Dtype("U64", 64, "uint64"),
    Dtype("U32", 32, "uint32"),
    Dtype("U16", 16, "uint16"),
    Dtype("U8", 8, "uint8"),
    Dtype("BOOL", 8, "bool"),
)
_BY_NAME = {dtype.name: dtype for dtype in TABLE}
BITS = {dtype.name: dtype.bits for dtype in TABLE}
"""Of one element, by safetensors name."""
_BY_TORCH = {dtype.torch: dtype for dtype in TABLE if dtype.torch}
NOT_IN_SAFETENSORS = frozenset({"complex128", "qint8", "quint8", "qint32", "complex32"})
"""torch dtypes that occur in checkpoints and that the format cannot hold."""


def dtype_named(name: str) -> Dtype:
    """Return the row of a safetensors name.

    Raises:
        UnknownDtype: The table has no such name.

    >>> dtype_named("BF16").bits
    16
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnknownDtype(f"unknown dtype {name!r}: safetensors has {', '.join(_BY_NAME)}") from None


def dtype_of_torch(name: str) -> Dtype:
    """Return the row of a torch dtype, given as the attribute's name.

    Raises:
        UnknownDtype: safetensors cannot hold it, or nobody knows it.

    >>> dtype_of_torch("float8_e4m3fn").name
    'F8_E4M3'
    """
    try:
        return _BY_TORCH[name]
    except KeyError:
        why = "safetensors cannot hold it" if name in NOT_IN_SAFETENSORS else "it is not in the table of dtypes"
        raise UnknownDtype(f"torch.{name}: {why}") from None


def size_in_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes, in a safetensors file or as a raw payload.

    Raises:
        UnknownDtype: The dtype is not in the table, or a packed kind ends inside a byte.

    >>> size_in_bytes("F32", (2, 3)), size_in_bytes("F4", (5, 12)), size_in_bytes("I64", ())
    (24, 30, 8)
    """
    bits = dtype_named(dtype).bits * math.prod(shape)
    if bits % 8:
        raise UnknownDtype(f"{dtype} of shape {list(shape)} ends inside a byte")
    return bits // 8
