"""A rank that dies in the middle of a save: the other ends with an error, and the older checkpoint still loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TIMES = 4
"""How often a rank is killed here; ``killing_ranks.py FOLDER 20 SEED`` does it more often."""


def test_the_older_checkpoint_outlives_ranks_that_are_killed(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killing_ranks.py")
    subprocess.run([sys.executable, str(script), str(tmp_path), str(TIMES), "1"], check=True, timeout=400)
    seen = json.loads((tmp_path / "killed.json").read_text())
    assert len(seen) == TIMES
    for way, _, _, statuses, before, step, after in seen:
        assert None not in statuses, "a rank went on waiting"
        # a rank that dies when all is written may find the new one whole, but never a mixture, and never nothing
        assert after in {before, step}, f"way {way}: after a rank was killed, step {before} became {after}"
    assert any(statuses[victim] == -9 for _, victim, _, statuses, *_ in seen)
