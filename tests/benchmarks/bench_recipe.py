"""What a recipe costs: experts taken out of a stack, and rows of heads that change places, against a plain run.

A command, not a test::

    python tests/benchmarks/bench_recipe.py --size 4e9 --out result

The checkpoint is a distributed one of four ranks, cut by rows, whose cuts fall inside of heads and experts. All runs
are ``hfdcp consolidate`` with everything checked and hashed; they differ in their recipe only:

- *plain*: every tensor as it is;
- *experts*: the matrices of all feed-forward layers are stacks of experts, which become one tensor each;
- *rope*: the rows of all matrices but those that lie across change places within their heads.

Besides time: the peak of resident memory, against the budget of 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from measuring import Rival, Table, compared, save, take_turns

from hfdcp_core.testing.checkpoints import write_model

RANKS = 4
COMMAND = (sys.executable, "-m", "hfdcp_flows.start")
EXPERTS = 11
HEADS = 4
REST = "{name}_layernorm.weight"


def recipes() -> Mapping[str, Sequence[Mapping[str, object]]]:
    """Return the rules of each run."""
    layer = "model.layers.{i}."
    plain = {"rename": {name: name for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}}
    norms = {"rename": {layer + REST: layer + REST}}
    attention = {"rename": {layer + "self_attn.{name}.weight": layer + "self_attn.{name}.weight"}}
    matrices = [
        (layer + f"mlp.{name}_proj.weight", count) for name, count in (("gate", EXPERTS), ("up", EXPERTS), ("down", 4))
    ]
    unstacked = [
        {
            "from": name,
            "to": name.replace("mlp.", "mlp.experts.{e}."),
            "ops": [{"unflatten": {"dim": 0, "sizes": [count, -1]}}, {"unbind": {"dim": 0, "as": "e"}}],
        }
        for name, count in matrices
    ]
    turned = [
        {"from": name, "to": name, "ops": [{"rope": {"heads": heads, "to": "half"}}]}
        for name, heads in [
            *((layer + f"self_attn.{kind}_proj.weight", HEADS) for kind in "qkvo"),
            *((layer + f"mlp.{kind}_proj.weight", EXPERTS) for kind in ("gate", "up")),
        ]
    ]
    down = {"rename": {layer + "mlp.down_proj.weight": layer + "mlp.down_proj.weight"}}
    return {"experts": [plain, norms, attention, *unstacked], "rope": [plain, norms, down, *turned]}


def main() -> int:
    """Write the checkpoint, measure, save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=lambda text: int(float(text)), default=4_000_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--folder", type=Path, help="where the model goes (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("bench-recipe"), help="stem of the files of results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hfdcp-bench-", dir=options.folder) as scratch:
        save(options.out, [measured(Path(scratch), options)], options=vars(options))
    return 0


def measured(folder: Path, options: argparse.Namespace) -> Table:
    """Let the recipes take turns."""
    truth = write_model(folder / "model", total_bytes=options.size, ranks=RANKS)
    named = {"plain": "none"}
    for name, rules in recipes().items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"name": name, "rules": rules}))
        named[name] = str(path)
    rivals = [
        Rival(
            name,
            [*COMMAND, "consolidate", str(truth.folder), str(folder / "out"), "--recipe", recipe, "--quiet"],
            prepare=lambda: shutil.rmtree(folder / "out", ignore_errors=True),
        )
        for name, recipe in named.items()
    ]
    turns = take_turns(rivals, repeat=options.repeat, patience_s=options.patience)
    return compared(f"Recipes, {options.size / 1e9:g} GB by rows of {RANKS} ranks", turns, to="plain")


if __name__ == "__main__":
    sys.exit(main())
