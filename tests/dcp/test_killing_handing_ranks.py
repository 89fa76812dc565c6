"""A rank dies while ranks hand over to one another: the others end with an error, the older checkpoint stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hfdcp_core.testing.gcs_server import GcsServer

KILLED, ENDED_WITH_AN_ERROR, SAVED = -9, 3, 0


def test_the_older_checkpoint_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killing_handing_ranks.py")
    with GcsServer() as gcs:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        command = [sys.executable, str(script), str(tmp_path), json.dumps({**gcs.options})]
        subprocess.run(command, check=True, timeout=400, env=environment)
        names = gcs.names()
    (first, *killed) = json.loads((tmp_path / "killed.json").read_text())
    assert (first[1], first[3]) == ([SAVED] * 4, [0.0])
    for victim, statuses, _, values in killed:
        assert statuses == [KILLED if rank == victim else ENDED_WITH_AN_ERROR for rank in range(4)]
        assert values == [0.0]
    assert [name for name in names if "shard" in name] == []
