"""How many replicas there should be: by open sessions, and by sound that goes out late.

Ray carries this file to its controller by value, so it imports nothing of the house.
"""

import math
from typing import Any


class SessionPolicy:
    """Enough replicas that each has the sessions it should have, and one more while sound is late."""

    def __init__(self, target: float, late_share: float) -> None:
        self.target, self.late_share = target, late_share

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas for what they report."""
        told = context.aggregated_metrics or {}
        sessions = sum((told.get("sessions") or {}).values())
        late = max((told.get("late_share") or {}).values(), default=0.0)
        return self.wanted(sessions, late, context.current_num_replicas), {}

    def wanted(self, sessions: float, late_share: float, running: int) -> int:
        """Replicas for so many sessions, of which so many pieces of sound go out late."""
        wanted = max(1, math.ceil(sessions / self.target))
        return max(wanted, running + 1) if late_share > self.late_share else wanted
