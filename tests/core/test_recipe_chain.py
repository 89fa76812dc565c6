"""Recipes through the whole chain: what is written is what numpy makes of the same tensors, however they were cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hfdcp_core import publish
from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.job import Job
from hfdcp_core.testing import tilings
from hfdcp_core.testing.in_memory import Output, Piece, publish_files, refusal_of, stored, weights_file
from hfdcp_core.testing.tilings import Placed, Whole

Array = npt.NDArray[np.float32]
MIB = 1 << 20


def numbers(*shape: int, first: int = 0) -> Array:
    """Numbers that a half float holds exactly; neighbours differ, in rows too."""
    return (np.arange(first, first + np.prod(shape)) % 2039).astype(np.float32).reshape(shape)


def whole(array: Array) -> Whole:
    return Whole(TensorSpec("F32", array.shape), array.tobytes())


def bounds(draw: st.DrawFn, extent: int, *, parts: int) -> list[int]:
    inner = draw(st.lists(st.integers(1, extent - 1), max_size=parts - 1, unique=True)) if extent > 1 else []
    return [0, *sorted(inner), extent]


def cells(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Cut a tensor at random places, as no mesh of devices would."""
    boxes = [Box.whole(shape)]
    for axis, extent in enumerate(shape):
        cuts = bounds(draw, extent, parts=3 if axis < 2 else 2)
        boxes = [
            Box((*b.offset[:axis], low, *b.offset[axis + 1 :]), (*b.shape[:axis], high - low, *b.shape[axis + 1 :]))
            for b in boxes
            for low, high in itertools.pairwise(cuts)
        ]
    return boxes


def recipe_file(folder: Path, *rules: Mapping[str, Any], **top: Any) -> str:
    path = folder / "recipe.json"
    path.write_text(json.dumps({"name": "mine", "rules": list(rules), **top}))
    return str(path)


def made(output: Output, name: str) -> Array:
    piece = output.tensors[name]
    dtype = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}[piece.dtype]
    return np.frombuffer(piece.data, dtype).reshape(piece.shape)


Make = Callable[[Array], Mapping[str, Array]]
WAYS: Mapping[str, tuple[tuple[int, ...], Mapping[str, Any], Make]] = {
    "rope": (
        (4 * 6, 20),
        {"to": "q", "ops": [{"rope": {"heads": 4, "to": "half"}}]},
        lambda w: {"q": w.reshape(4, 3, 2, 20).swapaxes(1, 2).reshape(24, 20)},
    ),
    "rope back": (
        (4 * 6, 20),
        {"to": "q", "ops": [{"rope": {"heads": 4, "to": "pairs"}}]},
        lambda w: {"q": w.reshape(4, 2, 3, 20).swapaxes(1, 2).reshape(24, 20)},
    ),
    "transpose": ((30, 17), {"to": "t", "ops": ["transpose"]}, lambda w: {"t": w.T}),
    "turned experts": (
        (3 * 5, 7),
        {"to": "e.{e}", "ops": [{"unflatten": {"dim": 0, "sizes": [3, 5]}}, {"unbind": {"as": "e"}}, "transpose"]},
        lambda w: {f"e.{n}": w.reshape(3, 5, 7)[n].T for n in range(3)},
    ),
    "experts": (
        (5, 8, 6),
        {
            "to": {"gate": "e.{e}.gate", "up": "e.{e}.up"},
            "ops": [{"unbind": {"dim": 0, "as": "e"}}, {"split": {"dim": 0}}],
        },
        lambda w: {f"e.{n}.{k}": w[n, 4 * i : 4 * i + 4] for n in range(5) for i, k in enumerate(("gate", "up"))},
    ),
    "interleaved columns": (
        (9, 14),
        {"to": ["a", "b"], "ops": [{"deinterleave": {"dim": 1}}]},
        lambda w: {"a": w[:, ::2], "b": w[:, 1::2]},
    ),
    "trimmed": ((13, 5), {"to": "v", "ops": [{"trim": {"dim": 0, "size": 11}}]}, lambda w: {"v": w[:11]}),
    "padded": (
        (11, 5),
        {"to": "v", "ops": [{"pad": {"dim": 1, "size": 8}}]},
        lambda w: {"v": np.pad(w, ((0, 0), (0, 3)))},
    ),
    "a number": ((1, 1), {"to": "n", "ops": [{"reshape": {"sizes": []}}]}, lambda w: {"n": w.reshape(())}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["", "float16"])
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_however_a_tensor_was_cut(tmp_path: Path, way: str, dtype: str, data: st.DataObject) -> None:
    shape, rule, make = WAYS[way]
    array = numbers(*shape)
    styles = st.sampled_from(("plain", "plain", "permuted", "view", "zstd"))
    boxes = data.draw(st.composite(cells)(shape))
    placed = [Placed("w", box, data.draw(st.integers(0, 1)), data.draw(styles)) for box in boxes]
    metadata, files = tilings.distcp({"w": whole(array)}, placed)
    everything = {**files, ".metadata": tilings.pickled(metadata)}
    recipe = recipe_file(tmp_path, {"from": "w", **rule})
    output = publish_files(everything, recipe=recipe, dtype=dtype)
    expected = make(array)
    assert set(output.tensors) == set(expected)
    for name, there in expected.items():
        assert (
            made(output, name).astype(np.float32) == there.astype(made(output, name).dtype).astype(np.float32)
        ).all()
    taken = sum(there.size for there in expected.values()) == array.size
    checks = [record.source for record in output.manifest.records]
    if taken and all(place.style != "zstd" for place in placed):
        assert sum(check.unchecked for check in checks) == 0


@pytest.mark.parametrize("way", ["rope", "experts", "turned experts", "transpose", "interleaved columns"])
@pytest.mark.parametrize("dtype", ["", "float16"])
def test_tensors_of_many_windows(tmp_path: Path, way: str, dtype: str) -> None:
    """Each of a MiB or two, made 64 KiB at a time."""
    shape, rule, make = {
        "rope": (
            (4 * 64, 2000),
            *WAYS["rope"][1:2],
            lambda w: {"q": w.reshape(4, 32, 2, 2000).swapaxes(1, 2).reshape(256, 2000)},
        ),
        "experts": (
            (5, 8, 12000),
            WAYS["experts"][1],
            lambda w: {f"e.{n}.{k}": w[n, 4 * i : 4 * i + 4] for n in range(5) for i, k in enumerate(("gate", "up"))},
        ),
        "turned experts": (
            (3 * 200, 700),
            {
                **WAYS["turned experts"][1],
                "ops": [{"unflatten": {"dim": 0, "sizes": [3, 200]}}, {"unbind": {"as": "e"}}, "transpose"],
            },
            lambda w: {f"e.{n}": w.reshape(3, 200, 700)[n].T for n in range(3)},
        ),
        "transpose": ((700, 600), *WAYS["transpose"][1:]),
        "interleaved columns": ((90, 4000), *WAYS["interleaved columns"][1:]),
    }[way]
    array = numbers(*shape)
    boxes = [Box((0, *(0 for _ in shape[1:])), (shape[0] // 3, *shape[1:]))]
    boxes.append(Box((shape[0] // 3, *(0 for _ in shape[1:])), (shape[0] - shape[0] // 3, *shape[1:])))
    metadata, files = tilings.distcp({"w": whole(array)}, [Placed("w", box, n) for n, box in enumerate(boxes)])
    recipe = recipe_file(tmp_path, {"from": "w", **rule})
    least = 104 * MIB
    output = publish_files(
        {**files, ".metadata": tilings.pickled(metadata)}, recipe=recipe, dtype=dtype, memory_bytes=least
    )
    for name, there in make(array).items():
        found = made(output, name)
        assert (found == there.astype(found.dtype)).all()
    assert all(record.source.unchecked == 0 for record in output.manifest.records)


def test_ranks_of_a_training_get_their_boxes_of_what_a_recipe_makes(tmp_path: Path) -> None:
    array = numbers(24, 20)
    files = {"model.safetensors": tilings.safetensors_file({"w": whole(array)}, {"format": "pt"})}
    recipe = recipe_file(tmp_path, {"from": "w", **WAYS["rope"][1]})
    sink = stored({})
    publish.make(Job(stored(files).url, sink.url, recipe=recipe, ranks=5, dtype="float16"))
    output = publish_files({stamp.path: sink.read(stamp.path, 0, stamp.size) for stamp in sink.list().files})
    [expected] = WAYS["rope"][2](array).values()
    assert (made(output, "q") == expected.astype(np.float16)).all()


def test_what_a_recipe_ties_is_left_out_where_the_config_says_so(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"tie_word_embeddings": true}')
    same = Piece.of(numbers(3, 2))
    recipe = recipe_file(
        tmp_path, {"rename": {"e": "my.in.weight", "h": "my.out.weight"}}, {"tie": {"my.out.weight": "my.in.weight"}}
    )
    source = {"model.safetensors": weights_file({"e": same, "h": same})}
    output = publish_files(source, recipe=recipe, config=str(config))
    assert set(output.tensors) == {"my.in.weight"}
    assert output.manifest.tied == {"my.out.weight": "my.in.weight"}


def test_a_recipe_is_kept_so_that_the_output_can_be_compared_later(tmp_path: Path) -> None:
    """Without the file that it came from, or its config."""
    array = numbers(24, 20)
    source = stored({"model.safetensors": tilings.safetensors_file({"w": whole(array)}, {"format": "pt"})})
    config = tmp_path / "config.json"
    config.write_text('{"heads": 4}')
    recipe = recipe_file(tmp_path, {"from": "w", "to": "q", "ops": [{"rope": {"heads": "heads", "to": "half"}}]})
    sink = stored({})
    manifest = publish.make(Job(source.url, sink.url, recipe=recipe, config=str(config)))
    assert manifest.recipe == "mine"
    assert str(tmp_path) not in manifest.rules
    Path(recipe).unlink()
    config.unlink()
    again = Job(source.url, sink.url)
    assert publish.validate_again(again) == manifest
    spoilt = numbers(24, 20)
    spoilt[3, 4] = -1
    source.put("model.safetensors", tilings.safetensors_file({"w": whole(spoilt)}, {"format": "pt"}))
    with pytest.raises(Exception, match="q is not what the source holds"):
        publish.validate_again(again)


def test_what_may_be_dropped_only_where_it_is_zero(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, {"rename": {"w": "w"}}, {"drop": "bias.{i}", "when": "zero"})
    zero, one = Piece.of(np.zeros(4, np.float32)), Piece.of(np.array([0, 0, 1e-30, 0], np.float32))
    weights = Piece.of(numbers(2))
    files = {"model.safetensors": weights_file({"w": weights, "bias.0": zero, "bias.1": zero})}
    output = publish_files(files, recipe=recipe)
    assert set(output.tensors) == {"w"}
    assert output.manifest.skipped == ("bias.0", "bias.1")
    files = {"model.safetensors": weights_file({"w": weights, "bias.0": zero, "bias.1": one})}
    error = refusal_of(files, recipe=recipe)
    assert isinstance(error, PlanError)
    assert error.problems == ("bias.1 is not zero; --exclude 'bias.1' leaves it out knowingly",)
    assert set(publish_files(files, recipe=recipe, exclude=("bias.1",)).tensors) == {"w"}


def test_a_recipe_says_what_is_cast_and_the_job_what_else(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, {"rename": {"{name}": "{name}"}}, {"cast": {"a": "float32"}})
    half = np.array([1.5, 2.5], np.float16)
    files = {"model.safetensors": weights_file({"a": Piece.of(half), "b": Piece.of(half)})}
    assert {n: p.dtype for n, p in publish_files(files, recipe=recipe).tensors.items()} == {"a": "F32", "b": "F16"}
    both = publish_files(files, recipe=recipe, dtype="float32")
    assert {n: p.dtype for n, p in both.tensors.items()} == {"a": "F32", "b": "F32"}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("no-such", "unknown recipe 'no-such'.*torchtitan-llama3"),
        ("no-such.yaml", "there is no recipe no-such.yaml"),
        ("inverse:auto", "only a recipe of rules"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        publish_files({"model.safetensors": weights_file({"w": Piece.of(numbers(1))})}, recipe=recipe)
