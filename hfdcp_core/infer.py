"""A recipe is proposed, for a person to confirm: which tensor of a checkpoint is which of the model of a config.

Names are compared kind by kind (numbers of layers and experts left open), so a proposal is one line for all layers:

1. what has one shape on both sides may be the same; so may a stack of as many tensors as an index counts;
2. of those, words decide: parts of names that mean the same in many frameworks (``wq`` and ``q_proj``, ``w1`` and
   ``gate``), and plain likeness of the rest;
3. each kind is given away once, the likeliest first. Where another candidate is nearly as likely, or the shape alone
   decides, the line is marked as unsure.

Nothing in names or shapes tells whether rows of heads lie in pairs (as Meta rotates) or half a head apart: matrices of
queries and keys are always marked, with the step that would put them right.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hfdcp_core.name_patterns import skeleton

SURE = 0.25
"""How much likelier than the next candidate a sure one is."""
USUAL_NORMS = 2
"""Norms of a layer that words tell apart; where there are more, frameworks call them otherwise."""
LEAST = 0.3
"""What is less alike is not proposed."""
_WORDS: tuple[frozenset[str], ...] = (
    frozenset({"wq", "w_q", "query", "q_proj"}),
    frozenset({"wk", "w_k", "key", "k_proj"}),
    frozenset({"wv", "w_v", "value", "v_proj"}),
    frozenset({"wo", "o_proj", "output_proj", "out_proj", "dense"}),
    frozenset({"w1", "gate", "gate_proj", "w1_efd"}),
    frozenset({"w3", "up", "up_proj", "w3_efd"}),
    frozenset({"w2", "down", "down_proj", "w2_edf"}),
    frozenset({"tok_embeddings", "embed_tokens", "embeddings", "wte", "word_embeddings"}),
    frozenset({"lm_head", "output", "output_layer", "head"}),
    frozenset({"q_norm"}),
    frozenset({"k_norm"}),
)
_BLOCKS: tuple[frozenset[str], ...] = (
    frozenset({"attention", "attn", "self_attn", "self_attention", "qkv_linear"}),
    frozenset({"feed_forward", "mlp", "ffn", "moe"}),
    frozenset({"experts", "inner_experts", "routed_experts"}),
    frozenset({"shared_experts", "shared_expert"}),
)
_NORMS: tuple[frozenset[str], ...] = (
    frozenset({"attention_norm", "sa_norm", "input_layernorm", "ln_1"}),
    frozenset({"ffn_norm", "mlp_norm", "post_attention_layernorm", "ln_2"}),
    frozenset({"norm", "final_layernorm", "ln_f"}),
)
_LAST = {"scale": "weight", "gamma": "weight", "beta": "bias"}
"""What frameworks call a norm's weight and bias otherwise."""
_ROTATED = re.compile(r"(^|\.)(wq|wk|q_proj|k_proj)\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a kind of tensor may be."""

    source: str
    """Pattern of names as they are."""
    target: str
    """Pattern of names as the model has them; empty where nothing is like it."""
    ops: tuple[str, ...]
    """Steps that its shape asks for, as a recipe has them."""
    sure: bool
    """Whether one candidate fits much better than any other."""
    why: str
    """What else may be, or what nobody can tell."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tensors whose names differ in numbers only."""

    pattern: str
    shape: tuple[int, ...]
    dims: int
    """How many numbers stand in the name."""
    counts: tuple[int, ...]
    """How many values each of them has."""


def kinds_of(tensors: Mapping[str, tuple[int, ...]]) -> list[_Kind]:
    """Return the kinds of tensors, in the order of their first names."""
    found: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        numbers = tuple(int(part) for part in name.split(".") if part.isascii() and part.isdigit())
        found.setdefault((skeleton(name), shape), []).append(numbers)
    return [
        _Kind(_lettered(text), shape, len(rows[0]), tuple(len({row[n] for row in rows}) for n in range(len(rows[0]))))
        for (text, shape), rows in found.items()
    ]


def _lettered(text: str) -> str:
    """Return a name with variables for its numbers.

    >>> _lettered("layers.{}.experts.{}.w1")
    'layers.{i}.experts.{e}.w1'
    """
    for letter in "iejk":
        text = text.replace("{}", f"{{{letter}}}", 1)
    return text


def propose(sources: Mapping[str, tuple[int, ...]], targets: Mapping[str, tuple[int, ...]]) -> tuple[Proposal, ...]:
    """Propose what each kind of tensor becomes.

    Args:
        sources: Shapes of the tensors that are there, by name.
        targets: Shapes of the tensors that the model has in its files, by name.

    Returns:
        A proposal for each kind of source, in their order.
    """
    kinds, wanted = kinds_of(sources), kinds_of(targets)
    rows = sorted(
        (
            (score, s, t, ops)
            for s, kind in enumerate(kinds)
            for t, other in enumerate(wanted)
            for score, ops in _fits(kind, other)
        ),
        key=lambda row: -row[0],
    )
    chosen: dict[int, tuple[float, int, tuple[str, ...]]] = {}
    taken: set[int] = set()
    for score, s, t, ops in rows:
        if s not in chosen and t not in taken and score >= LEAST:
            chosen[s] = (score, t, ops)
            taken.add(t)
    return tuple(_proposal(number, kind, wanted, chosen, rows) for number, kind in enumerate(kinds))


def _proposal(
    number: int,
    kind: _Kind,
    wanted: list[_Kind],
    chosen: Mapping[int, tuple[float, int, tuple[str, ...]]],
    rows: Iterable[tuple[float, int, int, tuple[str, ...]]],
) -> Proposal:
    if number not in chosen:
        return Proposal(kind.pattern, "", (), sure=False, why="nothing in the model is like it")
    score, t, ops = chosen[number]
    others = [(other, wanted[place].pattern) for other, s, place, _ in rows if s == number and place != t]
    near = next((name for other, name in others if other > score - SURE), "")
    if near:
        return Proposal(kind.pattern, wanted[t].pattern, ops, sure=False, why=f"perhaps {near}")
    alike = [other for other in wanted if (other.shape, other.counts) == (kind.shape, kind.counts)]
    if len(kind.shape) == 1 and kind.dims and len(alike) > USUAL_NORMS:
        why = f"{len(alike)} vectors of a layer have this shape"
        return Proposal(kind.pattern, wanted[t].pattern, ops, sure=False, why=why)
    if _ROTATED.search(kind.pattern):
        why = "rows may lie in pairs: then `rope: {heads: …, to: half}`"
        return Proposal(kind.pattern, wanted[t].pattern, ops, sure=False, why=why)
    return Proposal(kind.pattern, wanted[t].pattern, ops, sure=True, why="")


def _fits(kind: _Kind, other: _Kind) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Yield how alike two kinds are, and the steps between them, where their shapes allow it."""
    likeness = _likeness(kind.pattern, other.pattern)
    if kind.shape == other.shape and kind.counts == other.counts:
        yield likeness, ()
    stacked = kind.dims + 1 == other.dims and kind.counts == other.counts[:-1]
    if stacked and kind.shape == (other.counts[-1], *other.shape):
        yield likeness, ("unbind: {dim: 0, as: e}",)
    if stacked and kind.shape == (other.counts[-1], *reversed(other.shape)) and other.shape != other.shape[::-1]:
        yield likeness, ("unbind: {dim: 0, as: e}", "transpose")
    if kind.shape != other.shape and kind.counts == other.counts and kind.shape == other.shape[::-1]:
        yield likeness - SURE / 2, ("transpose",)


def _likeness(a: str, b: str) -> float:
    """Return how alike two names are: what their words mean counts, then their letters."""
    mine, theirs = _parts(a), _parts(b)
    score = 0.0
    for table, weight in ((_WORDS, 1.0), (_NORMS, 1.0), (_BLOCKS, 0.3)):
        here, there = _meanings(mine, table), _meanings(theirs, table)
        score += weight * len(here & there) - weight * 0.5 * len(here ^ there)
    score += 0.3 if _LAST.get(mine[-1], mine[-1]) == _LAST.get(theirs[-1], theirs[-1]) else -0.3
    return score + 0.5 * difflib.SequenceMatcher(None, a, b).ratio()


def _parts(name: str) -> list[str]:
    return [part.lower() for part in name.split(".") if not part.startswith("{")]


def _meanings(parts: Iterable[str], table: tuple[frozenset[str], ...]) -> set[int]:
    parts = list(parts)
    last = parts[-2:]  # words for matrices stand at the end; the same letters elsewhere mean something else
    looked = last if table is _WORDS else parts
    return {number for number, words in enumerate(table) for part in looked if part in words}


def as_yaml(proposals: Iterable[Proposal]) -> str:
    """Write proposals as the file of a recipe, what is unsure marked so."""
    lines = [
        "name: proposed",
        "about: proposed from names and shapes; every line marked UNSURE needs a person",
        "rules:",
    ]
    for one in proposals:
        mark = f"  # UNSURE: {one.why}" if not one.sure else ""
        if not one.target:
            lines.append(f'- drop: "{one.source}"{mark}')
        elif one.ops:
            lines += [f'- from: "{one.source}"{mark}', f'  to: "{one.target}"', f"  ops: [{', '.join(one.ops)}]"]
        else:
            lines.append(f'- rename: {{"{one.source}": "{one.target}"}}{mark}')
    return "\n".join(lines) + "\n"
