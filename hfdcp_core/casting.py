"""To settle the numbers is to find what the model's config says of blocks, and to let it say what is done to them.

What decides is in `hfdcp_core.quantization` and `hfdcp_core.quantization_config`; here the config is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hfdcp_core import quantization
from hfdcp_core.errors import PlanError
from hfdcp_core.job import Job
from hfdcp_core.manifest import CONFIG_PATH, Numerics
from hfdcp_core.quantization import USUAL_BLOCK
from hfdcp_core.quantization_config import configured, stated_block
from hfdcp_core.recipe import Definition
from hfdcp_core.store import Source
from hfdcp_core.ties import Config
from hfdcp_core.tying import Settled, config_at_hand


@dataclass(frozen=True, slots=True)
class Made:
    """What is written, now that it is known how the numbers are made."""

    numbers: quantization.Settled
    """The tensors, and what nothing needs any more."""
    numerics: Numerics
    """What was asked, with the size of blocks where the config says it."""
    config: Config | None
    """The model's config, where there is one."""


def settle(source: Source, definitions: Iterable[Definition], job: Job) -> Made:
    """Decide how the numbers of each tensor are made.

    Raises:
        PlanError: It cannot be done as asked.
        SourceError: The config cannot be read.
    """
    asked = job.numerics
    config = config_at_hand(job, source) if asked.asked else None
    if asked.quantize:
        if config is None:
            raise PlanError(
                f"--quantize changes the model's config, and there is no {CONFIG_PATH} in {job.source}; name it "
                "(--config)"
            )
        asked = replace(asked, block_size=asked.block_size or USUAL_BLOCK)
    elif asked.dequantize and config and not asked.block_size:
        asked = replace(asked, block_size=stated_block(config.text))
    return Made(quantization.settle(definitions, asked), asked, config)


def configure(made: Made, settled: Settled) -> Settled:
    """Let the config of the output say what was done to the numbers, beside what it says of ties."""
    if made.config is None:
        return settled
    before = made.config.text if settled.config is None else settled.config.decode()
    layers = quantization.unconverted(settled.definitions)
    after = configured(before, made.numerics, layers)
    return settled if after == before else replace(settled, config=after.encode())
