"""Which of gcsfs' two filesystems is used; part of the door to fsspec.

The one that gcsfs gives out asks for a bucket's layout, by another protocol, before nearly every call, until it gets an
answer. Where none comes (an emulator, a network that lets only HTTPS through, an account without the permission) every
range that is read waits for that, up to a minute. So it is asked once; where it does not answer, the plain filesystem
is used, which knows all there is to know of any bucket but the zonal ones.
"""

from __future__ import annotations

import logging
from functools import lru_cache

from fsspec.spec import AbstractFileSystem

_GOOGLE = "https://storage."  # then googleapis.com, or another universe of Google's
_LOG = logging.getLogger(__name__)


@lru_cache(maxsize=64)  # once for each bucket: who does not answer now is not asked again
def settled(fs: AbstractFileSystem, root: str) -> AbstractFileSystem:
    """Return the filesystem to use for a path of ``fs``: itself, unless it would ask in vain for a bucket's layout."""
    ask = getattr(fs, "_sync_lookup_bucket_type", None)
    if ask is None:
        return fs
    bucket = fs.split_path(root)[0]
    if fs._location.startswith(_GOOGLE):  # noqa: SLF001 - gcsfs' own name for the endpoint
        if ask(bucket).name != "UNKNOWN":
            return fs
        _LOG.warning("gs://%s does not say how it is laid out; it is taken for a usual bucket", bucket)
    from gcsfs.core import GCSFileSystem

    return GCSFileSystem(**fs.storage_options)
