"""One checkpoint whose files lie in several places: node-local disks, a folder for each rank, a copy that was resumed.

`Union` joins several stores into one source; all that reads a source works on it. Which copy of a file counts, and of
which place a single item is taken, `hfdcp_core.copies` finds out.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from hfdcp_core.catalog import FileStamp, Span
from hfdcp_core.errors import StorageNotFound
from hfdcp_core.store import Listing, Source

Found = TypeVar("Found")
Elsewhere = Mapping[str, tuple[tuple[int, int, int], ...]]
"""For a file: the spans that are read from another place than the rest, in order: start, stop, number of the place."""


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

    def __init__(
        self, places: Sequence[Source], holders: Mapping[str, int] | None = None, elsewhere: Elsewhere | None = None
    ) -> None:
        """Take the places.

        Args:
            places: The stores, in order.
            holders: Number of the place that a file is read from; else it is the first that has it.
            elsewhere: Spans of files that are read from another place.
        """
        self._places = tuple(places)
        self._holders = dict(holders or {})
        self._elsewhere = dict(elsewhere or {})

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
        listings = list(self.listings(folder))
        files = {stamp.path: stamp for _, listing in reversed(listings) for stamp in listing.files}
        for number, listing in listings:
            files |= {stamp.path: stamp for stamp in listing.files if self._holders.get(stamp.path) == number}
        folders = {inner for _, listing in listings for inner in listing.folders}
        return Listing(tuple(files[path] for path in sorted(files)), tuple(sorted(folders)))

    def listings(self, folder: str) -> Iterator[tuple[int, Listing]]:
        """Give the listing of each place that has the folder, with the place's number.

        Raises:
            StorageNotFound: No place has it.
        """
        return self._wherever(lambda place: place.list(folder))

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
        return self._wherever(lambda place: place.stat(path))

    def _wherever(self, look: Callable[[Source], Found]) -> Iterator[tuple[int, Found]]:
        absent = None
        found = 0
        for number, place in enumerate(self._places):
            try:
                seen = look(place)
            except StorageNotFound as error:
                absent = error
                continue
            found += 1
            yield number, seen
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
        """Fill ``buffer`` from the copies that count."""
        first = start
        for stop, place in self._runs(path, start, start + len(buffer)):
            place.read_into(path, first, buffer[first - start : stop - start])
            first = stop

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of the copies that count."""
        data = bytearray(stop - start)
        self.read_into(path, start, memoryview(data))
        return bytes(data)

    def place_of(self, path: str, start: int) -> int:
        """Return the number of the place that a byte of a file is read from."""
        held = (number for first, stop, number in self._elsewhere.get(path, ()) if first <= start < stop)
        found = next(held, None)
        return self.holder(path) if found is None else found

    def url_of(self, path: str, start: int) -> str:
        """Return the URL of the place that a byte of a file is read from."""
        return self._places[self.place_of(path, start)].url

    def alike(self, path: str) -> tuple[int, ...]:
        """Return the places of the copies that are as long as the one that counts."""
        size = self.stat(path).size
        return tuple(number for number, stamp in self.copies(path) if stamp.size == size)

    def with_moved(self, moved: Mapping[Span, int]) -> Union:
        """Return the union with other places for some spans."""
        spans = {(path, start, stop): n for path, held in self._elsewhere.items() for start, stop, n in held}
        spans |= {(span.path, span.start, span.stop): number for span, number in moved.items()}
        found: dict[str, list[tuple[int, int, int]]] = {}
        for (path, start, stop), number in spans.items():
            if number != self.holder(path):
                found.setdefault(path, []).append((start, stop, number))
        return Union(self._places, self._holders, {path: tuple(sorted(held)) for path, held in found.items()})

    @property
    def elsewhere(self) -> Elsewhere:
        """Spans of files that are read from another place than the rest."""
        return self._elsewhere

    def _runs(self, path: str, start: int, stop: int) -> Iterator[tuple[int, Source]]:
        """Cut bytes where another place begins: where each run ends, and the place that it is read from."""
        spans = self._elsewhere.get(path, ())
        for first, last, number in spans[bisect.bisect_right(spans, start, key=lambda span: span[1]) :]:
            if first >= stop:
                break
            if start < first:
                yield first, self._place(path)
            start = min(last, stop)
            yield start, self._places[number]
        if start < stop:
            yield stop, self._place(path)

    def _place(self, path: str) -> Source:
        return self._places[self.holder(path)]
