"""Two checkpoints are compared: what differs, where first, and by how much; damage is an error and no difference."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from hfdcp_core import diff as module
from hfdcp_core.box import Box
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.diff import DTYPE, EQUAL, ONLY_A, ONLY_B, SHAPE, VALUES, Diff, TensorDiff, diff
from hfdcp_core.errors import CorruptFile
from hfdcp_core.job import Job
from hfdcp_core.testing import tilings
from hfdcp_core.testing.in_memory import Piece, stored, weights_file
from hfdcp_core.testing.tilings import Placed, Whole

Pieces = Mapping[str, Piece]


def compared(a: Pieces, b: Pieces, **options: object) -> Diff:
    sides = (Job(stored({"model.safetensors": weights_file(pieces)}).url, "", **options) for pieces in (a, b))  # type: ignore[arg-type]
    return diff(*sides)


def only(a: Piece, b: Piece) -> TensorDiff:
    [one] = compared({"w": a}, {"w": b}).tensors
    return one


W = np.arange(24, dtype=np.float32).reshape(4, 6)


def test_what_is_the_same_is_equal_and_has_one_digest() -> None:
    one = only(Piece.of(W), Piece.of(W))
    assert (one.what, one.differing, one.first, one.error_max, one.relative_max) == (EQUAL, 0, None, 0.0, 0.0)
    assert one.digests[0] == one.digests[1]


def test_names_shapes_and_dtypes() -> None:
    a = {"a": Piece.of(W), "s": Piece.of(W), "d": Piece.of(W)}
    b = {"b": Piece.of(W), "s": Piece.of(W.T.copy()), "d": Piece.of(W.astype(np.float16))}
    found = {one.fqn: one for one in compared(a, b).tensors}
    assert {name: one.what for name, one in found.items()} == {"a": ONLY_A, "s": SHAPE, "d": DTYPE, "b": ONLY_B}
    assert (found["s"].a, found["s"].b) == ("F32[4, 6]", "F32[6, 4]")
    assert (found["d"].differing, found["d"].error_max) == (0, 0.0)
    assert [one.fqn for one in compared(a, b).different()] == ["a", "s", "d", "b"]


def test_one_element_far_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_BYTES", 64 << 10)
    monkeypatch.setattr(module, "COMPARED", 1000)
    large = np.ones((300, 500), np.float32)
    other = large.copy()
    other[250, 123] = 1.5
    one = only(Piece.of(large), Piece.of(other))
    assert (one.what, one.differing, one.first, one.error_max) == (VALUES, 1, (250, 123), 0.5)
    assert one.relative_max == pytest.approx(1 / 3)
    assert one.digests[0] != one.digests[1]


NAN, INF = math.nan, math.inf
CASES = {
    "NaN against NaN": ([NAN, 1], [NAN, 1], np.float32, 0, 0.0, 0.0),
    "NaN against a number": ([NAN, 1], [0, 1], np.float32, 1, INF, INF),
    "infinite against infinite": ([INF, 1], [INF, 2], np.float32, 1, 1.0, 0.5),
    "infinite against a number": ([INF, 1], [5, 1], np.float32, 1, INF, INF),
    "signs of zero": ([0.0], [-0.0], np.float32, 1, 0.0, 0.0),
    "doubles": ([1.0], [1.0 + 2**-50], np.float64, 1, 2**-50, 2**-50),
    "halves": ([1.0], [1.5], np.float16, 1, 0.5, 1 / 3),
    "bytes": ([200, 3], [100, 3], np.uint8, 1, 100.0, 0.5),
    "negative integers": ([-5], [5], np.int64, 1, 10.0, 2.0),
    "truths": ([True, False], [True, True], np.bool_, 1, 1.0, 1.0),
    "complex numbers": ([1 + 2j], [1 + 4j], np.complex64, 1, 2.0, 0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers(case: str) -> None:
    a, b, dtype, differing, error, relative = CASES[case]
    one = only(Piece.of(np.array(a, dtype)), Piece.of(np.array(b, dtype)))
    assert (one.differing, one.error_max) == (differing, pytest.approx(error))
    assert one.relative_max == pytest.approx(relative)
    assert one.what == (VALUES if differing else EQUAL)


def test_numbers_of_two_dtypes_are_compared_as_numbers() -> None:
    one = only(Piece.of(np.array([1, 2, 0.1], np.float32)), Piece.of(np.array([1, 2.5, 0.1], np.float16)))
    assert (one.what, one.differing, one.first) == (DTYPE, 2, (1,))
    assert one.error_max == 0.5
    whole = only(Piece.of(np.array([1, 2], np.int32)), Piece.of(np.array([1, 2], np.float64)))
    assert (whole.what, whole.differing, whole.error_max) == (DTYPE, 0, 0.0)
    mixed = only(Piece.of(np.array([1 + 0j], np.complex64)), Piece.of(np.array([1], np.float64)))
    assert (mixed.what, mixed.error_max) == (DTYPE, None)


def test_kinds_that_nobody_can_measure_are_compared_by_their_bytes() -> None:
    a, b = Piece("F4", (2, 4), bytes([1, 2, 3, 4])), Piece("F4", (2, 4), bytes([1, 2, 9, 4]))
    one = only(a, b)
    assert (one.what, one.differing, one.error_max) == (VALUES, 1, None)
    assert only(a, a).what == EQUAL


def test_tensors_without_an_element_or_a_dimension() -> None:
    assert only(Piece.of(np.zeros((0, 3), np.float32)), Piece.of(np.zeros((0, 3), np.float32))).what == EQUAL
    one = only(Piece.of(np.float32(2)), Piece.of(np.float32(3)))
    assert (one.what, one.first, one.error_max) == (VALUES, (), 1.0)


def test_a_tolerance_lets_numbers_pass_and_nothing_else() -> None:
    a = {"w": Piece.of(np.array([1.0], np.float32)), "n": Piece.of(np.array([NAN], np.float32)), "x": Piece.of(W)}
    b = {"w": Piece.of(np.array([1.001], np.float32)), "n": Piece.of(np.array([0], np.float32))}
    found = compared(a, b)
    assert [one.fqn for one in found.different()] == ["w", "n", "x"]
    assert [one.fqn for one in found.different(0.01)] == ["n", "x"]


def test_a_distributed_checkpoint_against_what_a_recipe_made_of_it(tmp_path: Path) -> None:
    """Rows that change places are put back in order before they are compared, whatever windows either side has."""
    rule = {"from": "q", "to": "w", "ops": [{"rope": {"heads": 2, "to": "half"}}]}
    (tmp_path / "r.json").write_text(json.dumps({"name": "r", "rules": [rule]}))
    whole = {"q": Whole(TensorSpec("F32", W.shape), W.tobytes())}
    boxes = [Box((0, 0), (1, 6)), Box((1, 0), (3, 6))]
    metadata, files = tilings.distcp(whole, [Placed("q", box, rank) for rank, box in enumerate(boxes)])
    a = Job(stored({**files, ".metadata": tilings.pickled(metadata)}).url, "", recipe=str(tmp_path / "r.json"))
    turned = W.reshape(2, 1, 2, 6).swapaxes(1, 2).reshape(4, 6)
    b = Job(stored({"model.safetensors": weights_file({"w": Piece.of(turned)})}).url, "")
    [one] = diff(a, b).tensors
    assert one.what == EQUAL


def test_damage_is_an_error() -> None:
    whole = {"w": Whole(TensorSpec("F32", W.shape), W.tobytes())}
    metadata, files = tilings.distcp(whole, [Placed("w", Box.whole(W.shape))])
    [path] = files
    at = files[path].index(W.tobytes()[:64]) + 20
    spoilt = files[path][:at] + b"\xff" + files[path][at + 1 :]
    whole_side = Job(stored({**files, ".metadata": tilings.pickled(metadata)}).url, "")
    spoilt_side = Job(stored({path: spoilt, ".metadata": tilings.pickled(metadata)}).url, "")
    assert diff(whole_side, whole_side).different() == ()
    with pytest.raises(CorruptFile, match="CRC-32"):
        diff(whole_side, spoilt_side)
