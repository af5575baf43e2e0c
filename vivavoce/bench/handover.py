"""Deprecated name of `vivavoce.bench.ipc`; removed in the next release."""

import sys

from vivavoce.bench.ipc import main

if __name__ == "__main__":
    print("vivavoce.bench.handover is deprecated; run python -m vivavoce.bench.ipc", file=sys.stderr)
    main()
