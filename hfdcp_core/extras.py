"""Entries that are no tensors: what hides in them is said, and plain values are saved apart when that is asked for.

They never reach a weights file. Each is an item of its own, which `hfdcp_core.distcp_file.read_object` reads without
executing anything of it. Looking into an item costs a small read, and a training state has thousands, so by default
only those are looked into that could hide weights: the largest few that are not named as optimizer state and the
like. With ``--keep-extra`` it is every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hfdcp_core import wire
from hfdcp_core.catalog import TORCH_SAVE_ZSTD, Catalog, ObjectItem, Skipped
from hfdcp_core.distcp_file import TENSORS, ObjectContent, hides_tensors, read_object
from hfdcp_core.errors import CorruptFile
from hfdcp_core.manifest import EXTRA_PATH
from hfdcp_core.recipe import EXTRA_STATE, why_no_weight
from hfdcp_core.store import Source, url_of
from hfdcp_core.zstd_stream import ZstdStream

LOOKED_INTO = 64
"""How many items are looked into where not every one is."""
IN_FLIGHT = 4
"""Items that are read at once."""
MOST_DECOMPRESSED_BYTES = 4 << 30
"""A compressed item that holds more is taken for a bomb."""
SAVED = f"not a tensor: saved in {EXTRA_PATH}"
"""Said of a plain value that is kept."""
LAYER_STATE = "extra state of a layer, not a weight"
"""Said of what some layers (Transformer Engine) keep beside their weights."""


def look_into(catalog: Catalog, source: Source, *, every: bool) -> Catalog:
    """Say of entries that are no tensors what they hold.

    Args:
        catalog: What was gathered.
        source: The store that it lies in.
        every: Whether all of them will be saved apart where they are plain values; else only tensors are looked for.

    Raises:
        CorruptFile: All are asked for, and one is damaged.
    """
    contents = _read(catalog.objects, source) if every else _suspected(catalog.objects, source)
    kept = _plain(contents) if every else {}
    held = {item.name: content.problem for item, content in contents if content.problem}
    reasons = {entry.name: _reason(entry, held.get(entry.name), kept) for entry in catalog.skipped}
    return replace(catalog, skipped=tuple(Skipped(entry.name, reasons[entry.name]) for entry in catalog.skipped))


def document(catalog: Catalog, source: Source) -> bytes | None:
    """Return the file with all plain values by name, or nothing where there is none; equal sources give equal bytes.

    Raises:
        CorruptFile: An item is damaged.
    """
    values = _plain(_read(catalog.objects, source))
    return wire.dump_extra({name: content.value for name, content in values.items()}) if values else None


Contents = list[tuple[ObjectItem, ObjectContent]]


def _suspected(items: Iterable[ObjectItem], source: Source) -> Contents:
    """Return the items that hide tensors, of the few that may hide weights; a damaged one is nobody's loss."""
    candidates = [item for item in items if why_no_weight((item.name,)) is None]
    candidates.sort(key=lambda item: (-item.span.length, item.name))

    def hides(item: ObjectItem) -> bool:
        try:
            fetch, length, where = _opened(item, source)
            return hides_tensors(fetch, length, where=where)
        except CorruptFile:
            return False

    with ThreadPoolExecutor(IN_FLIGHT, "hfdcp-objects") as pool:
        answers = list(pool.map(hides, candidates[:LOOKED_INTO]))
    return [(item, ObjectContent(None, TENSORS)) for item, hidden in zip(candidates, answers, strict=False) if hidden]


def _read(items: Iterable[ObjectItem], source: Source) -> Contents:
    def look(item: ObjectItem) -> tuple[ObjectItem, ObjectContent]:
        fetch, length, where = _opened(item, source)
        return item, read_object(fetch, length, where=where)

    with ThreadPoolExecutor(IN_FLIGHT, "hfdcp-objects") as pool:
        return list(pool.map(look, items))


def _opened(item: ObjectItem, source: Source) -> tuple[Callable[[int, int], bytes], int, str]:
    """Return what reads an item's archive, how long that is, and what to call it."""
    span = item.span

    def fetch(start: int, stop: int) -> bytes:
        return source.read(span.path, span.start + start, span.start + stop)

    where = f"{url_of(source, span.path, span.start)}: {item.name} in {span}"
    if item.encoding == TORCH_SAVE_ZSTD:
        stream = ZstdStream(fetch, span.length, most=MOST_DECOMPRESSED_BYTES, where=where)
        return stream.read, stream.length, where
    return fetch, span.length, where


def _plain(contents: Iterable[tuple[ObjectItem, ObjectContent]]) -> Mapping[str, ObjectContent]:
    """Return the plain values by name; of a name that two ranks saved with different values there is none."""
    found: dict[str, list[ObjectContent]] = {}
    for item, content in contents:
        found.setdefault(item.name, []).append(content)
    return {name: same[0] for name, same in found.items() if not same[0].problem and same.count(same[0]) == len(same)}


def _reason(entry: Skipped, problem: str | None, kept: Mapping[str, ObjectContent]) -> str:
    if entry.name in kept:
        return SAVED
    if problem == TENSORS:
        return TENSORS
    if any(part.startswith(EXTRA_STATE) for part in entry.name.split(".")):
        return LAYER_STATE
    return f"not a tensor: {problem}, not saved" if problem else entry.reason
