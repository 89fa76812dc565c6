"""A compressed item is read anywhere, in bounded memory, and whatever is wrong with it is said."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest
import zstandard

from hfdcp_core import zstd_stream
from hfdcp_core.errors import CorruptFile
from hfdcp_core.zstd_stream import MOST_LIVE, ZstdStream

TEXT = b"".join(f"{number * number} ".encode() for number in range(90_000))
CONTENT = random.Random(1).randbytes(70_000) + bytes(300_000) + random.Random(2).randbytes(70_000)


def compressed(content: bytes, **options: int) -> bytes:
    """Return one frame as torch's writer makes it: it does not know the size beforehand."""
    squeeze = zstandard.ZstdCompressor(**options).compressobj()
    return squeeze.compress(content) + squeeze.flush()


def stream_of(raw: bytes, most: int = 1 << 20) -> ZstdStream:
    return ZstdStream(lambda start, stop: raw[start:stop], len(raw), most=most, where="w in item")


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(compressed(CONTENT), id="one frame"),
        pytest.param(compressed(CONTENT[:100_000]) + compressed(CONTENT[100_000:]), id="two frames"),
        pytest.param(compressed(b"") + compressed(CONTENT) + compressed(b""), id="empty frames around"),
    ],
)
def test_any_part_is_read_forwards_and_backwards(raw: bytes) -> None:
    stream = stream_of(raw)
    assert stream.length == len(CONTENT)
    for start, stop in [
        (0, 50),
        (65_000, 80_000),
        (80_000, 80_001),
        (200_000, 440_000),
        (66_000, 90_000),
        (0, 440_000),
    ]:
        assert stream.read(start, stop) == CONTENT[start:stop]
    assert stream.read(440_000, 440_000) == b""


def test_what_lies_at_the_ends_is_kept_from_the_first_pass() -> None:
    raw = compressed(CONTENT)
    asked: list[int] = []

    def fetch(start: int, stop: int) -> bytes:
        asked.append(start)
        return raw[start:stop]

    stream = ZstdStream(fetch, len(raw), most=1 << 20, where="w")
    asked.clear()
    assert stream.read(0, 60_000) + stream.read(400_000, 440_000) == CONTENT[:60_000] + CONTENT[400_000:]
    assert asked == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw + b"behind the frame", "Unknown frame descriptor"),
        (lambda raw: b"#" + raw[1:], "not sound Zstandard data behind byte 0"),
        (lambda raw: raw[:6] + bytes([raw[6] | 0b110]) + raw[7:], "not sound Zstandard data"),
    ],
    ids=["bytes behind it", "no frame", "a block of a kind that does not exist"],
)
def test_a_garbled_stream_is_corrupt(damage: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(CorruptFile, match=message) as caught:
        stream_of(damage(compressed(TEXT)))
    assert str(caught.value).startswith("w in item: ")


def test_a_stream_that_is_cut_off_ends_early_and_says_so() -> None:
    raw = compressed(TEXT)
    stream = stream_of(raw[: len(raw) * 9 // 10])
    assert 0 < stream.length < len(TEXT)
    with pytest.raises(CorruptFile, match="the compressed data end at byte"):
        stream.read(stream.length - 10, stream.length + 10)


def test_a_stream_that_holds_more_than_its_item_can_is_left_at_once() -> None:
    raw = compressed(bytes(64 << 20))
    assert len(raw) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile, match="compressed bytes hold more than 1000000"):
            stream_of(raw, most=1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def test_a_frame_that_asks_for_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    squeeze = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(CorruptFile, match="too much memory"):
        stream_of(squeeze.compress(CONTENT) + squeeze.flush())


def test_only_a_few_streams_hold_a_decompressor_and_the_others_start_again() -> None:
    raw = compressed(CONTENT)
    streams = [stream_of(raw) for _ in range(3 * MOST_LIVE)]
    for step in range(70_000, 330_000, 60_000):
        assert {stream.read(step, step + 60_000) for stream in streams} == {CONTENT[step : step + 60_000]}
        assert sum(stream._reader is not None for stream in streams) <= MOST_LIVE
    assert len(zstd_stream._live) <= MOST_LIVE


def test_a_stream_at_work_is_not_made_to_rest() -> None:
    stream = stream_of(compressed(CONTENT))
    stream.read(100_000, 100_010)
    with stream._busy:
        stream.rest()
        assert stream._reader is not None
    stream.rest()
    assert stream._reader is None
    assert stream.read(100_010, 100_020) == CONTENT[100_010:100_020]


def test_a_stream_that_was_read_to_its_end_holds_nothing() -> None:
    stream = stream_of(compressed(CONTENT))
    stream.read(70_000, 440_000)
    assert stream._reader is None
