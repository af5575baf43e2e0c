"""What sessions at once went through: each by itself, and all of one number together."""

from dataclasses import dataclass, field


@dataclass
class Talked:
    """What one session went through. Seconds."""

    ttfa: float | None = None
    """From the end of its turn to the first sound."""
    v2v: float | None = None
    """From the end of its turn to the first sound that can be heard, played at once."""
    underruns: int = 0
    dry_seconds: float = 0.0
    sound_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Level:
    """One number of sessions. Milliseconds; percentiles are of sessions."""

    sessions: int
    ttfa_ms: dict[int, float]
    newcomer_ttfa_ms: dict[int, float]
    v2v_ms: dict[int, float]
    underruns: int
    sessions_that_ran_dry: int
    dry_seconds: float
    sound_seconds: float
    wall_seconds: float
    engine_busy: float
    """Share of the time in which the language model stepped."""
    step_ms: float
    longest_step_ms: float
    least_slack_ms: float | None
    """The least time a listener had left when a row of the language model came."""
    passes: int
    replies_a_pass: float
    ways: dict[str, dict[str, float]]
    """Of the ear and each way of the voice: passes, jobs in one, milliseconds of one, and the share of time it took."""
    first_sound_parts_ms: dict[str, float]
    """Where the wait for a first sound goes, medians: turn heard, reply begun, codes there, sound made, let out."""
    loop_lag_ms: float
    """The latest that the event loop was, at the 99th percentile."""
    threads: dict[str, float]
    """Shares of a core."""
    memory_bytes: int | None
    reserved_bytes: int | None
    watts: float | None
    failed: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every listener heard every reply without a gap."""
        return not self.underruns and not self.failed
