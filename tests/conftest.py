"""Settings that every test needs before anything is imported."""

import os
import signal
import tempfile

_HOME = tempfile.mkdtemp(prefix="hfdcp-tests-")
# Read by huggingface_hub, hf_xet, gcsfs and Prefect at import: no test may touch the user's own caches or accounts.
os.environ.update(
    HF_HOME=f"{_HOME}/hf",
    HF_XET_CACHE=f"{_HOME}/xet",
    HF_XET_CLIENT_RETRY_MAX_ATTEMPTS="4",
    HF_XET_CLIENT_RETRY_BASE_DELAY="1000ms",
    HF_XET_DATA_SESSION_XORB_METADATA_FLUSH_INTERVAL="5s",
    HF_HUB_DISABLE_TELEMETRY="1",
    PREFECT_HOME=f"{_HOME}/prefect",
    DO_NOT_TRACK="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    XDG_CACHE_HOME=f"{_HOME}/cache",
    XDG_STATE_HOME=f"{_HOME}/state",
    GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
)
for _name in ("HF_TOKEN", "HF_ENDPOINT", "PREFECT_API_URL"):
    os.environ.pop(_name, None)

# A shell starts what it puts in the background with SIGINT ignored, and children inherit that; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["benchmarks"]
"""Commands of their own, which import one another from their own folder."""
