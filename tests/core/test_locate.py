"""Of what lies below the named places the checkpoint that is meant is found, or all that could be meant are listed."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import HfApi
from safetensors.torch import save

from hfdcp_core.errors import (
    CorruptFile,
    IncompleteCheckpoint,
    StorageNotFound,
    UnknownFormat,
    UnsafePickle,
    UsageError,
)
from hfdcp_core.inspection import inspect
from hfdcp_core.job import Job
from hfdcp_core.locate import Located, locate, relocate, reopen
from hfdcp_core.run import Pinned
from hfdcp_core.search import MOST_TRIED, Search
from hfdcp_core.storage_options import configure
from hfdcp_core.store import open_store
from hfdcp_core.testing.checkpoints import Truth
from hfdcp_core.testing.faulty import FOREVER, Fault, faulty_store
from hfdcp_core.testing.hub import Hub

Files = Mapping[str, bytes]
DISTCP = "__0_0.distcp"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[object], Files]:
    """Return what gives the files of a checkpoint with some state."""

    def files(state: object) -> Files:
        folder = tmp_path_factory.mktemp("ckpt")
        dcp.save(state, checkpoint_id=folder, no_dist=True)  # type: ignore[arg-type]
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    return files


@pytest.fixture(scope="module")
def ckpt(made: Callable[[object], Files]) -> Files:
    return made({"w": torch.arange(12.0).reshape(3, 4)})


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty place: on this disk, or elsewhere."""
    return str(tmp_path / "runs") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def put(root: str, tree: Mapping[str, Files | bytes]) -> str:
    """Write files, or whole folders of them, below a place."""
    store = open_store(root)
    for name, held in tree.items():
        files = {"": held} if isinstance(held, bytes) else {f"/{path}": raw for path, raw in held.items()}
        for path, raw in files.items():
            store.put(name + path, raw)
    return root


def find(source: str, **asked: object) -> Located:
    return locate(Job(source=source, sink="", **asked))


WEIGHTS = save({"a": torch.ones(2)})
ADAPTERS = {
    "torchtitan": ("checkpoint/step-10", {"checkpoint/step-10": "ckpt"}),
    "accelerate": (
        "pytorch_model_fsdp_0",
        {"pytorch_model_fsdp_0": "ckpt", "optimizer_0": "ckpt", "random_states_0.pkl": b"x", "scheduler.bin": b"x"},
    ),
    "trainer": (
        "checkpoint-10/pytorch_model_fsdp_0",
        {
            "checkpoint-10/pytorch_model_fsdp_0": "ckpt",
            "checkpoint-10/optimizer_0": "ckpt",
            "checkpoint-10/rng_state_0.pth": b"x",
            "checkpoint-10/trainer_state.json": b"{}",
        },
    ),
    "lightning": (
        "checkpoints/epoch=0-step=10.ckpt",
        {"checkpoints/epoch=0-step=10.ckpt": "ckpt", "checkpoints/epoch=0-step=10.ckpt/meta.pt": b"x"},
    ),
    "megatron": (
        "iter_0000100",
        {
            "iter_0000100": "ckpt",
            "iter_0000100/common.pt": b"x",
            "iter_0000100/metadata.json": json.dumps({"sharded_backend": "torch_dist"}).encode(),
            "latest_checkpointed_iteration.txt": b"100",
        },
    ),
    "nemo": (
        "run--step=9-last/weights",
        {"run--step=9-last/weights": "ckpt", "run--step=9-last/context/io.json": b"{}"},
    ),
    "olmo-core": (
        "step10/model_and_optim",
        {"step10/model_and_optim": "ckpt", "step10/train/rank0.pt": b"x", "step10/config.json": b"{}"},
    ),
    "verl with megatron": (
        "global_step_5/actor/dist_ckpt",
        {
            "global_step_5/actor/dist_ckpt": "ckpt",
            "global_step_5/actor/huggingface/config.json": b"{}",
            "global_step_5/data.pt": b"x",
        },
    ),
    "torch's writer": ("sharded", {"sharded": {"model.safetensors": WEIGHTS}, "config.json": b"{}"}),
    "beside an output of ours": (
        "step-1",
        {"step-1": "ckpt", "out/.hfdcp/lock": b"", "out/model.safetensors": WEIGHTS},
    ),
}


@pytest.mark.parametrize(("folder", "tree"), ADAPTERS.values(), ids=ADAPTERS)
def test_a_parent_descends_to_the_one_checkpoint_and_says_so(
    root: str, ckpt: Files, folder: str, tree: Mapping[str, object]
) -> None:
    """accelerate 2848: whoever named the parent got a cryptic error."""
    found = find(put(root, {name: ckpt if held == "ckpt" else held for name, held in tree.items()}))
    assert found.pinned.folder == folder
    assert found.said[0].startswith(f"found in {folder}: ")
    assert found.source.url.endswith(f"/{folder}")


def test_a_place_that_is_a_checkpoint_is_the_one_whatever_lies_below(root: str, ckpt: Files) -> None:
    put(root, {"step-5": ckpt, "out": ckpt, "sharded": ckpt, "model.safetensors": WEIGHTS})
    found = find(root)
    assert (found.pinned, found.catalog.format) == (Pinned(), "safetensors")


def test_what_else_lies_in_a_checkpoint_is_said(root: str, ckpt: Files) -> None:
    """Final weights beside the steps of the run, or beside a copy of the last one."""
    put(root, {"model.safetensors": WEIGHTS, "ckpt": ckpt, "old/pytorch_model.bin": b"x", "optimizer_0": ckpt})
    put(root, {"notes/x": b"x", "out/.hfdcp/lock": b"", "out/model.safetensors": WEIGHTS})
    assert find(root).said == (
        "also here, and not read: ckpt (torch distributed checkpoint), old (weights in plain pickles)",
    )
    put(root, {f"step-{number}": ckpt for number in range(30)})
    (said,) = find(root).said
    assert said.startswith("also here, and not read: step-29 (")
    assert said.endswith(", and 11 more")


def test_folders_of_a_checkpoint_that_nobody_may_look_into_are_no_fault(tmp_path: Path, ckpt: Files) -> None:
    put(str(tmp_path), {**ckpt, "inner": ckpt})
    with faulty_store(str(tmp_path)) as faults:
        assert find(faults.url).said[0].startswith("also here")
        faults.add(Fault("list", "inner", error=PermissionError("not yours"), times=FOREVER))
        assert find(faults.url).said == ()


FILES = {
    ".metadata": "is a file; give the folder that it lies in: {root}$",
    DISTCP: "is a file; give the folder that it lies in: {root}$",
    "model.safetensors": "is a file; give the folder that it lies in: {root}$",
    "model.safetensors.index.json": "is a file; give the folder that it lies in: {root}$",
    "notes.txt": "is a file; give the folder that it lies in: {root}$",
    "last.ckpt": "cannot be read: weights in plain pickles: load them where you trust them",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("asked", [{}, {"latest": True}], ids=["the one", "latest"])
def test_a_file_in_the_place_of_its_folder_is_refused_with_the_folder(root: str, name: str, asked: object) -> None:
    put(root, {name: b"x"})
    for url in (f"{root}/{name}", f"{root}/{name}/"):
        with pytest.raises(UnknownFormat, match=FILES[name].format(root=root)):
            find(url, **asked)


def test_a_file_as_a_further_place_is_refused_with_its_folder_too(root: str, ckpt: Files) -> None:
    put(root, {"a": ckpt, "b": ckpt})
    with pytest.raises(UnknownFormat, match=rf"b/\.metadata is a file; .*: {root}/b$"):
        find(f"{root}/a", also=(f"{root}/b/.metadata",))


def test_a_named_folder_is_read_even_if_nobody_would_look_into_it(root: str, ckpt: Files) -> None:
    put(root, {"optimizer_0": ckpt})
    with pytest.raises(UnknownFormat, match="no checkpoint here"):
        find(root)
    assert set(find(f"{root}/optimizer_0").catalog.tensors) == {"w"}


def test_several_checkpoints_are_listed_by_step_and_what_they_are(root: str, ckpt: Files) -> None:
    put(root, {"step-9": ckpt, "step-10": ckpt, "step-11": {DISTCP: b"x"}, "other/pytorch_model.bin": b"x"})
    with pytest.raises(
        UnknownFormat, match=r"more than one could be meant; name one of them, or .* --latest"
    ) as caught:
        find(root)
    assert caught.value.problems == (
        "other: weights in plain pickles; cannot be read",
        "step-9: torch distributed checkpoint",
        "step-10: torch distributed checkpoint",
        "step-11: torch distributed checkpoint; not finished: no .metadata, which is written last",
    )


def test_each_that_is_not_complete_is_marked_where_several_are_listed(root: str, ckpt: Files) -> None:
    cases = broken(ckpt)
    put(root, {f"step-{number}": files for number, (files, _) in enumerate(cases.values(), 1)} | {"step-99": ckpt})
    put(root, {"step-50": {**ckpt, ".metadata": b"\x80\x04cos\nsystem\n(S'true'\ntR."}})
    with pytest.raises(UnknownFormat, match="more than one could be meant") as caught:
        find(root)
    said = dict(problem.split(": ", 1) for problem in caught.value.problems)
    assert said.pop("step-99") == "torch distributed checkpoint"
    assert said.pop("step-50").startswith("torch distributed checkpoint; cannot be used: .metadata: names 'os.system'")
    nothing = next(number for number, case in enumerate(cases, 1) if case == "nothing yet")
    assert {*said} == {f"step-{number}" for number in range(1, len(cases) + 1) if number != nothing}
    marks = ("; not finished: ", "; not complete: ", "; cannot be used: ", "; cannot be read")
    assert all(any(mark in line for mark in marks) for line in said.values())


def test_of_a_long_list_the_newest_are_tried_and_the_others_are_said_not_to_be(ckpt: Files) -> None:
    root = put(f"memory://{uuid.uuid4().hex}", {f"step-{number}": ckpt for number in range(MOST_TRIED + 2)})
    put(root, {f"step-{MOST_TRIED + 1}": {DISTCP: b"x"}})
    with pytest.raises(UnknownFormat) as caught:
        find(root)
    assert [problem.partition("; ")[2][:15] for problem in caught.value.problems] == [
        *["not looked into"] * 2,
        *[""] * (MOST_TRIED - 1),
        "cannot be used:",
    ]


def test_weights_that_cannot_be_read_are_refused_by_name_with_the_way_out(root: str) -> None:
    put(
        root,
        {"global_step100": {"mp_rank_00_model_states.pt": b"x"}, "latest": b"global_step100", "zero_to_fp32.py": b""},
    )
    for asked in ({}, {"latest": True}):
        with pytest.raises((UnknownFormat, IncompleteCheckpoint)) as caught:
            find(root, **asked)
        assert "zero_to_fp32.py" in str(caught.value)
    with pytest.raises(UnknownFormat, match="no checkpoint that can be read here") as caught:
        find(f"{root}/global_step100")
    assert caught.value.problems[0].startswith(".: DeepSpeed ZeRO checkpoint")


def test_readable_weights_beside_unreadable_ones_are_not_taken_unasked(root: str) -> None:
    put(root, {"model_world_size_1_rank_0.pt": b"x", "huggingface/model.safetensors": WEIGHTS})
    with pytest.raises(UnknownFormat, match="name one of them") as caught:
        find(root)
    assert caught.value.problems[1] == "huggingface: Hugging Face safetensors"


def test_a_long_list_says_how_many_folders_were_not_looked_into(ckpt: Files) -> None:
    root = put(f"memory://{uuid.uuid4().hex}", {f"run{n}": ckpt for n in range(8)})
    with pytest.raises(UnknownFormat) as caught:
        Search(open_store(root), most_listings=4).only()
    assert len(caught.value.problems) == 4
    assert caught.value.problems[-1] == "and 5 folders that were not looked into"


def test_an_unfinished_save_in_a_parent_is_called_so(root: str, ckpt: Files) -> None:
    put(root, {"step-5": {DISTCP: ckpt[DISTCP]}})
    with pytest.raises(IncompleteCheckpoint, match=r"step-5: .*no \.metadata"):
        find(root)


def test_a_folder_without_anything_says_what_was_found(root: str) -> None:
    put(root, {"notes.txt": b"1", "logs/x": b"1"})
    with pytest.raises(UnknownFormat, match=r"no \*\.safetensors\); found notes\.txt, logs/"):
        find(root)


def test_a_place_that_is_not_there_is_not_found(root: str) -> None:
    with pytest.raises(StorageNotFound):
        find(f"{root}/nowhere")


# ---- --latest ----


STEP_NAMES = {
    "torchtitan": ("step-9", "step-10"),
    "trainer": ("checkpoint-900", "checkpoint-1000"),
    "lightning": ("epoch=9-step=9.ckpt", "epoch=10-step=10.ckpt"),
    "megatron": ("iter_0000099", "iter_0000100"),
    "verl": ("global_step_9", "global_step_10"),
    "digits": ("9", "10"),
}


@pytest.mark.parametrize(("older", "newer"), STEP_NAMES.values(), ids=STEP_NAMES)
def test_the_latest_step_is_the_one_with_the_largest_number(root: str, ckpt: Files, older: str, newer: str) -> None:
    put(root, {older: ckpt, newer: ckpt, "tmp-checkpoint-99999": ckpt, "latest": older.encode()})
    found = find(root, latest=True)
    assert found.pinned.folder == newer
    assert found.said == (f"latest complete step: {newer}: torch distributed checkpoint",)


def broken(ckpt: Files) -> Mapping[str, tuple[Files, str]]:
    return {
        "without metadata": ({DISTCP: ckpt[DISTCP]}, "no .metadata"),
        "file absent": ({".metadata": ckpt[".metadata"]}, "names files that are not there"),
        "file short": ({**ckpt, DISTCP: ckpt[DISTCP][:-5]}, "cut short"),
        "file longer": ({**ckpt, DISTCP: ckpt[DISTCP] + b"x"}, "longer: of another save"),
        "metadata cut": ({**ckpt, ".metadata": ckpt[".metadata"][:-9]}, ".metadata"),
        "nothing yet": ({"notes": b"x"}, "nothing that looks like weights"),
        "pickles": ({"pytorch_model.bin": b"x"}, "safetensors"),
        "safetensors cut": ({"model.safetensors": WEIGHTS[:-1]}, "model.safetensors"),
        "index alone": ({"model.safetensors.index.json": b"{}"}, "no file that it names"),
    }


@pytest.mark.parametrize("name", broken({".metadata": b"", DISTCP: b""}))
def test_a_step_that_is_not_complete_is_passed_over_and_said(root: str, ckpt: Files, name: str) -> None:
    """torchtitan 315: the newest step of a run that was saving had no .metadata yet."""
    files, why = broken(ckpt)[name]
    found = find(put(root, {"step-8": ckpt, "step-9": ckpt, "step-10": files}), latest=True)
    assert found.pinned.folder == "step-9"
    assert found.said[0].startswith("passed over step-10: ")
    assert why in found.said[0]


def test_where_no_step_is_complete_each_is_named(root: str, ckpt: Files) -> None:
    put(root, {"step-1": {DISTCP: b"x"}, "step-2": {".metadata": ckpt[".metadata"]}})
    with pytest.raises(IncompleteCheckpoint, match="no step is complete") as caught:
        find(root, latest=True)
    assert [problem[:18] for problem in caught.value.problems] == ["passed over step-2", "passed over step-1"]


def test_steps_may_lie_deeper_and_hold_the_weights_deeper(root: str, ckpt: Files) -> None:
    tree = {f"dump/checkpoint/checkpoint-{n}/pytorch_model_fsdp_0": ckpt for n in (9, 10)}
    found = find(put(root, {**tree, "dump/checkpoint/checkpoint-10/optimizer_0": ckpt}), latest=True)
    assert found.pinned.folder == "dump/checkpoint/checkpoint-10/pytorch_model_fsdp_0"


def test_two_runs_have_no_latest_step_in_common(root: str, ckpt: Files) -> None:
    put(root, {"a/step-1": ckpt, "a/step-3": ckpt, "b/step-2": ckpt})
    with pytest.raises(UnknownFormat, match="several folders hold steps") as caught:
        find(root, latest=True)
    assert caught.value.problems == ("a: steps 1 to 3", "b: steps 2 to 2")


def test_one_step_with_two_models_or_two_folders_is_ambiguous(root: str, ckpt: Files) -> None:
    put(root, {"x/global_step_5/actor": ckpt, "x/global_step_5/critic": ckpt})
    with pytest.raises(UnknownFormat, match="more than one") as caught:
        find(f"{root}/x", latest=True)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "global_step_5/actor",
        "global_step_5/critic",
    ]
    put(root, {"y/epoch=0-step=5.ckpt": ckpt, "y/epoch=0-step=5-v1.ckpt": ckpt})
    with pytest.raises(UnknownFormat, match="more than one"):
        find(f"{root}/y", latest=True)


def test_latest_takes_the_place_itself_where_nothing_is_named_after_a_step(root: str, ckpt: Files) -> None:
    assert find(put(root, ckpt), latest=True).pinned.folder == ""


def test_latest_goes_before_a_final_model_beside_the_steps(root: str, ckpt: Files) -> None:
    put(root, {"checkpoint-5": ckpt, "model.safetensors": WEIGHTS})
    assert find(root, latest=True).pinned.folder == "checkpoint-5"


def test_a_hostile_step_is_not_passed_over(root: str, ckpt: Files) -> None:
    hostile = b"\x80\x04cos\nsystem\n(S'true'\ntR."
    put(root, {"step-1": ckpt, "step-2": {**ckpt, ".metadata": hostile}})
    with pytest.raises(UnsafePickle):
        find(root, latest=True)


def test_what_is_found_can_be_looked_at_deeply(root: str, ckpt: Files) -> None:
    at = ckpt[DISTCP].index(b"data.pkl") + 20
    put(root, {"step-1": {**ckpt, DISTCP: ckpt[DISTCP][:at] + b"\xff" * 40 + ckpt[DISTCP][at + 40 :]}})
    assert find(root, latest=True).pinned.folder == "step-1"
    with pytest.raises(CorruptFile, match="items are damaged"):
        locate(Job(source=root, sink="", latest=True), deep=True)


# ---- bounded ----


class Counting:
    """A memory store that counts its listings."""

    def __init__(self, url: str) -> None:
        self.inner, self.url, self.listings = open_store(url), url, 0
        self.stat, self.read, self.read_into = self.inner.stat, self.inner.read, self.inner.read_into

    def list(self, folder: str = "") -> object:
        self.listings += 1
        return self.inner.list(folder)


def test_the_work_is_bounded_however_many_folders_there_are(ckpt: Files) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    put(root, {f"data/{n}x/{m}/file": b"x" for n in range(9) for m in range(9)} | {"step-7": ckpt})
    source = Counting(root)
    with pytest.raises(UnknownFormat) as caught:
        Search(source, most_listings=20).only()
    assert source.listings == 20
    assert "folders that were not looked into" in caught.value.problems[-1]
    assert find(f"{root}/step-7").pinned.folder == ""


def test_not_every_step_of_a_long_run_is_looked_at(ckpt: Files) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    put(root, {f"step-{n}/notes": b"x" for n in range(30)} | {"step-30": ckpt})
    source = Counting(root)
    assert [step.folder for step in next(iter(Search(source).newest_first()))] == ["step-30"]
    assert source.listings == 2
    with pytest.raises(UnknownFormat, match="20 folders were listed"):
        list(Search(source, most_listings=20).newest_first())


def test_nothing_is_looked_for_deeper_than_a_few_folders(root: str, ckpt: Files) -> None:
    put(root, {"a/b/c/d": ckpt})
    with pytest.raises(UnknownFormat, match="no checkpoint here"):
        find(root)
    assert find(f"{root}/a").pinned.folder == "b/c/d"


# ---- several places ----


def test_a_checkpoint_on_the_disks_of_two_nodes_is_found_below_both(tmp_path: Path, ckpt: Files) -> None:
    one = put(str(tmp_path / "n0"), {"step-1": ckpt, "step-2": {".metadata": ckpt[".metadata"]}})
    two = put(f"memory://{uuid.uuid4().hex}", {"step-2": {DISTCP: ckpt[DISTCP]}})
    job = Job(source=one, sink="", also=(two,), latest=True)
    found = locate(job)
    assert found.pinned == Pinned("step-2", {".metadata": 0, DISTCP: 1})
    assert reopen(job, found.pinned).read(DISTCP, 0, 40) == ckpt[DISTCP][:40]
    assert find(one, latest=True).pinned.folder == "step-1"


def test_a_further_place_that_is_not_there_is_an_error_and_not_left_out(tmp_path: Path, ckpt: Files) -> None:
    one = put(str(tmp_path / "n0"), ckpt)
    with pytest.raises(StorageNotFound, match="n1"):
        find(one, also=(str(tmp_path / "n1"),))


def test_a_place_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="named twice"):
        Job(source="a", sink="", also=("b", "a"))


def test_places_that_contradict_each_other_are_no_unfinished_step(
    tmp_path: Path, ckpt: Files, made: Callable[[object], Files]
) -> None:
    one = put(str(tmp_path / "n0"), {"step-1": ckpt, "step-2": ckpt})
    two = put(str(tmp_path / "n1"), {"step-2": made({"w": torch.zeros(3, 4)})})
    with pytest.raises(CorruptFile, match="say different things"):
        find(one, also=(two,), latest=True)


def test_ranks_of_a_real_checkpoint_may_lie_in_a_folder_each(checkpoints: Mapping[str, Truth], tmp_path: Path) -> None:
    """verl 2402, accelerate 3010: every node kept its own files, and the first one .metadata too."""
    whole = checkpoints["fsdp2_even"].folder
    for file in whole.iterdir():
        node = tmp_path / f"node{file.name[2] if file.name.startswith('__') else 0}"
        node.mkdir(exist_ok=True)
        shutil.copy(file, node)
    nodes = [str(tmp_path / f"node{n}") for n in range(4)]
    assert find(nodes[0], also=tuple(nodes[1:])).catalog.tensors == find(str(whole)).catalog.tensors
    with pytest.raises(IncompleteCheckpoint, match="--also URL") as caught:
        find(nodes[0], also=tuple(nodes[1:3]))
    assert caught.value.problems == ("rank 3: __3_0.distcp",)
    with pytest.raises(IncompleteCheckpoint, match=r"rank 0 writes last.*--also URL"):
        find(nodes[2])
    with pytest.raises(UnknownFormat, match="name one of them, or all that hold files of the same save: --also"):
        find(str(tmp_path))


# ---- again ----


def test_an_earlier_run_is_held_against_the_step_that_it_read(root: str, ckpt: Files) -> None:
    put(root, {"step-1": ckpt, "step-2": ckpt})
    job = Job(source=root, sink="", latest=True)
    assert relocate(job, Pinned("step-1")).pinned.folder == "step-1"
    assert relocate(job, Pinned("gone")).pinned.folder == "step-2"
    assert relocate(Job(source=f"{root}/step-1", sink=""), Pinned("step-1")).pinned.folder == ""


# ---- Hugging Face ----


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as served:
        configure("hf", {"endpoint": served.url, "token": served.token, "skip_instance_cache": True})
        try:
            yield served
        finally:
            configure("hf", {})
            fsspec.get_filesystem_class("hf").clear_instance_cache()


# huggingface_hub 2.4 still sends LFS parts by an argument that httpx2 deprecates; it is theirs to change.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_repository_on_the_hub_is_a_source_at_any_revision(hub: Hub) -> None:
    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo("acme/m", private=True)
    first = api.upload_file(path_or_fileobj=WEIGHTS, path_in_repo="model.safetensors", repo_id="acme/m")
    api.upload_file(path_or_fileobj=save({"b": torch.ones(3)}), path_in_repo="model.safetensors", repo_id="acme/m")
    api.upload_file(path_or_fileobj=save({"c": torch.ones(3)}), path_in_repo="sub/model.safetensors", repo_id="acme/m")
    assert set(find("hf://acme/m").catalog.tensors) == {"b"}
    assert set(find(f"hf://acme/m@{first.oid}").catalog.tensors) == {"a"}
    assert set(find("hf://acme/m@main/sub").catalog.tensors) == {"c"}
    assert inspect(Job(source="hf://acme/m", sink="")).format == "safetensors"


def test_the_cache_of_the_hub_descends_to_the_snapshot_of_its_head(tmp_path: Path) -> None:
    commit = "a" * 40
    repo = tmp_path / "models--acme--m"
    put(str(repo), {"blobs/1234": WEIGHTS, "blobs/5678": save({"old": torch.ones(1)}), "refs/main": commit.encode()})
    for name, blob in ((commit, "1234"), ("b" * 40, "5678")):
        (repo / "snapshots" / name).mkdir(parents=True)
        (repo / "snapshots" / name / "model.safetensors").symlink_to(f"../../blobs/{blob}")
    found = find(str(repo))
    assert (found.pinned.folder, set(found.catalog.tensors)) == (f"snapshots/{commit}", {"a"})
    assert find(str(tmp_path)).pinned.folder == f"models--acme--m/snapshots/{commit}"
    (repo / "refs" / "main").unlink()
    with pytest.raises(UnknownFormat, match="more than one"):
        find(str(repo))
    (repo / "refs" / "main").write_text("c" * 40)
    with pytest.raises(UnknownFormat, match="found blobs/, refs/, snapshots/"):
        find(str(repo))
