"""Synthetic voices of installable programs: training voices, held-out voices, and the voice of the replies.

Some are in non-free packages; training uses those that are installed.
"""

import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.resample import resample
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.train.synthesizers import DEBIAN_PACKAGES, Programs, bundle, programs, varied_prosody

__all__ = [
    "HELD_OUT",
    "OPTIONAL",
    "RATE",
    "TEACHER",
    "TRAINING",
    "VOICES",
    "SyntheticVoice",
    "bundle",
    "draw",
    "programs",
    "speak",
    "speak_many",
    "training_voices",
]

RATE = 16_000
LEAD = RATE * 2 // 100  # samples of silence before speech; short, as it delays a reply
TAIL = RATE * 7 // 100  # samples of silence after it
FRAME = RATE // 100
QUIET = 10 ** (-42 / 20)  # relative to the loudest frame; quieter frames are not speech
CLICK = 10 ** (-38 / 20)  # speech does not start below this level: flite's "I" has a click 150 ms before it
FESTIVAL_BATCH = 64  # sentences per process, whose start costs as much as ten of them
PROCESS_TIMEOUT = 120


@dataclass(frozen=True)
class SyntheticVoice:
    """A voice of a program with its settings; `held_out` ones are for evaluation, `part` is the data of optional ones.

    A `loose` voice has random prosody for each sentence.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    held_out: bool = False
    part: str = ""
    loose: bool = False


def _flite() -> list[SyntheticVoice]:
    """Recorded or modelled voices; only the diphone voice has variable pitch."""
    voices = [
        SyntheticVoice(
            f"flite-{speaker}-{stretch}", "flite", ("-voice", speaker, "--setf", f"duration_stretch={stretch}"), held
        )
        for speaker, held in (("rms", False), ("slt", False), ("awb", True))
        for stretch in ("0.85", "1.0", "1.15", "1.3")
    ]
    for pitch in ("85", "105", "130", "160"):
        for stretch in ("0.9", "1.1"):
            settings = ("--setf", f"int_f0_target_mean={pitch}", "--setf", f"duration_stretch={stretch}")
            voices.append(SyntheticVoice(f"flite-kal16-{pitch}-{stretch}", "flite", ("-voice", "kal16", *settings)))
    return voices


def _festival() -> list[SyntheticVoice]:
    """A diphone voice and an HTS voice of fixed speed."""
    voices = [
        SyntheticVoice(f"festival-ked-{stretch}", "festival", ("ked_diphone", stretch), True)
        for stretch in ("0.9", "1.1")
    ]
    return [*voices, SyntheticVoice("festival-slt", "festival", ("cmu_us_slt_arctic_hts", "1.0"))]


CLEAR_ACCENTS = ("en-us", "en")
OTHER_ACCENTS = ("en-gb-scotland", "en-029", "en-us-nyc", "en-gb-x-gbclan")
VARIANTS = (
    *("m1", "m2", "m4", "m5", "m6", "m7", "m8", "f1", "f2", "f3", "f5", "klatt", "klatt2", "klatt3", "klatt4"),
    *("adam", "Alex", "Andrea", "Andy", "Annie", "anika", "belinda", "benjamin", "boris", "caleb"),
    *("david", "Denis", "Diogo", "ed", "edward", "Gene", "gustave", "Henrique", "Hugo", "iven", "john", "Lee"),
    *("linda", "marcelo", "max", "Michael", "michel", "miguel", "Mike", "norbert", "pablo", "paul"),
    *("quincy", "rob", "robert", "sandro", "shelby", "steph", "steph2", "travis", "victor", "zac"),
)
LOUDNESS = "30"  # of 200; at the usual 100 many variants clip
HELD_OUT_ACCENT = "en-gb-x-rp"
HELD_OUT_VARIANTS = ("m3", "f4", "steph3")


def _espeak() -> list[SyntheticVoice]:
    """Each variant in a clear and in another accent, at human pitch and tempo; one accent is held out."""
    pitches, speeds = (38, 50, 62, 45, 56), (140, 165, 150, 180)
    voices = []
    for index, variant in enumerate(VARIANTS):
        for turn, accents in enumerate((CLEAR_ACCENTS, OTHER_ACCENTS)):
            accent, pitch, speed = (
                accents[index % len(accents)],
                pitches[(index + turn) % 5],
                speeds[(index + turn) % 4],
            )
            voices.append(_espeak_voice(accent, variant, pitch, speed))
    held_out = zip(HELD_OUT_VARIANTS, (45, 55, 50), (150, 160, 145), strict=True)
    return voices + [_espeak_voice(HELD_OUT_ACCENT, *held, held_out=True) for held in held_out]


def _espeak_voice(accent: str, variant: str, pitch: int, speed: int, held_out: bool = False) -> SyntheticVoice:
    arguments = ("-v", f"{accent}+{variant}", "-p", str(pitch), "-s", str(speed), "-a", LOUDNESS)
    return SyntheticVoice(f"espeak-{accent}-{variant}", "espeak-ng", arguments, held_out)


MBROLA_SPEAKERS = {"us1": "us1", "us2": "us2", "us3": "us3", "en1": "en1", "sw2-en": "sw2"}
LOOSE_TURNS = 12  # twice as many as with rule-based prosody
PICO_SPEAKERS = ("en-US", "en-GB")


def _mbrola() -> list[SyntheticVoice]:
    """Recorded diphones driven by espeak-ng, with rule-based and random prosody; sw2 has a Swedish accent."""
    by_rule = [
        SyntheticVoice(
            f"mbrola-{part}-{pitch}-{speed}", "mbrola", ("-v", f"mb-{name}", "-p", pitch, "-s", speed), part=part
        )
        for name, part in MBROLA_SPEAKERS.items()
        for pitch, speed in (("38", "140"), ("50", "130"), ("50", "155"), ("50", "175"), ("62", "145"), ("70", "165"))
    ]
    loose = [
        SyntheticVoice(f"mbrola-{part}-loose-{turn}", "mbrola", ("-v", f"mb-{name}"), part=part, loose=True)
        for name, part in MBROLA_SPEAKERS.items()
        for turn in range(LOOSE_TURNS)
    ]
    return by_rule + loose


def _pico() -> list[SyntheticVoice]:
    """Two female voices with pitch and speed in per cent."""
    return [
        SyntheticVoice(f"pico-{speaker}-{pitch}-{speed}", "pico2wave", (speaker, pitch, speed), part=speaker)
        for speaker in PICO_SPEAKERS
        for pitch, speed in (("85", "95"), ("100", "85"), ("100", "100"), ("100", "120"), ("115", "105"))
    ]


def _more_festival() -> list[SyntheticVoice]:
    """Two more diphone voices, like the held-out one, at several speeds and pitches."""
    plain = [
        SyntheticVoice(
            f"festival-{speaker}-{stretch}", "festival", (f"{speaker}_diphone", stretch), part=f"{speaker}_diphone"
        )
        for speaker in ("kal", "don")
        for stretch in ("0.9", "1.1", "1.25")
    ]
    prosodies = (
        "0.8 95 8",
        "0.95 125 22",
        "1.05 150 30",
        "1.2 110 5",
        "1.35 88 18",
    )  # stretch, pitch and its deviation
    return plain + [
        SyntheticVoice(
            f"festival-{speaker}-{prosody.replace(' ', '-')}",
            "festival",
            (f"{speaker}_diphone", *prosody.split()),
            part=f"{speaker}_diphone",
        )
        for speaker in ("kal", "don")
        for prosody in prosodies
    ]


VOICES = (*_flite(), *_festival(), *_espeak())
TRAINING = tuple(voice for voice in VOICES if not voice.held_out)
HELD_OUT = tuple(voice for voice in VOICES if voice.held_out)
OPTIONAL = (*_mbrola(), *_pico(), *_more_festival())
# espeak-ng is formant synthesis, not recorded speech
SHARES = {"flite": 0.22, "mbrola": 0.27, "pico2wave": 0.09, "festival": 0.12, "espeak-ng": 0.3}
TEACHER = next(voice for voice in VOICES if voice.name == "flite-rms-1.0")


def training_voices(programs: Programs) -> tuple[SyntheticVoice, ...]:
    """The training voices that these programs can synthesize."""
    return (*TRAINING, *(voice for voice in OPTIONAL if voice.part in programs.parts))


def draw(source: random.Random, count: int, voices: Sequence[SyntheticVoice] = TRAINING) -> list[SyntheticVoice]:
    """Distinct random voices, programs weighted by their shares."""
    shares = {program: share for program, share in SHARES.items() if any(v.program == program for v in voices)}
    drawn: list[SyntheticVoice] = []
    while len(drawn) < count:
        (program,) = source.choices(list(shares), list(shares.values()))
        voice = source.choice([voice for voice in voices if voice.program == program])
        if voice not in drawn:
            drawn.append(voice)
    return drawn


def speak(voice: SyntheticVoice, text: str, programs: Programs) -> NDArray[np.float32]:
    """Synthesize a sentence: mono, 16 kHz, with a little silence before and after."""
    return speak_many(voice, [text], programs)[0]


def speak_many(voice: SyntheticVoice, texts: Sequence[str], programs: Programs) -> list[NDArray[np.float32]]:
    """Synthesize sentences as `speak` does; slow programs are started once for many."""
    if voice.program not in DEBIAN_PACKAGES:
        raise InputError(f"voice {voice.name} needs the program {voice.program!r}; known: {', '.join(DEBIAN_PACKAGES)}")
    if voice.program == "festival":
        batches = [texts[begin : begin + FESTIVAL_BATCH] for begin in range(0, len(texts), FESTIVAL_BATCH)]
        return [sound for batch in batches for sound in _speak_festival(voice, batch, programs)]
    if voice.program == "pico2wave":
        return [_speak_pico(voice, text, programs) for text in texts]
    return [_decode_wav(_speak_once(voice, text, programs), voice, text) for text in texts]


def _speak_once(voice: SyntheticVoice, text: str, programs: Programs) -> bytes:
    if voice.program == "flite":
        return _run([*programs.command("flite"), *voice.arguments, "-t", text, "-o", "/dev/stdout"], voice, programs)
    if voice.loose:
        return _speak_with_random_prosody(voice, text, programs)
    programs.command(voice.program)  # raises if missing; espeak-ng drives mbrola voices too
    return _run([*programs.command("espeak-ng"), *voice.arguments, "--stdout", "--", text], voice, programs)


def _speak_with_random_prosody(voice: SyntheticVoice, text: str, programs: Programs) -> bytes:
    stdin = _run([*programs.command("espeak-ng"), *voice.arguments, "--pho", "-q", "--", text], voice, programs)
    varied = varied_prosody(stdin.decode(), voice.part, random.Random(f"{voice.name} {text}"))
    database = str(programs.database(voice.part))
    return _run([*programs.command("mbrola"), "-e", database, "-", "-.wav"], voice, programs, varied.encode())


def _speak_pico(voice: SyntheticVoice, text: str, programs: Programs) -> NDArray[np.float32]:
    speaker, pitch, speed = voice.arguments
    marked = f'<pitch level="{pitch}"><speed level="{speed}">{escape(text)}</speed></pitch>'
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "speech.wav")  # pico2wave only writes to names that end in .wav
        _run([*programs.command("pico2wave"), "-l", speaker, "-w", str(file), marked], voice, programs)
        return _decode_wav(file.read_bytes(), voice, text)


def _speak_festival(voice: SyntheticVoice, texts: Sequence[str], programs: Programs) -> list[NDArray[np.float32]]:
    speaker, stretch, *pitch = voice.arguments
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"(voice_{speaker})", f"(Parameter.set 'Duration_Stretch {stretch})"]
        if pitch:
            model = "(model_f0_mean 170) (model_f0_std 34)"
            mean, deviation = pitch
            lines.append(f"(set! int_lr_params '((target_f0_mean {mean}) (target_f0_std {deviation}) {model}))")
        for index, text in enumerate(texts):
            utterance = f'(utt.synth (Utterance Text "{_quoted(text)}"))'
            lines.append(f'(utt.save.wave {utterance} "{folder}/{index}.wav" \'riff)')
        script = Path(folder, "sentences.scm")
        script.write_text("\n".join(lines))
        _run([*programs.command("festival"), "-b", str(script)], voice, programs)
        files = [Path(folder, f"{index}.wav") for index in range(len(texts))]
        return [_decode_wav(file.read_bytes(), voice, text) for file, text in zip(files, texts, strict=True)]


def _quoted(text: str) -> str:
    return text.replace("\\", " ").replace('"', " ")


def _run(command: list[str], voice: SyntheticVoice, programs: Programs, stdin: bytes | None = None) -> bytes:
    try:
        finished = subprocess.run(
            command, input=stdin, capture_output=True, timeout=PROCESS_TIMEOUT, env=programs.environment, check=False
        )
    except FileNotFoundError as error:
        package = DEBIAN_PACKAGES[voice.program]
        raise MissingDependencyError(f"voice {voice.name} needs {voice.program}: apt install {package}") from error
    if finished.returncode != 0:
        stderr_lines = finished.stderr.decode(errors="replace").strip().splitlines()
        raise InputError(
            f"{voice.program} failed for voice {voice.name}: {stderr_lines[-1] if stderr_lines else 'no error message'}"
        )
    return finished.stdout


def _decode_wav(wav: bytes, voice: SyntheticVoice, text: str) -> NDArray[np.float32]:
    """The samples of a synthesizer's WAV file at our rate, with trimmed silence."""
    data = wav.find(b"data", 12)
    if data < 0 or len(wav) < data + 10:
        raise InputError(f"voice {voice.name} produced no audio for {text!r}")
    rate = int.from_bytes(wav[24:28], "little")
    body = wav[data + 8 :]
    samples = np.frombuffer(body[: len(body) // 2 * 2], "<i2").astype(np.float32) / np.float32(32768)
    if rate != RATE:
        samples = resample(samples, rate, RATE)
    return trimmed(samples.clip(-1, 1), f"voice {voice.name} is silent on {text!r}")


def trimmed(samples: NDArray[np.float32], message: str = "the sound is silent") -> NDArray[np.float32]:
    """Speech with exactly LEAD and TAIL samples of silence around it."""
    frames = np.abs(samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)).max(axis=1, initial=0.0)
    if frames.size == 0 or frames.max() < 1e-3:
        raise InputError(message)
    first = np.flatnonzero(frames > CLICK * frames.max())[0]
    last = np.flatnonzero(frames > QUIET * frames.max())[-1]
    begin, end = first * FRAME - LEAD, (last + 1) * FRAME + TAIL
    padding = (max(0, -begin), max(0, end - len(samples)))
    return np.pad(samples[max(0, begin) : end], padding).astype(np.float32)
