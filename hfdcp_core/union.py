"""One checkpoint whose files lie in several places: node-local disks, a folder for each rank, a copy that was resumed.

`Union` joins several stores into one source; all that reads a source works on it. `settle` decides which copy of a
file counts, and never by guessing:

1. Every ``.metadata`` must be the same bytes: two of them are two checkpoints.
2. Of the copies of one file those count that are whole: as long as ``.metadata`` says, or as a safetensors file's own
   header says. Where none is, the longest stands for it, and whoever gathers says what it lacks.
3. Several whole copies must hold the same. That is shown by the CRC-32 of every item where the writer computed them
   (the directories of two copies are equal to the byte), else by reading both. If they differ, one is of another save,
   nothing tells which, and it is an error that names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from hfdcp_core.catalog import FileStamp, Span
from hfdcp_core.distcp_file import read_item, read_metadata
from hfdcp_core.errors import CorruptFile, SourceError, StorageNotFound
from hfdcp_core.homes import METADATA
from hfdcp_core.manifest import INDEX_PATH
from hfdcp_core.safetensors_file import header_length, parse_header
from hfdcp_core.store import Listing, Source

COMPARED_BYTES = 4 << 20
"""How much of two copies is held in memory while they are compared."""
COMPARED_AT_ONCE = 8
"""Items that are compared at the same time."""


class Below:
    """One folder of a source, as a source of its own."""

    def __init__(self, source: Source, folder: str) -> None:
        """Take the source and a folder in it, which need not be there."""
        self._source = source
        self._prefix = f"{folder}/"

    @property
    def url(self) -> str:
        """Where the folder is, without secrets."""
        return f"{self._source.url.rstrip('/')}/{self._prefix.rstrip('/')}"

    @property
    def remote(self) -> bool:
        """Whether the source is."""
        return self._source.remote

    def list(self, folder: str = "") -> Listing:
        """List a folder in it."""
        found = self._source.list(f"{self._prefix}{folder}".rstrip("/"))
        return Listing(
            tuple(FileStamp(self._inner(file.path), file.size, file.tag) for file in found.files),
            tuple(map(self._inner, found.folders)),
        )

    def stat(self, path: str) -> FileStamp:
        """Return the stamp of a file in it."""
        found = self._source.stat(self._prefix + path)
        return FileStamp(path, found.size, found.tag)

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Return the stamps of files in it."""
        found = self._source.stamps([self._prefix + path for path in paths])
        return {self._inner(full): FileStamp(self._inner(full), file.size, file.tag) for full, file in found.items()}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from a file in it."""
        self._source.read_into(self._prefix + path, start, buffer)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of a file in it."""
        return self._source.read(self._prefix + path, start, stop)

    def _inner(self, path: str) -> str:
        return path.removeprefix(self._prefix)


def below(source: Source, folder: str) -> Source:
    """Return a folder of a source as a source; the source itself where no folder is named."""
    return Below(source, folder) if folder else source


class Union:
    """Several sources as one: a file is read from the place that holds it."""

    def __init__(self, places: Sequence[Source], holders: Mapping[str, int] | None = None) -> None:
        """Take the places in order, and the number of the one that holds a file; else it is the first that has it."""
        self._places = tuple(places)
        self._holders = dict(holders or {})

    @property
    def url(self) -> str:
        """All places in braces, as a shell would write them."""
        return f"{{{','.join(place.url for place in self._places)}}}"

    @property
    def remote(self) -> bool:
        """Whether any place is."""
        return any(place.remote for place in self._places)

    @property
    def places(self) -> tuple[Source, ...]:
        """The joined sources, in order."""
        return self._places

    def list(self, folder: str = "") -> Listing:
        """List what all places have in one folder, each file once.

        Raises:
            StorageNotFound: No place has such a folder.
        """
        listings = list(self._listings(folder))
        files = {stamp.path: stamp for _, listing in reversed(listings) for stamp in listing.files}
        for number, listing in listings:
            files |= {stamp.path: stamp for stamp in listing.files if self._holders.get(stamp.path) == number}
        folders = {inner for _, listing in listings for inner in listing.folders}
        return Listing(tuple(files[path] for path in sorted(files)), tuple(sorted(folders)))

    def _listings(self, folder: str) -> Iterator[tuple[int, Listing]]:
        absent = None
        found = 0
        for number, place in enumerate(self._places):
            try:
                listing = place.list(folder)
            except StorageNotFound as error:
                absent = error
                continue
            found += 1
            yield number, listing
        if absent and not found:
            raise absent

    def holder(self, path: str) -> int:
        """Return the number of the place that a file is read from, counted from 0.

        Raises:
            StorageNotFound: No place has it.
        """
        if path not in self._holders:
            self._holders[path] = next(number for number, _ in self.copies(path))
        return self._holders[path]

    def copies(self, path: str) -> Iterator[tuple[int, FileStamp]]:
        """Give every copy of a file: the number of its place, and its stamp.

        Raises:
            StorageNotFound: No place has it.
        """
        absent = None
        found = 0
        for number, place in enumerate(self._places):
            try:
                stamp = place.stat(path)
            except StorageNotFound as error:
                absent = error
                continue
            found += 1
            yield number, stamp
        if absent and not found:
            raise absent

    def stat(self, path: str) -> FileStamp:
        """Return the stamp of the copy that counts."""
        return self._place(path).stat(path)

    def stamps(self, paths: Iterable[str]) -> Mapping[str, FileStamp]:
        """Return the stamps of the copies that count."""
        held: dict[int, list[str]] = {}
        for path in paths:
            with suppress(StorageNotFound):
                held.setdefault(self.holder(path), []).append(path)
        return {path: stamp for number, own in held.items() for path, stamp in self._places[number].stamps(own).items()}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the copy that counts."""
        self._place(path).read_into(path, start, buffer)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of the copy that counts."""
        return self._place(path).read(path, start, stop)

    def _place(self, path: str) -> Source:
        return self._places[self.holder(path)]


def settle(union: Union) -> Union:
    """Return the union with a copy chosen for every file of a checkpoint that lies directly in its places.

    Raises:
        CorruptFile: Places hold different metadata, or different bytes in whole files of one name.
        StorageNotFound: No place has the folder.
    """
    copies: dict[str, dict[int, FileStamp]] = {}
    for number, listing in union._listings(""):  # noqa: SLF001 - of this module
        for stamp in listing.files:
            copies.setdefault(stamp.path, {})[number] = stamp
    several = {path: found for path, found in copies.items() if len(found) > 1}
    return Union(union.places, {path: min(found) for path, found in copies.items()} | _Copies(union, several).chosen())


class _Copies:
    """The files that lie in more than one place."""

    def __init__(self, union: Union, several: Mapping[str, Mapping[int, FileStamp]]) -> None:
        self._places = union.places
        self._several = several

    def chosen(self) -> dict[str, int]:
        """Return the place of the copy that counts, for every file that a checkpoint is made of."""
        told = [path for path in self._several if path.endswith(METADATA) or path == INDEX_PATH]
        self._refuse("say different things; they are of two checkpoints", told)
        weights = [path for path in self._several if path.endswith(".distcp")]
        headed = [path for path in self._several if path.endswith(".safetensors")]
        whole = {path: self._with_own_size(path) for path in headed}
        self._refuse("hold different bytes; one is of another save", headed, whole)
        return self._shards(weights) | {path: (whole[path] or self._longest(path))[0] for path in headed}

    def _refuse(self, what: str, paths: Sequence[str], among: Mapping[str, Sequence[int]] | None = None) -> None:
        """Refuse files whose copies, all of them or those in some places, are not the same bytes."""
        held = {path: tuple(self._several[path] if among is None else among[path]) for path in paths}
        self._raise(what, [problem for path in paths if (problem := self._difference(path, held[path]))])

    def _raise(self, what: str, problems: Sequence[str]) -> None:
        CorruptFile.raise_for(f"files of one name {what}: leave out the place that does not belong here", problems)

    def _difference(self, path: str, numbers: Sequence[int]) -> str | None:
        sizes = {number: self._several[path][number].size for number in numbers}
        for other in numbers[1:]:
            pair = (numbers[0], other)
            if sizes[other] != sizes[pair[0]] or not self._same(path, pair, Span(path, 0, sizes[other])):
                return self._told_apart(path, *pair)
        return None

    def _told_apart(self, path: str, first: int, other: int) -> str:
        return f"{path}: in {self._places[first].url} and in {self._places[other].url}"

    def _same(self, path: str, pair: tuple[int, int], span: Span) -> bool:
        """Compare two copies byte by byte."""
        for start in range(span.start, span.stop, COMPARED_BYTES):
            stop = min(start + COMPARED_BYTES, span.stop)
            one, other = (self._places[number].read(path, start, stop) for number in pair)
            if one != other:
                return False
        return True

    def _longest(self, path: str) -> list[int]:
        """Return the places of the longest copies."""
        most = max(stamp.size for stamp in self._several[path].values())
        return [number for number, stamp in self._several[path].items() if stamp.size == most]

    # ---- safetensors: the size that a file's own header states ----

    def _with_own_size(self, path: str) -> tuple[int, ...]:
        return tuple(number for number in self._several[path] if self._is_whole(path, number))

    def _is_whole(self, path: str, number: int) -> bool:
        place, size = self._places[number], self._several[path][number].size
        where = f"{place.url}/{path}"
        try:
            length = header_length(place.read(path, 0, min(8, size)), path=where)
            parse_header(place.read(path, 0, min(8 + length, size)), path=where, file_size=size)
        except SourceError:
            return False
        return True

    # ---- distributed checkpoints: the size that .metadata states ----

    def _shards(self, paths: Sequence[str]) -> dict[str, int]:
        if not paths:
            return {}
        stated = self._stated()
        if stated is None:  # nothing says how long they must be
            self._refuse("hold different bytes; one is of another save, or cut short", paths)
            return {}
        extents, spans = stated
        alike, bytewise, problems = {}, [], []
        for path in paths:
            whole = [n for n, stamp in self._several[path].items() if stamp.size == extents.get(path, stamp.size)]
            alike[path] = whole or self._longest(path)
            if path in spans and whole:
                problems += [p for n in whole[1:] if (p := self._item_problem(path, (whole[0], n), spans[path]))]
            elif path in extents:
                bytewise.append(path)
        self._raise("hold different bytes; one is of another save", problems)
        self._refuse("hold different bytes; one is of another save", bytewise, alike)
        return {path: numbers[0] for path, numbers in alike.items()}

    def _stated(self) -> tuple[Mapping[str, int], Mapping[str, list[Span]]] | None:
        source = Union(self._places)
        try:
            size = source.stat(METADATA).size
        except StorageNotFound:
            return None
        found = read_metadata(source.read(METADATA, 0, size), path=f"{source.url}/{METADATA}")
        # A file that may hold its tensors otherwise than item by item is compared as a whole.
        spans: dict[str, list[Span]] = {}
        for span in (*(shard.span for shard in found.shards), *(entry.span for entry in found.objects)):
            if span.path not in found.bare:
                spans.setdefault(span.path, []).append(span)
        return found.extents, spans

    def _item_problem(self, path: str, pair: tuple[int, int], spans: Sequence[Span]) -> str | None:
        with ThreadPoolExecutor(COMPARED_AT_ONCE, "hfdcp-compare") as pool:
            same = all(pool.map(lambda span: self._same_item(path, pair, span), spans))
        return None if same else self._told_apart(path, *pair)

    def _same_item(self, path: str, pair: tuple[int, int], span: Span) -> bool:
        """Compare two copies of an item by what their directories say, CRC-32 with it, else by their bytes."""
        try:
            one, other = (self._item(path, number, span) for number in pair)
        except SourceError:  # not an archive, or a damaged one: the bytes decide
            return self._same(path, pair, span)
        return one == other and (one[1] or self._same(path, pair, span))

    def _item(self, path: str, number: int, span: Span) -> tuple[object, bool]:
        place = self._places[number]
        item = read_item(
            lambda start, stop: place.read(path, span.start + start, span.start + stop),
            span.length,
            where=f"{place.url}/{path}",
        )
        return item, item.crc32 is not None
