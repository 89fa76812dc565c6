"""What a folder is taken for: one listing for each framework, and the words that refuse what cannot be read."""

import json
from dataclasses import replace

import pytest

from hfdcp_core.homes import Folder, Home, no_home, of_rank, questions, recognise, step_of


def folder(name: str, *names: str, texts: dict[str, bytes] | None = None) -> Folder:
    """Return a folder by the names in it; those of folders end with a slash."""
    files = {each: 100 for each in names if not each.endswith("/")}
    return Folder(name, files, tuple(each[:-1] for each in names if each.endswith("/")), texts or {})


def megatron(backend: object) -> dict[str, bytes]:
    return {"metadata.json": json.dumps({"sharded_backend": backend, "common_backend": "torch"}).encode()}


DCP = (".metadata", "__0_0.distcp", "__1_0.distcp")
SHARDS = tuple(f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2))
COMMIT = "0123456789abcdef0123456789abcdef01234567"

READ = {
    "torch": (folder("ckpt", *DCP), "torch distributed checkpoint"),
    "torchtitan": (folder("step-1000", *DCP), "torch distributed checkpoint"),
    "per-rank metadata": (folder("x", "__0.metadata", "__1.metadata", *DCP[1:]), "torch distributed checkpoint"),
    "lightning": (folder("epoch=0-step=10.ckpt", *DCP, "meta.pt"), "Lightning sharded checkpoint"),
    "accelerate": (folder("pytorch_model_fsdp_0", *DCP), "accelerate's FSDP weights"),
    "megatron": (
        folder("iter_0000100", *DCP, "common.pt", "metadata.json", texts=megatron("torch_dist")),
        "Megatron-core torch_dist checkpoint",
    ),
    "hf": (folder("m", "config.json", "model.safetensors", "tokenizer.json"), "Hugging Face safetensors"),
    "hf, with its pickles too": (folder("m", "model.safetensors", "pytorch_model.bin"), "Hugging Face safetensors"),
    "deepspeed that gathered its weights": (
        folder("checkpoint-5", "model.safetensors", "zero_to_fp32.py", "latest", "global_step5/"),
        "Hugging Face safetensors",
    ),
    "torch's writer": (folder("m", *SHARDS), "torch's sharded safetensors"),
    "torch's writer, consolidated": (
        folder("m", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "sharded/"),
        "Hugging Face safetensors",
    ),
    "dcp beside safetensors": (folder("m", *DCP, "model.safetensors"), "torch distributed checkpoint"),
}


@pytest.mark.parametrize(("listing", "kind"), READ.values(), ids=READ)
def test_a_checkpoint_is_told_by_what_lies_in_its_folder(listing: Folder, kind: str) -> None:
    assert recognise(listing) == Home(kind, "checkpoint")


AROUND = {
    "accelerate": (
        folder("state", "pytorch_model_fsdp_0/", "optimizer_0/", "random_states_0.pkl", "scheduler.bin"),
        ("pytorch_model_fsdp_0",),
    ),
    "trainer": (
        folder("checkpoint-10", "pytorch_model_fsdp_0/", "optimizer_0/", "trainer_state.json", "rng_state_0.pth"),
        ("pytorch_model_fsdp_0",),
    ),
    "accelerate, two models": (
        folder("state", "pytorch_model_fsdp_0/", "pytorch_model_fsdp_1/"),
        ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"),
    ),
    "nemo": (folder("run--step=99-last", "weights/", "context/"), ("weights",)),
    "torch's writer, not consolidated": (folder("m", "sharded/"), ("sharded",)),
    "cache": (
        folder("models--a--b", "blobs/", "refs/", "snapshots/", texts={"refs/main": COMMIT.encode()}),
        (f"snapshots/{COMMIT}",),
    ),
    "cache without a head": (folder("models--a--b", "blobs/", "refs/", "snapshots/"), ("snapshots",)),
    "cache with an odd head": (
        folder("models--a--b", "refs/", "snapshots/", texts={"refs/main": b"../../x"}),
        ("snapshots",),
    ),
}


@pytest.mark.parametrize(("listing", "inside"), AROUND.values(), ids=AROUND)
def test_a_folder_around_says_where_the_weights_are(listing: Folder, inside: tuple[str, ...]) -> None:
    home = recognise(listing)
    assert home is not None
    assert (home.verdict, home.inside) == ("around", inside)


UNFINISHED = {
    "dcp": (folder("step-5", "__0_0.distcp"), "no .metadata"),
    "lightning": (folder("x.ckpt", "__0_0.distcp", "meta.pt"), "no .metadata"),
    "megatron": (folder("iter_5", "common.pt", "metadata.json", texts=megatron("torch_dist")), "no .metadata"),
    "hf": (folder("m", "config.json", "model.safetensors.index.json"), "no file that it names"),
}


@pytest.mark.parametrize(("listing", "why"), UNFINISHED.values(), ids=UNFINISHED)
def test_a_save_that_did_not_end_is_told_from_no_save(listing: Folder, why: str) -> None:
    home = recognise(listing)
    assert home is not None
    assert home.verdict == "unfinished"
    assert why in home.advice


ZERO = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
FOREIGN = {
    "deepspeed 3": (folder("global_step100", *ZERO), "DeepSpeed ZeRO", "zero_to_fp32.py"),
    "deepspeed 1": (folder("global_step100", "mp_rank_00_model_states.pt"), "DeepSpeed ZeRO", "--safe_serialization"),
    "deepspeed pipeline": (folder("g", "layer_00-model_00-model_states.pt"), "DeepSpeed", "universal checkpoint"),
    "verl": (
        folder("actor", "model_world_size_8_rank_0.pt", "optim_world_size_8_rank_0.pt", "huggingface/"),
        "verl",
        "python -m verl.model_merger merge",
    ),
    "fsdp": (folder("x", "rank_0.pt", "rank_1.pt"), "local pickles of FSDP", "SHARDED_STATE_DICT"),
    "dinov2": (folder("x", "model_0012499.rank_0.pth"), "local pickles of FSDP", "torch.distributed.checkpoint"),
    "composer": (folder("x", "ep0-ba10-rank0.pt"), "local pickles of FSDP", "load them there"),
    "accelerate local": (folder("x", "pytorch_model_fsdp_rank0.bin"), "local pickles of FSDP", "as many ranks"),
    "megatron legacy": (folder("iter_0000100", "mp_rank_00/", "mp_rank_01/"), "Megatron-LM", "--ckpt-convert-format"),
    "megatron pipeline": (folder("iter_0000100", "mp_rank_00_000/"), "legacy", "torch_dist"),
    "megatron zarr": (
        folder("iter_1", "common.pt", "metadata.json", "w.weight/", texts=megatron("zarr")),
        "'zarr'",
        "--ckpt-convert-format torch_dist",
    ),
    "llama": (folder("8B", "consolidated.00.pth", "params.json"), "Llama", "convert_llama_weights_to_hf"),
    "bin": (folder("m", "config.json", "pytorch_model.bin"), "plain pickles", "save_pretrained"),
    "bins": (folder("m", "pytorch_model-00001-of-00002.bin"), "plain pickles", "weights_only=True"),
    "diffusers bin": (folder("unet", "diffusion_pytorch_model.bin"), "plain pickles", "safetensors"),
    "lightning file": (folder("m", "last.ckpt"), "plain pickles", "safetensors"),
}


@pytest.mark.parametrize(("listing", "kind", "way_out"), FOREIGN.values(), ids=FOREIGN)
def test_weights_that_cannot_be_read_are_refused_by_name_with_the_way_out(
    listing: Folder, kind: str, way_out: str
) -> None:
    home = recognise(listing)
    assert home is not None
    assert home.verdict == "foreign"
    assert kind in home.kind
    assert way_out in home.advice


NOTHING = {
    "empty": folder("x"),
    "logs": folder("x", "events.out.tfevents.1", "train.log"),
    "training state": folder("x", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "data.pt"),
    "a metadata.json of somebody else": folder("x", "metadata.json", texts={"metadata.json": b'{"a": 1}'}),
    "a metadata.json that is none": folder("x", "metadata.json", texts={"metadata.json": b"{"}),
    "a metadata.json with a list": folder("x", "metadata.json", texts={"metadata.json": b"[]"}),
    "a metadata.json with another backend": folder("x", "metadata.json", texts=megatron(3)),
    "metadata.json too deep": folder("x", "metadata.json", texts={"metadata.json": b"[" * 100_000}),
}


@pytest.mark.parametrize("listing", NOTHING.values(), ids=NOTHING)
def test_a_folder_without_weights_is_taken_for_nothing(listing: Folder) -> None:
    assert recognise(listing) is None


def test_only_small_files_that_decide_are_asked_for() -> None:
    assert questions(folder("x", *DCP)) == ()
    assert questions(folder("x", "metadata.json")) == ("metadata.json",)
    assert questions(folder("models--a--b", "blobs/", "refs/", "snapshots/")) == ("refs/main",)


def test_the_commit_of_a_cache_may_end_with_a_line_break() -> None:
    cache = folder("models--a--b", "refs/", "snapshots/", texts={"refs/main": f"{COMMIT}\n".encode()})
    home = recognise(cache)
    assert home is not None
    assert home.inside == (f"snapshots/{COMMIT}",)
    assert recognise(replace(cache, texts={})) == replace(home, inside=("snapshots",))


@pytest.mark.parametrize(
    ("listing", "reason"),
    [
        (folder("optimizer_0", *DCP), "optimizer state"),
        (folder("optim", *DCP), "optimizer state"),
        (folder(".git"), "not weights"),
        (folder("wandb"), "not weights"),
        (folder("train", "rank0.pt"), "not weights"),
        (folder("out", "model.safetensors", "hfdcp-manifest.json"), "an output of hfdcp"),
        (folder("out", "model.safetensors", ".hfdcp/"), "an output of hfdcp"),
        (folder("pytorch_model_fsdp_0", *DCP), None),
    ],
)
def test_some_folders_are_never_what_somebody_looks_for(listing: Folder, reason: str | None) -> None:
    assert no_home(listing) == reason


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-9", 9),
        ("step-10", 10),
        ("step_7", 7),
        ("step1000", 1000),
        ("step1000-unsharded", 1000),
        ("checkpoint-500", 500),
        ("checkpoint_3", 3),
        ("iter_0000100", 100),
        ("global_step100", 100),
        ("global_step_5", 5),
        ("epoch=1-step=200.ckpt", 200),
        ("epoch=1-step=200-v1.ckpt", 200),
        ("m--val_loss=0.00-step=99-consumed_samples=200.0-last", 99),
        ("ep0-ba10", 10),
        ("epoch_3", 3),
        ("250", 250),
        ("last.ckpt", None),
        ("checkpoint", None),
        ("optimizer_0", None),
        ("pytorch_model_fsdp_0", None),
        ("mp_rank_00", None),
        ("llama-3", None),
        ("tmp-checkpoint-500", None),
        ("step1000-tmp", None),
        ("checkpoint-500.tmp", None),
        ("9" * 5000, None),
    ],
)
def test_the_step_of_a_folder_is_the_number_in_its_name(name: str, step: int | None) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("__3_0.distcp", "rank 3: __3_0.distcp"),
        ("__12_7.distcp", "rank 12: __12_7.distcp"),
        ("sub/__1_0.distcp", "rank 1: sub/__1_0.distcp"),
        ("all.distcp", "all.distcp"),
    ],
)
def test_a_file_says_which_rank_wrote_it(path: str, said: str) -> None:
    assert of_rank(path) == said
