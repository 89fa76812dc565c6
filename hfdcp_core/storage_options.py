"""Storage options: what a user sets for this process, and what we set where the user says nothing.

Options hold credentials, so they never become part of a value, a message or a file: they stay in this module until a
filesystem is made.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping

_ALIASES = {"gs": "gcs", "s3a": "s3"}
_CHOSEN: dict[str, dict[str, object]] = {}
_LOCK = threading.Lock()
_SECRET_CHARACTERS = 4  # shorter values say nothing, and would blot out half of a message


def configure(protocol: str, options: Mapping[str, object]) -> None:
    """Set the storage options of one protocol (``gs``, ``s3``, …) for this process, in place of earlier ones."""
    with _LOCK:
        _CHOSEN[_ALIASES.get(protocol, protocol)] = dict(options)


def configured(protocol: str) -> Mapping[str, object]:
    """Return what `configure` was given for ``protocol``; nothing where it was given nothing."""
    with _LOCK:
        return dict(_CHOSEN.get(_ALIASES.get(protocol, protocol), {}))


def merged_options(protocol: str, given: Mapping[str, object], environment: Mapping[str, object]) -> dict[str, object]:
    """Join the options of one protocol: ``given`` go before configured ones, which go before our defaults.

    ``environment`` is what fsspec takes from its own configuration: it goes before our defaults too.
    """
    chosen = {**configured(protocol), **given}
    defaults = {name: value for name, value in _defaults(protocol, chosen).items() if name not in environment}
    return {**defaults, **chosen}


def _defaults(protocol: str, chosen: Mapping[str, object]) -> dict[str, object]:
    """Return what we set where the user says nothing."""
    if protocol in {"gs", "gcs"}:
        import aiohttp

        if chosen.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"):
            _spare_the_layout_probe()
        # aiohttp's own limit is 300 s for a whole request, and gcsfs never retries a timeout.
        patience = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
        return {
            "use_listings_cache": False,
            "retry_timeout": 5.0,
            "requests_timeout": patience,
            "finalize_on_close": True,  # zonal buckets would leave what is written open for more
        }
    if protocol in {"s3", "s3a"}:
        theirs = chosen.get("config_kwargs")
        wider = {"max_pool_connections": 32, "read_timeout": 60}
        return {"use_listings_cache": False} if theirs else {"use_listings_cache": False, "config_kwargs": wider}
    return {"use_listings_cache": False} if protocol in {"hf", "http", "https", "abfs", "az"} else {}


def _spare_the_layout_probe() -> None:
    """Keep gcsfs from asking an emulator for a bucket's layout: none answers, and each call then waits for a minute."""
    if "gcsfs" not in sys.modules:
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


def texts(value: object) -> set[str]:
    """Return every text in some options, however deep: any of them may be a secret."""
    if isinstance(value, str):
        return {value} if len(value) >= _SECRET_CHARACTERS else set()
    if isinstance(value, Mapping):
        return set().union(*map(texts, value.values()))
    return set().union(*map(texts, value)) if isinstance(value, (list, tuple)) else set()
