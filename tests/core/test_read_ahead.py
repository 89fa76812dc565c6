"""What is planned is fetched ahead, within a budget; what was not, or what fails, is read as it is asked for."""

import threading
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from hfdcp_core.errors import CorruptFile, StorageError
from hfdcp_core.fetches import Fetch
from hfdcp_core.read_ahead import IN_FLIGHT, ReadAhead
from hfdcp_core.store import Source, open_store
from hfdcp_core.testing.faulty import FOREIGN_ERRORS, FOREVER, Fault, Faults, faulty_store

DATA = np.random.default_rng(5).bytes(4096)


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faulty_store(f"memory://{uuid.uuid4().hex}") as faults:
        open_store(faults.url).put("f", DATA)
        faults.clear()
        yield faults


def reads(faults: Faults) -> list[tuple[int, int]]:
    return sorted((call.start, call.stop) for call in faults.journal if call.operation == "read")


def ahead(source: Source, *spans: tuple[int, int, int, int], budget_bytes: int = 1 << 20) -> ReadAhead:
    return ReadAhead(source, [Fetch("f", *span) for span in spans], budget_bytes=budget_bytes)


def test_ranges_inside_a_fetch_cost_no_request_of_their_own(faults: Faults) -> None:
    with ahead(open_store(faults.url), (100, 500, 0, 0), (500, 900, 0, 1)) as source:
        buffer = bytearray(50)
        source.read_into("f", 120, memoryview(buffer))
        assert bytes(buffer) == DATA[120:170]
        assert source.read("f", 600, 900) == DATA[600:900]
        assert source.read("f", 100, 500) == DATA[100:500]
        wide = bytearray(16)
        source.read_into("f", 104, memoryview(wide).cast("q"))
        assert bytes(wide) == DATA[104:120]
    assert reads(faults) == [(100, 500), (500, 900)]


@pytest.mark.parametrize("span", [(0, 10), (490, 510), (4000, 4096)], ids=["before", "across two", "behind"])
def test_what_was_not_planned_is_read_as_it_is_asked_for(faults: Faults, span: tuple[int, int]) -> None:
    with ahead(open_store(faults.url), (100, 500, 0, 0), (500, 900, 0, 1)) as source:
        assert source.read("f", *span) == DATA[slice(*span)]
        buffer = bytearray(span[1] - span[0])
        source.read_into("f", span[0], memoryview(buffer))
        assert bytes(buffer) == DATA[slice(*span)]
    assert reads(faults).count(span) == 2


def test_a_fetch_that_ends_inside_a_longer_one_hides_it_from_nobody(faults: Faults) -> None:
    with ahead(open_store(faults.url), (100, 900, 0, 0), (300, 320, 0, 0), (310, 330, 0, 0)) as source:
        assert source.read("f", 305, 800) == DATA[305:800]
    assert len(reads(faults)) == 3


def test_no_more_is_asked_for_than_the_budget_until_windows_are_filled(faults: Faults) -> None:
    spans = [(start, start + 256, window, window) for window, start in enumerate(range(0, 4096, 256))]
    with ahead(open_store(faults.url), *spans, budget_bytes=600) as source:
        assert source.read("f", 0, 256) == DATA[:256]
        assert source.read("f", 256, 512) == DATA[256:512]
        assert len(reads(faults)) == 2
        source.done(1)  # out of order: the window before it is still being filled
        assert source.read("f", 0, 256) == DATA[:256]
        assert len(reads(faults)) == 2
        source.done(0)
        assert source.read("f", 768, 1024) == DATA[768:1024]
        assert source.read("f", 512, 768) == DATA[512:768]
        assert len(reads(faults)) == 4


def test_a_range_whose_turn_has_not_come_goes_before_the_budget(faults: Faults) -> None:
    with ahead(
        open_store(faults.url), (0, 1000, 0, 5), (1000, 2000, 1, 5), (2000, 2100, 1, 2), budget_bytes=1
    ) as source:
        assert source.read("f", 2000, 2050) == DATA[2000:2050]
        assert source.read("f", 2050, 2100) == DATA[2050:2100]
    assert (2000, 2100) in reads(faults)
    assert (1000, 2000) not in reads(faults)


def test_what_was_forgotten_is_read_again_where_it_is_asked_for(faults: Faults) -> None:
    with ahead(open_store(faults.url), (0, 1000, 0, 0), (1000, 2000, 0, 0), budget_bytes=1) as source:
        source.done(0)
        assert source.read("f", 1000, 1010) == DATA[1000:1010]
        assert source.read("f", 10, 20) == DATA[10:20]
    assert set(reads(faults)) >= {(1000, 1010), (10, 20)}
    assert (1000, 2000) not in reads(faults)


def test_a_fetch_that_fails_leaves_the_word_to_the_range_that_was_asked_for(faults: Faults) -> None:
    with ahead(open_store(faults.url), (4000, 5000, 0, 0)) as source:
        assert source.read("f", 4000, 4096) == DATA[4000:]
        with pytest.raises(CorruptFile, match=r"expected bytes \[4090, 4100\), found the end of the file at byte 4096"):
            source.read("f", 4090, 4100)


def test_a_storage_that_stays_away_is_told_as_such(faults: Faults) -> None:
    faults.add(Fault("read", times=FOREVER, error=FOREIGN_ERRORS[StorageError]))
    with (
        ahead(open_store(faults.url), (0, 1000, 0, 0)) as source,
        pytest.raises(StorageError, match=f"cannot read {faults.url}/f: .*connection reset"),
    ):
        source.read("f", 0, 10)


def test_many_requests_are_in_flight(faults: Faults) -> None:
    together = threading.Barrier(IN_FLIGHT, timeout=30)
    faults.add(Fault("read", times=IN_FLIGHT, then=together.wait))
    spans = [(start, start + 16, 0, 0) for start in range(0, 16 * IN_FLIGHT, 16)]
    with ahead(open_store(faults.url), *spans) as source:
        assert [source.read("f", *span[:2]) for span in spans] == [DATA[slice(*span[:2])] for span in spans]
    assert not together.broken


def test_it_says_of_its_files_what_the_source_says(faults: Faults) -> None:
    store = open_store(faults.url)
    with ahead(store) as source:
        assert source.url == store.url
        assert source.remote
        assert source.list() == store.list()
        assert source.stat("f") == store.stat("f")
        assert source.stamps(["f", "absent"]) == {"f": store.stat("f")}
