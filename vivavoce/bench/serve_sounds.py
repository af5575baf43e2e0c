"""What the callers of `viva bench serve` say: recorded questions in room noise, as messages encoded in advance."""

import base64

import numpy as np

from vivavoce.audio.io import Sound, float_to_pcm16
from vivavoce.audio.vad import RATE as VAD_RATE
from vivavoce.audio.vad import WINDOW_SECONDS, VoiceActivity, speech_probabilities, voice_activity
from vivavoce.bench.serve_plans import EncodedQuestion, EncodedSounds
from vivavoce.bench.turn_sounds import RATE, Samples, gather, room_noise, voiced_bounds
from vivavoce.errors import InputError

NOISE_DBFS = -60.0
NOISE_SECONDS = 10.0
MAX_QUESTIONS = 8
MAX_PAUSE_SECONDS = 0.1  # a longer pause inside a question might end the turn
SPEECH_PROBABILITY = 0.5
JSON_PACKET_SECONDS = 0.04
OPUS_PACKET_SECONDS = 0.02


def encoded_sounds(transport: str, question_seconds: float) -> EncodedSounds:
    """The sounds of a transport; WebRTC takes 16-bit PCM, which its track encodes."""
    packet_seconds = JSON_PACKET_SECONDS if transport == "websocket" else OPUS_PACKET_SECONDS
    noise = room_noise(NOISE_SECONDS, NOISE_DBFS)
    questions = []
    for sound in one_turn_questions(question_seconds):
        mixed, onset, last = _in_noise(sound, noise, round(packet_seconds * RATE))
        questions.append(EncodedQuestion(_encode(mixed, transport, packet_seconds), onset / RATE, last))
    return EncodedSounds(packet_seconds, _encode(noise, transport, packet_seconds), questions)


def one_turn_questions(seconds: float) -> list[Samples]:
    """Recorded questions of about this length that the voice activity detector takes for one turn."""
    detector = voice_activity()
    usable = [question.sound for question in gather().questions if _is_one_turn(question.sound, detector)]
    if not usable:
        raise InputError("no recorded question is taken for speech by the voice activity detector")
    return sorted(usable, key=lambda sound: abs(len(sound) / RATE - seconds))[:MAX_QUESTIONS]


def _is_one_turn(samples: Samples, detector: VoiceActivity) -> bool:
    probabilities = speech_probabilities(detector, Sound(samples, RATE).resampled(VAD_RATE).samples[0])
    speech = np.flatnonzero(probabilities > SPEECH_PROBABILITY)
    if not speech.size:
        return False
    max_pause = (np.diff(speech).max(initial=1) - 1) * WINDOW_SECONDS
    is_whole = speech.size * WINDOW_SECONDS > 0.5 * len(samples) / RATE
    return bool(is_whole and max_pause <= MAX_PAUSE_SECONDS)


def _in_noise(samples: Samples, noise: Samples, packet: int) -> tuple[Samples, int, int]:
    """Whole packets of noise with the question in them, its first voiced sample, and the packet its voice ends with."""
    first, last = voiced_bounds(samples)
    offset = -last % packet
    count = -(-(offset + len(samples)) // packet)
    mixed = noise[: count * packet].copy()
    mixed[offset : offset + len(samples)] += samples
    return mixed, offset + first, (offset + last) // packet - 1


def _encode(samples: Samples, transport: str, packet_seconds: float) -> list[bytes]:
    if transport == "binary":
        from vivavoce.server.realtime.audio_formats import OpusWriter

        writer = OpusWriter(RATE)
        return [*writer.write(samples), *writer.flush()]
    pcm = float_to_pcm16(samples).astype("<i2", copy=False).reshape(-1, round(packet_seconds * RATE))
    packets = [row.tobytes() for row in pcm]
    if transport == "webrtc":
        return packets
    return [b'{"type":"input_audio_buffer.append","audio":"%s"}' % base64.b64encode(packet) for packet in packets]
