"""A user's own adapter (state dict in, state dict out) is run once on tensors without data, and noted as arrangements.

Runs in a process of its own (``python -m hfdcp_core.tracing``), because it imports torch and whatever the adapter does.
A request comes as one JSON document on stdin, the answer goes as one to the file that the request names, since adapters
print.

A `TracedTensor` has a shape and a dtype, and knows where each of its elements comes from. Operations that only move
elements (views, transpositions, slices, parts, joints, stacks, copies) and casts lead to another one. Any other
operation would have to be repeated on real numbers, so it is refused by its name: an adapter is either traced as a
whole or not at all.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from hfdcp_core import rearrange as arranging
from hfdcp_core import wire
from hfdcp_core.arrangement import Arrangement, arranged, merged
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.dtypes import TABLE
from hfdcp_core.equations import Equations
from hfdcp_core.errors import HfdcpError, PlanError
from hfdcp_core.recipe_text import write_recipe

aten = torch.ops.aten
_TO_COPY, _UNSAFE_VIEW, _ALIAS = (
    getattr(aten, name).default for name in ("_to_copy", "_unsafe_view", "_reshape_alias")
)
_TORCH = {row.name: getattr(torch, row.torch) for row in TABLE if row.torch and hasattr(torch, row.torch)}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


class TracedTensor(torch.Tensor):
    """A tensor without data whose elements are known by where they come from."""

    arrangement: Arrangement

    @staticmethod
    def __new__(cls, arrangement: Arrangement, dtype: torch.dtype) -> Self:
        """Make one; ``dtype`` is what its elements have been cast to since they were read."""
        meta = torch.device("meta")
        made = torch.Tensor._make_wrapper_subclass(cls, arrangement.shape, dtype=dtype, device=meta)  # noqa: SLF001 - torch documents it
        made.arrangement = arrangement
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is without looking at data."""
        return f"TracedTensor({self.arrangement.spec})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do an operation on arrangements, or refuse it."""
        if func is _TO_COPY:
            return _cast(func, args[0], **(kwargs or {}))
        act = _ACTS.get(func)
        if act is None:
            raise PlanError(f"{func} changes or looks at numbers; only what moves them can be traced")
        given = list(_tensors([*args, *(kwargs or {}).values()]))
        if strange := [one for one in given if not isinstance(one, TracedTensor)]:
            raise PlanError(f"{func} with a tensor of {list(strange[0].shape)} that is not of the checkpoint")
        if len({one.dtype for one in given}) > 1:
            raise PlanError(f"{func} of tensors of different dtypes")
        result = act(*(_unwrapped(arg) for arg in args), **{k: _unwrapped(v) for k, v in (kwargs or {}).items()})
        return _wrapped(result, given[0].dtype)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _unwrapped(value: Any) -> Any:
    if isinstance(value, TracedTensor):
        return value.arrangement
    return [_unwrapped(item) for item in value] if isinstance(value, list | tuple) else value


def _wrapped(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, Arrangement):
        return TracedTensor(result, dtype)
    return [_wrapped(item, dtype) for item in result] if isinstance(result, list) else result


# ---- operations -----------------------------------------------------------------------------------------------------


def _same(given: Arrangement, *_: object, **__: object) -> Arrangement:
    return given


def _reshaped(given: Arrangement, shape: Sequence[int]) -> Arrangement:
    return arranging.regrouped(given, shape)


def _transposed(given: Arrangement, a: int = 0, b: int = 1) -> Arrangement:
    axes = len(given.shape)
    order = list(range(axes))
    if axes:
        order[a], order[b] = order[b], order[a]
    return arranging.permuted(given, order)


def _turned(given: Arrangement) -> Arrangement:
    return _transposed(given) if len(given.shape) == 2 else given


def _slice(
    given: Arrangement, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Arrangement:
    axis, extent = dim % len(given.shape), given.shape[dim]
    first, last, _ = slice(start, stop).indices(extent)
    part = arranging.sliced(given, axis, first, max(first, last))
    if step == 1:
        return part
    count = -(-part.shape[axis] // step)
    filled = arranging.padded(part, axis, count * step)  # what is padded is left out again
    apart = arranging.regrouped(filled, (*part.shape[:axis], count, step, *part.shape[axis + 1 :]))
    return arranging.selected(apart, axis + 1, 0)


def _parts(given: Arrangement, sizes: Sequence[int] | int, dim: int = 0) -> list[Arrangement]:
    axis, extent = dim % len(given.shape), given.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - start) for start in range(0, extent, sizes)]
    stops = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [arranging.sliced(given, axis, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _unbound(given: Arrangement, dim: int = 0) -> list[Arrangement]:
    return [arranging.selected(given, dim, index) for index in range(given.shape[dim])]


def _squeezed(given: Arrangement, dims: int | Sequence[int] | None = None) -> Arrangement:
    axes = len(given.shape)
    wanted = range(axes) if dims is None else [d % axes for d in ([dims] if isinstance(dims, int) else dims)]
    return arranging.regrouped(given, [n for axis, n in enumerate(given.shape) if n != 1 or axis not in wanted])


def _expanded(given: Arrangement, sizes: Sequence[int], **_: object) -> Arrangement:
    more = len(sizes) - len(given.shape)
    wanted = [there if size == -1 else size for size, there in zip(sizes, [1] * more + list(given.shape), strict=True)]
    if math.prod(wanted) != math.prod(given.shape):
        raise PlanError("aten.expand repeats elements, and each is written once")
    return arranging.regrouped(given, wanted)


def _joined(parts: list[Arrangement], dim: int = 0) -> Arrangement:
    kept = [part for part in parts if part.shape != (0,)] or parts[:1]
    return arranging.joined(kept, dim)


def _stacked(parts: list[Arrangement], dim: int = 0) -> Arrangement:
    return arranging.stacked(parts, dim)


def _padded(given: Arrangement, pad: Sequence[int], value: float = 0) -> Arrangement:
    if value or min(pad) < 0 or any(pad[::2]):
        raise PlanError("aten.constant_pad_nd other than with zeros at the end")
    for number, more in enumerate(pad[1::2]):
        axis = len(given.shape) - 1 - number
        given = arranging.padded(given, axis, given.shape[axis] + more)
    return given


_ACTS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.view.default, _UNSAFE_VIEW, aten.reshape.default, _ALIAS), _reshaped),
    **dict.fromkeys((aten.clone.default, aten.detach.default, aten.alias.default, aten.contiguous.default), _same),
    **dict.fromkeys((aten.lift_fresh.default, aten.lift_fresh_copy.default), _same),
    aten.transpose.int: _transposed,
    aten.t.default: _turned,
    aten.permute.default: arranging.permuted,
    aten.slice.Tensor: _slice,
    aten.select.int: arranging.selected,
    aten.split.Tensor: _parts,
    aten.split_with_sizes.default: _parts,
    aten.unbind.int: _unbound,
    aten.unsqueeze.default: arranging.unsqueezed,
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _squeezed),
    aten.expand.default: _expanded,
    aten.cat.default: _joined,
    aten.stack.default: _stacked,
    aten.constant_pad_nd.default: _padded,
}
"""What only moves elements."""


def _cast(func: Any, given: TracedTensor, **options: Any) -> TracedTensor:
    """Note another dtype; elements that were cast already would lose twice, and only the last would be repeated."""
    dtype = options.get("dtype") or given.dtype
    read = _TORCH[given.arrangement.dtype]
    if given.dtype not in {dtype, read}:
        raise PlanError(f"{func} casts a second time: {read} to {given.dtype} to {dtype}")
    return TracedTensor(given.arrangement, dtype)


# ---- adapters -------------------------------------------------------------------------------------------------------


def trace(
    adapter: Callable[[dict[str, Any]], Mapping[str, Any]], tensors: Mapping[str, tuple[str, TensorSpec]]
) -> dict[str, Any]:
    """Run an adapter on tensors without data.

    Args:
        adapter: State dict in, state dict out.
        tensors: By the name that the adapter sees: the name as saved, and what it is.

    Returns:
        The answer: arrangement and dtype of every target, by name.

    Raises:
        PlanError: It does what cannot be traced.
    """
    if odd := [name for name, (_, spec) in tensors.items() if spec.dtype not in _TORCH]:
        raise PlanError(f"{odd[0]} is {tensors[odd[0]][1].dtype}, which this torch has no name for")
    given = {name: TracedTensor(arranged(saved, spec), _TORCH[spec.dtype]) for name, (saved, spec) in tensors.items()}
    with torch.no_grad():
        made = adapter(dict(given))
    if not isinstance(made, Mapping):
        raise PlanError(f"the adapter returns a {type(made).__name__}, not a state dict")
    return {"targets": {str(name): _traced(name, value) for name, value in made.items()}}


def _traced(name: object, value: object) -> dict[str, Any]:
    if not isinstance(value, TracedTensor):
        raise PlanError(f"{name} comes out as a {type(value).__name__} that is not made of tensors of the checkpoint")
    return {"dtype": _NAMES[value.dtype], "arrangement": wire.encode(merged(value.arrangement))}


def load_adapter(text: str) -> Callable[[dict[str, Any]], Mapping[str, Any]] | Equations:
    """Return what ``module:name`` or ``file.py:name`` is: a function, an object with ``to_hf``, or a recipe of rules.

    Raises:
        PlanError: It cannot be imported, or is neither.
    """
    place, _, path = text.rpartition(":")
    found: Any = _module(place)
    for name in path.split("."):
        if not hasattr(found, name):
            raise PlanError(f"{place} has no {path}")
        found = getattr(found, name)
    if isinstance(found, Equations):
        return found
    found = getattr(found, "to_hf", found)
    if not callable(found):
        raise PlanError(
            f"{text} is a {type(found).__name__}: expected a function of a state dict, or an object with to_hf"
        )
    return found  # type: ignore[no-any-return]


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(Path(place).resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def transformers_adapter(config: Mapping[str, Any]) -> Callable[[dict[str, Any]], Mapping[str, Any]]:
    """Return transformers' own way back: from the names of its modules to those that its checkpoints have.

    Raises:
        PlanError: This transformers does not know the model.
    """
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    model_type = str(config.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        raise PlanError(f"transformers {transformers.__version__} knows no model_type {model_type!r}")
    made = transformers.CONFIG_MAPPING[model_type].from_dict(dict(config))
    name = next(iter(config.get("architectures") or []), "")
    cls = getattr(transformers, name, None)
    with torch.device("meta"):
        model = cls(made) if cls is not None else transformers.AutoModelForCausalLM.from_config(made)  # type: ignore[no-untyped-call]
    return functools.partial(revert_weight_conversion, model)


def expected(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names and shapes of the tensors that a model's files have, by transformers' own way back."""
    adapter = transformers_adapter(config)
    assert isinstance(adapter, functools.partial)
    [model] = adapter.args
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}
    made = trace(adapter, {name: (name, TensorSpec("F32", shape)) for name, shape in shapes.items()})["targets"]
    return {
        "expected": {name: [math.prod(group) for group in one["arrangement"]["groups"]] for name, one in made.items()}
    }


def _request(data: Mapping[str, Any]) -> dict[str, Any]:
    if data.get("expected"):
        return expected(data["config"])
    tensors = {name: (saved, TensorSpec(dtype, tuple(shape))) for name, saved, dtype, shape in data["tensors"]}
    adapter = load_adapter(data["adapter"]) if data["adapter"] else transformers_adapter(data["config"])
    if isinstance(adapter, Equations):
        return {"recipe": write_recipe(adapter), "inverted": adapter.inverted}
    return trace(adapter, tensors)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def main() -> None:
    """Answer the request on stdin."""
    data = json.load(sys.stdin)
    try:
        answer = _request(data)
    except Exception as error:  # noqa: BLE001 - whatever an adapter raises is what its user must hear
        own = next((one for one in _chain(error) if isinstance(one, HfdcpError)), None)
        frames = traceback.extract_tb(error.__traceback__)
        inner = next(
            (
                f
                for f in reversed(frames)
                if "hfdcp_core" not in f.filename and "site-packages/torch/" not in f.filename
            ),
            None,
        )
        where = f" ({Path(inner.filename).name}, line {inner.lineno}: {inner.line})" if inner else ""
        answer = {"error": f"{own or f'{type(error).__name__}: {error}'}{where}"}
    Path(data["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
