"""The rest of a model repository, from a base model: config, tokenizer, processors, licence, code, byte for byte.

1. The files at the root of the base are listed. Those of a known name are *assets*; weights and hidden files are left
   where they are, and what is neither is left out and said.
2. The config is corrected where it says something else than what is written: dtype, rows of the vocabulary,
   ``quantization_config`` (`hfdcp_core.quantization_config`), ties (`hfdcp_core.ties`). Every other byte of it stays,
   and each correction is said.
3. When everything is written, assets are copied, if the base still is what was listed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hfdcp_core import json_text
from hfdcp_core.catalog import FileStamp
from hfdcp_core.dtypes import dtype_named
from hfdcp_core.errors import PlanError, SourceChanged, SourceError
from hfdcp_core.job import Job
from hfdcp_core.manifest import CONFIG_PATH
from hfdcp_core.quantization import PLAIN
from hfdcp_core.quantization_config import DTYPES
from hfdcp_core.recipe import Definition
from hfdcp_core.store import Source, open_store
from hfdcp_core.ties import TEXT_CONFIGS, TIES
from hfdcp_core.tying import base_url

CARD_PATH = "README.md"
"""The model card."""
ASSETS = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer*.model", "*.tiktoken", "*.spm"),
    *("vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "image_processor*.json"),
    *("feature_extractor*.json", "audio_tokenizer_config.json", "configuration.json", "params.json"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*", "*.py"),
)
"""Names of what belongs to a model beside its weights; those of code only at the root."""
WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf"),
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.npz", "*.distcp", "*.metadata"),
)
"""Names of weights: of the base, never of ours."""
MOST_BYTES = 64 << 20
"""A larger file is no asset."""
EMBEDDINGS = tuple(dict.fromkeys(kept for _, kept in TIES if not kept.startswith("*")))
"""Ends of the names of input embeddings."""


@dataclass(frozen=True, slots=True)
class Assets:
    """What of a base is taken along."""

    files: tuple[FileStamp, ...] = ()
    """The assets, and the card where there is one, as they were when they were listed."""
    left_out: tuple[str, ...] = ()
    """Files that are neither assets nor weights."""


def look(job: Job) -> Assets:
    """List what of the base is taken along; nothing where there is no base.

    Raises:
        PlanError: An asset is too large to be one.
        SourceError: There is no config in the base.
    """
    if not job.base:
        return Assets()
    store = open_store(base_url(job.base))
    listed = (*store.list().files, *_below(store, "additional_chat_templates"))
    files = [file for file in listed if is_asset(file.path) or file.path == CARD_PATH]
    if not any(file.path == CONFIG_PATH for file in files):
        raise SourceError(f"{store.url}: there is no {CONFIG_PATH}; --base is a folder or repository of a model")
    PlanError.raise_for(
        f"{store.url}: files that are too large to belong beside a model's weights",
        [f"{file.path}: {file.size} bytes" for file in files if file.size > MOST_BYTES],
    )
    taken = {file.path for file in files}
    return Assets(tuple(files), tuple(file.path for file in listed if file.path not in taken and not _left(file.path)))


def _below(store: Source, folder: str) -> tuple[FileStamp, ...]:
    return tuple(file for file in store.list(folder).files) if folder in store.list().folders else ()


def is_asset(path: str) -> bool:
    """Whether a file of a base belongs to a model beside its weights.

    >>> [is_asset(p) for p in ("tokenizer.json", "modeling_x.py", "model.safetensors", "sub/x.py", "train.log")]
    [True, True, False, False, False]
    """
    if any(fnmatchcase(path, pattern) for pattern in WEIGHTS) or path.count("/") > 1:
        return False
    return any(fnmatchcase(path, pattern) and path.count("/") == pattern.count("/") for pattern in ASSETS)


def _left(path: str) -> bool:
    """Whether nobody expects a file to be taken along: weights, what is hidden, and our own manifest."""
    weights = any(fnmatchcase(path, pattern) for pattern in WEIGHTS)
    return weights or path.rpartition("/")[2].startswith((".", "hfdcp-"))


def fetch(job: Job, stamps: Iterable[FileStamp]) -> dict[str, bytes]:
    """Return the assets, as they were listed.

    Raises:
        SourceChanged: The base holds other files by now.
    """
    stamps = tuple(stamps)
    if not stamps:
        return {}
    store = open_store(base_url(job.base))
    now = store.stamps([stamp.path for stamp in stamps])
    SourceChanged.raise_for(
        f"{store.url}: the base model is not what it was when this run began; run it again with --overwrite",
        [stamp.path for stamp in stamps if now.get(stamp.path) != stamp],
    )
    return {stamp.path: store.read(stamp.path, 0, stamp.size) for stamp in stamps}


# ---- the config -----------------------------------------------------------------------------------------------------


def corrected(text: str, definitions: Iterable[Definition]) -> str:
    """Return a config that says what is written: the dtype of most numbers, and how many words are embedded.

    Args:
        text: The config, after what was done to ties and scales.
        definitions: The tensors that are written.
    """
    definitions = tuple(definitions)
    text = _with_dtype(text, definitions)
    rows = {d.spec.shape[0] for d in definitions if d.spec.shape and _ends(d.fqn)}
    if len(rows) == 1:
        text = _with_number(text, "vocab_size", rows.pop())
    return text


def _ends(fqn: str) -> bool:
    return any(fqn == end or fqn.endswith(f".{end}") for end in EMBEDDINGS)


def _with_dtype(text: str, definitions: Iterable[Definition]) -> str:
    """Let a config that names a dtype name the one that most plain numbers have."""
    nbytes: Counter[str] = Counter()
    for definition in definitions:
        if definition.spec.dtype in PLAIN:
            nbytes[definition.spec.dtype] += definition.spec.nbytes
    if not nbytes:
        return text
    [(most, _)] = nbytes.most_common(1)
    for path in _holding(json.loads(text), DTYPES, str):
        text = json_text.replaced(text, path, json.dumps(dtype_named(most).torch))
    return text


def _with_number(text: str, key: str, number: int) -> str:
    """Let a config that states a number state this one, where the model's text part does it."""
    for path in _holding(json.loads(text), (key,), int):
        text = json_text.replaced(text, path, str(number))
    return text


def _holding(top: Mapping[str, object], keys: Iterable[str], kind: type) -> list[tuple[str, ...]]:
    """Return the paths under which a config, or the one of its text part, states something of a kind."""
    inner = ((name, top.get(name)) for name in TEXT_CONFIGS)
    holders = [((), top), *(((name,), value) for name, value in inner if isinstance(value, dict))]
    return [(*path, key) for path, holder in holders for key in keys if type(holder.get(key)) is kind]


def corrections(before: str, after: str) -> tuple[str, ...]:
    """Say what was corrected in a config.

    >>> corrections('{"dtype": "float32", "a": 1}', '{"dtype": "bfloat16", "a": 1}')
    ('config.json: dtype "float32" is "bfloat16" now',)
    """
    old, new = _flat(json.loads(before)), _flat(json.loads(after))
    lines = []
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            was = f" {json.dumps(old[key])}" if key in old else ""
            now = f"is {json.dumps(new[key])} now" if key in new else "is gone"
            lines.append(f"{CONFIG_PATH}: {'.'.join(key)}{was} {now}")
    return tuple(lines)


def _flat(value: Mapping[str, object]) -> dict[tuple[str, ...], object]:
    """Return what a config says, with the members of its text part apart."""
    flat: dict[tuple[str, ...], object] = {}
    for key, item in value.items():
        if key in TEXT_CONFIGS and isinstance(item, dict):
            flat |= {(key, inner): each for inner, each in item.items()}
        else:
            flat[key,] = item
    return flat
