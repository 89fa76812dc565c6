"""Whose storage options go first."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hfdcp_core.storage_options import configure, configured, merged_options, texts


@pytest.fixture(autouse=True)
def nothing_configured() -> Iterator[None]:
    yield
    for protocol in ("gs", "s3", "hf"):
        configure(protocol, {})


def test_given_options_go_before_configured_ones_and_those_before_our_defaults() -> None:
    configure("s3", {"use_listings_cache": True, "key": "configured", "secret": "configured"})
    merged = merged_options("s3", {"key": "given"}, {})
    assert merged["use_listings_cache"] is True
    assert (merged["key"], merged["secret"]) == ("given", "configured")
    assert merged["config_kwargs"] == {"max_pool_connections": 32, "read_timeout": 60}


def test_what_fsspec_is_configured_with_goes_before_our_defaults_and_is_left_to_it() -> None:
    merged = merged_options("gs", {}, {"use_listings_cache": True})
    assert "use_listings_cache" not in merged
    assert merged["retry_timeout"] == 5.0


@pytest.mark.parametrize(("one", "other"), [("gs", "gcs"), ("s3", "s3a")])
def test_both_names_of_a_protocol_share_their_options(one: str, other: str) -> None:
    configure(one, {"token": "x"})
    assert configured(other) == configured(one) == {"token": "x"}


def test_to_configure_again_replaces_and_a_copy_is_handed_out() -> None:
    configure("hf", {"token": "x"})
    configure("hf", {"revision": "y"})
    configured("hf").update(token="z")  # type: ignore[attr-defined]
    assert configured("hf") == {"revision": "y"}


def test_a_protocol_that_we_know_nothing_of_gets_no_default() -> None:
    assert merged_options("sftp", {}, {}) == {}


@pytest.mark.parametrize(
    ("before", "options", "expected"),
    [
        ("", {"endpoint_url": "http://127.0.0.1:1"}, "false"),
        ("", {}, "None"),
        ("import gcsfs", {"endpoint_url": "http://127.0.0.1:1"}, "None"),
        ("os.environ['STORAGE_EMULATOR_HOST'] = 'http://127.0.0.1:1'", {}, "false"),
        ("os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'true'", {"endpoint_url": "http://x"}, "true"),
    ],
    ids=["emulator", "real", "too late", "emulator by environment", "the user's own"],
)
def test_an_emulator_is_not_asked_for_a_layout(before: str, options: dict[str, str], expected: str) -> None:
    script = (
        f"import os\n{before}\nfrom hfdcp_core.storage_options import merged_options\n"
        f"merged_options('gs', {options!r}, {{}})\nprint(os.environ.get('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'))"
    )
    names = ("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "STORAGE_EMULATOR_HOST")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_every_text_in_some_options_may_be_a_secret() -> None:
    options = {"a": "first", "b": {"c": ["second", ("third", {"d": "fourth"})]}, "e": 5, "f": "x"}
    assert texts(options) == {"first", "second", "third", "fourth"}
