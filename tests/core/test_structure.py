"""The steps of a rule, against numpy, and taken back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest

from hfdcp_core.arrangement import arranged
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import PlanError, UsageError
from hfdcp_core.sizes import Sizes
from hfdcp_core.structure import OPTIONS, Flow, Key, Step, applied, checked, inverted
from hfdcp_core.testing.arrangements import evaluated

Array = npt.NDArray[np.int64]
SIZES = Sizes({"heads": 2, "half": 3, "n": 4, "experts": 3})


def flow_of(arrays: Mapping[str, Array], keys: Mapping[str, Key]) -> Flow:
    return {keys[name]: arranged(name, TensorSpec("F32", array.shape)) for name, array in arrays.items()}


def numbers(*shape: int) -> Array:
    return np.arange(np.prod(shape)).reshape(shape)


W = numbers(12, 5)
ONE = [
    (Step("transpose"), W, W.T),
    (Step("transpose", {"dims": (0, 1)}), W, W.T),
    (Step("permute", {"order": (2, 0, 1)}), numbers(2, 3, 4), numbers(2, 3, 4).transpose(2, 0, 1)),
    (Step("unflatten", {"dim": 0, "sizes": ("heads", -1, 3)}), W, W.reshape(2, 2, 3, 5)),
    (Step("unflatten", {"dim": -1, "sizes": (5, 1)}), W, W.reshape(12, 5, 1)),
    (Step("flatten", {"dim": 1, "sizes": (3, -1)}), numbers(2, 3, 4), numbers(2, 12)),
    (Step("reshape", {"sizes": (4, 15), "from": (12, 5)}), W, W.reshape(4, 15)),
    (Step("rope", {"heads": "heads", "to": "half"}), W, W.reshape(2, 3, 2, 5).swapaxes(1, 2).reshape(12, 5)),
    (Step("rope", {"heads": 2, "head_dim": 6, "to": "pairs"}), W, W.reshape(2, 2, 3, 5).swapaxes(1, 2).reshape(12, 5)),
    (Step("rope", {"heads": 2, "to": "half"}), numbers(12), numbers(12).reshape(2, 3, 2).swapaxes(1, 2).reshape(12)),
    (Step("pad", {"dim": 1, "size": 7, "from": 5}), W, np.pad(W, ((0, 0), (0, 2)))),
]


@pytest.mark.parametrize(
    ("step", "given", "expected"), ONE, ids=lambda value: str(value) if isinstance(value, Step) else ""
)
def test_a_step_does_what_numpy_does_and_can_be_taken_back(step: Step, given: Array, expected: Array) -> None:
    [made] = applied(checked(step), flow_of({"w": given}, {"w": ("", ())}), SIZES, ("",)).values()
    assert (evaluated(made, {"w": given}) == expected).all()
    assert made.shape == expected.shape
    [back] = applied(checked(inverted(step)), {("", ()): made}, SIZES, ("",)).values()
    assert (evaluated(back, {"w": given}) == given).all()


def test_what_is_trimmed_is_padded_again() -> None:
    step = Step("trim", {"dim": 0, "size": 10, "from": 12})
    [made] = applied(step, flow_of({"w": W}, {"w": ("", ())}), SIZES, ("",)).values()
    assert (evaluated(made, {"w": W}) == W[:10]).all()
    [back] = applied(inverted(step), {("", ()): made}, SIZES, ("",)).values()
    assert (evaluated(back, {"w": W}) == np.concatenate([W[:10], np.zeros((2, 5))])).all()


MANY = [
    (Step("split", {"dim": 0}), ("a", "b", "c"), [W[:4], W[4:8], W[8:]]),
    (Step("split", {"dim": 0, "sizes": ("heads", 6, "n")}), ("a", "b", "c"), [W[:2], W[2:8], W[8:]]),
    (Step("deinterleave", {"dim": 0}), ("a", "b"), [W[::2], W[1::2]]),
]


@pytest.mark.parametrize(
    ("step", "labels", "expected"), MANY, ids=lambda value: str(value) if isinstance(value, Step) else ""
)
def test_one_becomes_several_and_one_again(step: Step, labels: tuple[str, ...], expected: list[Array]) -> None:
    given = flow_of({"w": W}, {"w": ("", (("i", 3),))})
    made = applied(checked(step), given, SIZES, labels)
    assert list(made) == [(label, (("i", 3),)) for label in labels]
    assert all((evaluated(part, {"w": W}) == array).all() for part, array in zip(made.values(), expected, strict=True))
    back = applied(checked(inverted(step)), made, SIZES, ("",))
    assert list(back) == [("", (("i", 3),))]
    assert (evaluated(back["", (("i", 3),)], {"w": W}) == W).all()


def test_indices_become_tensors_that_a_variable_counts_and_are_stacked_again() -> None:
    step = Step("unbind", {"dim": 0, "as": "e", "size": "experts"})
    given = numbers(3, 4, 2)
    made = applied(checked(step), flow_of({"w": given}, {"w": ("a", (("b", 1),))}), SIZES, ("a",))
    assert list(made) == [("a", (("b", 1), ("e", number))) for number in range(3)]
    assert (evaluated(made["a", (("b", 1), ("e", 2))], {"w": given}) == given[2]).all()
    assert str(inverted(step)) == "stack(dim: 0, size: experts, over: e)"
    back = applied(checked(inverted(step)), dict(reversed(made.items())), SIZES, ("a",))
    assert (evaluated(back["a", (("b", 1),)], {"w": given}) == given).all()


def test_a_step_may_act_on_some_labels() -> None:
    flow = flow_of({"w": W, "v": W}, {"w": ("q", ()), "v": ("k", ())})
    made = applied(checked(Step("transpose", on=("q",))), flow, SIZES, ("q", "k"))
    assert (made["q", ()].shape, made["k", ()].shape) == ((5, 12), (12, 5))
    assert str(Step("transpose", on=("q",))) == "transpose(only: ['q'])"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step("transpose", {"dims": (0, 2)}), "no dimensions 0 and 2"),
        (Step("unflatten", {"dim": 0, "sizes": (5, 2)}), "is not 5 x 2"),
        (Step("unflatten", {"dim": 3, "sizes": (5, 2)}), "has no dimension 3"),
        (Step("flatten", {"dim": 0, "count": 3}), "dimensions 0 to 2"),
        (Step("flatten", {"dim": 0, "sizes": (12, 4)}), "are not 12 x 4"),
        (Step("reshape", {"sizes": (60,), "from": (5, 12)}), r"is not of the shape \[5, 12\]"),
        (Step("rope", {"heads": 5, "to": "half"}), "is not 5 heads of 2 rows"),
        (Step("rope", {"heads": 4, "to": "half"}), "is not 4 heads of 3 rows, an even number"),
        (Step("rope", {"heads": 2, "head_dim": 4, "to": "half"}), "is not 2 heads of 4 rows"),
        (Step("trim", {"dim": 0, "size": 13}), "fewer than 13"),
        (Step("pad", {"dim": 0, "size": 13, "from": 11}), "has not 11 indices"),
        (Step("split", {"dim": 0}), "is not 5 equal parts"),
        (Step("split", {"dim": 0, "sizes": (6, 7)}), r"is not 6 \+ 7"),
        (Step("deinterleave", {"dim": 0}), "taken in turns by 5"),
        (Step("unbind", {"dim": 0, "as": "e", "size": 5}), "has not 5 indices"),
    ],
    ids=str,
)
def test_what_does_not_fit_a_step_is_refused(step: Step, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        applied(step, flow_of({"w": W}, {"w": ("", ())}), SIZES, tuple("abcde"))


def test_parts_must_be_equal_or_of_stated_sizes() -> None:
    arrays = {"w": numbers(2, 5), "v": numbers(3, 5)}
    flow = flow_of(arrays, {"w": ("a", ()), "v": ("b", ())})
    with pytest.raises(PlanError, match="not equal: state their sizes"):
        applied(Step("cat", {"dim": 0}), flow, SIZES, ("",))
    with pytest.raises(PlanError, match=r"have \[2, 3\] indices, not \[3, 2\]"):
        applied(Step("cat", {"dim": 0, "sizes": (3, 2)}), flow, SIZES, ("",))
    [made] = applied(Step("cat", {"dim": 0, "sizes": (2, 3)}), flow, SIZES, ("",)).values()
    assert (evaluated(made, arrays) == np.concatenate([arrays["w"], arrays["v"]])).all()
    with pytest.raises(PlanError, match=r"parts of \[5, 0\] indices"):
        applied(
            Step("cat", {"dim": 1}), flow_of({"w": W, "v": numbers(3)}, {"w": ("a", ()), "v": ("b", ())}), SIZES, ("",)
        )
    with pytest.raises(PlanError, match="takes one tensor, and there are 2: a, b"):
        applied(Step("split", {"dim": 0}), flow, SIZES, ("a", "b"))


def test_a_stack_has_no_gap_and_nothing_beyond() -> None:
    arrays = {"w": W, "v": W}
    flow = flow_of(arrays, {"w": ("", (("e", 0),)), "v": ("", (("e", 2),))})
    with pytest.raises(PlanError, match="should count 0 to 2: 1 lacking or beyond"):
        applied(Step("stack", {"over": "e"}), flow, SIZES, ("",))
    with pytest.raises(PlanError, match="should count 0 to 1: 1, 2 lacking or beyond"):
        applied(Step("stack", {"over": "e", "size": 2}), flow, SIZES, ("",))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step("twist"), "there is no step 'twist': there are transpose"),
        (Step("rope", {"heads": 2}), "rope.*: to; it needs"),
        (Step("rope", {"heads": 2, "to": "whole"}), "to is half or pairs"),
        (Step("split", {"dim": 0, "at": 3}), "split.*: at; it needs nothing and takes"),
        (Step("flatten", {"dim": 0}), "it needs sizes or count"),
        (Step("flatten", {"dim": 0, "sizes": (1, 2), "count": 2}), "it needs sizes or count"),
        (Step("split", {"dim": 0}, on=("a",)), "acts on all labels together"),
    ],
    ids=str,
)
def test_what_is_no_step_is_refused(step: Step, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checked(step)


def test_one_number_is_not_several() -> None:
    with pytest.raises(UsageError, match="heads is one number"):
        applied(Step("rope", {"heads": (1, 2), "to": "half"}), flow_of({"w": W}, {"w": ("", ())}), SIZES, ("",))


@pytest.mark.parametrize(
    "step",
    [
        Step("reshape", {"sizes": (60,)}),
        Step("trim", {"dim": 0, "size": 3}),
        Step("flatten", {"dim": 0, "count": 2}),
        Step("permute", {"order": (-1, 0)}),
    ],
    ids=str,
)
def test_what_does_not_say_what_was_there_cannot_be_taken_back(step: Step) -> None:
    with pytest.raises(UsageError, match="cannot be taken back"):
        inverted(checked(step))


def test_every_step_is_in_the_table_of_the_module() -> None:
    from hfdcp_core import structure

    assert all(f"| ``{kind}`` |" in str(structure.__doc__) for kind in OPTIONS)
