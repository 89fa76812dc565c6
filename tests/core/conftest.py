"""Checkpoints that torch itself wrote, for every test of the core: written once in a session."""

from collections.abc import Mapping

import pytest
from hypothesis import settings

from hfdcp_core.testing.checkpoints import CASES, Truth, write_checkpoints

# `pytest tests/core/test_round_trips.py --hypothesis-profile=deep` tries more than 10,000 examples, by hand.
settings.register_profile("deep", max_examples=1700)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Truth]:
    """Every case, written by one set of processes for each number of ranks. Read only: who damages one copies it."""
    return write_checkpoints(CASES, tmp_path_factory.mktemp("checkpoints"))
