"""Ties and values on the command line: what is said, what is written, and what reaches the Hub."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hfdcp_core.manifest import CONFIG_PATH, EXTRA_PATH
from hfdcp_core.publish import Job, publish
from hfdcp_core.state import SILENT, Cancellation
from hfdcp_core.testing.hub import Hub
from hfdcp_flows.arguments import parse
from hfdcp_flows.commands import ANSWERS, Control
from hfdcp_flows.report import Answer

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
SAID = f"left out {HEAD}: tied to {EMBED}, and its bytes are the same"
REPO = "acme/tied"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint with a tied head, a step counter, and a config beside it."""
    weight = torch.arange(8.0).reshape(4, 2)
    dcp.save({EMBED: weight, HEAD: weight, "step": 7}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "ckpt" / CONFIG_PATH).write_text('{"tie_word_embeddings": true}')
    return tmp_path / "ckpt"


def run(*argv: str | Path) -> Answer:
    args = parse([*map(str, argv)])
    return ANSWERS[args.command](args, Control(SILENT, Cancellation()))


def test_what_is_tied_is_said_before_and_after(checkpoint: Path, tmp_path: Path) -> None:
    planned = run("plan", checkpoint)
    assert SAID in planned.text
    assert planned.document["plan"]["tied"] == {HEAD: EMBED}
    written = run("consolidate", checkpoint, tmp_path / "out")
    assert SAID in written.text
    assert written.document["manifest"]["tied"] == {HEAD: EMBED}
    assert SAID in run("validate", tmp_path / "out", "--source", checkpoint).text


def test_untying_says_nothing_of_it_and_lists_the_config(checkpoint: Path, tmp_path: Path) -> None:
    written = run("consolidate", checkpoint, tmp_path / "out", "--untie").text
    assert "left out lm_head" not in written
    assert f"  {CONFIG_PATH}  " in written


@pytest.mark.parametrize("keep_extra", [False, True], ids=["not-asked", "asked"])
def test_values_reach_the_hub_only_if_that_was_asked_for(
    keep_extra: bool,
    checkpoint: Path,
    tmp_path: Path,
    hub: Hub,
) -> None:
    publish(Job(str(checkpoint), str(tmp_path / "out"), REPO, endpoint=hub.url, keep_extra=keep_extra, stream="hub"))
    assert (EXTRA_PATH in hub.files(REPO)) is keep_extra
