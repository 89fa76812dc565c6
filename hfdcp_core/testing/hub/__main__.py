"""Serve a Hub on loopback until interrupted: ``python -m hfdcp_core.testing.hub --root FOLDER --port N``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading

from hfdcp_core.testing.hub import Hub


def main() -> None:
    """Serve, and say on the standard output how to get here."""
    parser = argparse.ArgumentParser(description="A Hugging Face Hub on loopback, for tests and demonstrations only.")
    parser.add_argument("--root", required=True, help="folder that keeps the repositories")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 takes a free one")
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Hub(options.root, options.port) as hub:
        lines = (f"export {name}={value}\n" for name, value in hub.environment.items())
        sys.stdout.writelines(lines)
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            stop.wait()


if __name__ == "__main__":
    main()
