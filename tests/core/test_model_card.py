"""The model card: what is there is kept, our section is replaced, and what is no card is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.errors import ValidationError
from hfdcp_core.manifest import FileRecord, Statistics
from hfdcp_core.model_card import BEGIN, END, Provenance, front_matter, validate_card, write_card

RECORD = FileRecord("model.safetensors", 12, "ab" * 32, statistics=Statistics("basic"))
OURS = Provenance({"step": "7", "recipe": "auto | none"}, (RECORD,), "org/base")
THEIRS = "---\nlicense: mit\ntags:\n- mine\n---\n# Mine\n\nWords.\n"


def test_a_new_card_says_where_the_weights_come_from() -> None:
    card = write_card(OURS)
    assert front_matter(card) == {"library_name": "transformers", "tags": ["hfdcp"], "base_model": "org/base"}
    assert "| step | 7 |" in card
    assert "| recipe | auto \\| none |" in card
    assert f"| model.safetensors | 12 | `{'ab' * 32}` |" in card
    assert "no NaN" in card


def test_an_existing_card_is_kept_and_gets_what_it_lacks() -> None:
    card = write_card(OURS, THEIRS)
    assert front_matter(card) == {
        "license": "mit",
        "tags": ["mine"],
        "base_model": "org/base",
        "library_name": "transformers",
    }
    assert card.startswith(
        "---\nlicense: mit\ntags:\n- mine\nbase_model: org/base\nlibrary_name: transformers\n---\n# Mine\n\nWords.\n"
    )
    assert card.count(BEGIN) == card.count(END) == 1


def test_a_card_that_says_everything_gets_our_section_only() -> None:
    full = "---\nlibrary_name: other\ntags: []\nbase_model: [a/b]\n---\nText"
    card = write_card(OURS, full)
    assert card.startswith(f"{full}\n\n{BEGIN}\n")


def test_without_a_base_none_is_named() -> None:
    assert "base_model" not in front_matter(write_card(Provenance({}, ())))
    assert write_card(Provenance({}, ()), "# No front matter\n").startswith("---\nlibrary_name: transformers\n")


def test_only_our_section_is_replaced() -> None:
    once = write_card(OURS, THEIRS)
    again = write_card(Provenance({"step": "8"}, (), "org/base"), once + "\nAfter.\n")
    assert "| step | 8 |" in again
    assert "| step | 7 |" not in again
    assert again.endswith("\nAfter.\n")
    assert again.startswith(once[: once.index(BEGIN)])


def test_lines_of_windows_stay_so() -> None:
    card = write_card(OURS, THEIRS.replace("\n", "\r\n"))
    assert "\n" not in card.replace("\r\n", "")
    assert front_matter(card)["license"] == "mit"


@given(st.text(alphabet=st.characters(exclude_characters="\r", exclude_categories=["Cs"]), max_size=80))
def test_what_stands_around_our_section_stays(text: str) -> None:
    try:
        once = write_card(OURS, f"# Title\n{text}")
    except ValidationError:
        return
    assert f"# Title\n{text}" in once
    assert write_card(OURS, once) == once


def test_numbers_are_told_where_they_were_counted() -> None:
    counted = Statistics("basic", nan={"w": 3}, inf={"w": 1, "v": 2}, zero=("z",))
    card = write_card(Provenance({}, (FileRecord("m", 1, "", {"z": "digest"}, statistics=counted),)))
    assert "Numbers: 3 NaN in 1 tensors; 3 infinite numbers in 2 tensors; 1 tensors of zeros only." in card
    silent = write_card(Provenance({}, (FileRecord("m", 1, ""),), notes=("A note.",)))
    assert "Numbers" not in silent
    assert "A note." in silent


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("---\nlicense: mit\n# no end\n", "is not closed"),
        ("---\n- a\n---\n", "no mapping of names"),
        ("---\n1: a\n---\n", "no mapping of names"),
        ("---\na: [\n---\n", "is no YAML"),
        ("---\nlicense: 3\n---\n", "license is int: str or list is expected"),
        ("---\ntags: mine\n---\n", "tags is str: list is expected"),
        ("---\ntags: [1]\n---\n", "tags holds 1, and texts are expected"),
        ("---\nlicense: other\n---\n", "license_name says nothing"),
        (f"{BEGIN}\n{BEGIN}\n{END}\n{END}", "has 2 times"),
        (f"{END}\n{BEGIN}", "has 1 times"),
        (f"{BEGIN}\n", "and 0 times"),
    ],
)
def test_what_is_no_card_is_refused(card: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        write_card(OURS, card)


def test_a_card_of_the_hub_is_taken() -> None:
    validate_card("---\n---\n# Empty\n")
    validate_card("\ufeff---\nlicense: other\nlicense_name: mine\nlanguage:\n---\n")
    validate_card("# Nothing in front")
