"""What a Whisper checkpoint wants of its decoding: forbidden ids, alignment heads, and thresholds of its own.

Thresholds belong to the model: one that was tuned on other data has other log-probabilities, and the usual limits would
send every window of it through all temperatures.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vivavoce.errors import CheckpointError
from vivavoce.models.whisper_config import WhisperConfig
from vivavoce.models.whisper_tokens import SECONDS_PER_TIMESTAMP, WhisperTokens

WindowFill = Literal["zeros", "silence"]
MULTILINGUAL = 51865  # the smallest published vocabulary with many languages
NON_SPEECH = (  # brackets, notes and other signs that nobody says, in the multilingual vocabularies
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542, 873),
    *(893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667, 6585),
    *(6647, 7273, 9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635, 15265, 15618, 16553),
    *(16604, 18362, 18956, 20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650, 32302, 32470, 36865, 42863),
    *(47425, 49870, 50254),
)
BLANK = 220  # a lone space, in every published vocabulary
LARGE_V2_HEADS = (  # also Breeze-ASR-25's
    *((10, 12), (13, 17), (16, 11), (16, 12), (16, 13), (17, 15), (17, 16), (18, 4), (18, 11), (18, 19), (19, 11)),
    *((21, 2), (21, 3), (22, 3), (22, 9), (22, 12), (23, 5), (23, 7), (23, 13), (25, 5), (26, 1), (26, 12), (27, 15)),
)
LARGE_V3_HEADS = ((7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6))
TURBO_HEADS = ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14))
KNOWN_HEADS = {(51865, 32, 1280): LARGE_V2_HEADS, (51866, 32, 1280): LARGE_V3_HEADS, (51866, 4, 1280): TURBO_HEADS}


@dataclass(frozen=True)
class WhisperSettings:
    """Defaults are OpenAI's; None switches a threshold off."""

    suppressed: tuple[int, ...] = ()
    suppressed_at_start: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    latest_start: float | None = 1.0
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    best_of: int = 5
    highest_compression: float | None = 2.4
    least_logprob: float | None = -1.0
    no_speech: float | None = 0.6
    likely_text_is_speech: bool = True
    """Whether a text above `least_logprob` is kept although the model hears nobody."""
    forget_prompt_above: float = 0.5
    writes_times: bool = True
    """Whether timestamps are asked for; a model tuned without them writes worse with them."""
    untimed_up_to: float = 0.0
    """Seconds of a sound that is written without times all the same, unless the caller asks for them."""
    language: str | None = None
    """The language it writes where the caller names none; None: it listens first."""
    shortest_window: float = 1.0
    """Seconds that a trimmed window has at least."""
    window_fill: WindowFill = "zeros"
    """What follows the sound in a window it does not fill: zeros in the normalised log-mel, or silence."""
    hotword_bonus: float = 2.0

    @classmethod
    def read(cls, folder: str | Path, config: WhisperConfig, tokens: WhisperTokens) -> "WhisperSettings":
        """A folder's `generation_config.json`, and what is known of the size where it says nothing."""
        file = Path(folder) / "generation_config.json"
        published = cls.of_size(config, tokens)
        if not file.is_file():
            return published
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        except ValueError as error:
            raise CheckpointError(f"{file} is not JSON ({error}); fetch it again") from error
        return published.updated(values)

    @classmethod
    def of_size(cls, config: WhisperConfig, tokens: WhisperTokens) -> "WhisperSettings":
        """What the published model of these sizes uses."""
        is_published = config.vocab_size >= MULTILINGUAL
        half = range(config.decoder_layers // 2, config.decoder_layers)
        all_heads = tuple((layer, head) for layer in half for head in range(config.decoder_attention_heads))
        shape = (config.vocab_size, config.decoder_layers, config.d_model)
        return cls(
            suppressed=(*(NON_SPEECH if is_published else ()), *tokens.specials),
            suppressed_at_start=(*((BLANK,) if is_published else ()), tokens.endoftext),
            alignment_heads=KNOWN_HEADS.get(shape, all_heads),
        )

    def updated(self, values: Mapping[str, Any]) -> "WhisperSettings":
        """These settings with what a generation config says, by its names."""
        changes: dict[str, Any] = {}
        for theirs, ours in (
            ("compression_ratio_threshold", "highest_compression"),
            ("logprob_threshold", "least_logprob"),
            ("no_speech_threshold", "no_speech"),
            ("likely_text_is_speech", "likely_text_is_speech"),
            ("writes_timestamps", "writes_times"),
            ("untimed_up_to", "untimed_up_to"),
            ("default_language", "language"),
            ("shortest_window", "shortest_window"),
            ("window_fill", "window_fill"),
        ):
            if theirs in values:
                changes[ours] = values[theirs]
        for theirs, ours in (("suppress_tokens", "suppressed"), ("begin_suppress_tokens", "suppressed_at_start")):
            if values.get(theirs) is not None:
                changes[ours] = tuple(values[theirs])
        if values.get("alignment_heads"):
            changes["alignment_heads"] = tuple((layer, head) for layer, head in values["alignment_heads"])
        if values.get("max_initial_timestamp_index") is not None:
            changes["latest_start"] = values["max_initial_timestamp_index"] * SECONDS_PER_TIMESTAMP
        return replace(self, **changes)
