"""How many replicas there should be: by open sessions, and by how near sound is to its deadlines.

Ray carries this file to its controller by value, so it imports nothing of the house.
"""

import math
from typing import Any


class SessionPolicy:
    """Enough replicas that each has the sessions it should have, and one more while sound is late or nearly is."""

    def __init__(self, target: float, late_share: float, least_slack: float) -> None:
        self.target, self.late_share, self.least_slack = target, late_share, least_slack

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas for what they report."""
        told = context.aggregated_metrics or {}
        sessions = sum((told.get("sessions") or {}).values())
        late = max((told.get("late_share") or {}).values(), default=0.0)
        slack = min((told.get("slack") or {}).values(), default=math.inf)
        return self.wanted(sessions, late, slack, context.current_num_replicas), {}

    def wanted(self, sessions: float, late_share: float, slack: float, running: int) -> int:
        """Replicas for so many sessions, of which so many pieces of sound go out late, and all so near to it."""
        wanted = max(1, math.ceil(sessions / self.target))
        is_pressed = late_share > self.late_share or slack < self.least_slack
        return max(wanted, running + 1) if is_pressed else wanted
