"""Which names a model ties, what a config says of it, and how it is made to say otherwise."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.errors import SourceError
from hfdcp_core.ties import KEY, TEXT_CONFIGS, TIES, Config, Ties, find, read_config, untied

BERT = "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["lm_head.weight", "model.embed_tokens.weight"], {"lm_head.weight": "model.embed_tokens.weight"}),
        (["lm_head.weight", "embed_tokens.weight"], {"lm_head.weight": "embed_tokens.weight"}),
        (["lm_head.weight", "transformer.wte.weight"], {"lm_head.weight": "transformer.wte.weight"}),
        (["embed_out.weight", "gpt_neox.embed_in.weight"], {"embed_out.weight": "gpt_neox.embed_in.weight"}),
        (["output.weight", "tok_embeddings.weight"], {"output.weight": "tok_embeddings.weight"}),
        (
            ["proj_out.weight", "model.decoder.embed_tokens.weight"],
            {"proj_out.weight": "model.decoder.embed_tokens.weight"},
        ),
        (
            ["language_model.lm_head.weight", "language_model.model.embed_tokens.weight"],
            {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
        ),
        (
            ["lm_head.weight", "model.language_model.embed_tokens.weight"],
            {"lm_head.weight": "model.language_model.embed_tokens.weight"},
        ),
        (
            ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "cls.predictions.bias", BERT],
            {"cls.predictions.decoder.weight": BERT, "cls.predictions.decoder.bias": "cls.predictions.bias"},
        ),
        (
            ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
            dict.fromkeys(
                ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"], "shared.weight"
            ),
        ),
        (["a.lm_head.weight", "b.model.embed_tokens.weight"], {}),
        (["xlm_head.weight", "model.embed_tokens.weight"], {}),
        (["cls.predictions.decoder.weight", BERT, BERT.replace("bert", "other")], {}),
        (["cls.predictions.decoder.weight", "a.b.embeddings.word_embeddings.weight"], {}),
        (["model.embed_tokens.weight", "model.norm.weight"], {}),
        ([], {}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else None,
)
def test_the_embedding_is_kept_and_the_head_may_go(names: list[str], kept: dict[str, str]) -> None:
    assert find(names).kept == kept


def test_a_name_that_may_go_itself_is_never_the_one_to_keep() -> None:
    names = ["model.shared.weight", "model.decoder.embed_tokens.weight", "lm_head.weight", "proj_out.weight"]
    assert find(names).kept == dict.fromkeys(names[1:], "model.shared.weight")


def test_the_table_has_no_circles() -> None:
    assert {dropped for dropped, _ in TIES}.isdisjoint(
        kept for _, kept in TIES if kept not in {"model.decoder.embed_tokens.weight", "embed_tokens.weight"}
    )
    everything = [name.replace("*", "bert") for row in TIES for name in row]
    found = find(everything).kept
    assert set(found.values()).isdisjoint(found)


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        (["lm_head.weight", "model.norm.weight"], ("lm_head.weight",)),
        (["text.lm_head.weight", "model.embed_tokens.weight"], ("text.lm_head.weight",)),
        (["lm_head.weight", "model.embed_tokens.weight"], ()),
        (["decoder.weight", "output.weight"], ()),
    ],
    ids=["head-alone", "embedding-elsewhere", "both", "no-head-beyond-doubt"],
)
def test_a_head_without_an_embedding_is_told(names: list[str], lost: tuple[str, ...]) -> None:
    assert find(names) == Ties({} if lost or names[0] != "lm_head.weight" else {names[0]: names[1]}, lost)


# ---- the config ----


def config(value: object) -> Config:
    return read_config(json.dumps(value).encode(), where="config.json")


@pytest.mark.parametrize(
    ("value", "tied", "claims"),
    [
        ({}, False, False),
        ({KEY: None}, False, False),
        ({KEY: True}, True, True),
        ({KEY: False}, False, False),
        ({KEY: False, "text_config": {KEY: True}}, False, True),
        ({"text_config": {KEY: True}}, True, True),
        ({KEY: True, "text_config": {KEY: True}, "vision_config": {KEY: False}}, True, True),
        ({"vision_config": {KEY: True}}, False, False),
        ({"text_config": [KEY], "decoder": "x"}, False, False),
    ],
    ids=json.dumps,
)
def test_a_config_ties_where_it_says_so_and_nowhere_says_otherwise(value: object, tied: bool, claims: bool) -> None:
    found = config(value)
    assert (found.tied, found.claims) == (tied, claims)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b'{"tie_word_embeddings": true', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "a list, expected an object"),
        (b'{"tie_word_embeddings": "true"}', "expected true or false\n  - tie_word_embeddings is 'true'"),
        (b'{"text_config": {"tie_word_embeddings": 1}}', "text_config.tie_word_embeddings is 1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_config_is_refused_with_its_place(raw: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=r"^m/config\.json: ") as caught:
        read_config(raw, where="m/config.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"tie_word_embeddings": true}', b'{"tie_word_embeddings": false}'),
        (
            b'{\n\t"a": 1.50,\n\t"tie_word_embeddings"\t:  true }\n\n',
            b'{\n\t"a": 1.50,\n\t"tie_word_embeddings"\t:  false }\n\n',
        ),
        (
            b'{"tie_word_embeddings": true, "tie_word_embeddings":true}',
            b'{"tie_word_embeddings": false, "tie_word_embeddings":false}',
        ),
        (
            b'{"x": "\\"tie_word_embeddings\\": true", "decoder": {"k": [], "tie_word_embeddings": true}, "z": {}}',
            b'{"x": "\\"tie_word_embeddings\\": true", "decoder": {"k": [], "tie_word_embeddings": false}, "z": {}}',
        ),
        (
            b'{"vision_config": {"tie_word_embeddings": true}, "tie_word_embeddings": true}',
            b'{"vision_config": {"tie_word_embeddings": true}, "tie_word_embeddings": false}',
        ),
        (b'{"tie\\u005fword_embeddings": true}', b'{"tie\\u005fword_embeddings": false}'),
        (
            b'{"text_config": 1, "text_config": {"tie_word_embeddings": true}}',
            b'{"text_config": 1, "text_config": {"tie_word_embeddings": false}}',
        ),
        (b'{\n  "a": "\xc3\xa4"\n}\n', b'{\n  "tie_word_embeddings": false,\n  "a": "\xc3\xa4"\n}\n'),
        (b"{}", b'{"tie_word_embeddings": false}'),
        (b"{\n}", b'{\n"tie_word_embeddings": false\n}'),
        (b'{"tie_word_embeddings": null}', b'{"tie_word_embeddings": false}'),
    ],
    ids=lambda value: value.decode()[:30],
)
def test_untying_changes_what_it_must_and_no_other_byte(before: bytes, after: bytes) -> None:
    assert untied(read_config(before, where="x")) == after


def test_a_config_that_says_false_already_is_not_touched() -> None:
    assert untied(config({KEY: False, "text_config": {KEY: False}})) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        KEY: st.booleans() | st.none(),
        "text_config": st.fixed_dictionaries({}, optional={KEY: st.booleans(), "n": JSON}),
        "decoder": JSON,
        "other": JSON,
    },
)


@given(CONFIGS, st.sampled_from([None, 0, 2]))
def test_an_untied_config_says_false_and_is_otherwise_the_same(value: dict[str, object], indent: int | None) -> None:
    raw = json.dumps(value, indent=indent).encode()
    found = read_config(raw, where="x")
    changed = untied(found)
    now = read_config(raw if changed is None else changed, where="x")
    assert set(now.said.values()) == {False}
    assert (changed is None) == (bool(found.said) and not any(found.said.values()))
    assert without(json.loads(now.text)) == without(value)


def without(value: dict[str, object]) -> dict[str, object]:
    """Return a config without what it says of ties, where that is looked at."""
    inner = {name: item for name, item in value.items() if name != KEY}
    for name in TEXT_CONFIGS:
        if isinstance(part := inner.get(name), dict):
            inner[name] = {key: item for key, item in part.items() if key != KEY}
    return inner
