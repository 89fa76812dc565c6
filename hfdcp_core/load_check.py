"""Would transformers load it? Asked of headers alone, before a byte is written, or of what was written.

The question goes to a process of its own (`hfdcp_core.load_child`), which needs the extra ``transformers``. What cannot
be judged is said to be unchecked, never taken for right: a model whose code is not transformers' own, a kind of
quantisation whose names are not known here.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.child import ask
from hfdcp_core.equations import nearest
from hfdcp_core.errors import PlanError, ValidationError
from hfdcp_core.job import OFF, REQUIRE, Job
from hfdcp_core.name_patterns import collapsed, skeleton
from hfdcp_core.operation import mxfp4_shape
from hfdcp_core.quantization import companions, is_mxfp4
from hfdcp_core.recipe import Definition
from hfdcp_core.safetensors_file import file_names, parse_header, write_header

KNOWN_QUANTISATION = frozenset({"fp8", "mxfp4"})
"""Kinds whose tensors can be told from plain ones: they are judged as if they were dequantised."""
MOST_BYTES = 32 << 30
"""A larger model is not loaded for its logits."""
NO_MODEL = "the config names no model_type"
NOT_ASKED = "--load-check off"
NO_REPOSITORY = "not a model repository"
QUIET = frozenset({NO_MODEL, NOT_ASKED, NO_REPOSITORY})
"""Reasons that nobody needs to hear."""
_MODULE = "hfdcp_core.load_child"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What transformers' loader found."""

    version: str = ""
    """Version of transformers; empty where it was not asked."""
    why: str = ""
    """Why it could not be judged; empty where it was."""
    missing: tuple[str, ...] = ()
    """Parameters of the model that nothing fills."""
    unexpected: tuple[str, ...] = ()
    """Tensors that the model has no place for."""
    mismatched: tuple[str, ...] = ()
    """Tensors of another shape than the model's, with both."""
    errors: tuple[str, ...] = ()
    """What else it said."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that is wrong, with the nearest names; what is so in every layer is said once."""
        lines = [
            f"{name}: the model needs it, and it is not there{_perhaps(alike, self.unexpected)}"
            for name, alike in _kinds(self.missing)
        ]
        lines += [
            f"{name}: the model has no place for it{_perhaps(alike, self.missing)}"
            for name, alike in _kinds(self.unexpected)
        ]
        return (*lines, *collapsed(self.mismatched), *self.errors)

    @property
    def sentence(self) -> str:
        """What a manifest says of it."""
        return f"transformers {self.version} loads it: nothing missing, nothing unexpected, every shape as it expects"


def _kinds(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return a line for names that differ in numbers only, and the first of them."""
    first = {skeleton(name): name for name in reversed(list(names))}
    return list(zip(collapsed(names), reversed(first.values()), strict=True))


def _perhaps(name: str, others: Iterable[str]) -> str:
    near = nearest(name, others)
    return f"; perhaps {', '.join(near)}" if near else ""


def can_ask(config: Mapping[str, object]) -> str:
    """Say why transformers cannot be asked; nothing where it can."""
    if not isinstance(config.get("model_type"), str):
        return NO_MODEL
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed (pip install 'hfdcp[transformers]')"
    stated = config.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    if stated is not None and method not in KNOWN_QUANTISATION:
        return f"names of tensors of quant_method {method!r} are not known here"
    return ""


def check(config: Mapping[str, object], headers: Mapping[str, bytes]) -> LoadReport:
    """Let transformers load a model from headers alone.

    Args:
        config: The model's config.
        headers: All bytes before the data of each weight file, by its name.

    Raises:
        PlanError: It could not be asked at all.
    """
    if why := can_ask(config):
        return LoadReport(why=why)
    specs = _plain(_specs(headers))
    [path] = file_names(1)
    header, entries = write_header(specs, metadata={"format": "pt"})
    size = len(header) + sum(entry.stop - entry.start for entry in entries)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    request = {
        "kind": "check",
        "config": plain,
        "files": {path: [base64.b64encode(header).decode(), size]},
    }
    found = ask(_MODULE, request, what="whether transformers loads it")
    if found["why"]:
        return LoadReport(found["version"], found["why"])
    mismatched = tuple(
        f"{name} is {there}, and the model expects {wanted}" for name, there, wanted in found["mismatched"]
    )
    missing, unexpected, errors = (tuple(found[kind]) for kind in ("missing", "unexpected", "errors"))
    return LoadReport(found["version"], "", missing, unexpected, mismatched, errors)


def _specs(headers: Mapping[str, bytes]) -> dict[str, TensorSpec]:
    found = {}
    for path, raw in headers.items():
        size = len(raw) + _data_bytes(raw)
        for entry in parse_header(raw, path=path, file_size=size).entries:
            found[entry.fqn] = TensorSpec(entry.dtype, entry.shape)
    return found


def _data_bytes(raw: bytes) -> int:
    """Return how many bytes of data a header announces."""
    entries: dict[str, Any] = json.loads(raw[8:])
    return max((row["data_offsets"][1] for name, row in entries.items() if name != "__metadata__"), default=0)


def _plain(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return what would be there if all numbers with scales were plain ones."""
    by_name = {name: Definition(name, spec, name) for name, spec in specs.items()}
    scales = companions(by_name)
    gone = {scale.fqn for scale in scales.values()}
    plain = {}
    for name, spec in specs.items():
        definition = by_name[name]
        if name in scales and is_mxfp4(definition):
            plain[name.removesuffix("_blocks")] = TensorSpec("BF16", mxfp4_shape(spec.shape))
        elif name in scales:
            plain[name] = TensorSpec("BF16", spec.shape)
        elif name not in gone:
            plain[name] = spec
    return plain


# ---- for real -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logits:
    """What a model answers to a prompt."""

    ids: tuple[int, ...]
    """The prompt."""
    top: tuple[int, ...]
    """The likeliest next tokens, the best first."""
    tokens: tuple[str, ...]
    """The same as text, where there is a tokenizer."""
    equal: bool | None = None
    """Whether a reference's logits are the same to the bit; None where there is none."""
    error_max: float | None = None
    """The largest difference from a reference's logits."""

    @property
    def sentence(self) -> str:
        """What a person hears of it."""
        pairs = zip(self.top, self.tokens, strict=False)
        shown = ", ".join(f"{token} {text!r}" for token, text in pairs) or str(list(self.top))
        against = "" if self.equal is None else ("; the reference's logits are equal to the bit")
        if self.equal is False:
            against = f"; the reference's logits differ by {self.error_max:.3g} at most"
        return f"loaded for real: next after {list(self.ids)}: {shown}{against}"


def logits(folder: Path, *, prompt: str, reference: str, tolerance: float) -> Logits:
    """Load a model for real, and compare its answer with a reference's where one is given.

    Args:
        folder: The model.
        prompt: Text, or ids between commas.
        reference: Folder of another model; empty for none.
        tolerance: How large a difference from the reference may be.

    Raises:
        ValidationError: Its logits are not finite, or differ from the reference's.
        PlanError: It cannot be loaded.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > MOST_BYTES:
        raise PlanError(f"--check-logits loads the whole model, and {size} bytes are too many: at most {MOST_BYTES}")
    request = {"kind": "logits", "folder": str(folder), "prompt": prompt, "reference": reference}
    found = ask(_MODULE, request, what=f"logits of {folder}")
    answer = Logits(tuple(found["ids"]), tuple(found["top"]), tuple(found["tokens"]))
    if not found["finite"]:
        raise ValidationError(f"{folder}: the model's logits are not finite: {answer.sentence}")
    if not reference:
        return answer
    compared = replace(answer, equal=found["equal"], error_max=found["error_max"])
    if found["error_max"] is None:
        raise ValidationError(
            f"{folder}: logits are of the shape {found['shapes'][0]}, the reference's {found['shapes'][1]}"
        )
    if not found["equal"] and not found["error_max"] <= tolerance:
        raise ValidationError(f"{folder}: {compared.sentence}, which is more than {tolerance:g}")
    return compared


# ---- as a step of a job ---------------------------------------------------------------------------------------------


def judge(config: Mapping[str, object], headers: Mapping[str, bytes], job: Job) -> LoadReport:
    """Let transformers load a model from headers alone, as far as a job asks for that.

    Raises:
        PlanError: It would not load as it should, or cannot be judged where the job requires that.
    """
    if job.load_check == OFF:
        return LoadReport(why=NOT_ASKED)
    report = check(config, headers)
    if report.why and job.load_check == REQUIRE:
        raise PlanError(f"it cannot be checked whether transformers loads it: {report.why}")
    if not job.include and not job.exclude:
        PlanError.raise_for(
            f"transformers {report.version} would not load this as its config says; where that is right all the same, "
            "--load-check off goes on",
            report.problems,
        )
    return report


def told(report: LoadReport) -> tuple[str, ...]:
    """Say what came out, for a person."""
    if report.why in QUIET:
        return ()
    if report.why:
        return (f"not checked whether transformers loads it: {report.why}",)
    if report.problems:
        return ("of what was chosen (--include, --exclude), transformers would say:", *report.problems)
    return (report.sentence,)
