"""What is consolidated: models that real ranks wrote, and sheets of equal tensors that every rank has a part of."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
from safetensors import safe_open

from hfdcp_core.dtypes import size_in_bytes
from hfdcp_core.testing.checkpoints import Layout, Truth, compare_with_truth, read_truth, write_model


@dataclass(frozen=True)
class Case:
    """One model in up to two formats."""

    name: str
    ranks: int
    nbytes: int
    mapping: Path
    """The output file of each tensor, as torch's consolidation takes it."""
    sharded: Path
    """As sharded safetensors, which torch's consolidation starts from."""
    distributed: Path | None = None
    """As a distributed checkpoint, with a CRC-32 of every item."""
    truth: Truth | None = None
    dtype: str = ""
    """What its floating tensors become on the way, by torch's name; nothing where they stay what they are."""

    def problems(self, output: Path) -> list[str]:
        """Say where an output is wrong."""
        return list(compare_with_truth(self.truth, output)) if self.truth else sheet_problems(self.mapping, output)


# ---- models ---------------------------------------------------------------------------------------------------------


def model(folder: Path, layout: Layout, *, nbytes: int, ranks: int, files: int) -> Case:
    """Let ranks write a model with llama-like names and shapes, in both formats."""
    for kind in ("dcp", "dcp-safetensors"):
        write_model(folder / kind, total_bytes=nbytes, ranks=ranks, layout=layout, format=kind)
    truth = read_truth(folder / "dcp")
    sizes = {name: size_in_bytes(tensor.dtype, tensor.shape) for name, tensor in truth.tensors.items()}
    mapping = written_mapping(folder, sizes, files)
    sharded = read_truth(folder / "dcp-safetensors").folder
    return Case(layout, ranks, sum(sizes.values()), mapping, sharded, truth.folder, truth)


TRUE_CAST = """
import hashlib, json, sys, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
source, dtype, scratch = sys.argv[1:]
dcp_to_torch_save(source, scratch)
state = torch.load(scratch, weights_only=True, mmap=True)
cast = ((name, tensor.to(getattr(torch, dtype))) for name, tensor in state.items())
print(json.dumps({name: hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest() for name, tensor in cast}))
"""


def cast(folder: Path, *, nbytes: int, ranks: int, files: int) -> Case:
    """Let ranks write a model of F32, which is to become BF16; what is true of that is what torch says."""
    truth = write_model(folder / "dcp", total_bytes=nbytes, ranks=ranks, layout="row", dtype="float32")
    command = [sys.executable, "-c", TRUE_CAST, str(truth.folder), "bfloat16", str(folder / "all.pt")]
    digests = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (folder / "all.pt").unlink()
    tensors = {name: replace(tensor, dtype="BF16", sha256=digests[name]) for name, tensor in truth.tensors.items()}
    sizes = {name: size_in_bytes(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    mapping = written_mapping(folder, sizes, files)
    total = 2 * sum(sizes.values())
    return Case("cast", ranks, total, mapping, truth.folder, truth.folder, replace(truth, tensors=tensors), "bfloat16")


def written_mapping(folder: Path, sizes: Mapping[str, int], files: int) -> Path:
    """Share the tensors out over the files, in order, evenly."""
    mapping, before, total = {}, 0, sum(sizes.values())
    for name, size in sizes.items():
        mapping[name] = 1 + min(files - 1, before * files // total)
        before += size
    path = folder / "mapping.json"
    path.write_text(json.dumps(mapping))
    return path


# ---- sheets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sheet:
    """Tensors of one shape, F16, each cut into a grid of equal boxes, one for each rank; or dealt out whole."""

    name: str
    tensors: int
    shape: tuple[int, int]
    grid: tuple[int, int]
    ranks: int
    files: int

    def boxes(self, number: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield rank, offset and shape of each box of a tensor."""
        rows, columns = (extent // cuts for extent, cuts in zip(self.shape, self.grid, strict=True))
        cells = math.prod(self.grid)
        for cell in range(cells):
            row, column = divmod(cell, self.grid[1])
            yield (cell if cells > 1 else number % self.ranks), row * rows, column * columns, rows, columns


TALL = Sheet("column, 131072 x 512 in 8", 8, (131_072, 512), (1, 8), 8, 2)
WIDE = Sheet("column, 16384 x 4096 in 8", 8, (16_384, 4096), (1, 8), 8, 2)
GRID = Sheet("2-D, 2 x 2", 16, (8192, 4096), (2, 2), 4, 4)
MANY = Sheet("20,000 small tensors in 16 files", 20_000, (32, 64), (1, 1), 16, 16)


def value(name: str, shape: tuple[int, int]) -> np.ndarray:
    """Return the numbers of a tensor: a few random rows, over and over, so that any exchange of boxes shows."""
    rng = np.random.default_rng(crc32(name.encode()))
    some = np.frombuffer(rng.bytes(shape[1] * 2 * min(shape[0], 257)), np.uint16).reshape(-1, shape[1])
    return np.resize(some, shape)


def sheet(folder: Path, kind: Sheet) -> Case:
    """Write a sheet as torch's sharded safetensors."""
    target = folder / "sharded"
    target.mkdir(parents=True)
    names = [f"layers.{number}.weight" for number in range(kind.tensors)]
    entries: list[dict[str, object]] = [{} for _ in range(kind.ranks)]
    offsets: list[dict[str, object]] = [{} for _ in range(kind.ranks)]
    sizes = [0] * kind.ranks
    for number, name in enumerate(names):
        for rank, row, column, rows, columns in kind.boxes(number):
            stop = sizes[rank] + rows * columns * 2
            entries[rank][name] = {"dtype": "F16", "shape": [rows, columns], "data_offsets": [sizes[rank], stop]}
            offsets[rank][name] = {"saved_offsets": [row, column]}
            sizes[rank] = stop
    files = [
        (target / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").open("wb") for rank in range(kind.ranks)
    ]
    for file, entry, offset in zip(files, entries, offsets, strict=True):
        metadata = {"DCP_SHARDING_INFO": json.dumps(offset), "DCP_VERSION": "1.0", "format": "pt"}
        header = json.dumps({"__metadata__": metadata, **entry}).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
    for number, name in enumerate(names):
        whole = value(name, kind.shape)
        for rank, row, column, rows, columns in kind.boxes(number):
            files[rank].write(np.ascontiguousarray(whole[row : row + rows, column : column + columns]).data)
    for file in files:
        file.close()
    each = math.prod(kind.shape) * 2
    mapping = written_mapping(folder, dict.fromkeys(names, each), kind.files)
    (folder / "shape.json").write_text(json.dumps(kind.shape))
    return Case(kind.name, kind.ranks, each * kind.tensors, mapping, target)


def sheet_problems(mapping: Path, output: Path) -> list[str]:
    """Hold an output against what a sheet was made of."""
    rows, columns = json.loads((mapping.parent / "shape.json").read_text())
    missing, problems = set(json.loads(mapping.read_text())), []
    for path in sorted(output.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                missing.discard(name)
                if not np.array_equal(file.get_tensor(name).view(np.uint16), value(name, (rows, columns))):
                    problems.append(f"{path.name}: {name} has other bytes")
    return [*problems, *(f"{name} is missing" for name in sorted(missing))]
