"""Sizes by name, from a config and small sums."""

from __future__ import annotations

import pytest

from hfdcp_core.errors import PlanError
from hfdcp_core.sizes import Sizes

CONFIG = {"hidden_size": 64, "heads": 4, "kv": None, "tied": True, "text_config": {"layers": 3, "tied_too": True}}


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        (7, 7),
        ("7", 7),
        ("hidden_size", 64),
        ("layers", 3),
        ("kv or heads", 4),
        ("absent or kv or hidden_size / heads", 16),
        ("hidden_size // heads + 2 - 1", 17),
        ("ceil(hidden_size + 1, 32)", 96),
        ("mine * 2", 10),
        ("chain", 11),
        ("given", 9),
        ("fixed", 8),
    ],
)
def test_an_expression_is_a_number(expression: str | int, number: int) -> None:
    sizes = Sizes(
        CONFIG, {"mine": "heads + 1", "chain": "mine + 6", "fixed": 8, "given": 1, "heads": "heads"}, {"given": 9}
    )
    assert sizes.number(expression) == number


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("heads2", "nothing says what heads2 is: name the model's config .*--size heads2=N"),
        ("absent or also", "what absent or also is"),
        ("absent * 2", "what absent is"),
        ("ceil(heads, 0)", "what ceil"),
        ("hidden_size / 3", "64 / 3 is no whole number"),
        ("hidden_size / 0", "64 / 0 is no whole number"),
        ("heads **  2", "is no size"),
        ("round(heads)", "is no size"),
        ("-heads", "is no size"),
        ("1.5", "is no size"),
        ("heads +", "is no size"),
        ("loop", "nothing says what"),
    ],
)
def test_what_is_no_size_is_refused(expression: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Sizes(CONFIG, {"loop": "pool", "pool": "loop"}).number(expression)


def test_flags_are_true_where_the_config_says_so() -> None:
    sizes = Sizes(CONFIG)
    assert (sizes.holds("tied"), sizes.holds("tied_too"), sizes.holds("heads"), sizes.holds("absent")) == (
        True,
        True,
        False,
        False,
    )
