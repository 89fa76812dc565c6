"""Where a tensor comes from is told: rule, sources, operation, and which bytes are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hfdcp_core.errors import UsageError
from hfdcp_core.explain import SHOWN, Explanation
from hfdcp_core.job import Job
from hfdcp_core.publish import explain_only
from hfdcp_core.testing.in_memory import Piece, rank_files, stored, weights_file


def explained(folder: Path, fqn: str, **options: object) -> Explanation:
    rules = [
        {"from": "q", "to": "q_proj", "ops": [{"rope": {"heads": 2, "to": "half"}}]},
        {"from": "v", "to": "v_proj", "ops": [{"pad": {"size": 40}}], "optional": True},
    ]
    (folder / "r.json").write_text(json.dumps({"name": "mine", "rules": rules}))
    arrays = {"q": np.ones((8, 4), np.float32), "v": np.ones((32, 1), np.float32)}
    source = stored({"model.safetensors": weights_file({name: Piece.of(array) for name, array in arrays.items()})})
    job = Job(source.url, "", recipe=str(folder / "r.json"), **options)  # type: ignore[arg-type]
    _, _, [told] = explain_only(job, (fqn,))
    return told


def test_a_tensor_whose_rows_change_places(tmp_path: Path) -> None:
    told = explained(tmp_path, "q_proj")
    assert (told.kind, told.path, told.sources) == ("F32[8, 4]", "model.safetensors", ("q",))
    assert told.rule == "q -> q_proj: rope(heads: 2, to: half)"
    assert told.fine == (2, 2, 2, 4)
    assert [(read.box, read.first, read.strides) for read in told.reads] == [("[0:2, 0:2, 0:2, 0:4]", 0, (16, 4, 8, 1))]
    assert "q[0:8, 0:4] in model.safetensors[" in told.reads[0].shard
    assert (told.count, told.nbytes, told.operation) == (1, 128, "")
    assert told.span[1] - told.span[0] == 128


def test_a_tensor_whose_numbers_are_cast(tmp_path: Path) -> None:
    told = explained(tmp_path, "q_proj", dtype="bfloat16")
    assert told.kind == "BF16[8, 4]"
    assert told.operation == "cast of q F32[8, 4] to BF16[8, 4]"
    assert told.span[1] - told.span[0] == 64
    assert told.count == 1


def test_a_tensor_of_many_shards_shows_the_first_of_them(tmp_path: Path) -> None:
    ranks = [{"w": Piece.of(np.ones((2, 3), np.float32), at=(2 * rank, 0))} for rank in range(SHOWN + 5)]
    source = stored(rank_files(*ranks))
    job = Job(source.url, "", world_size=len(ranks))
    _, _, [told] = explain_only(job, ("w",))
    assert (len(told.reads), told.count, told.nbytes, told.rule) == (SHOWN, SHOWN + 5, 24 * (SHOWN + 5), "")


@pytest.mark.parametrize(("name", "words"), [("proj", "q_proj"), ("qproj", "q_proj"), ("zzzzzz", "comes out$")])
def test_a_tensor_that_does_not_come_out_is_refused_with_what_may_be_meant(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(UsageError, match=f"(?s){name}: no such tensor comes out.*{words}|{words}"):
        explained(tmp_path, name)
