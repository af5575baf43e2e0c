"""Words of the beta protocol, turned into today's; accepted on the way in, never sent."""

from typing import Any

Wire = dict[str, Any]

EVENT_TYPES = {"transcription_session.update": "session.update"}
PART_TYPES = {"text": "output_text", "audio": "output_audio"}
RENAMED = {"modalities": "output_modalities", "max_response_output_tokens": "max_output_tokens"}
MOVED = {  # old name: its place under `audio`
    "input_audio_format": ("input", "format"),
    "input_audio_transcription": ("input", "transcription"),
    "input_audio_noise_reduction": ("input", "noise_reduction"),
    "turn_detection": ("input", "turn_detection"),
    "output_audio_format": ("output", "format"),
    "voice": ("output", "voice"),
    "speed": ("output", "speed"),
}


def modern_event(event: Wire) -> Wire:
    """The event under its present name."""
    kind = event.get("type")
    return event | {"type": EVENT_TYPES[kind]} if isinstance(kind, str) and kind in EVENT_TYPES else event


def modern_session(change: Wire) -> Wire:
    """The session or response object with every field where it is today; what is there already wins."""
    if not any(name in change for name in (*RENAMED, *MOVED)):
        return change
    modern = {name: value for name, value in change.items() if name not in (*RENAMED, *MOVED)}
    for old, new in RENAMED.items():
        if old in change:
            modern.setdefault(new, change[old])
    audio = {side: dict(value) for side, value in _sides(modern.get("audio"))}
    for old, (side, name) in MOVED.items():
        if old in change:
            audio.setdefault(side, {}).setdefault(name, change[old])
    return modern | ({"audio": audio} if audio else {})


def _sides(audio: Any) -> list[tuple[str, Wire]]:
    return (
        [(side, value) for side, value in audio.items() if isinstance(value, dict)] if isinstance(audio, dict) else []
    )
