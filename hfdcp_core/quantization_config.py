"""What a model's config says of its numbers, and how it is made to say what was done to them.

``quantization_config`` tells a loader that weights have scales. Where they no longer have any it must go, since loaders
would look for scales that are not there; where they have now, it must say of what kind. Everything else in the config
stays as it is, to the byte, but for the dtype, which is the one that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from hfdcp_core import json_text
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.manifest import Numerics
from hfdcp_core.quantization import USUAL_BLOCK
from hfdcp_core.ties import TEXT_CONFIGS

KEY = "quantization_config"
"""What a config calls it."""
DTYPES = ("torch_dtype", "dtype")
"""Where a config says in which dtype a model is loaded: transformers' older name, and its newer one."""


def stated_block(text: str) -> tuple[int, ...]:
    """Return the rows and columns of a block, where a config states them.

    >>> stated_block('{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}}')
    (128, 64)
    >>> stated_block('{"quantization_config": {"quant_method": "mxfp4"}}')
    ()
    """
    for path in _paths(KEY):
        stated = _at(json.loads(text), (*path, "weight_block_size"))
        if (
            isinstance(stated, list)
            and len(stated) == 2
            and all(type(extent) is int and extent > 0 for extent in stated)
        ):
            return tuple(stated)
    return ()


def _paths(key: str) -> Iterator[tuple[str, ...]]:
    yield (key,)
    yield from ((name, key) for name in TEXT_CONFIGS)


def _at(value: object, path: Iterable[str]) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def configured(text: str, asked: Numerics, layers: Iterable[str]) -> str:
    """Return a config that says what was done.

    Args:
        text: The config as it was.
        asked: What was done.
        layers: Where weights were quantised: the layers that were not.

    >>> configured('{"torch_dtype": "float32", "quantization_config": {}}', Numerics(dtype="BF16", dequantize=True), [])
    '{"torch_dtype": "bfloat16"}'
    """
    if asked.dequantize or asked.quantize:
        for path in _paths(KEY):
            text = json_text.removed(text, path)
    if asked.quantize:
        text = json_text.inserted(text, KEY, _indented(_fp8(asked, layers)))
    return _with_dtype(text, asked.dtype) if asked.dtype else text


def _with_dtype(text: str, dtype: str) -> str:
    """Let a config that names a dtype name this one."""
    for key in DTYPES:
        for path in _paths(key):
            if isinstance(_at(json.loads(text), path), str):
                text = json_text.replaced(text, path, json.dumps(dtype_named(dtype).torch))
    return text


def _fp8(asked: Numerics, layers: Iterable[str]) -> Mapping[str, object]:
    """Say it as transformers' ``FineGrainedFP8Config`` reads it, and vLLM and SGLang too."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(asked.block_size or USUAL_BLOCK),
        "modules_to_not_convert": list(layers),
    }


def _indented(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2).replace("\n", "\n  ")
