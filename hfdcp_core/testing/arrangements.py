"""The elements of an arrangement, by the definition of a patch: what tests hold everything else against."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hfdcp_core.arrangement import Arrangement, Patch

Numbers = npt.NDArray[np.int64]


def index_in_source(patch: Patch, index: tuple[int, ...]) -> tuple[int, ...]:
    """Return where in its source an element of a patch lies.

    >>> from hfdcp_core.box import Box
    >>> index_in_source(Patch(Box((0, 0), (2, 3)), "w", (5, 0), ((0, 3), (0, 1))), (1, 2))
    (10, 0)
    """
    found = list(patch.start)
    for number, (axis, step) in zip(index, patch.moves, strict=True):
        if step:
            found[axis] += step * number
    return tuple(found)


def place_in_target(patch: Patch, index: tuple[int, ...]) -> tuple[int, ...]:
    """Return where in the fine shape of the target an element of a patch lies."""
    return tuple(map(sum, zip(patch.box.offset, index, strict=True)))


def evaluated(made: Arrangement, arrays: Mapping[str, Numbers]) -> Numbers:
    """Return the elements of an arrangement.

    Raises:
        AssertionError: One of them is there twice, or not at all.
    """
    out, times = np.zeros(made.fine, np.int64), np.zeros(made.fine, np.int64)
    for patch in made.patches:
        for index in np.ndindex(*patch.box.shape):
            place = place_in_target(patch, index)
            times[place] += 1
            out[place] = arrays[patch.source][index_in_source(patch, index)] if patch.source else 0
    assert (times == 1).all(), "elements are there twice, or not at all"
    return out.reshape(made.shape)
