"""The processor cores of this machine."""

import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time per period, or "max"


def usable_cores() -> int:
    """The cores that this process may use, within the CPU quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no quota, or no Linux
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
