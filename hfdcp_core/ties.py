"""Tied tensors: which names stand for one parameter, what a config says of them, and how it is made to say otherwise.

A model may use its input embedding as its output head. Distributed checkpoints then hold the same bytes twice, under
two names. A loader that reads ``tie_word_embeddings: true`` takes the *embedding* and overwrites the head with it, so:

- leaving the head out is right only if the config says so and the bytes are equal;
- the embedding is the one to keep: with the head alone the model starts with a random embedding;
- where the bytes differ (trained apart), such a config would throw away what was trained: it must say ``false``.

Nothing here reads a tensor: the caller compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hfdcp_core import json_text
from hfdcp_core.errors import SourceError

KEY = "tie_word_embeddings"
"""What a config calls it."""
TEXT_CONFIGS = ("text_config", "decoder", "generator", "language_config", "llm_config")
"""Configs inside of a config that speak of the part with the head (transformers' ``get_text_config``, and others)."""
_WORDS = "*.embeddings.word_embeddings.weight"
TIES: tuple[tuple[str, str], ...] = (
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "model.language_model.embed_tokens.weight"),
    ("lm_head.weight", "model.text_model.embed_tokens.weight"),
    ("lm_head.weight", "model.shared.weight"),
    ("lm_head.weight", "shared.weight"),
    ("lm_head.weight", "model.decoder.embed_tokens.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("lm_head.weight", "transformer.word_embeddings.weight"),
    ("lm_head.weight", "transformer.tokens_embed.weight"),
    ("lm_head.weight", "backbone.embeddings.weight"),
    ("lm_head.weight", "gpt_neox.embed_in.weight"),
    ("embed_out.weight", "gpt_neox.embed_in.weight"),
    ("proj_out.weight", "model.decoder.embed_tokens.weight"),
    ("output_projection.weight", "model.decoder.embed_tokens.weight"),
    ("model.encoder.embed_tokens.weight", "model.shared.weight"),
    ("model.decoder.embed_tokens.weight", "model.shared.weight"),
    ("encoder.embed_tokens.weight", "shared.weight"),
    ("decoder.embed_tokens.weight", "shared.weight"),
    ("cls.predictions.decoder.weight", _WORDS),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("predictions.decoder.weight", _WORDS),
    ("predictions.decoder.bias", "predictions.bias"),
    ("lm_head.decoder.weight", _WORDS),
    ("lm_head.decoder.bias", "lm_head.bias"),
    ("generator_lm_head.weight", _WORDS),
    ("vocab_projector.weight", _WORDS),
    ("decoder.weight", "model.embeddings.tok_embeddings.weight"),
    # Without the model's own prefix, as training code that keeps its own names has it (torchtitan, Meta's Llama).
    ("lm_head.weight", "embed_tokens.weight"),
    ("lm_head.weight", "wte.weight"),
    ("lm_head.weight", "tok_embeddings.weight"),
    ("output.weight", "tok_embeddings.weight"),
)
"""Dropped and kept names, each the end of a name behind one common prefix; ``*`` is one segment. First fit wins.

From the maps ``_tied_weights_keys`` of all models in transformers 5.24 ({dropped: kept}), those that ``KEY`` governs.
"""
_DROPPED = tuple({dropped for dropped, _ in TIES})
_HEAD = "lm_head.weight"
"""A head beyond doubt: where it is tied and no embedding is known, a loader would tie it to a random one."""


@dataclass(frozen=True, slots=True)
class Ties:
    """Which of some names may stand for one parameter."""

    kept: Mapping[str, str]
    """The name to keep, by the name that may be dropped."""
    lost: tuple[str, ...]
    """Heads for which no embedding is known."""


def find(names: Iterable[str], more: Mapping[str, str] | None = None) -> Ties:
    """Look for names that models tie, or that a recipe says are (``more``: name to leave out, and name to keep).

    >>> find(["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]).kept
    {'lm_head.weight': 'model.embed_tokens.weight'}
    >>> find(["lm_head.weight", "model.norm.weight"]).lost
    ('lm_head.weight',)
    """
    present = dict.fromkeys(names)
    kept = {name: other for name in present if name.endswith(_DROPPED) and (other := _kept(name, present))}
    kept |= {name: other for name, other in (more or {}).items() if name in present and other in present}
    roots = {name: _root(name, kept) for name in kept}
    heads = (name for name in present if _prefix(name, _HEAD) is not None)
    return Ties(roots, tuple(head for head in heads if head not in roots))


def _kept(name: str, present: Mapping[str, None]) -> str | None:
    for dropped, kept in TIES:
        prefix = _prefix(name, dropped)
        if prefix is not None and (other := _holder(prefix, kept, present)):
            return other
    return None


def _prefix(name: str, end: str) -> str | None:
    """Return what stands before the end of a name, if that end is whole segments of it."""
    prefix = name.removesuffix(end)
    return prefix if prefix != name and (not prefix or prefix.endswith(".")) else None


def _holder(prefix: str, kept: str, present: Mapping[str, None]) -> str | None:
    """Return the one name that is meant; of two that fit a ``*`` nobody knows which."""
    if not kept.startswith("*"):
        return prefix + kept if prefix + kept in present else None
    end = kept[1:]
    fits = [name for name in present if name.startswith(prefix) and name.endswith(end)]
    fits = [name for name in fits if "." not in (name[len(prefix) : -len(end)] or ".")]
    return fits[0] if len(fits) == 1 else None


def _root(name: str, kept: Mapping[str, str]) -> str:
    """Follow a name to the one that is kept itself; the table has no circles."""
    while name in kept:
        name = kept[name]
    return name


# ---- the config -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Config:
    """What a model's config says of ties."""

    where: str
    """Its place, for messages."""
    text: str
    """All of it, as it was found."""
    said: Mapping[tuple[str, ...], bool]
    """What it says, by the path of keys that leads there; nothing where it leaves it to the model's class."""

    @property
    def tied(self) -> bool:
        """Whether it says that the tensors are tied, and nowhere that they are not."""
        return bool(self.said) and all(self.said.values())

    @property
    def claims(self) -> bool:
        """Whether it says anywhere that they are tied."""
        return any(self.said.values())


def read_config(raw: bytes, *, where: str) -> Config:
    """Read a ``config.json``.

    Raises:
        SourceError: It is none.

    >>> read_config(b'{"text_config": {"tie_word_embeddings": true}}', where="x").said
    {('text_config', 'tie_word_embeddings'): True}
    """
    try:
        text = raw.decode()
        top = json.loads(text)
    except (ValueError, RecursionError) as broken:
        raise SourceError(f"{where}: not JSON: {broken}; mend it, or name another config (--config)") from broken
    if not isinstance(top, dict):
        raise SourceError(f"{where}: not a config: a {type(top).__name__}, expected an object with keys")
    stated = {path: holder[KEY] for path, holder in _holders(top) if holder.get(KEY) is not None}
    odd = [f"{'.'.join(path)} is {value!r}" for path, value in stated.items() if not isinstance(value, bool)]
    SourceError.raise_for(f"{where}: expected true or false", odd)
    return Config(where, text, {path: value is True for path, value in stated.items()})


def _holders(top: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """Yield every object that may say something of ties, and the path of what it would say."""
    yield (KEY,), top
    for name in TEXT_CONFIGS:
        inner = top.get(name)
        if isinstance(inner, dict):
            yield (name, KEY), inner


def untied(config: Config) -> bytes | None:
    """Return the config with all it says of ties turned into false, every other byte as it is; None if it says so.

    >>> untied(read_config(b'{"tie_word_embeddings" : true, "x": 1e3}', where="x"))
    b'{"tie_word_embeddings" : false, "x": 1e3}'
    >>> untied(read_config(b'{"x": 1}', where="x"))
    b'{"tie_word_embeddings": false,"x": 1}'
    """
    if config.said and not config.claims:
        return None
    text = config.text
    paths = config.said or [(KEY,)]  # where nothing is said, null may stand there
    edits = [(span, "false") for path in paths for span in json_text.values(text, json_text.top_of(text), path)]
    return (json_text.edited(text, edits) if edits else json_text.inserted(text, KEY, "false")).encode()
