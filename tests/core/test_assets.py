"""The rest of a repository comes from a base model, byte for byte; its config is corrected, its weights stay there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import CommitOperationAdd, HfApi

from hfdcp_core import publish
from hfdcp_core.assets import MOST_BYTES, corrected, corrections, is_asset
from hfdcp_core.catalog import TensorSpec
from hfdcp_core.errors import Conflict, PlanError, SourceChanged, SourceError, ValidationError
from hfdcp_core.job import Job
from hfdcp_core.recipe import Definition
from hfdcp_core.store import configure
from hfdcp_core.testing.hub import Hub, Settings
from hfdcp_core.testing.in_memory import Piece, weights_file
from hfdcp_core.tying import base_url

EMBEDDING = np.arange(20, dtype=np.float32).reshape(5, 4)
CONFIG = '{\n  "vocab_size": 7,\n  "dtype": "bfloat16",\n  "other":  [1,2]\n}\n'
BASE = {
    "config.json": CONFIG,
    "generation_config.json": "{}",
    "tokenizer.json": '{"a": "é"}\r\n',
    "tokenizer.model": "\x00\x01binary",
    "chat_template.jinja": "{{ x }}",
    "additional_chat_templates/tool.jinja": "{{ y }}",
    "LICENSE": "words",
    "modeling_mine.py": "code",
    "README.md": "---\nlicense: mit\n---\n# Base\n",
    "model.safetensors": "weights",
    "pytorch_model.bin": "weights",
    "consolidated.00.pth": "weights",
    "train.log": "a log",
    ".gitattributes": "hidden",
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode("latin-1", "replace") if name == "tokenizer.model" else text.encode())
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base", BASE)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights_file({"model.embed_tokens.weight": Piece.of(EMBEDDING)}))
    return folder


class Heard:
    """Progress that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, step: str, total_bytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_a_complete_repository(source: Path, base: Path, tmp_path: Path) -> None:
    heard, out = Heard(), tmp_path / "out"
    manifest = publish.make(Job(str(source), str(out), base=str(base)), progress=heard)
    copied = ["additional_chat_templates/tool.jinja", "chat_template.jinja", "generation_config.json", "LICENSE"]
    copied += ["modeling_mine.py", "tokenizer.json", "tokenizer.model"]
    assert sorted(record.path for record in manifest.extra_files) == sorted([*copied, "config.json", "README.md"])
    for name in copied:
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert (out / "config.json").read_text() == CONFIG.replace("7", "5").replace("bfloat16", "float32")
    assert manifest.corrections == (
        "config.json: vocab_size 7 is 5 now",
        'config.json: dtype "bfloat16" is "float32" now',
    )
    assert set(manifest.corrections) <= set(heard.lines)
    assert "files of the base that are left out: train.log" in heard.lines
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n")
    assert "# Base\n" in card
    assert str(tmp_path) not in card + (out / "hfdcp-manifest.json").read_text()
    assert publish.validate_again(Job("", str(out))) == manifest


def test_a_rerun_changes_nothing_and_keeps_what_a_person_wrote_into_the_card(
    source: Path, base: Path, tmp_path: Path
) -> None:
    job = Job(str(source), str(tmp_path / "out"), base=str(base))
    first = publish.make(job)
    assert publish.make(job) == first
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text().replace("# Base\n", "# Mine\n"))
    publish.make(job)
    assert "# Mine\n" in card.read_text()


def test_a_base_that_changes_meanwhile_is_refused(source: Path, base: Path, tmp_path: Path) -> None:
    job = Job(str(source), str(tmp_path / "out"), base=str(base))
    publish.gather(job)
    publish.reshard(job)
    publish.consolidate_all(job)
    (base / "tokenizer.json").write_text("another one")
    with pytest.raises(SourceChanged, match="the base model is not what it was") as caught:
        publish.validate(job)
    assert list(caught.value.problems) == ["tokenizer.json"]
    assert not (tmp_path / "out" / "hfdcp-manifest.json").exists()


def test_what_is_no_base_is_refused(source: Path, tmp_path: Path) -> None:
    empty = write(tmp_path / "empty", {"tokenizer.json": "{}"})
    with pytest.raises(SourceError, match=r"there is no config\.json"):
        publish.make(Job(str(source), str(tmp_path / "out"), base=str(empty)))
    large = write(tmp_path / "large", {"config.json": "{}"})
    with (large / "tokenizer.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(PlanError, match="too large to belong beside"):
        publish.make(Job(str(source), str(tmp_path / "out"), base=str(large)))


def test_a_card_that_the_hub_would_not_take_ends_the_run(source: Path, base: Path, tmp_path: Path) -> None:
    (base / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(ValidationError, match="is no YAML"):
        publish.make(Job(str(source), str(tmp_path / "out"), base=str(base)))
    (base / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(ValidationError, match=r"README\.md is no text"):
        publish.make(Job(str(source), str(tmp_path / "out"), base=str(base)))


def test_a_card_alone_is_written_where_it_is_asked_for(source: Path, tmp_path: Path) -> None:
    manifest = publish.make(Job(str(source), str(tmp_path / "out"), card=True))
    assert [record.path for record in manifest.extra_files] == ["README.md"]


@pytest.mark.parametrize(
    ("path", "asset"),
    [
        ("tokenizer_config.json", True),
        ("vocab.txt", True),
        ("spiece.model", True),
        ("LICENSE.md", True),
        ("additional_chat_templates/x.jinja", True),
        ("additional_chat_templates/deep/x.jinja", False),
        ("sub/config.json", False),
        ("model-00001-of-00002.safetensors", False),
        ("model.safetensors.index.json", False),
        ("consolidated.safetensors", False),
        ("optimizer.pt", False),
        ("notes.txt", False),
    ],
)
def test_which_files_belong_to_a_model(path: str, asset: bool) -> None:
    assert is_asset(path) == asset


def definitions(*rows: tuple[str, str, tuple[int, ...]]) -> tuple[Definition, ...]:
    return tuple(Definition(name, TensorSpec(dtype, shape), name) for name, dtype, shape in rows)


@pytest.mark.parametrize(
    ("before", "rows", "after"),
    [
        ('{"torch_dtype": "float32"}', [("w", "BF16", (9,)), ("v", "F32", (1,))], '{"torch_dtype": "bfloat16"}'),
        (
            '{"text_config": {"dtype": "x", "vocab_size": 1}}',
            [("model.embed_tokens.weight", "F16", (3, 1))],
            '{"text_config": {"dtype": "float16", "vocab_size": 3}}',
        ),
        ('{"dtype": null}', [("w", "BF16", (9,))], '{"dtype": null}'),
        ('{"dtype": "float32"}', [("w", "F8_E4M3", (9,))], '{"dtype": "float32"}'),
        (
            '{"vocab_size": 4}',
            [("a.embed_tokens.weight", "F32", (3, 1)), ("b.embed_tokens.weight", "F32", (2, 1))],
            '{"vocab_size": 4}',
        ),
    ],
)
def test_a_config_says_what_is_written(before: str, rows: list[tuple[str, str, tuple[int, ...]]], after: str) -> None:
    assert corrected(before, definitions(*rows)) == after


def test_what_was_corrected_is_said() -> None:
    assert corrections('{"a": {"b": 1}, "c": 2}', '{"a": {"b": 1}, "d": 3}') == (
        "config.json: c 2 is gone",
        "config.json: d is 3 now",
    )
    assert corrections('{"text_config": {"b": 1}}', '{"text_config": {"b": 2}}') == (
        "config.json: text_config.b 1 is 2 now",
    )


# ---- on the Hub -----------------------------------------------------------------------------------------------------


def test_names_of_repositories_are_told_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert base_url("acme/it") == "hf://acme/it"
    (tmp_path / "acme" / "it").mkdir(parents=True)
    assert base_url("acme/it") == "acme/it"
    assert base_url("only") == "only"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", settings=Settings()) as running:
        monkeypatch.setenv("HF_TOKEN", running.token)
        configure("hf", {"endpoint": running.url, "token": running.token, "skip_instance_cache": True})
        yield running
        configure("hf", {})


def committed(hub: Hub, repo: str, files: Mapping[str, str]) -> None:
    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo(repo, private=True)
    adds = [CommitOperationAdd(name, text.encode()) for name, text in files.items()]
    api.create_commit(repo, adds, commit_message="all")


def text_of(hub: Hub, repo: str, path: str, folder: Path) -> str:
    return hub.download(repo, path, folder).read_text()


def test_a_base_of_the_hub_is_named_in_the_card(hub: Hub, source: Path, tmp_path: Path) -> None:
    committed(
        hub,
        "acme/base",
        {name: text for name, text in BASE.items() if name not in {".gitattributes", "tokenizer.model"}},
    )
    job = Job(str(source), str(tmp_path / "out"), repo="acme/it", endpoint=hub.url, base="acme/base")
    receipt = publish.publish(job)
    assert {"config.json", "tokenizer.json", "LICENSE", "README.md", "model.safetensors"} <= set(receipt.files)
    assert not {"consolidated.00.pth", "pytorch_model.bin", "train.log"} & set(hub.files("acme/it"))
    card = text_of(hub, "acme/it", "README.md", tmp_path / "got")
    assert "base_model: acme/base\n" in card
    calls = [call.path for call in hub.calls()]
    looked = next(number for number, path in enumerate(calls) if "validate-yaml" in path)
    sent = next(number for number, path in enumerate(calls) if "acme/it" in path and "preupload" in path)
    assert looked < sent


def test_a_card_that_is_on_the_hub_already_is_kept(hub: Hub, source: Path, base: Path, tmp_path: Path) -> None:
    committed(hub, "acme/it", {"README.md": "---\nlicense: apache-2.0\n---\n# Written on the Hub\n"})
    job = Job(str(source), str(tmp_path / "out"), repo="acme/it", endpoint=hub.url, base=str(base))
    publish.publish(job)
    card = text_of(hub, "acme/it", "README.md", tmp_path / "got")
    assert "# Written on the Hub\n" in card
    assert "license: apache-2.0\n" in card
    assert "Where these weights come from" in card


def test_a_stray_consolidated_file_stands_against_a_push(hub: Hub, source: Path, base: Path, tmp_path: Path) -> None:
    committed(hub, "acme/it", {"consolidated.safetensors": "weights of somebody else"})
    job = Job(str(source), str(tmp_path / "out"), repo="acme/it", endpoint=hub.url, base=str(base))
    with pytest.raises(Conflict, match=r"consolidated\.safetensors"):
        publish.publish(job)
