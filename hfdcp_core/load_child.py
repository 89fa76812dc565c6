"""Let transformers load a model, as a check or for real, in a process of its own: ``python -m hfdcp_core.load_child``.

Checking takes no numbers. A folder is made with the config and a *stand-in* for the weights: a real header, and as many
bytes behind it as there would be, which a file system keeps as a hole. From it transformers' own loader builds the
model on the meta device. So what it renames, fuses, splits and ties is done by itself, and what it finds missing,
unexpected or of another shape is what it would find in the real files.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.modeling_utils

TOP = 5
"""How many of the likeliest next tokens are told."""


def main() -> None:
    """Answer the request on stdin."""
    data = json.load(sys.stdin)
    try:
        answer = check(data) if data["kind"] == "check" else logits(data)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is what the user must hear
        answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    Path(data["answer"]).write_text(json.dumps(answer))


def model_class(config: Mapping[str, Any]) -> Any:
    """Return the class that a config names, or the one for its kind of model; None where transformers has none."""
    name = next(iter(config.get("architectures") or []), None)
    if name is not None:
        return getattr(transformers, name, None)
    return transformers.AutoModelForCausalLM if config.get("model_type") in transformers.CONFIG_MAPPING else None


def check(data: Mapping[str, Any]) -> dict[str, Any]:
    """Say what the loader would miss, and what it would not expect."""
    config: dict[str, Any] = data["config"]
    version = transformers.__version__
    cls = model_class(config)
    if config.get("model_type") not in transformers.CONFIG_MAPPING or cls is None:
        what = next(iter(config.get("architectures") or []), config.get("model_type"))
        return {"version": version, "why": f"transformers {version} has no class of its own for {what}"}
    # The loader prints a report, and raises where it cannot convert: here its findings are what counts.
    transformers.modeling_utils.log_state_dict_report = _silent  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="hfdcp-load-") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(config))
        for path, (header, size) in data["files"].items():
            with (folder / path).open("wb") as file:
                file.write(base64.b64decode(header))
                file.truncate(size)
        _, found = cls.from_pretrained(
            folder,
            device_map="meta",
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
        )
    return {
        "version": version,
        "why": "",
        "missing": sorted(found["missing_keys"]),
        "unexpected": sorted(found["unexpected_keys"]),
        "mismatched": sorted([name, list(there), list(wanted)] for name, there, wanted in found["mismatched_keys"]),
        "errors": [str(error) for error in found.get("error_msgs", [])],
    }


def _silent(*_: object, **__: object) -> None:
    """Say nothing."""


def logits(data: Mapping[str, Any]) -> dict[str, Any]:
    """Run a model on a prompt, and a reference too where one is given."""
    ids = _ids(data["prompt"], data["folder"])
    ours = _logits(data["folder"], ids)
    answer: dict[str, Any] = {
        "ids": ids,
        "finite": bool(torch.isfinite(ours).all()),
        "top": ours[-1].topk(min(TOP, ours.shape[-1])).indices.tolist(),
        "tokens": [],
    }
    if (Path(data["folder"]) / "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(data["folder"], local_files_only=True)
        answer["tokens"] = [tokenizer.decode([token]) for token in answer["top"]]
    if data["reference"]:
        theirs = _logits(data["reference"], ids)
        answer["shapes"] = [list(ours.shape), list(theirs.shape)]
        same = ours.shape == theirs.shape
        answer["equal"] = same and bool(torch.equal(ours, theirs))
        answer["error_max"] = float((ours.double() - theirs.double()).abs().max()) if same else None
    return answer


def _ids(prompt: str, folder: str) -> list[int]:
    """Return the ids that a prompt is: numbers between commas, or text for the model's own tokenizer."""
    parts = [part.strip() for part in prompt.split(",")]
    if all(part.isdecimal() for part in parts):
        return [int(part) for part in parts]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return list(tokenizer(prompt)["input_ids"])


def _logits(folder: str, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    model.eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        made: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return made


if __name__ == "__main__":
    main()
