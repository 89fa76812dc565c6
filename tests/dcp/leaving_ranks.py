"""Ranks that end at once after a save, while the interpreter is given to another thread only by who lets it go."""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hfdcp_core import HuggingFaceStorageWriter

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    writer = HuggingFaceStorageWriter(sys.argv[1])
    sys.setswitchinterval(100)  # torch's threads wait for the interpreter when the last collective has returned
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
