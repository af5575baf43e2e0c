"""How much of everything one client may have."""

import asyncio
from collections import OrderedDict

MOST_ADDRESSES = 4096


class Bucket:
    """Fills at `rate` up to `burst`; who takes more than is there waits until it is paid back."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._level, self._at = burst, _now()

    def take(self, amount: float) -> float:
        """Take it; seconds to wait before going on."""
        now = _now()
        self._level = min(self.burst, self._level + (now - self._at) * self.rate) - amount
        self._at = now
        return max(-self._level / self.rate, 0.0)

    def try_take(self, amount: float) -> bool:
        """Take it if it is there."""
        if self.take(amount) == 0:
            return True
        self._level += amount
        return False


class OpenRate:
    """How often each address may open a session; the addresses seen last are remembered."""

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def admits(self, address: str) -> bool:
        """Whether this address may open one more now."""
        bucket = self._buckets.pop(address, None) or Bucket(self._per_minute / 60, self._per_minute)
        self._buckets[address] = bucket
        if len(self._buckets) > MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        return bucket.try_take(1)


def _now() -> float:
    return asyncio.get_running_loop().time()
