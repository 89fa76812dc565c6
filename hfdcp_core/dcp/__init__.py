"""torch's Hugging Face checkpoint classes on any storage: the one door to `torch.distributed.checkpoint`.

Change one import, and ``dcp.load`` and ``dcp.save`` read and write what `hfdcp_core` gathers and consolidates. Nothing
is decided here: torch's plans are translated into boxes and spans, and their tensors into bytes.

::

    metadata     a gathered catalog  → torch's Metadata
    tensors      torch's tensors     ⇄ arrays over their memory
    measured     what a load read
    shard_file   one file of shards, with the face of ``safetensors.safe_open``
    reader       HuggingFaceStorageReader
    planners     StridedSavePlanner, StridedLoadPlanner
    quantized    QuantizedHuggingFaceStorageReader
    consolidation  consolidate_safetensors_files, consolidate_safetensors_files_on_every_rank
    orders       what each rank writes, and where
    box_writer   a box of a tensor into its place in a file
    output       the files while they are written
    together     files that appear together
    ranks        what ranks do in step
    shares       which rank makes which file, of what the others hand over
    box_run      the boxes of a rank as one run of bytes
    peers        how ranks reach one another during a save
    pieces       pieces of tensors that one rank reads of another
    agreement    when all files of all ranks are whole, or what went wrong first
    hand_over    files that single ranks make
    writer       HuggingFaceStorageWriter
"""

from hfdcp_core.dcp.consolidation import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from hfdcp_core.dcp.planners import StridedLoadPlanner, StridedSavePlanner
from hfdcp_core.dcp.quantized import QuantizedHuggingFaceStorageReader
from hfdcp_core.dcp.reader import HuggingFaceStorageReader
from hfdcp_core.dcp.writer import HuggingFaceStorageWriter

__all__ = [
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "QuantizedHuggingFaceStorageReader",
    "StridedLoadPlanner",
    "StridedSavePlanner",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
]
