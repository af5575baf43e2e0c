"""The session object: defaults, a client's changes merged into it, and what they mean for the conversation."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from vivavoce.dialogue.events import ConversationSettings, Tool, TurnSettings
from vivavoce.server.realtime.audio_formats import WireFormat, parse_format
from vivavoce.server.wire_error import WireError
from vivavoce.server.wire_legacy import modern_session

STOCK_VOICES = ("alloy", "ash", "ballad", "coral", "echo", "sage", "shimmer", "verse", "marin", "cedar")
"""Names that stock clients send; they stand for the default voice where we have none of that name."""

DETECTORS = {"server_vad": "silence", "semantic_vad": "semantic"}
EAGERNESS = ("low", "medium", "high", "auto")
BINARY = ("raw", "opus")

Wire = dict[str, Any]


def default_session(settings: ConversationSettings, model: str, kind: str = "realtime") -> Wire:
    """The full session object of a client that asked for nothing."""
    audio_input = {
        "format": WireFormat().as_wire(),
        "transcription": {"model": "default"} if settings.transcribe_input or kind == "transcription" else None,
        "noise_reduction": None,
        "turn_detection": _wire_turn(settings.turn),
    }
    if kind == "transcription":
        return {"type": kind, "model": model, "audio": {"input": audio_input}, "include": None}
    return {
        "type": kind,
        "model": model,
        "output_modalities": [settings.modality],
        "instructions": settings.instructions,
        "tools": [],
        "tool_choice": settings.tool_choice,
        "max_output_tokens": settings.most_output_tokens or "inf",
        "tracing": None,
        "truncation": "auto",
        "prompt": None,
        "include": None,
        "audio": {
            "input": audio_input,
            "output": {"format": WireFormat().as_wire(), "voice": settings.voice or "default", "speed": settings.speed},
        },
    }


def merged(session: Wire, change: Any, turn: TurnSettings, voices: Sequence[str], param: str = "session") -> Wire:
    """The session after a change: only what is named changes, null clears. `turn` holds the defaults."""
    if not isinstance(change, dict):
        raise WireError(f"{param} must be an object, not {type(change).__name__}", "invalid_type", param)
    change = modern_session(change)
    result = _of_type(deepcopy(session), change.get("type"), f"{param}.type")
    for name, check in TOP_LEVEL.items():
        if name in change and name in result:
            result[name] = check(change[name], f"{param}.{name}")
    audio = _object(change.get("audio") or {}, f"{param}.audio")
    if audio.get("input") is not None:
        _merge_input(result["audio"]["input"], _object(audio["input"], f"{param}.audio.input"), turn, param)
    if audio.get("output") is not None and "output" in result["audio"]:
        _merge_output(result["audio"]["output"], _object(audio["output"], f"{param}.audio.output"), voices, param)
    if "viva" in change:
        result["viva"] = result.get("viva", {}) | _extension(change["viva"], f"{param}.viva")
    return result


def _of_type(session: Wire, kind: Any, param: str) -> Wire:
    """The session, or what is left of it when it shall only write down what it hears."""
    if kind in (None, session["type"]):
        return session
    if kind != "transcription":
        raise WireError(f"this is a {session['type']} session; it cannot become {kind!r}", param=param)
    heard = session["audio"]["input"]
    heard["transcription"] = heard["transcription"] or {"model": "default"}
    return {name: session[name] for name in ("model", "include")} | {"type": kind, "audio": {"input": heard}}


def conversation_settings(session: Wire, base: ConversationSettings, voices: Sequence[str]) -> ConversationSettings:
    """What a session object asks of the conversation."""
    heard = session["audio"]["input"]
    transcription = heard["transcription"] or {}
    settings = replace(
        base,
        turn=turn_settings(heard["turn_detection"], base.turn),
        transcribe_input=heard["transcription"] is not None,
        language=transcription.get("language"),
    )
    if session["type"] == "transcription":
        return replace(settings, turn=replace(settings.turn, create_response=False, interrupt_response=False))
    spoken = session["audio"]["output"]
    limit, voice = session["max_output_tokens"], _voice_name(spoken["voice"])
    return replace(
        settings,
        instructions=session["instructions"],
        modality=session["output_modalities"][0],
        voice=voice if voice in voices else base.voice,
        speed=spoken["speed"],
        most_output_tokens=None if limit == "inf" else limit,
        tools=tuple(
            Tool(tool["name"], tool.get("description") or "", tool.get("parameters") or {}) for tool in session["tools"]
        ),
        tool_choice=_choice_name(session["tool_choice"]),
    )


def turn_settings(wire: Wire | None, base: TurnSettings) -> TurnSettings:
    """How a turn ends, as the session object has it."""
    if wire is None:
        return replace(base, detector="none")
    known = {name: wire[name] for name in TURN_FIELDS if name in wire}
    return replace(base, **{"detector": DETECTORS[wire["type"]], **known})


def input_format(session: Wire) -> WireFormat:
    """The format of the sound a client sends."""
    return parse_format(session["audio"]["input"]["format"], "session.audio.input.format")


def output_format(session: Wire) -> WireFormat:
    """The format of the sound a client gets."""
    spoken = session["audio"].get("output") or {}
    return parse_format(spoken.get("format") or WireFormat().as_wire(), "session.audio.output.format")


def _merge_input(current: Wire, change: Wire, turn: TurnSettings, param: str) -> None:
    param = f"{param}.audio.input"
    if change.get("format") is not None:
        current["format"] = parse_format(change["format"], f"{param}.format").as_wire()
    for name in ("transcription", "noise_reduction"):
        if name in change:
            current[name] = None if change[name] is None else _object(change[name], f"{param}.{name}")
    language = (current["transcription"] or {}).get("language")
    if language is not None:
        text(language, f"{param}.transcription.language")
    if "turn_detection" in change:
        current["turn_detection"] = _merged_turn(
            current["turn_detection"], change["turn_detection"], turn, f"{param}.turn_detection"
        )


def _merged_turn(current: Wire | None, change: Any, defaults: TurnSettings, param: str) -> Wire | None:
    if change is None:
        return None
    change = _object(change, param)
    kind = one_of(change.get("type") or (current or {}).get("type") or "server_vad", DETECTORS, f"{param}.type")
    if current is None or current["type"] != kind:
        current = _wire_turn(replace(defaults, detector=DETECTORS[kind]))  # type: ignore[arg-type]
    result = dict(current or {})
    for name, check in TURN_FIELDS.items():
        if name in result and name in change:
            optional = name == "idle_timeout_ms"
            if change[name] is not None or optional:
                result[name] = None if change[name] is None else check(change[name], f"{param}.{name}")
    return result


def _wire_turn(turn: TurnSettings) -> Wire | None:
    """Every field explicit: stock clients decide by `interrupt_response` whether they must cancel themselves."""
    answers = {"create_response": turn.create_response, "interrupt_response": turn.interrupt_response}
    if turn.detector == "none":
        return None
    if turn.detector == "semantic":
        return {"type": "semantic_vad", "eagerness": turn.eagerness, **answers}
    return {
        "type": "server_vad",
        "threshold": turn.threshold,
        "prefix_padding_ms": turn.prefix_padding_ms,
        "silence_duration_ms": turn.silence_duration_ms,
        "idle_timeout_ms": turn.idle_timeout_ms,
        **answers,
    }


def _merge_output(current: Wire, change: Wire, voices: Sequence[str], param: str) -> None:
    param = f"{param}.audio.output"
    if change.get("format") is not None:
        current["format"] = parse_format(change["format"], f"{param}.format").as_wire()
    if change.get("voice") is not None:
        voice = _voice_name(change["voice"])
        if voice not in (*voices, *STOCK_VOICES, "default"):
            known = ", ".join(voices) or "only the default one"
            raise WireError(f"there is no voice {voice!r}; there is {known}", param=f"{param}.voice")
        current["voice"] = change["voice"]
    if change.get("speed") is not None:
        current["speed"] = within(0.25, 1.5)(change["speed"], f"{param}.speed")


def _extension(value: Any, param: str) -> Wire:
    """Our own addition to the session: `binary`, sound in binary frames, as its format has it or as Opus packets."""
    change = _object(value, param)
    binary = change.get("binary")
    if binary is not None and binary not in BINARY:
        raise WireError(f"binary sound is one of {', '.join(BINARY)}, or null; not {binary!r}", param=f"{param}.binary")
    return {"binary": binary}


def _voice_name(voice: Any) -> str | None:
    name = voice.get("id") if isinstance(voice, dict) else voice
    return name if isinstance(name, str) else None


def _choice_name(choice: Any) -> str:
    return str(choice["name"]) if isinstance(choice, dict) else str(choice)


def _object(value: Any, param: str) -> Wire:
    if not isinstance(value, dict):
        raise WireError(f"{param} must be an object, not {type(value).__name__}", "invalid_type", param)
    return value


def text(value: Any, param: str) -> str:
    """A text, or an error that says it is none."""
    if not isinstance(value, str):
        raise WireError(f"{param} must be text, not {type(value).__name__}", "invalid_type", param)
    return value


def _flag(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"{param} must be true or false, not {value!r}", "invalid_type", param)
    return value


def one_of(value: Any, known: Iterable[str], param: str) -> str:
    """A value of these, or an error that names them."""
    if value not in (names := tuple(known)):  # which also takes what cannot be hashed
        raise WireError(f"{value!r} is not one of {', '.join(names)}", param=param)
    return str(value)


def within(low: float, high: float, kind: type = float) -> Callable[[Any, str], Any]:
    """A check that a number lies between two."""

    def check(value: Any, param: str) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or kind(value) != value:
            raise WireError(f"{param} must be {low:g} to {high:g}, not {value!r}", param=param)
        return kind(value)

    return check


def _eagerness(value: Any, param: str) -> str:
    if value not in EAGERNESS:
        raise WireError(f"{param} must be one of {', '.join(EAGERNESS)}, not {value!r}", param=param)
    return str(value)


def _modalities(value: Any, param: str) -> list[str]:
    """One of the two; the beta protocol said ["text", "audio"] for what is now ["audio"]."""
    if not isinstance(value, list) or not value or any(entry not in ("audio", "text") for entry in value):
        raise WireError(f'{param} must be ["audio"] or ["text"], not {value!r}', param=param)
    return ["audio"] if "audio" in value else ["text"]


def _tools(value: Any, param: str) -> list[Wire]:
    if not isinstance(value, list):
        raise WireError(f"{param} must be a list, not {type(value).__name__}", "invalid_type", param)
    for index, tool in enumerate(value):
        place = f"{param}[{index}]"
        if _object(tool, place).get("type", "function") != "function":
            raise WireError(f"{tool['type']!r} tools are not run here, only function tools", param=f"{place}.type")
        if not text(tool.get("name"), f"{place}.name"):
            raise WireError("a tool needs a name", param=f"{place}.name")
        if tool.get("description") is not None:
            text(tool["description"], f"{place}.description")
        if tool.get("parameters") is not None:
            _object(tool["parameters"], f"{place}.parameters")
    return value


def _tool_choice(value: Any, param: str) -> Any:
    is_named = isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str)
    if value not in ("auto", "none", "required") and not is_named:
        raise WireError(f"{param} must be auto, none, required or a function, not {value!r}", param=param)
    return value


def _token_limit(value: Any, param: str) -> int | str:
    return "inf" if value in ("inf", None) else int(within(1, 4096, int)(value, param))


def _anything(value: Any, param: str) -> Any:
    return value


TURN_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "threshold": within(0.0, 1.0),
    "prefix_padding_ms": within(0, 5000, int),
    "silence_duration_ms": within(0, 10_000, int),
    "idle_timeout_ms": within(1000, 600_000, int),
    "eagerness": _eagerness,
    "create_response": _flag,
    "interrupt_response": _flag,
}
TOP_LEVEL: dict[str, Callable[[Any, str], Any]] = {
    "instructions": lambda value, param: "" if value is None else text(value, param),
    "output_modalities": _modalities,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "max_output_tokens": _token_limit,
    "tracing": _anything,
    "truncation": _anything,
    "prompt": _anything,
    "include": _anything,
}
