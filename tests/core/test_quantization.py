"""What is asked of the numbers is decided tensor by tensor: scales are never forgotten, and never left behind."""

from __future__ import annotations

import re

import pytest

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.manifest import Numerics
from hfdcp_core.operation import CAST, DEQUANTIZE, DEQUANTIZE_MXFP4, QUANTIZE, SCALES
from hfdcp_core.quantization import block_of, changes, numerics_of, settle, unconverted
from hfdcp_core.recipe import Definition

UP = "layers.0.up_proj.weight"
SCALED = {UP: ("F8_E4M3", 256, 128), f"{UP}_scale_inv": ("F32", 2, 1), "norm.weight": ("F32", 128), "step": ("I64",)}
PLAIN = {UP: ("BF16", 256, 128), "embed_tokens.weight": ("BF16", 512, 128), "lm_head.weight": ("BF16", 512, 128)}
GPT_OSS = {"mlp.up_blocks": ("U8", 2, 8, 4, 16), "mlp.up_scales": ("U8", 2, 8, 4), "mlp.up_bias": ("BF16", 2, 8)}


def definitions(tensors: dict[str, tuple[object, ...]]) -> list[Definition]:
    return [
        Definition(name, TensorSpec(str(dtype), tuple(map(int, map(str, shape)))), f"model.{name}")
        for name, (dtype, *shape) in tensors.items()
    ]


def settled(tensors: dict[str, tuple[object, ...]], asked: Numerics) -> dict[str, tuple[str, str | None]]:
    """Return dtype and kind of operation of each tensor that is written."""
    return {
        d.fqn: (str(d.spec), d.operation.kind if d.operation else None)
        for d in settle(definitions(tensors), asked).definitions
    }


def problems_of(tensors: dict[str, tuple[object, ...]], asked: Numerics) -> str:
    with pytest.raises(PlanError, match="numbers cannot be made") as caught:
        settle(definitions(tensors), asked)
    return "\n".join(caught.value.problems)


# ---- casts ----


def test_nothing_is_touched_where_nothing_is_asked() -> None:
    plain = tuple(definitions(SCALED))
    assert settle(plain, Numerics()).definitions == plain


def test_only_floating_tensors_of_another_dtype_are_cast() -> None:
    tensors = {"a": ("F32", 2), "b": ("BF16", 2), "n": ("I64", 2), "m": ("BOOL", 2), "u": ("U8", 2), "c": ("C64", 2)}
    assert settled(tensors, Numerics("BF16")) == {
        "a": ("BF16[2]", CAST),
        "b": ("BF16[2]", None),
        "n": ("I64[2]", None),
        "m": ("BOOL[2]", None),
        "u": ("U8[2]", None),
        "c": ("C64[2]", None),
    }


@pytest.mark.parametrize("pattern", ["*.gate", "model.*.gate"], ids=["clean-name", "saved-name"])
def test_exceptions_are_named_as_saved_or_as_written(pattern: str) -> None:
    tensors = {"mlp.gate": ("F32", 2), "mlp.up": ("F32", 2)}
    found = settled(tensors, Numerics("BF16", (pattern,)))
    assert found == {"mlp.gate": ("F32[2]", None), "mlp.up": ("BF16[2]", CAST)}


def test_an_exception_that_matches_nothing_is_a_problem() -> None:
    assert "'nothing' matches no tensor" in problems_of(PLAIN, Numerics("F16", ("nothing",)))


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_scaled_numbers_are_not_cast_without_their_scale(suffix: str) -> None:
    tensors = {UP: ("F8_E4M3", 256, 128), UP + suffix: ("F32", 2, 1)}
    found = problems_of(tensors, Numerics("BF16"))
    assert f"only {UP}{suffix} makes it right" in found
    assert "--dequantize" in found


def test_what_stays_as_saved_keeps_its_scales_as_saved() -> None:
    found = settled(SCALED, Numerics("BF16", ("*_proj.weight",)))
    assert found == {
        UP: ("F8_E4M3[256, 128]", None),
        f"{UP}_scale_inv": ("F32[2, 1]", None),
        "norm.weight": ("BF16[128]", CAST),
        "step": ("I64[]", None),
    }


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ"])
def test_eight_bits_without_a_known_scale_are_not_taken_for_plain_numbers(dtype: str) -> None:
    assert f"w is {dtype}, and no scale of it is known" in problems_of({"w": (dtype, 4)}, Numerics("BF16"))
    assert settled({"w": (dtype, 4), "v": ("F32", 4)}, Numerics("BF16", ("w",)))["w"] == (f"{dtype}[4]", None)


def test_a_cast_to_eight_bits_leaves_those_that_are_there() -> None:
    tensors = {"w": ("F8_E4M3", 4), "v": ("BF16", 4), "s": ("F8_E4M3", 4), "s_scale": ("F32",)}
    found = settled(tensors, Numerics("F8_E4M3", ("s*",)))
    assert found["w"] == ("F8_E4M3[4]", None)
    assert found["v"] == ("F8_E4M3[4]", CAST)
    assert found["s_scale"] == ("F32[]", None)


# ---- dequantising ----


def test_what_is_no_number_with_a_scale_stays_where_only_scales_are_asked_away() -> None:
    found = settled({**SCALED, "f4": ("F4", 4), "e": ("F8_E8M0", 4)}, Numerics(dequantize=True))
    assert (found["f4"], found["e"]) == (("F4[4]", None), ("F8_E8M0[4]", None))


@pytest.mark.parametrize(("dtype", "expected"), [("", "BF16"), ("F16", "F16")])
def test_numbers_and_scales_become_one_plain_tensor(dtype: str, expected: str) -> None:
    found = settled(SCALED, Numerics(dtype, dequantize=True))
    assert found[UP] == (f"{expected}[256, 128]", DEQUANTIZE)
    assert f"{UP}_scale_inv" not in found
    assert found["norm.weight"] == ((f"{dtype}[128]", CAST) if dtype else ("F32[128]", None))


def test_mxfp4_becomes_what_models_of_stacked_experts_want() -> None:
    found = settled(GPT_OSS, Numerics(dequantize=True))
    assert found == {"mlp.up": ("BF16[2, 128, 8]", DEQUANTIZE_MXFP4), "mlp.up_bias": ("BF16[2, 8]", None)}


def test_mxfp4_is_no_number_to_a_cast() -> None:
    found = settled(GPT_OSS, Numerics("F32"))
    assert found["mlp.up_blocks"] == ("U8[2, 8, 4, 16]", None)
    assert found["mlp.up_scales"] == ("U8[2, 8, 4]", None)


def test_scales_of_activations_go_too_and_that_is_said() -> None:
    tensors = {**SCALED, "layers.0.up_proj.input_scale": ("F32",), "other.input_scale": ("F32",)}
    found = settle(definitions(tensors), Numerics(dequantize=True))
    assert [entry.name for entry in found.skipped] == ["model.layers.0.up_proj.input_scale"]
    assert "no longer quantised" in found.skipped[0].reason
    assert "other.input_scale" in {definition.fqn for definition in found.definitions}


@pytest.mark.parametrize(
    ("tensors", "asked", "expected"),
    [
        (PLAIN, Numerics(dequantize=True), "no tensor has scales"),
        (SCALED, Numerics("BF16", ("*_proj.weight",), dequantize=True), "leave out --dequantize or the pattern"),
        ({"w": ("F8_E4M3", 4), **SCALED}, Numerics(dequantize=True), "w is F8_E4M3, and no scale of it is known"),
        (
            {UP: ("F8_E4M3", 200, 128), f"{UP}_scale": ("F32", 2, 1)},
            Numerics(dequantize=True),
            "do not say how large the blocks",
        ),
        (SCALED, Numerics(dequantize=True, block_size=(64, 64)), "do not fit numbers .* in blocks of 64x64"),
        (
            {UP: ("F8_E4M3FNUZ", 4), f"{UP}_scale": ("F32",)},
            Numerics(dequantize=True),
            "F8_E4M3FNUZ with scales of F32 cannot be dequantised",
        ),
        ({**GPT_OSS, "mlp.up": ("BF16", 2)}, Numerics(dequantize=True), "mlp.up would be there twice"),
        (SCALED, Numerics(quantize="fp8-block"), "has scales already"),
        ({"norm.weight": ("F32", 2)}, Numerics(quantize="fp8-block"), "no tensor is the matrix of a linear layer"),
    ],
    ids=[
        "plain",
        "kept",
        "no-scale",
        "ragged",
        "wrong-blocks",
        "fnuz",
        "clash",
        "quantised-already",
        "nothing-linear",
    ],
)
def test_what_cannot_be_done_is_said(tensors: dict[str, tuple[object, ...]], asked: Numerics, expected: str) -> None:
    with pytest.raises(PlanError) as caught:
        settle(definitions(tensors), asked)
    assert any(re.search(expected, problem) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("numbers", "scales", "given", "expected"),
    [
        ((200, 300), (), (), (200, 300)),
        ((200, 300), (1,), (128, 128), (200, 300)),
        ((200, 300), (200,), (), (1, 300)),
        ((200, 300), (200, 1), (128, 128), (1, 300)),
        ((200, 300), (2, 3), (128, 128), (128, 128)),
        ((256, 384), (2, 3), (), (128, 128)),
        ((64, 384), (1, 3), (), (64, 128)),
        ((4, 256, 384), (4, 2, 3), (128, 128), (1, 128, 128)),
        ((4, 256, 384), (4,), (), (1, 256, 384)),
        ((4, 256, 384), (4, 1, 1), (), (1, 256, 384)),
        ((4, 256, 384), (4, 256), (), (1, 1, 384)),
        ((4, 256, 384), (4, 256, 1), (), (1, 1, 384)),
        ((0, 8), (0, 1), (), (1, 8)),
        ((64,), (4,), (), (16,)),
        ((), (), (), ()),
    ],
    ids=str,
)
def test_the_shape_of_scales_says_what_each_is_for(
    numbers: tuple[int, ...], scales: tuple[int, ...], given: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert block_of(TensorSpec("F8_E4M3", numbers), TensorSpec("F32", scales), given) == expected


@pytest.mark.parametrize(
    ("numbers", "scales"), [((200, 300), (2, 3)), ((300, 300), (3, 3)), ((256, 384), (2,)), ((256, 8), (0, 8))]
)
def test_blocks_that_could_be_of_several_sizes_are_not_guessed(
    numbers: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    found = block_of(TensorSpec("F8_E4M3", numbers), TensorSpec("F32", scales), ())
    assert isinstance(found, str)
    assert "--block-size" in found


# ---- quantising ----


def test_matrices_of_linear_layers_get_scales_and_the_rest_stays() -> None:
    tensors = {**PLAIN, "norm.weight": ("F32", 128), "moe.gate.weight": ("BF16", 8, 128), "moe.up": ("BF16", 2, 8, 8)}
    found = settle(definitions(tensors), Numerics(quantize="fp8-block", block_size=(128, 128))).definitions
    made = {d.fqn: (str(d.spec), d.operation.kind) for d in found if d.operation}
    assert made == {UP: ("F8_E4M3[256, 128]", QUANTIZE), f"{UP}_scale_inv": ("F32[2, 1]", SCALES)}
    assert list(unconverted(found)) == ["embed_tokens", "lm_head", "moe.gate", "moe"]


def test_exceptions_are_not_quantised_and_the_others_are_cast() -> None:
    tensors = {UP: ("F32", 256, 128), "layers.1.up_proj.weight": ("F32", 256, 128), "b": ("F32", 3)}
    found = settled(tensors, Numerics("BF16", (UP,), quantize="fp8-block"))
    assert found[UP] == ("F32[256, 128]", None)
    assert found["layers.1.up_proj.weight"] == ("F8_E4M3[256, 128]", QUANTIZE)
    assert found["b"] == ("BF16[3]", CAST)


# ---- words and refusals ----


def test_what_changes_is_counted_in_tensors_and_bytes() -> None:
    tensors = {**SCALED, **GPT_OSS, "a": ("F32", 10), "b": ("F32", 10)}
    found = changes(settle(definitions(tensors), Numerics("BF16", dequantize=True)).definitions)
    assert {(change.what, change.tensors, change.before, change.after) for change in found} == {
        ("dequantised from F8_E4M3 to BF16", 1, 256 * 128 + 8, 2 * 256 * 128),
        ("dequantised from MXFP4 to BF16", 1, 2 * 8 * 4 * 17, 2 * 2 * 8 * 128),
        ("cast from F32 to BF16", 3, 592, 296),
    }
    [quantised] = changes(settle(definitions(PLAIN), Numerics(quantize="fp8-block")).definitions)
    assert quantised.what == "quantised from BF16 to F8_E4M3, a scale for every 128x128"
    assert (quantised.tensors, quantised.before, quantised.after) == (1, 2 * 256 * 128, 256 * 128 + 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "int8"}, "'int8': it is one of float64"),
        ({"quantize": "int4"}, "there is fp8-block"),
        ({"quantize": "fp8-block", "dequantize": True}, "not both"),
        ({"keep_dtype": ("a",)}, "--keep-dtype names exceptions"),
        ({"dtype": "BF16", "block_size": (128, 128)}, "for --dequantize or --quantize"),
        ({"dequantize": True, "block_size": (128,)}, "rows and columns"),
        ({"dequantize": True, "block_size": (128, 0)}, "rows and columns"),
        ({"quantize": "fp8-block", "block_size": (512, 512)}, "at most 65536"),
    ],
    ids=["dtype", "kind", "both", "nothing-asked", "block-of-nothing", "one-number", "zero", "large"],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], expected: str) -> None:
    nothing = {"dtype": "", "keep_dtype": (), "dequantize": False, "quantize": "", "block_size": ()}
    with pytest.raises(UsageError, match=expected):
        numerics_of(**{**nothing, **options})
