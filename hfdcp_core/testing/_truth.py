"""What a checkpoint truly holds, kept beside it, and the comparison of an output with it.

Knows no torch: a written output is opened by safetensors' own reader, and its bytes are hashed where they lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

TRUTH_NAME = "truth.json"
"""Name of the file that holds the truth, beside the checkpoint's own folder."""
CHECKPOINT_NAME = "ckpt"
"""Name of the folder that holds the checkpoint and nothing else."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class TruthTensor:
    """What is true of one tensor."""

    dtype: str
    """Its safetensors name."""
    shape: tuple[int, ...]
    """Its extents, in logical elements."""
    sha256: str
    """Lower-case hex, of its row-major little-endian bytes."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of a checkpoint, known before it was sharded and saved."""

    folder: Path
    """The checkpoint."""
    tensors: Mapping[str, TruthTensor]
    """Every tensor, by the name it was saved under."""
    objects: tuple[str, ...] = ()
    """Names of the entries that are no tensors."""
    weights: Mapping[str, str] | None = None
    """Clean name of each tensor that is a weight, by the name it was saved under; None where all keep their names."""

    @property
    def cleaned(self) -> Mapping[str, TruthTensor]:
        """The weights by their clean names: what an output with the recipe ``auto`` holds."""
        if self.weights is None:
            return self.tensors
        return {clean: self.tensors[saved] for saved, clean in self.weights.items()}


def write_truth(folder: Path, truth: Truth) -> None:
    """Keep the truth in ``folder``, beside the checkpoint."""
    document = {
        "tensors": {name: asdict(tensor) for name, tensor in truth.tensors.items()},
        "objects": truth.objects,
        "weights": truth.weights,
    }
    (folder / TRUTH_NAME).write_text(json.dumps(document, indent=1))


def read_truth(folder: Path) -> Truth:
    """Return the truth of the checkpoint that was written into ``folder``."""
    document = json.loads((folder / TRUTH_NAME).read_text())
    tensors = {
        name: TruthTensor(entry["dtype"], tuple(entry["shape"]), entry["sha256"])
        for name, entry in document["tensors"].items()
    }
    return Truth(folder / CHECKPOINT_NAME, tensors, tuple(document["objects"]), document["weights"])


def compare_with_truth(
    truth: Truth, output: Path, *, names: Mapping[str, TruthTensor] | None = None
) -> tuple[str, ...]:
    """Hold every tensor of a consolidated output against the truth, bit by bit; return what is wrong, if anything.

    ``output`` is one safetensors file, or a folder with ``model.safetensors`` or with an index and its files.
    ``names`` says what should be there: the weights under their clean names if it is not given, and
    ``truth.tensors`` where every tensor should be there as it was saved.
    """
    wanted = truth.cleaned if names is None else names
    try:
        found = dict(_tensors_of(output))
    except (OSError, SafetensorError, ValueError, KeyError) as fault:
        return (f"{output}: {type(fault).__name__}: {fault}",)
    missing = [f"{name}: missing" for name in wanted if name not in found]
    surplus = [f"{name}: not in the truth" for name in found if name not in wanted]
    wrong = [
        f"{name}: expected {wanted[name]}, found {tensor}"
        for name, tensor in found.items()
        if name in wanted and tensor != wanted[name]
    ]
    return (*missing, *surplus, *wrong)


def _tensors_of(output: Path) -> Iterator[tuple[str, TruthTensor]]:
    if output.is_file():
        yield from _tensors_in(output)
    elif (index := output / "model.safetensors.index.json").exists():
        yield from _tensors_by_index(output, json.loads(index.read_text())["weight_map"])
    else:
        yield from _tensors_in(output / "model.safetensors")


def _tensors_by_index(folder: Path, weight_map: Mapping[str, str]) -> Iterator[tuple[str, TruthTensor]]:
    on_disk = {path.name for path in folder.glob("*.safetensors")}
    if on_disk != set(weight_map.values()):
        raise ValueError(f"the index names {sorted(set(weight_map.values()))}, the folder holds {sorted(on_disk)}")
    for file_name in sorted(on_disk):
        found = dict(_tensors_in(folder / file_name))
        mapped = {name for name, file in weight_map.items() if file == file_name}
        if found.keys() != mapped:
            raise ValueError(f"{file_name}: index and header differ in {sorted(found.keys() ^ mapped)}")
        yield from found.items()


def _tensors_in(path: Path) -> Iterator[tuple[str, TruthTensor]]:
    """Yield what safetensors' own reader sees; the bytes are hashed in place, as numpy cannot hold every dtype."""
    with safe_open(path, framework="np") as reader, path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
        for name in reader.keys():  # noqa: SIM118  (the reader is no Mapping)
            seen = reader.get_slice(name)
            start, stop = header[name]["data_offsets"]
            digest = _sha256(file, 8 + header_size + start, stop - start)
            yield name, TruthTensor(seen.get_dtype(), tuple(seen.get_shape()), digest)


def _sha256(file: BinaryIO, start: int, length: int) -> str:
    digest = hashlib.sha256()
    file.seek(start)
    while length and (piece := file.read(min(length, _PIECE))):
        digest.update(piece)
        length -= len(piece)
    return digest.hexdigest()
