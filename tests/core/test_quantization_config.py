"""A config says of the numbers what was done to them, and everything else as before."""

from __future__ import annotations

import json

import pytest

from hfdcp_core.manifest import Numerics
from hfdcp_core.quantization_config import configured, stated_block

DEEPSEEK = """{
  "torch_dtype": "bfloat16",
  "quantization_config": {
    "quant_method": "fp8",
    "weight_block_size": [128, 128]
  },
  "rope_theta": 1e4
}
"""


@pytest.mark.parametrize(
    ("text", "block"),
    [
        (DEEPSEEK, (128, 128)),
        ('{"text_config": {"quantization_config": {"weight_block_size": [64, 32]}}}', (64, 32)),
        ("{}", ()),
        ('{"quantization_config": null}', ()),
        ('{"quantization_config": {"weight_block_size": null}}', ()),
        ('{"quantization_config": {"weight_block_size": [128]}}', ()),
        ('{"quantization_config": {"weight_block_size": [128, true]}}', ()),
        ('{"quantization_config": {"weight_block_size": [0, 128]}}', ()),
        ('{"quantization_config": []}', ()),
    ],
)
def test_the_size_of_blocks_is_read_where_it_is_stated(text: str, block: tuple[int, ...]) -> None:
    assert stated_block(text) == block


def test_plain_numbers_lose_what_is_said_of_scales_and_nothing_else() -> None:
    assert (
        configured(DEEPSEEK, Numerics(dequantize=True), [])
        == '{\n  "torch_dtype": "bfloat16",\n  "rope_theta": 1e4\n}\n'
    )


def test_a_cast_says_its_dtype_where_one_is_said() -> None:
    text = '{"dtype": "float32", "text_config": {"torch_dtype": "float32", "dtype": null}, "x": {"dtype": "float32"}}'
    after = json.loads(configured(text, Numerics("BF16"), []))
    assert after == {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "dtype": None},
        "x": {"dtype": "float32"},
    }
    assert configured("{}", Numerics("BF16"), []) == "{}"
    assert "quantization_config" in configured(DEEPSEEK, Numerics("F16"), [])


@pytest.mark.parametrize("text", ["{}", DEEPSEEK, '{"quantization_config": {"quant_method": "mxfp4"}}'])
def test_quantised_numbers_are_said_to_be(text: str) -> None:
    after = json.loads(configured(text, Numerics(quantize="fp8-block", block_size=(64, 128)), ["lm_head"]))
    assert after.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [64, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    assert after == {key: value for key, value in json.loads(text).items() if key != "quantization_config"}


def test_blocks_are_of_the_usual_size_where_nobody_chose() -> None:
    after = json.loads(configured("{}", Numerics(quantize="fp8-block"), []))
    assert after["quantization_config"]["weight_block_size"] == [128, 128]
