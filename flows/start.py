"""Where the program ``hfdcp`` begins, before anything large is imported.

numpy's BLAS starts a thread for every processor when it is imported, and each spins for a while for work that never
comes from us: an eighth of a second of processor time in each run of the program. So it is told to start none. And a
Ctrl-C while modules are imported ends like any other.
"""

from __future__ import annotations

import os
import sys

ONE_BLAS_THREAD = "OPENBLAS_NUM_THREADS"


def main() -> int:
    """Import the command line, and run it on what was typed."""
    told = ONE_BLAS_THREAD not in os.environ
    os.environ.setdefault(ONE_BLAS_THREAD, "1")
    try:
        from hfdcp_flows import cli

        if told:
            del os.environ[ONE_BLAS_THREAD]  # processes that we start decide for themselves
        return cli.main()
    except KeyboardInterrupt:
        print("hfdcp: interrupted before it began", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
