"""Going on with another copy: what is read beforehand, and what is reported of work that is done twice."""

from __future__ import annotations

import numpy as np
import pytest

from hfdcp_core.gather import gather
from hfdcp_core.layout import lay_out, lay_out_for_ranks
from hfdcp_core.mending import Furthest, mended, taken_in_parts
from hfdcp_core.plan import reshard
from hfdcp_core.recipe import define, recipe_named
from hfdcp_core.state import SILENT
from hfdcp_core.testing.in_memory import Piece, stored, weights_file

FILES = {
    "model.safetensors": weights_file(
        {"b": Piece.of(np.ones((), np.float32)), "w": Piece.of(np.ones((4, 3), np.float32))}
    )
}


class Counted:
    """Progress that keeps the sum."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def begin(self, step: str, total_bytes: int) -> None:
        self.heard.append((step, total_bytes))

    def advance(self, nbytes: int) -> None:
        self.heard.append(nbytes)

    def say(self, line: str) -> None:
        self.heard.append(line)


def test_bytes_that_are_done_twice_are_reported_once() -> None:
    heard = Counted()
    furthest = Furthest(heard)
    furthest.begin("consolidate", 9)
    furthest.advance(5)
    furthest.again()
    furthest.say("once more")
    for _ in range(3):
        furthest.advance(3)
    assert heard.heard == [("consolidate", 9), 5, "once more", 1, 3]


@pytest.mark.parametrize(("ranks", "parts"), [(1, []), (2, ["w"])], ids=["whole", "cut in two"])
def test_shards_that_a_file_takes_only_parts_of_are_told(ranks: int, parts: list[str]) -> None:
    catalog = gather(stored(FILES))
    definitions = define(catalog, ("b", "w"), recipe_named("none"))
    target = (
        lay_out(definitions, max_file_size=1 << 20) if ranks == 1 else lay_out_for_ranks(definitions, ranks=2, dim=0)
    )
    first = reshard(catalog, target, window_bytes=1 << 12).files[0]
    assert [shard.fqn for shard in taken_in_parts(first)] == parts


def test_a_source_in_one_place_has_nothing_better() -> None:
    source = stored(FILES)
    assert mended(source, gather(source).shards, SILENT) is None
