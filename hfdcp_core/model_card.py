"""The model card: front matter for the Hub, and a section of ours that says what the weights were made from.

A card that is there already is kept. In its front matter, what we know is added where nothing is said of it, and our
section is replaced between its two marks, or put at the end; every other byte stays. What cannot be a card for the Hub
is refused before anything is uploaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hfdcp_core.errors import ValidationError
from hfdcp_core.manifest import FileRecord
from hfdcp_core.statistics import NONE, merged

BEGIN, END = "<!-- hfdcp:begin -->", "<!-- hfdcp:end -->"
"""What stands around our section."""
_FRONT = re.compile(r"\A(\ufeff?)---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_KINDS: Mapping[str, tuple[type, ...]] = {
    "license": (str, list),
    "license_name": (str,),
    "license_link": (str,),
    "base_model": (str, list),
    "base_model_relation": (str,),
    "library_name": (str,),
    "pipeline_tag": (str,),
    "language": (str, list),
    "tags": (list,),
    "datasets": (str, list),
    "metrics": (list,),
    "model-index": (list,),
}
"""What the Hub expects of keys that it reads, from huggingface_hub's ``ModelCardData``."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a card says of the weights."""

    rows: Mapping[str, str]
    """What they were made from, and how: name and value."""
    records: tuple[FileRecord, ...]
    """The weight files."""
    base_model: str = ""
    """Name of the base model on the Hub; empty where it has none."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What else should be said."""


def write_card(provenance: Provenance, existing: str = "") -> str:
    """Return a card with our section: the existing one, or a new one.

    Raises:
        ValidationError: The existing card is none that the Hub would take, or its marks of our section do not match.
    """
    newline = "\r\n" if "\r\n" in existing else "\n"
    section = _section(provenance).replace("\n", newline)
    body = _with_section(existing, section, newline) if existing else f"# Model\n\n{section}\n"
    text = _with_front_matter(body, provenance, newline)
    validate_card(text)
    return text


def validate_card(text: str) -> None:
    """Refuse a card that the Hub would refuse, as far as that can be told here.

    Raises:
        ValidationError: ``problems`` has everything that is wrong.
    """
    front = front_matter(text)
    problems = [
        f"{key} is {type(value).__name__}: {' or '.join(kind.__name__ for kind in _KINDS[key])} is expected"
        for key, value in front.items()
        if key in _KINDS and value is not None and not isinstance(value, _KINDS[key])
    ]
    problems += [
        f"{key} holds {item!r}, and texts are expected"
        for key in ("tags", "language", "datasets", "base_model", "license")
        if isinstance(front.get(key), list)
        for item in front[key]  # type: ignore[attr-defined]
        if not isinstance(item, str)
    ]
    if front.get("license") == "other" and not front.get("license_name"):
        problems.append("license is other, and license_name says nothing")
    ValidationError.raise_for("the model card cannot be pushed", problems)


def front_matter(text: str) -> Mapping[str, object]:
    r"""Return what stands in front of a card.

    Raises:
        ValidationError: It is not closed, or no YAML mapping.

    >>> front_matter("---\nlicense: mit\n---\n# Words")
    {'license': 'mit'}
    """
    from hfdcp_core.yaml_text import read_yaml

    found = _FRONT.match(text)
    if found is None:
        if re.match(r"\A\ufeff?---[ \t]*\r?\n", text):
            raise ValidationError("the model card's front matter is not closed: a line of `---` ends it")
        return {}
    try:
        front = read_yaml(found[2])
    except ValueError as error:
        raise ValidationError(f"the model card's front matter is no YAML: {error}") from error
    if front is None:
        return {}
    if not isinstance(front, dict) or not all(isinstance(key, str) for key in front):
        raise ValidationError("the model card's front matter is no mapping of names")
    return front


def _with_front_matter(text: str, provenance: Provenance, newline: str) -> str:
    """Add what we know, where the card says nothing of it; all that it says stays as it is."""
    from hfdcp_core.yaml_text import write_yaml

    front = front_matter(text)
    known: dict[str, object] = {"library_name": "transformers", "tags": ["hfdcp"]}
    if provenance.base_model:
        known["base_model"] = provenance.base_model
    added = {key: value for key, value in known.items() if key not in front}
    if not added:
        return text
    lines = write_yaml(added).replace("\n", newline)
    found = _FRONT.match(text)
    if found is None:
        return f"---{newline}{lines}---{newline}{newline}{text}"
    end = found.start(2) + len(found[2])
    return text[:end] + lines + text[end:]


def _with_section(text: str, section: str, newline: str) -> str:
    """Put our section in the place of the one that is there, or at the end."""
    begins, ends = text.count(BEGIN), text.count(END)
    if begins != ends or begins > 1 or text.find(END) < text.find(BEGIN):
        raise ValidationError(
            f"the model card has {begins} times {BEGIN} and {ends} times {END}: our section stands between one of each"
        )
    if begins:
        start, stop = text.index(BEGIN), text.index(END) + len(END)
        return text[:start] + section + text[stop:]
    gap = "" if text.endswith(newline * 2) else newline if text.endswith(newline) else newline * 2
    return f"{text}{gap}{section}{newline}"


def _section(provenance: Provenance) -> str:
    lines = [BEGIN, "## Where these weights come from", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in provenance.rows.items()]
    lines += ["", "| file | bytes | sha256 |", "|---|---:|---|"]
    lines += [f"| {record.path} | {record.size} | `{record.sha256}` |" for record in provenance.records]
    lines += ["", *_statistics(provenance.records), *provenance.notes]
    lines += ["", "`hfdcp-manifest.json` has the digest of every tensor.", END]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _statistics(records: Sequence[FileRecord]) -> list[str]:
    """Say what was counted of the numbers."""
    if any(record.statistics.level == NONE for record in records):
        return []
    counted = merged(records)
    said = [
        f"{sum(counts.values())} {word} in {len(counts)} tensors"
        for word, counts in (("NaN", counted.nan), ("infinite numbers", counted.inf))
        if counts
    ]
    said += [f"{len(counted.zero)} tensors of zeros only"] if counted.zero else []
    return [f"Numbers: {'; '.join(said)}."] if said else ["Numbers: no NaN, nothing infinite, no tensor of zeros only."]
