"""Everything is read once and all that is wrong is returned, each with tensor, box and file."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hfdcp_core.box import Box
from hfdcp_core.catalog import TORCH_SAVE, Catalog, Shard, Span
from hfdcp_core.errors import StorageError, StorageNotFound
from hfdcp_core.examine import examine, is_unusual, look
from hfdcp_core.gather import gather
from hfdcp_core.store import open_store
from hfdcp_core.testing.checkpoints import CASES, Truth


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].ranks > 1])
def test_a_sound_checkpoint_has_no_problems(case: str, checkpoints: Mapping[str, Truth]) -> None:
    source = open_store(checkpoints[case].folder)
    catalog = gather(source, world_size=CASES[case].ranks if CASES[case].format != "dcp" else None)
    assert examine(catalog, source) == ()


def flip(folder: Path, shard: Shard, back: int) -> None:
    """Change one byte of an item, counted from its end."""
    with (folder / shard.span.path).open("r+b") as file:
        file.seek(shard.span.stop - back)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))


def test_all_problems_are_found_and_not_only_the_first(checkpoints: Mapping[str, Truth], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints["fsdp2_even"].folder, tmp_path / "copy"))
    source = open_store(folder)
    catalog = gather(source)
    ups = [shard for shard in catalog.shards if shard.fqn == "layers.0.up.weight"]
    downs = [shard for shard in catalog.shards if shard.fqn == "layers.0.down.weight"]
    for shard in ups:
        with (folder / shard.span.path).open("r+b") as file:
            file.seek(shard.span.start + 800)  # behind the archive's head: the payload
            file.write(b"damage")
    flip(folder, downs[1], 1)
    problems = examine(catalog, source)
    assert len(problems) == len(ups) + 1
    for shard in (*ups, downs[1]):
        [problem] = [problem for problem in problems if str(shard) in problem]
        assert ("CRC-32" in problem) is (shard in ups)


def test_progress_hears_of_every_byte(checkpoints: Mapping[str, Truth]) -> None:
    class Counter:
        total = 0

        def begin(self, step: str, total_bytes: int) -> None:
            raise AssertionError((step, total_bytes))

        def advance(self, nbytes: int) -> None:
            self.total += nbytes

        def say(self, line: str) -> None:
            raise AssertionError(line)

    counter = Counter()
    source = open_store(checkpoints["plain"].folder)
    catalog = gather(source)
    assert examine(catalog, source, counter) == ()
    assert counter.total == catalog.nbytes


def test_a_storage_that_fails_is_no_problem_of_the_checkpoint(checkpoints: Mapping[str, Truth]) -> None:
    source = open_store(checkpoints["plain"].folder)
    catalog = gather(source)
    gone = replace(catalog, shards=tuple(replace(s, span=replace(s.span, path="gone.distcp")) for s in catalog.shards))
    with pytest.raises(StorageNotFound, match="gone"):
        examine(gone, source)
    with pytest.raises(StorageError, match="gone"):
        look(source, gone.shards)


def test_nothing_to_examine_is_nothing_wrong(tmp_path: Path) -> None:
    assert examine(Catalog("dcp", {}, ()), open_store(tmp_path)) == ()


@pytest.mark.parametrize(
    ("overhead", "unusual"), [(0, True), (1116, False), (1180, False), (1513, False), (1641, False), (29_225, True)]
)
def test_an_item_is_unusual_that_is_not_as_long_as_torch_makes_it(overhead: int, unusual: bool) -> None:
    shard = Shard("w", "BF16", Box.whole((3, 5)), Span("f", 10, 10 + 30 + overhead), TORCH_SAVE)
    assert is_unusual(shard) is unusual


def test_no_item_that_torch_writes_here_is_unusual(checkpoints: Mapping[str, Truth]) -> None:
    """Else gathering would open every item of a checkpoint, which costs a request each in a bucket."""
    usual = [
        shard
        for case in ("fsdp2_uneven", "train_state", "scalars_and_empties", "blocks", "fsdp1", "saved_in_background")
        for shard in gather(open_store(checkpoints[case].folder)).shards
    ]
    assert usual
    assert [str(shard) for shard in usual if is_unusual(shard)] == []
