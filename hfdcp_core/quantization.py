"""What is asked of the numbers becomes operations: which tensors are cast, dequantised, quantised, or why they cannot.

Scaled numbers are told by their companions, as published checkpoints have them:

- ``X`` of eight bits with ``X_scale_inv`` or ``X_scale``: both are multiplied with, whatever their name says. The scale
  is one number, one for each row, or one for each block;
- ``X_blocks`` with ``X_scales``: MXFP4, which become ``X``.

A scale is never left behind, and never forgotten: eight-bit numbers without their scale are wrong by a factor that
nobody sees. So they are refused where they would be read as plain numbers, and the companions of what stays as saved
stay as saved too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from hfdcp_core.catalog import Skipped, TensorSpec
from hfdcp_core.dtypes import TABLE, dtype_named
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.manifest import FP8_BLOCK, Numerics
from hfdcp_core.operation import (
    CAST,
    CASTABLE,
    DECODABLE,
    DEQUANTIZE,
    DEQUANTIZE_MXFP4,
    MXFP4_BYTES,
    QUANTIZE,
    SCALES,
    Operand,
    Operation,
    blocks_of,
    mxfp4_shape,
)
from hfdcp_core.recipe import Definition

USUAL_BLOCK = (128, 128)
"""Rows and columns of a block where we choose."""
MOST_IN_BLOCK = 1 << 16
"""More numbers than a block that is quantised may have: they are worked on together."""
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""What the name of a scale ends with, behind the name of its numbers."""
ACTIVATION_SCALES = ("input_scale", "input_scale_inv", "activation_scale")
"""What scales of activations are called, beside a ``weight``: nothing needs them when it is no longer quantised."""
EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2"})
PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
"""Numbers that need no scale."""
KEPT_LAYERS = frozenset({"lm_head", "head", "output", "score", "classifier", "embed_out", "proj_out", "router", "gate"})
"""Linear layers that are not quantised: heads, and what chooses experts."""
_NOT_LINEAR = re.compile(r"embed|norm|wte|wpe|(^|[._])ln(_|\.|\d)")
"""What the names of embeddings and norms have in them."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What is written, now that it is known how the numbers are made."""

    definitions: tuple[Definition, ...]
    """The tensors to write."""
    skipped: tuple[Skipped, ...] = ()
    """What nothing needs any more."""


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to the numbers of some tensors."""

    what: str
    """In words for a person."""
    tensors: int
    """How many there are."""
    before: int
    """Their bytes in the source, scales counted."""
    after: int
    """Their bytes in the output, scales counted."""


def numerics_of(
    *, dtype: str, keep_dtype: tuple[str, ...], dequantize: bool, quantize: str, block_size: tuple[int, ...]
) -> Numerics:
    """Return what is asked of the numbers, with the safetensors name of the dtype.

    Raises:
        UsageError: It makes no sense.
    """
    asked = Numerics(_castable(dtype) if dtype else "", keep_dtype, dequantize, quantize, block_size)
    if quantize not in {"", FP8_BLOCK}:
        raise UsageError(f"--quantize {quantize!r}: there is {FP8_BLOCK}")
    if quantize and dequantize:
        raise UsageError("--quantize and --dequantize: numbers get scales or lose them, not both")
    if keep_dtype and not asked.asked:
        raise UsageError("--keep-dtype names exceptions of --dtype, --dequantize or --quantize, and none is given")
    if block_size and not (quantize or dequantize):
        raise UsageError("--block-size says how large blocks with a scale are: for --dequantize or --quantize")
    if block_size and (len(block_size) != 2 or min(block_size) < 1):
        raise UsageError("--block-size is the rows and columns of a block, such as 128x128")
    if quantize and math.prod(block_size) > MOST_IN_BLOCK:
        raise UsageError(f"--block-size: a block that is quantised has at most {MOST_IN_BLOCK} numbers")
    return asked


def _castable(name: str) -> str:
    """Return the safetensors name of a dtype that can be cast to, known by that name or torch's.

    >>> _castable("bfloat16"), _castable("F32")
    ('BF16', 'F32')
    """
    rows = [row for row in TABLE if row.name in CASTABLE]
    for row in rows:
        if name in {row.name, row.torch}:
            return row.name
    raise UsageError(f"--dtype {name!r}: it is one of {', '.join(str(row.torch) for row in rows)}")


def settle(definitions: Iterable[Definition], asked: Numerics) -> Settled:
    """Decide how the numbers of each tensor are made.

    Args:
        definitions: The wanted tensors, all of them with the bytes of their source.
        asked: What is asked; a block size that is known from the model's config stands in it too.

    Raises:
        PlanError: Something cannot be done; ``problems`` has all of it.
    """
    definitions = tuple(definitions)
    if not asked.asked:
        return Settled(definitions)
    settler = _Settler(definitions, asked)
    settled = settler.settle()
    PlanError.raise_for("the numbers cannot be made as asked", settler.problems)
    return settled


@dataclass(slots=True)
class _Settler:
    """One decision for each tensor, and everything that stands against it."""

    definitions: tuple[Definition, ...]
    asked: Numerics
    problems: list[str] = field(default_factory=list)

    def settle(self) -> Settled:
        by_name = {definition.fqn: definition for definition in self.definitions}
        scales = companions(by_name)
        used = {scale.fqn for scale in scales.values()}
        self._refuse_idle_patterns()
        written: list[Definition] = []
        gone: list[str] = []
        for definition in self.definitions:
            if definition.operation is not None:
                written.append(definition)  # a recipe said what becomes of it
            elif definition.fqn in scales:
                written += self._scaled(definition, scales[definition.fqn])
                gone += [scales[definition.fqn].fqn, *_of_activations(definition.fqn, by_name)] if self._undoes else []
            elif definition.fqn not in used:
                written += self._plain(definition)
            elif not self._undoes:
                written.append(definition)  # a scale is as it was where its numbers are
        self._refuse_nothing_done(written)
        self._refuse_clashes(written)
        dropped = {name for name in gone if name not in used}
        reason = "scale of activations of a layer that is no longer quantised"
        return Settled(
            tuple(definition for definition in written if definition.fqn not in dropped),
            tuple(Skipped(by_name[name].source, reason) for name in gone if name in dropped),
        )

    @property
    def _undoes(self) -> bool:
        return self.asked.dequantize

    def _kept(self, definition: Definition) -> bool:
        names = {definition.fqn, definition.source}
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.asked.keep_dtype)

    def _refuse_idle_patterns(self) -> None:
        names = {name for definition in self.definitions for name in (definition.fqn, definition.source)}
        self.problems += [
            f"--keep-dtype {pattern!r} matches no tensor"
            for pattern in self.asked.keep_dtype
            if not any(fnmatchcase(name, pattern) for name in names)
        ]

    def _scaled(self, numbers: Definition, scale: Definition) -> list[Definition]:
        """Decide what becomes of numbers with a scale."""
        kept = self._kept(numbers)
        if self.asked.dequantize and kept:
            self.problems.append(
                f"{numbers.fqn}: --keep-dtype would leave it quantised, and a config says one thing of all: "
                "leave out --dequantize or the pattern"
            )
        elif self.asked.dequantize:
            return self._dequantized(numbers, scale)
        elif self.asked.quantize:
            self.problems.append(
                f"{numbers.fqn} has scales already ({scale.fqn}); --dequantize makes plain numbers of it"
            )
        elif not kept and numbers.spec.dtype != self.asked.dtype and dtype_named(numbers.spec.dtype).floating:
            self.problems.append(
                f"{numbers.fqn} is {numbers.spec.dtype}, and only {scale.fqn} makes it right: --dequantize multiplies "
                f"with that, --keep-dtype {numbers.fqn!r} leaves both as they are"
            )
        return [numbers]

    def _dequantized(self, numbers: Definition, scale: Definition) -> list[Definition]:
        dtype = self.asked.dtype or "BF16"
        operands = Operand(numbers.source, numbers.spec), Operand(scale.source, scale.spec)
        both = (numbers.arrangement, scale.arrangement)
        if is_mxfp4(numbers):
            name, target = _plain_name(numbers.fqn), TensorSpec(dtype, mxfp4_shape(numbers.spec.shape))
            return [Definition(name, target, numbers.source, Operation(DEQUANTIZE_MXFP4, operands, target), both)]
        block = block_of(numbers.spec, scale.spec, self.asked.block_size)
        if isinstance(block, str):
            self.problems.append(f"{numbers.fqn}: {block}")
            return []
        target = TensorSpec(dtype, numbers.spec.shape)
        return [Definition(numbers.fqn, target, numbers.source, Operation(DEQUANTIZE, operands, target, block), both)]

    def _plain(self, definition: Definition) -> list[Definition]:
        """Decide what becomes of a tensor without a scale."""
        dtype, wanted = definition.spec.dtype, self.asked.dtype
        if self._kept(definition) or not dtype_named(dtype).floating or dtype == wanted:
            return [definition]
        if dtype not in PLAIN:
            if wanted or (self.asked.dequantize and dtype in EIGHT_BITS):
                self.problems.append(
                    f"{definition.fqn} is {dtype}, and no scale of it is known (looked for {definition.fqn}_scale_inv "
                    f"and _scale): as plain numbers it may be wrong; --keep-dtype {definition.fqn!r} leaves it as it is"
                )
            return [definition]
        if self.asked.quantize and is_linear(definition):
            return _quantized(definition, self.asked.block_size or USUAL_BLOCK)
        return [_cast(definition, wanted)] if wanted else [definition]

    def _refuse_nothing_done(self, written: Iterable[Definition]) -> None:
        kinds = {definition.operation.kind for definition in written if definition.operation}
        if self.problems:
            return  # those are why
        if self.asked.dequantize and not kinds & {DEQUANTIZE, DEQUANTIZE_MXFP4}:
            self.problems.append(
                "--dequantize: no tensor has scales (X with X_scale_inv or X_scale, X_blocks with X_scales)"
            )
        if self.asked.quantize and QUANTIZE not in kinds:
            self.problems.append(
                "--quantize: no tensor is the matrix of a linear layer (two dimensions, named ….weight)"
            )

    def _refuse_clashes(self, written: Iterable[Definition]) -> None:
        seen: set[str] = set()
        for definition in written:
            if definition.fqn in seen:
                self.problems.append(f"{definition.fqn} would be there twice")
            seen.add(definition.fqn)


# ---- what belongs together ------------------------------------------------------------------------------------------


def companions(by_name: Mapping[str, Definition]) -> dict[str, Definition]:
    """Return the scale of each tensor that has one."""
    found = {}
    for name, definition in by_name.items():
        for other in _scale_names(definition):
            if other in by_name:
                found[name] = by_name[other]
                break
    return found


def _scale_names(definition: Definition) -> tuple[str, ...]:
    if is_mxfp4(definition):
        return (f"{_plain_name(definition.fqn)}_scales",)
    if dtype_named(definition.spec.dtype).bits != 8 or not dtype_named(definition.spec.dtype).floating:
        return ()
    return tuple(definition.fqn + suffix for suffix in SCALE_SUFFIXES)


def is_mxfp4(definition: Definition) -> bool:
    """Whether a tensor may be the blocks of MXFP4 numbers."""
    shape = definition.spec.shape
    of_blocks = definition.fqn.endswith("_blocks") and definition.spec.dtype == "U8"
    return of_blocks and len(shape) > 1 and shape[-1] == MXFP4_BYTES


def _plain_name(blocks: str) -> str:
    return blocks.removesuffix("_blocks")


def _of_activations(fqn: str, names: Iterable[str]) -> list[str]:
    layer = fqn.removesuffix("weight")
    return [layer + name for name in ACTIVATION_SCALES if layer + name in names]


def is_linear(definition: Definition) -> bool:
    """Whether a tensor is the matrix of a linear layer that bears eight bits, as far as names tell.

    >>> names = ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight", "m.norm.weight"]
    >>> [is_linear(Definition(name, TensorSpec("BF16", (256, 128)), name)) for name in names]
    [True, False, False, False]
    """
    layer, _, last = definition.fqn.rpartition(".")
    if len(definition.spec.shape) != 2 or last != "weight" or definition.spec.dtype not in PLAIN:
        return False
    return layer.rpartition(".")[2] not in KEPT_LAYERS and not _NOT_LINEAR.search(layer)


def block_of(numbers: TensorSpec, scale: TensorSpec, given: tuple[int, ...]) -> tuple[int, ...] | str:
    """Return the extents of the block that each scale is for, or why they cannot be told.

    >>> block_of(TensorSpec("F8_E4M3", (200, 300)), TensorSpec("F32", (2, 3)), (128, 128))
    (128, 128)
    >>> block_of(TensorSpec("F8_E4M3", (256, 384)), TensorSpec("F32", (2, 3)), ())
    (128, 128)
    >>> block_of(TensorSpec("F8_E4M3", (256, 384)), TensorSpec("F32", (256, 1)), ())
    (1, 384)
    """
    if numbers.dtype not in EIGHT_BITS or scale.dtype not in DECODABLE:
        return f"{numbers.dtype} with scales of {scale.dtype} cannot be dequantised"
    shape, scales = numbers.shape, scale.shape
    for block in _candidates(shape, scales, given):
        if _fits(blocks_of(shape, block), scales):
            return block
    if given:
        return f"scales {list(scales)} do not fit numbers {list(shape)} in blocks of {given[0]}x{given[1]}"
    return (
        f"scales {list(scales)} do not say how large the blocks of numbers {list(shape)} are: the model's config does "
        "(--config), or --block-size"
    )


def _candidates(shape: tuple[int, ...], scales: tuple[int, ...], given: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the blocks that may be meant, the surest first: everything, the given one, a row, an expert, equal ones."""
    ones, full = tuple(1 for _ in shape), tuple(max(1, extent) for extent in shape)
    if math.prod(scales) == 1:
        yield full
    if given and len(shape) > 1:
        yield (*ones[2:], *given)
    yield (*ones[1:], *full[-1:])
    yield (*ones[2:], *full[-2:])
    if not given and len(scales) == len(shape) and (equal := tuple(map(_equal_blocks, shape, scales))):
        yield tuple(extent or 1 for extent in equal)


def _fits(blocks: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Whether scales are for so many blocks in each dimension; the last of them may be left out where there is one."""
    left_out = blocks[len(scales) :]
    return math.prod(blocks) == math.prod(scales) == 1 or (blocks[: len(scales)] == scales and set(left_out) <= {1})


def _equal_blocks(extent: int, count: int) -> int:
    """Return how long blocks are of which so many make up a dimension, if they are equal and a power of two; else 0.

    >>> [_equal_blocks(*row) for row in ((256, 2), (100, 1), (300, 3), (200, 2), (5, 0))]
    [128, 100, 0, 0, 0]
    """
    if count == 1:
        return max(1, extent)
    size = extent // count if count else 0
    return size if size * count == extent and size & (size - 1) == 0 else 0


def _cast(definition: Definition, dtype: str) -> Definition:
    target = TensorSpec(dtype, definition.spec.shape)
    operands = (Operand(definition.source, definition.spec),)
    return replace(definition, spec=target, operation=Operation(CAST, operands, target))


def _quantized(definition: Definition, block: tuple[int, ...]) -> list[Definition]:
    operands = (Operand(definition.source, definition.spec),)
    numbers = TensorSpec("F8_E4M3", definition.spec.shape)
    scales = TensorSpec("F32", blocks_of(definition.spec.shape, block))
    return [
        replace(definition, spec=numbers, operation=Operation(QUANTIZE, operands, numbers, block)),
        replace(
            definition,
            fqn=f"{definition.fqn}_scale_inv",
            spec=scales,
            operation=Operation(SCALES, operands, scales, block),
        ),
    ]


# ---- what a person hears --------------------------------------------------------------------------------------------


def changes(definitions: Iterable[Definition]) -> tuple[Change, ...]:
    """Say what happens to the numbers, kind by kind."""
    rows: dict[str, list[tuple[int, int, int]]] = {}
    for definition in definitions:
        if operation := definition.operation:
            read = 0 if operation.kind == SCALES else sum(operand.spec.nbytes for operand in operation.operands)
            count = 0 if operation.kind == SCALES else 1
            rows.setdefault(_words(operation), []).append((count, read, definition.spec.nbytes))
    return tuple(Change(what, *map(sum, zip(*numbers, strict=True))) for what, numbers in rows.items())


def _words(operation: Operation) -> str:
    source, target = operation.operands[0].spec.dtype, operation.target.dtype
    if operation.kind in {QUANTIZE, SCALES}:
        return f"quantised from {source} to F8_E4M3, a scale for every {operation.block[0]}x{operation.block[1]}"
    if operation.kind == CAST:
        return f"cast from {source} to {target}"
    return f"dequantised from {'MXFP4' if operation.kind == DEQUANTIZE_MXFP4 else source} to {target}"


def unconverted(definitions: Iterable[Definition]) -> Iterator[str]:
    """Yield the layers whose matrices are not quantised, for a config that says so."""
    seen = set()
    for definition in definitions:
        layer, _, _ = definition.fqn.rpartition(".")
        plain = definition.operation is None or definition.operation.kind == CAST
        if plain and len(definition.spec.shape) > 1 and layer not in seen:
            seen.add(layer)
            yield layer
