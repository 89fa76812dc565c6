"""The state dicts that one process hands to ``dcp.save``: names, dtypes, scalars, bit patterns, views.

A function's name is the name of its case; `hfdcp_core.testing.checkpoints.CASES` says what each is for.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from hfdcp_core.testing._net import Net, filled
from hfdcp_core.testing._values import DTYPES, whole
from hfdcp_core.testing._world import State, World, builder


@builder()
def plain(world: World) -> State:
    return dict(filled(world, Net(blocks=2)).state_dict())


@builder()
def flat_names(world: World) -> State:
    return dict(filled(world, Net(), "model.").state_dict(prefix="model."))


@builder()
def tied(world: World) -> State:
    weight = world.recorder.make("embed_tokens.weight", (12, 8))
    return {"embed_tokens.weight": weight, "lm_head.weight": world.recorder.record("lm_head.weight", weight)}


@builder()
def scalars_and_empties(world: World) -> State:
    make = world.recorder.make
    state: State = {
        f"scalar.{name}": make(f"scalar.{name}", (), dtype) for name, dtype in DTYPES.items() if name != "F4"
    }
    empties = {"empty.0": (0,), "empty.3x0x2": (3, 0, 2), "empty.5x0": (5, 0), "one": (1,), "ones": (1, 1, 1, 1)}
    return state | {name: make(name, shape, torch.bfloat16) for name, shape in empties.items()}


@builder()
def dtypes(world: World) -> State:
    return {name: world.recorder.make(name, (5, 6), dtype) for name, dtype in DTYPES.items()}


@builder()
def bit_patterns(world: World) -> State:
    every_16, every_8 = torch.arange(65536, dtype=torch.int32).to(torch.int16), torch.arange(256).to(torch.uint8)
    state = {name: every_16.view(DTYPES[name]).clone() for name in ("F16", "BF16")}
    state |= {name: every_8.view(dtype).clone() for name, dtype in DTYPES.items() if name.startswith("F8")}
    state["F32"] = (every_16.to(torch.int32) << 16 | 1).view(torch.float32)
    return {name: world.recorder.record(name, tensor) for name, tensor in state.items()}


@builder()
def views(world: World) -> State:
    base, image = whole("base", (8, 10)), whole("image", (2, 3, 4, 5))
    state = {
        "transposed": base.t(),
        "transposed.bf16": whole("bf16", (6, 9), torch.bfloat16).t(),
        "columns": base[:, 2:5],
        "every.other.row": base[::2],
        "expanded": whole("expanded", (1, 4)).expand(6, 4),
        "channels.last": image.to(memory_format=torch.channels_last),
        "permuted": whole("permuted", (2, 3, 4)).permute(2, 0, 1),
        "odd.stride.of.one": base[:1].as_strided((1, 10), (999, 1)),
        "conjugated": whole("complex", (4, 3), torch.complex64).conj(),
    }
    return {name: world.recorder.record(name, tensor) for name, tensor in state.items()}


@builder()
def odd_names(world: World) -> State:
    names = ("with/slash", "with space", "ünï☃", "..", 'quo"te\\', "new\nline", "x" * 300, "0")
    return {name: world.recorder.make(name, (3, 2)) for name in names}


@builder()
def overwritten(world: World) -> State:
    older = {f"old.{number}": whole(f"old.{number}", (3,)) for number in range(5)}
    writer = FileSystemWriter(str(world.checkpoint), single_file_per_rank=False)
    save(older, storage_writer=writer, no_dist=True)
    return {"w": world.recorder.make("w", (3, 3)), "step": 2}
