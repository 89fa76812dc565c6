"""Where the program ``hfdcp`` begins, before anything large is imported.

numpy's BLAS starts a thread for every processor when it is imported, and each spins for a while for work that never
comes from us: an eighth of a second of processor time in each run of the program. So it is told to start none. And a
Ctrl-C while modules are imported ends like any other.
"""

from __future__ import annotations

import os
import signal
import sys

ONE_BLAS_THREAD = "OPENBLAS_NUM_THREADS"


def main() -> int:
    """Import the command line, and run it on what was typed."""
    told = ONE_BLAS_THREAD not in os.environ
    os.environ.setdefault(ONE_BLAS_THREAD, "1")
    asked: list[int] = []

    def stop(number: int, _frame: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        from hfdcp_flows import cli

        if told:
            del os.environ[ONE_BLAS_THREAD]  # processes that we start decide for themselves
        signal.signal(signal.SIGINT, before)
        return cli.main()
    except (KeyboardInterrupt, ImportError, SystemError) as error:  # numpy makes an ImportError of an interruption
        if not (asked or isinstance(error, KeyboardInterrupt)):
            raise
        print("hfdcp: interrupted before it began", file=sys.stderr, flush=True)
        # Nothing is open yet. Python itself would die by the signal where it came while a string was being executed.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
