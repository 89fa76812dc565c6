"""Python's cyclic garbage collector, kept still while very many values are made.

It walks over all values again and again while their number grows, and finds nothing: catalogs, plans and what a pickle
holds have no cycles. That is a quarter to a third of the time of making a million of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the collector still inside of a block, or of a function that this decorates.

    >>> with without_collector():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
