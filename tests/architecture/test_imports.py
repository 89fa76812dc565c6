"""The import rules, read from the source: which way the arrows run, one door to each outside world, a pure half.

The rules are the tables below; `problems_in` holds a tree of files against them. A new module of the core needs a place
in `RANKS`, and whoever opens a new way to an outside world writes it into `DOORS`.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"hfdcp_core": "hfdcp_core", "tasks": "hfdcp_tasks", "flows": "hfdcp_flows"}
"""Folders of the checkout and the names under which they are imported."""

LAYERS = ("hfdcp_core", "hfdcp_tasks", "hfdcp_flows")
"""A package imports from those before it, never from those behind it."""

RANKS = (
    ("errors",),
    ("dtypes", "box", "homes", "json_text", "yaml_text", "collector", "name_patterns"),
    ("catalog", "manifest", "picture"),
    ("arrangement",),
    ("rearrange",),
    ("pull_back",),
    ("distcp_scan", "distcp_zip", "numeric", "operation", "statistics"),
    ("distcp_records", "distcp_form", "operate"),
    ("distcp_machine",),
    ("distcp_item", "distcp_metadata", "distcp_object"),
    ("safetensors_file", "distcp_file", "ops"),
    ("recipe", "distcp_tail"),
    ("ties", "quantization"),
    ("sizes",),
    ("structure",),
    ("equations",),
    ("recipe_text", "infer"),
    ("quantization_config",),
    ("layout",),
    ("plan",),
    ("wire", "windows", "explain", "model_card"),
    ("tiling",),
    ("fetches",),
    ("job",),
    ("storage_options", "gcs_layout", "descriptors", "lease", "store_base", "zstd_stream"),
    ("file_lock", "fsspec_upload"),
    ("local_upload", "chunked_upload"),
    ("gcs_upload", "s3_upload"),
    ("local_store", "fsspec_store"),
    ("store",),
    ("state",),
    ("run",),
    ("read", "child", "union", "extras"),
    ("recipe_sources", "tracing", "load_child"),
    ("examine", "replicas", "item_copies"),
    ("copies",),
    ("mending",),
    ("gather_dcp",),
    ("gather",),
    ("search",),
    ("locate",),
    ("fill", "read_ahead", "crew"),
    ("consolidate", "single"),
    ("tying",),
    ("casting", "defining", "load_check", "assets"),
    ("repository",),
    ("planning",),
    ("validate", "inspection", "diff"),
    ("hub_calls",),
    ("hub_streams",),
    ("hub_client", "signing"),
    ("hub_stage", "hub_target", "hub_verify"),
    ("hub",),
    ("streaming",),
    ("publish",),
    ("dcp",),
    ("testing",),
)
"""Modules of the core: each imports from ranks above its own line only."""

PACKAGES = {"testing", "dcp", "homes"}
"""Those that are folders: their modules may import one another."""

PARTS = {
    "distcp_file": {
        "distcp_scan",
        "distcp_zip",
        "distcp_form",
        "distcp_records",
        "distcp_item",
        "distcp_metadata",
        "distcp_machine",
        "distcp_object",
    },
    "store": {
        *("storage_options", "descriptors", "lease", "store_base", "file_lock"),
        *("local_upload", "local_store", "fsspec_upload", "chunked_upload", "gcs_layout", "gcs_upload", "s3_upload"),
        "fsspec_store",
    },
    "hub_client": {"hub_calls", "hub_streams"},
}
"""Modules behind another one: the rest of the core imports that one, never them; its doors are theirs."""
WHOLE = {part: concept for concept, parts in PARTS.items() for part in parts}

PURE = tuple(name for rank in RANKS[: RANKS.index(("job",))] for name in rank)
"""Values and bytes in, values and bytes out."""
IMPURE = frozenset({"os", "pathlib", "tempfile", "time", "threading", "asyncio", "logging", "fsspec", "torch"})
"""What the pure half never imports."""

SHARED = {"hfdcp_tasks": {"options", "blocks"}, "hfdcp_flows": {"hooks", "embedded"}}
"""What siblings of a package may import from one another; all else would be sideways."""
COMMAND_LINE = {
    "hfdcp_flows." + name
    for name in ("start", "cli", "arguments", "options", "typed", "commands", "screen", "report", "demo")
}
"""The modules of the command line: they call flows and core, import one another, and nobody imports them."""

DOORS = {
    **{name: {"hfdcp_core.store"} for name in ("fsspec", "gcsfs", "s3fs", "aiohttp")},
    "cryptography": {"hfdcp_core.signing"},
    "huggingface_hub": {"hfdcp_core.hub_client", "hfdcp_flows.demo"},
    "hf_xet": {"hfdcp_core.hub_client"},
    "httpx2": {"hfdcp_core.hub_client"},
    "pickle": {"hfdcp_core.distcp_file"},
    "pickletools": {"hfdcp_core.distcp_file"},
    "torch": {"hfdcp_core.dcp", "hfdcp_core.tracing", "hfdcp_core.load_child"},
    "transformers": {"hfdcp_core.tracing", "hfdcp_core.load_child"},
    "yaml": {"hfdcp_core.yaml_text"},
    "prefect": {"hfdcp_tasks", "hfdcp_flows"},
    "rich": {"hfdcp_flows.screen"},
    "zstandard": {"hfdcp_core.zstd_stream"},
}
"""Each outside world and the modules (with those below them) that may import it; `hfdcp_core.testing` may all."""
LATE = {
    **DOORS,
    "hfdcp_core.dcp": {"hfdcp_core"},
    "hfdcp_core.fsspec_store": {"hfdcp_core.store"},
    "hfdcp_core.yaml_text": {"hfdcp_core.recipe_sources", "hfdcp_core.model_card"},
    "hfdcp_flows": {"hfdcp_flows.start", "hfdcp_flows.cli", "hfdcp_flows.commands", "hfdcp_flows.demo"},
    "hfdcp_core.testing": {"hfdcp_flows.demo"},
}
"""What may be imported inside a function, and where: it, or what it imports, is heavy or optional."""


@dataclass(frozen=True)
class Import:
    """One imported module, seen from the module that imports it."""

    target: str
    line: int
    late: bool


def module_name(path: Path, root: Path) -> str:
    folder, *rest = path.relative_to(root).with_suffix("").parts
    parts = [FOLDERS[folder], *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, package: str, *, late: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(f"{source}.{alias.name}", node.lineno, late) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports_of(node, package, late=late or inside)


def top_of(name: str) -> str:
    return name.partition(".")[0]


def below(name: str, tops: set[str]) -> bool:
    return any(name == top or name.startswith(top + ".") for top in tops)


def concept_of(name: str) -> str:
    """The module that stands for ``name`` outside: the concept that it is a part of, or itself."""
    top, _, rest = name.partition(".")
    return f"{top}.{WHOLE.get(top_of(rest), top_of(rest))}" if top == "hfdcp_core" and rest else name


def target_module(target: str) -> str:
    return ".".join(target.split(".")[:2])


def rank_of(name: str) -> int | None:
    top, _, rest = name.partition(".")
    return next((place for place, rank in enumerate(RANKS) if top == "hfdcp_core" and top_of(rest) in rank), None)


def layer_problem(name: str, target: str) -> str | None:
    here, there = top_of(name), top_of(target)
    if there not in LAYERS:
        return None
    if LAYERS.index(there) > LAYERS.index(here):
        return "runs up the layers"
    if name in COMMAND_LINE:
        return "goes past the flows to a task" if there == "hfdcp_tasks" else None
    if target.split(".")[:2] in [module.split(".") for module in COMMAND_LINE]:
        return "nobody imports the command line"
    if here == there and here in SHARED and target.split(".")[1] not in SHARED[here]:
        return "runs sideways"
    return None


def core_problem(name: str, target: str) -> str | None:
    if not below(target, {"hfdcp_core"}):
        return None
    if below(target, {"hfdcp_core.testing"}) and not below(name, {"hfdcp_core.testing", "hfdcp_flows.demo"}):
        return "only the demo uses hfdcp_core.testing"
    here, there = rank_of(name), rank_of(target)
    if here is None or there is None:
        return None
    if not below(name, {"hfdcp_core.testing"}) and concept_of(name) != concept_of(target) != target_module(target):
        return f"is a part of {concept_of(target)}"
    inside = target_module(name) == target_module(target) in {f"hfdcp_core.{name}" for name in PACKAGES}
    return None if there < here or inside else "is not from a rank below its own"


def door_problem(name: str, target: str) -> str | None:
    if below(name, {"hfdcp_core.testing"}):
        return None
    top = top_of(target)
    if below(name, {f"hfdcp_core.{pure}" for pure in PURE}) and top in IMPURE:
        return "does not belong in the pure half"
    return (
        None
        if top not in DOORS or below(concept_of(name), DOORS[top])
        else f"comes in by {' or '.join(sorted(DOORS[top]))} only"
    )


def late_problem(name: str, found: Import) -> str | None:
    if not found.late or below(name, {"hfdcp_core.testing"}):
        return None
    allowed = any(below(found.target, {top}) and below(concept_of(name), LATE[top]) for top in LATE)
    return None if allowed else "is imported inside a function, and is neither heavy nor optional there"


def opens(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno


def problems_of(name: str, tree: ast.AST, package: str) -> Iterator[str]:
    if name.startswith("hfdcp_core.") and rank_of(name) is None:
        yield f"{name}: has no rank"
    if below(name, {f"hfdcp_core.{pure}" for pure in PURE}):
        yield from (f"{name}:{line}: open() does not belong in the pure half" for line in opens(tree))
    for found in imports_of(tree, package):
        checks = [check(name, found.target) for check in (layer_problem, core_problem, door_problem)]
        for problem in [*checks, late_problem(name, found)]:
            if problem:
                yield f"{name}:{found.line}: {found.target} {problem}"


def problems_in(root: Path) -> list[str]:
    problems: list[str] = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        name = module_name(path, root)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        problems += problems_of(name, ast.parse(path.read_bytes()), package)
    return problems


def test_the_arrows_run_one_way_and_each_outside_world_has_one_door() -> None:
    assert problems_in(ROOT) == []


def test_the_check_reads_every_layer() -> None:
    names = {module_name(path, ROOT).split(".")[0] for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert names == set(LAYERS)


VIOLATIONS = {
    "core-imports-tasks": ("hfdcp_core/plan.py", "import hfdcp_tasks.push", "runs up"),
    "tasks-import-flows": ("tasks/push.py", "from hfdcp_flows.publish import publish", "runs up"),
    "task-imports-task": ("tasks/push.py", "from hfdcp_tasks.gather import gather", "sideways"),
    "task-imports-task-relatively": ("tasks/push.py", "from .gather import gather", "sideways"),
    "flow-imports-flow": ("flows/audit.py", "from hfdcp_flows import publish", "sideways"),
    "flow-imports-cli": ("flows/publish.py", "from hfdcp_flows.cli import main", "command line"),
    "cli-imports-task": ("flows/cli.py", "import hfdcp_tasks.push", "past the flows"),
    "rank-above": ("hfdcp_core/box.py", "from hfdcp_core.plan import reshard", "not from a rank below"),
    "rank-beside": ("hfdcp_core/read.py", "from hfdcp_core import recipe_sources", "not from a rank below"),
    "rank-relative": ("hfdcp_core/layout.py", "from .wire import dump", "not from a rank below"),
    "part-of-another": (
        "hfdcp_core/gather.py",
        "from hfdcp_core.fsspec_store import open",
        "is a part of hfdcp_core.store",
    ),
    "part-of-the-same-above": ("hfdcp_core/lease.py", "import hfdcp_core.local_store", "not from a rank below"),
    "no-rank": ("hfdcp_core/helpers.py", "", "no rank"),
    "testing-in-the-core": ("hfdcp_core/publish.py", "from hfdcp_core.testing import hub", "only the demo"),
    "testing-in-the-cli": ("flows/cli.py", "import hfdcp_core.testing.hub", "only the demo"),
    "fsspec": ("hfdcp_core/read.py", "import fsspec", "comes in by hfdcp_core.store"),
    "hub-client": ("tasks/push.py", "from huggingface_hub import HfApi", "comes in by hfdcp_core.hub"),
    "dcp": ("hfdcp_core/gather.py", "import torch.distributed.checkpoint as dcp", "comes in by hfdcp_core.dcp"),
    "pickle": ("hfdcp_core/wire.py", "import pickle", "comes in by hfdcp_core.distcp_file"),
    "prefect": ("hfdcp_core/publish.py", "from prefect import flow", "comes in by hfdcp_flows or hfdcp_tasks"),
    "yaml": ("hfdcp_core/publish.py", "import yaml", "comes in by hfdcp_core.yaml_text"),
    "pure-os": ("hfdcp_core/wire.py", "import os.path", "pure half"),
    "pure-typing-only": ("hfdcp_core/plan.py", "if TYPE_CHECKING:\n    from pathlib import Path", "pure half"),
    "pure-torch-late": ("hfdcp_core/dtypes.py", "def f():\n    import torch", "pure half"),
    "pure-open": ("hfdcp_core/recipe.py", "def f():\n    return open('x')", "open()"),
    "late": ("hfdcp_core/gather.py", "def f():\n    import json", "inside a function"),
    "late-elsewhere": ("flows/publish.py", "def f():\n    from hfdcp_core import publish", "inside a function"),
}


@pytest.mark.parametrize(("path", "source", "expected"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_violation_is_found(tmp_path: Path, path: str, source: str, expected: str) -> None:
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(source)
    found = problems_in(tmp_path)
    assert any(expected in problem for problem in found)


ALLOWED = {
    "down": ("flows/publish.py", "from hfdcp_tasks.gather import gather\nimport prefect"),
    "options": ("tasks/gather.py", "from hfdcp_tasks.options import retries"),
    "heavy-at-its-door": ("hfdcp_core/hub_client.py", "def f():\n    import huggingface_hub"),
    "flow-from-the-command-line": ("flows/cli.py", "def f():\n    from hfdcp_flows.publish import publish"),
    "demo": ("flows/demo.py", "def f():\n    from hfdcp_core.testing.hub import Hub"),
    "ranks": ("hfdcp_core/plan.py", "from hfdcp_core.errors import PlanError\nfrom .layout import lay_out"),
    "part-behind-its-concept": ("hfdcp_core/local_store.py", "from hfdcp_core.lease import Lease"),
    "door-of-a-part": ("hfdcp_core/hub_calls.py", "def f():\n    from huggingface_hub import HfApi"),
    "testing-uses-parts": ("hfdcp_core/testing/faulty.py", "from hfdcp_core.store_base import Listing"),
    "testing-uses-all": ("hfdcp_core/testing/checkpoints.py", "import torch.distributed.checkpoint, tempfile"),
}


@pytest.mark.parametrize(("path", "source"), ALLOWED.values(), ids=ALLOWED)
def test_what_the_rules_allow_is_not_found(tmp_path: Path, path: str, source: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    assert problems_in(tmp_path) == []


def test_importing_the_core_imports_nothing_heavy() -> None:
    """Whoever imports the library in a training process or a script pays for what they use only."""
    command = [sys.executable, "-X", "importtime", "-c", "import hfdcp_core"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.splitlines()}
    assert "hfdcp_core" in imported
    assert not imported & {"torch", "prefect", "transformers", "huggingface_hub", "fsspec", "numpy"}


def test_continuous_integration_holds_the_coverage_of_exactly_the_pure_half() -> None:
    text = (ROOT / ".ci" / "test").read_text()
    lines = [line for line in text.splitlines() if line.startswith("pure=")]
    held = {name for line in lines for name in re.findall(r"\w+", line)} - {"pure"}
    core = ROOT / "hfdcp_core"
    assert held == {name for name in PURE if (core / f"{name}.py").exists() or (core / name).is_dir()}


IN_TORCH_2_7 = {
    "torch": "nn",
    "torch.distributed._shard.sharded_tensor": "init_from_local_shards",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed.checkpoint": "filesystem",
    "torch.distributed.checkpoint._extension": "ZStandard",
    "torch.distributed.checkpoint._nested_dict": "flatten_state_dict",
    "torch.distributed.checkpoint.default_planner": "DefaultLoadPlanner DefaultSavePlanner",
    "torch.distributed.checkpoint.filesystem": "FileSystemReader FileSystemWriter _StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata",
    "torch.distributed.checkpoint.planner": "LoadPlan LoadPlanner ReadItem SavePlan SavePlanner TensorWriteData "
    "WriteItem WriteItemType",
    "torch.distributed.checkpoint.planner_helpers": "create_read_items_for_chunk_list",
    "torch.distributed.checkpoint.state_dict": "get_state_dict",
    "torch.distributed.checkpoint.state_dict_saver": "async_save save",
    "torch.distributed.checkpoint.storage": "WriteResult",
    "torch.distributed.device_mesh": "DeviceMesh init_device_mesh",
    "torch.distributed.fsdp": "FullyShardedDataParallel StateDictType fully_shard",
    "torch.distributed.tensor": "DTensor Replicate Shard distribute_tensor",
    "torch.distributed.tensor.parallel": "ColwiseParallel RowwiseParallel parallelize_module",
    "torch.distributed.tensor.parallel.style": "ParallelStyle",
    "torch.distributed.tensor.placement_types": "Placement _StridedShard",
    "torch.futures": "Future",
}
"""What we import from torch, all of which the oldest release that we run on has (looked up in 2.7.1).

What is younger is asked for with ``getattr``, or imported where somebody calls for it.
"""


def test_nothing_is_imported_from_torch_that_its_oldest_release_lacks() -> None:
    known = {(module, name) for module, names in IN_TORCH_2_7.items() for name in names.split()}
    found = {
        (node.module, alias.name)
        for path in sorted((ROOT / "hfdcp_core").rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"
        for alias in node.names
    }
    assert found - known == set()
    assert known - found == set()
