"""The session object: defaults told in full, changes merged, old words understood, wrong ones refused."""

import json

import msgspec
import pytest

from tests.server.scripted import ScriptedHost
from vivavoce.dialogue.settings import ConversationSettings, NoiseSettings, TurnSettings
from vivavoce.server.realtime.client_events import decode_object
from vivavoce.server.realtime.session_changes import default_session, merged
from vivavoce.server.realtime.session_config import Configuration
from vivavoce.server.realtime.session_settings import conversation_settings, turn_settings
from vivavoce.server.realtime.session_types import SemanticVad, SessionParams, TranscriptionSessionObject
from vivavoce.server.wire import WireError

BASE = ConversationSettings(instructions="Be kind.", voice="ada")
VOICES = ("ada", "ben")


def session_params(change: dict) -> SessionParams:
    return decode_object(json.dumps(change), SessionParams, "session")


def changed(*changes, kind="realtime"):
    session = default_session(BASE, "model", kind)
    for change in changes:
        session = merged(session, session_params(change), BASE.turn, VOICES)
    return session


def settings(*changes, **options):
    return conversation_settings(changed(*changes, **options), BASE, VOICES)


def test_without_a_change_the_settings_are_the_hosts():
    assert settings() == BASE


def test_only_what_is_named_changes():
    first = {"audio": {"input": {"turn_detection": {"silence_duration_ms": 700}}}, "tools": [{"name": "look"}]}
    session = changed(first, {"instructions": "Whisper."})
    assert session.audio.input.turn_detection.silence_duration_ms == 700
    assert session.audio.input.turn_detection.threshold == 0.5
    assert msgspec.to_builtins(session.tools) == [{"type": "function", "name": "look"}]
    assert session.instructions == "Whisper."
    assert changed(first, {"tools": []}).tools == [] == changed(first, {"tools": None}).tools


def test_null_clears_what_can_be_cleared():
    session = changed({"audio": {"input": {"transcription": {"model": "whisper-1", "language": "de"}}}})
    assert session.audio.input.transcription.language == "de"
    change = session_params({"audio": {"input": {"transcription": None, "turn_detection": None}}})
    cleared = merged(session, change, BASE.turn, VOICES).audio.input
    assert cleared.transcription is None and cleared.turn_detection is None
    assert turn_settings(None, TurnSettings()).detector == "none"


def test_noise_reduction_keeps_what_a_change_leaves_out():
    def reduced(*changes):
        return settings(*({"audio": {"input": {"noise_reduction": each}}} for each in changes)).noise_reduction

    assert settings().noise_reduction is None
    assert reduced({"type": "far_field"}) == NoiseSettings("far_field", 1.0)
    assert reduced({"type": "far_field", "strength": 0.4}, {"type": "near_field"}) == NoiseSettings("near_field", 0.4)
    assert reduced({"strength": 0.4}) == NoiseSettings("near_field", 0.4)
    assert reduced({"type": "far_field"}, None) is None
    assert settings({"input_audio_noise_reduction": {"type": "near_field"}}).noise_reduction == NoiseSettings()
    with pytest.raises(WireError, match="strength"):
        reduced({"strength": 1.5})


def test_a_servers_noise_reduction_holds_until_a_client_switches_it_off():
    base = ConversationSettings(noise_reduction=NoiseSettings(strength=0.8))
    session = default_session(base, "model")
    assert msgspec.to_builtins(session.audio.input.noise_reduction) == {"type": "near_field", "strength": 0.8}
    assert conversation_settings(session, base, VOICES).noise_reduction == base.noise_reduction
    off = merged(session, session_params({"audio": {"input": {"noise_reduction": None}}}), base.turn, VOICES)
    assert conversation_settings(off, base, VOICES).noise_reduction is None


def test_semantic_detection_has_all_its_fields():
    session = changed({"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}})
    assert session.audio.input.turn_detection == SemanticVad("auto", create_response=True, interrupt_response=True)
    eager = {"type": "semantic_vad", "eagerness": "high"}
    assert settings({"audio": {"input": {"turn_detection": eager}}}).turn.eagerness == "high"


SEMANTIC = ConversationSettings(turn=TurnSettings(detector="semantic"))
"""Of a server that detects ends of turns by their sound unless a client says otherwise."""


def detection(*changes, base=SEMANTIC):
    """As a server tells it, which also refuses what has no effect."""
    configuration = Configuration(ScriptedHost(base), "scripted-1")
    for change in changes:
        params = session_params({"audio": {"input": {"turn_detection": change}}})
        configuration.session = configuration.changed(params)
    return msgspec.to_builtins(configuration.session.audio.input.turn_detection)


@pytest.mark.parametrize("field", [{"silence_duration_ms": 320}, {"threshold": 0.7}, {"prefix_padding_ms": 100}])
def test_a_client_that_sends_what_only_silence_detection_has_gets_it(field):
    assert detection()["type"] == "semantic_vad"
    assert detection(field) == detection({"type": "server_vad", **field})
    assert detection({"create_response": False}, field) == detection(
        {"type": "server_vad", "create_response": False, **field}
    )
    assert detection(None, field) == detection({"type": "server_vad", **field})


def test_fields_of_both_detectors_are_not_mixed():
    with pytest.raises(WireError, match="not a parameter of server_vad"):
        detection({"eagerness": "low", "silence_duration_ms": 320})


def test_the_silence_of_a_call_holds_with_either_detector():
    for base in (SEMANTIC, BASE):
        turn = Configuration(ScriptedHost(base), "scripted-1", idle_timeout_ms=7_000).settings().turn
        assert (turn.detector, turn.idle_timeout_ms) == (base.turn.detector, 7_000)


def test_what_both_detectors_have_chooses_neither():
    for base, kind in ((SEMANTIC, "semantic_vad"), (BASE, "server_vad")):
        assert detection({"interrupt_response": False}, base=base)["type"] == kind
        assert detection(None, {"interrupt_response": False}, base=base)["type"] == kind
    assert detection({"type": "semantic_vad", "eagerness": "low"}, {"create_response": False})["eagerness"] == "low"


def test_what_the_session_asks_reaches_the_conversation():
    tools = [{"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}]
    asked = settings(
        {
            "output_modalities": ["text"],
            "tools": tools,
            "tool_choice": {"type": "function", "name": "look"},
            "max_output_tokens": 99,
            "audio": {"input": {"transcription": {"language": "fr"}}, "output": {"voice": "ben", "speed": 1.25}},
        }
    )
    assert asked.modality == "text" and asked.tools[0].name == "look" and asked.tool_choice == "look"
    assert asked.max_output_tokens == 99 and asked.voice == "ben" and asked.speed == 1.25
    assert asked.transcribe_input and asked.recognition.language == "fr"


def test_voices_of_stock_clients_stand_for_ours():
    assert settings({"audio": {"output": {"voice": "alloy"}}}).voice == "ada"
    assert settings({"audio": {"output": {"voice": "marin"}}}).voice == "ben"
    assert changed({"audio": {"output": {"voice": "marin"}}}).audio.output.voice == "marin"
    assert settings({"audio": {"output": {"voice": {"id": "ben"}}}}).voice == "ben"


def test_the_beta_protocols_words():
    old = {
        "modalities": ["text", "audio"],
        "voice": "ben",
        "input_audio_format": "g711_ulaw",
        "output_audio_format": "g711_alaw",
        "input_audio_transcription": {"model": "whisper-1"},
        "turn_detection": {"type": "server_vad", "silence_duration_ms": 321},
        "max_response_output_tokens": 7,
        "temperature": 0.8,
    }
    session = changed(old)
    assert msgspec.to_builtins(session.audio.input.format) == {"type": "audio/pcmu"}
    assert msgspec.to_builtins(session.audio.output.format) == {"type": "audio/pcma"}
    assert session.output_modalities == ["audio"] and session.max_output_tokens == 7
    assert settings(old).turn.silence_duration_ms == 321 and settings(old).voice == "ben"


def test_a_transcription_session_never_replies():
    session = changed({"type": "transcription", "audio": {"input": {"transcription": {"model": "x"}}}})
    assert isinstance(session, TranscriptionSessionObject)
    assert msgspec.to_builtins(session).keys() == {"type", "object", "include", "audio"}
    assert msgspec.to_builtins(session.audio).keys() == {"input"}
    asked = conversation_settings(session, BASE, VOICES)
    assert asked.transcribe_input and not asked.turn.create_response
    with pytest.raises(WireError):
        merged(session, session_params({"type": "realtime"}), BASE.turn, VOICES)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"instructions": 5}, "session.instructions"),
        ({"output_modalities": []}, "session.output_modalities"),
        ({"output_modalities": "audio"}, "session.output_modalities"),
        ({"tools": {}}, "session.tools"),
        ({"tools": [{"type": "mcp"}]}, "session.tools[0].type"),
        ({"tools": [{"type": "function"}]}, "session.tools[0].name"),
        ({"tool_choice": "perhaps"}, "session.tool_choice"),
        ({"max_output_tokens": 0}, "session.max_output_tokens"),
        ({"max_output_tokens": True}, "session.max_output_tokens"),
        ({"audio": {"output": {"speed": 9}}}, "session.audio.output.speed"),
        ({"audio": {"output": {"voice": "nobody"}}}, "session.audio.output.voice"),
        ({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 11025}}}}, "session.audio.input.format.rate"),
        ({"audio": {"input": {"turn_detection": {"type": "magic"}}}}, "session.audio.input.turn_detection.type"),
        ({"audio": {"input": {"turn_detection": {"threshold": 2}}}}, "session.audio.input.turn_detection.threshold"),
        ({"audio": {"input": 3}}, "session.audio.input"),
        ({"audio": []}, "session.audio"),
        ({"audio": "loud"}, "session.audio"),
        ({"viva": {"binary": "mp3"}}, "session.viva.binary"),
        ({"type": "other"}, "session.type"),
    ],
)
def test_what_is_wrong_is_named(change, param):
    with pytest.raises(WireError) as refused:
        changed(change)
    assert refused.value.param == param


def test_a_number_that_json_does_not_have_is_refused():
    with pytest.raises(WireError) as refused:
        changed({"audio": {"output": {"speed": float("nan")}}})
    assert refused.value.code == "invalid_json"
