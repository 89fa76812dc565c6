"""Real distributed checkpoints, written by torch itself, and the truth beside them.

Real processes meet over gloo on loopback, shard tensors whose bytes follow from their names, and save them through
torch's own writers. What is true of every tensor was known before it was sharded, so it depends on no code that
shards, saves or reads::

    truth = write_checkpoint("fsdp2_uneven", folder)     # folder/ckpt, folder/truth.json
    ...                                                  # consolidate truth.folder into output
    assert compare_with_truth(truth, output) == ()

From the command line: ``python -m hfdcp_core.testing.checkpoints fsdp2_uneven FOLDER``. Importing this module imports
no torch; the ranks do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hfdcp_core.testing._orders import Order, RankFailed, carry_out
from hfdcp_core.testing._truth import Truth, TruthTensor, compare_with_truth, read_truth

__all__ = [
    "CASES",
    "Case",
    "Format",
    "Layout",
    "RankFailed",
    "Truth",
    "TruthTensor",
    "compare_with_truth",
    "read_truth",
    "write_checkpoint",
    "write_checkpoints",
    "write_model",
]

Format = Literal["dcp", "dcp-safetensors"]
"""torch's ``FileSystemWriter``, or its ``HuggingFaceStorageWriter(save_distributed=True)``."""
Layout = Literal["row", "column", "mixed"]
"""Whether the ranks hold rows or columns of each matrix, or columns of some as tensor parallelism would."""
TIMEOUT_S = 300.0
"""When ranks that have not finished are ended."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of checkpoint."""

    name: str
    """What it is called here."""
    ranks: int
    """How many processes write it."""
    summary: str
    """What is particular about it."""
    format: Format = "dcp"
    """Which of torch's writers saves it."""


_HF: Format = "dcp-safetensors"
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("plain", 1, "one process, no process group"),
        Case("flat_names", 1, "a flat state dict whose names all begin with 'model.'"),
        Case("tied", 1, "one parameter under two names"),
        Case("scalars_and_empties", 1, "0-d tensors of every dtype, and tensors without elements"),
        Case("dtypes", 1, "every dtype that both torch and safetensors have"),
        Case("bit_patterns", 1, "NaN payloads, infinities, negative zero, denormals"),
        Case("views", 1, "transposed, channels-last, permuted, expanded and conjugated tensors"),
        Case("odd_names", 1, "names with slashes, line breaks, 300 characters, and '..'"),
        Case("overwritten", 1, "saved over a larger checkpoint, whose files stay"),
        Case("fsdp2_pair", 2, "fully_shard over two ranks"),
        Case("tied_fsdp2", 2, "one sharded parameter under two names"),
        Case("file_per_shard", 2, "one file for each shard, two threads"),
        Case("transposed_shards", 2, "shards that are views of wider or transposed storage"),
        Case("blocks", 2, "a ShardedTensor in two-dimensional blocks, several on each rank"),
        Case("sharded_dtypes", 2, "every dtype, cut by rows"),
        Case("train_state", 2, "{'model', 'optim', 'lr_scheduler', 'dataloader', ...} in one checkpoint"),
        Case("app_state", 2, "{'app': {'model', 'optim'}}"),
        Case("wrapped_names", 2, "what DDP, torch.compile, FSDP and activation checkpointing make of names"),
        Case("fsdp2_even", 4, "fully_shard, everything divides"),
        Case("fsdp2_uneven", 4, "fully_shard, nothing divides, some shards empty"),
        Case("fsdp2_mostly_empty", 4, "fully_shard of tensors with fewer rows than ranks"),
        Case("fsdp2_columns", 4, "fully_shard along dimension 1, bf16"),
        Case("hsdp", 4, "replicated over one dimension of the mesh, sharded over the other"),
        Case("ddp", 4, "DistributedDataParallel: whole tensors on every rank, 'module.' before each name"),
        Case("tp_column", 4, "column-parallel linear layers, uneven"),
        Case("tp_row", 4, "row-parallel linear layers, uneven"),
        Case("fsdp_tp", 4, "FSDP2 over tensor parallelism, 2 x 2"),
        Case("fsdp_tp_uneven", 4, "the same where nothing divides"),
        Case("mesh_orders", 4, "two-dimensional meshes in every order: rows, columns, twice the same, replicas"),
        Case("middle_dimension", 4, "3-D to 5-D tensors cut along a middle or last dimension"),
        Case("tall_columns", 4, "column shards of thousands of rows"),
        Case("experts", 4, "grouped experts over two dimensions, and tensors that only one rank has"),
        Case("zstd", 2, "items compressed by torch's ZStandard extension"),
        Case("safetensors_inside", 2, "SerializationFormat.SAFETENSORS: safetensors behind pickled objects in .distcp"),
        Case("safetensors_inside_only", 2, "the same without objects, several dtypes"),
        Case("threads", 2, "thread_count=3: several files for each rank"),
        Case("metadata_by_rank", 2, "use_collectives=False: each rank writes metadata of its own, none for all"),
        Case("saved_in_background", 2, "async_save"),
        Case("fsdp1", 2, "FullyShardedDataParallel, SHARDED_STATE_DICT"),
        Case("pipeline", 2, "each rank has layers of its own"),
        Case("mesh_of_three", 8, "a three-dimensional mesh, cut along up to three dimensions"),
        Case("hf_pair", 2, "FSDP2 over two ranks", _HF),
        Case("hf_dtypes", 2, "every dtype that torch's reader knows, and scalars", _HF),
        Case("hf_unreadable", 2, "dtypes that torch writes and cannot read back: F8_E8M0, F4", _HF),
        Case("hf_mapped", 2, "two files for each rank by fqn_to_index_mapping", _HF),
        Case("hf_uneven", 4, "FSDP2 over four ranks, nothing divides", _HF),
        Case("hf_columns", 4, "column shards", _HF),
        Case("hf_two_dimensional", 4, "FSDP2 over tensor parallelism, 2 x 2", _HF),
    )
}
"""Every kind of checkpoint, by name."""


def write_checkpoint(case: str, folder: Path) -> Truth:
    """Write one kind of checkpoint to ``folder/ckpt`` and its truth to ``folder/truth.json``.

    Raises:
        KeyError: There is no such case.
        FileExistsError: A checkpoint lies there already.
        RankFailed: A rank raised, died or hung; the message holds its traceback.
    """
    return _write([_order_of(CASES[case], folder)])[0]


def write_checkpoints(cases: Iterable[str], folder: Path) -> Mapping[str, Truth]:
    """Write many kinds, each to ``folder/<case>``, by one set of processes for each number of ranks.

    Starting processes that import torch costs seconds; this pays for it once.

    Raises:
        KeyError: There is no such case.
        FileExistsError: A checkpoint lies there already.
        RankFailed: A rank raised, died or hung; the message holds its traceback.
    """
    names = tuple(dict.fromkeys(cases))
    return dict(zip(names, _write([_order_of(CASES[name], folder / name) for name in names]), strict=True))


def write_model(
    folder: Path,
    *,
    total_bytes: int,
    ranks: int = 4,
    layout: Layout = "row",
    dtype: str = "bfloat16",
    format: Format = "dcp",  # noqa: A002  (the glossary's word, as in Case.format)
) -> Truth:
    """Write a model with llama-like names and very nearly ``total_bytes`` of weights, for benchmarks.

    Together the ranks hold the model once, and each one whole tensor for a moment; torch's Hugging Face writer holds
    the bytes of its file besides.

    Raises:
        FileExistsError: A checkpoint lies there already.
        RankFailed: A rank raised, died or hung; the message holds its traceback.
    """
    settings = {"total_bytes": total_bytes, "layout": layout, "dtype": dtype}
    return _write([Order("model", ranks, str(folder.absolute()), format, settings)])[0]


def _order_of(case: Case, folder: Path) -> Order:
    return Order(case.name, case.ranks, str(folder.absolute()), case.format)


def _write(orders: Sequence[Order]) -> list[Truth]:
    if orders:
        carry_out(orders, timeout_s=TIMEOUT_S)
    return [read_truth(Path(order.folder)) for order in orders]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one case from the command line."""
    epilog = "\n".join(f"  {case.name:20} {case.ranks} x {case.format:16} {case.summary}" for case in CASES.values())
    parser = argparse.ArgumentParser(
        prog="python -m hfdcp_core.testing.checkpoints",
        description="Write a real distributed checkpoint and the truth beside it.",
        epilog=f"cases:\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", choices=CASES, metavar="CASE", help="which kind of checkpoint")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where 'ckpt' and 'truth.json' go")
    given = parser.parse_args(arguments)
    truth = write_checkpoint(given.case, given.folder)
    sys.stdout.write(f"{truth.folder}: {len(truth.tensors)} tensors, {len(truth.objects)} other entries\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
