"""Figures of other systems, as published. They were measured on other dialogues: compare sizes, not decimals."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedSystem:
    """One system's figures by the names of this lab's."""

    name: str
    source: str
    figures: dict[str, float]


TAU_VOICE = "τ-voice leaderboard, interaction_metrics.overall of its submissions (sierra-research/tau2-bench a2c0247)"
FULL_DUPLEX_BENCH = "Full-Duplex-Bench v1.0 (arXiv 2503.04721), table of its README at d7336bd; latencies are means"
NAMES = ("R_R", "L_R", "R_Y", "L_Y", "I_A", "S_BC", "S_VT", "S_ND")
DUPLEX_NAMES = (
    "pause.turn_over",
    "monologue.turn_over",
    "monologue.backchannels_a_second",
    "smooth.turn_over",
    "smooth.latency",
    "interruption.latency",
)


def _tau(name: str, *figures: float) -> PublishedSystem:
    return PublishedSystem(name, TAU_VOICE, dict(zip(NAMES, figures, strict=True)))


def _duplex(name: str, *figures: float) -> PublishedSystem:
    return PublishedSystem(name, FULL_DUPLEX_BENCH, dict(zip(DUPLEX_NAMES, figures, strict=True)))


SYSTEMS = (
    _tau("gpt-realtime-2, minimal", 0.998, 1.440, 0.999, 0.620, 0.187, 0.019, 0.063, 0.168),
    _tau("gpt-realtime-1.5", 0.999, 1.389, 1.000, 0.419, 0.135, 0.019, 0.053, 0.097),
    _tau("gemini-live-2.5-flash", 0.806, 1.429, 0.564, 0.859, 0.206, 0.849, 0.339, 0.446),
    _tau("gemini-3.1-flash-live", 0.970, 1.639, 0.522, 0.822, 0.098, 0.897, 0.513, 0.270),
    _tau("grok-voice-think-fast-2.0", 1.000, 1.708, 0.970, 0.937, 0.107, 0.472, 0.329, 0.277),
    _tau("qwen3.5-omni-plus-realtime", 0.992, 1.698, 0.902, 0.933, 0.361, 0.840, 0.364, 0.145),
    _tau("LiveKit cascade", 0.791, 4.237, 0.988, 0.870, 0.644, 0.667, 0.489, 0.577),
    _duplex("GPT-Realtime", 0.010, 0.000, 0.007, 1.000, 1.470, 1.500),
    _duplex("Gemini Live 2.0", 0.255, 0.091, 0.012, 0.655, 1.301, 1.183),
    _duplex("PersonaPlex", 0.584, 0.327, 0.025, 0.992, 0.070, 0.400),
    _duplex("Moshi", 0.985, 1.000, 0.001, 0.941, 0.265, 0.257),
    _duplex("Freeze-Omni", 0.642, 0.636, 0.001, 0.336, 0.953, 1.409),
)
