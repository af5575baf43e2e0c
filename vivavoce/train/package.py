"""Trained parts as a miniature small enough to ship: `viva train ship --lm … --codec … --out …`.

With `--tts` and `--codec`, a voice; with `--asr`, a recogniser; with `--draft`, what guesses ahead of one. Matrices
become int8 with a scale a row, those of a voice and a recogniser less; of the vocoder float16 stays where errors are
heard at once.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vivavoce.audio.io import Sound
from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.flow.model import FlowDecoder
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.hift.model import HiFT
from vivavoce.models.moss_speech.codec import EAR_RATE, VOICE_RATE, MossSpeechCodec, read_sizes
from vivavoce.models.quantised import pack_file
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.flow_vocoder.flow import FLOW_FILE, teacher_vector
from vivavoce.train.voices import TEACHER

KEPT_WIDE = {"hift.safetensors": ["f0_predictor", "conv_post", "source_downs"]}  # patterns of names, by file
BITS_OF_SPEAKER = {"": 5}  # by patterns of names
BITS_OF_ITS_CODEC = {"encoder": 5, "decoder": 6}
BITS_OF_DRAFT = {"": 5}
BITS_OF_RECOGNISER = {r"encoder\.embed_positions": 8, "": 5}  # of which it has learnt all that learns
REPLIES = {"temperature": 0.0, "left_chunks": 4}
"""A front desk gives one answer to a question; the flow was trained to look back two to ten chunks."""
SPEECH_FILES = ("config.json", "tokenizer.json")
VOICE_FILES = ("config.json", "tokenizer.model", "speech.json")
RECOGNISER_FILES = ("config.json", "tokenizer.json", "generation_config.json", "preprocessor_config.json")
WEIGHTS = "model.safetensors"


def ship_speech(lm: Path, codec: Path, out: Path) -> int:
    """Write the folder of a speech-to-speech miniature; its size in bytes."""
    _ship(lm, SPEECH_FILES, out)
    (out / "generation_config.json").write_text(json.dumps(REPLIES, indent=2), encoding="utf8")
    for file in sorted(codec.rglob("*")):
        target = out / "codec" / file.relative_to(codec)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors" and file.parent.name != "voices":
            pack_file(file, target, KEPT_WIDE.get(file.name, ()))
        elif file.is_file():
            shutil.copy2(file, target)
    return _size(out)


def ship_voice(tts: Path, codec: Path, out: Path) -> int:
    """Write the folder of a text-to-speech miniature; its size in bytes."""
    _ship(tts, VOICE_FILES, out, BITS_OF_SPEAKER)
    _ship(codec, ("config.json",), out / "codec", BITS_OF_ITS_CODEC)
    return _size(out)


def ship_recogniser(asr: Path, out: Path) -> int:
    """Write the folder of a recogniser; its size in bytes."""
    _ship(asr, RECOGNISER_FILES, out, BITS_OF_RECOGNISER)
    return _size(out)


def ship_draft(draft: Path, out: Path) -> int:
    """Write the folder of a recogniser's draft or heads; its size in bytes."""
    _ship(draft, ("config.json",), out, BITS_OF_DRAFT)
    return _size(out)


def _ship(trained: Path, files: Sequence[str], out: Path, narrow: Mapping[str, int] | None = None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in files:
        shutil.copy2(trained / name, out / name)
    pack_file(trained / WEIGHTS, out / WEIGHTS, narrow=narrow)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, help="folder that `viva train lm` wrote")
    parser.add_argument("--tts", type=Path, help="folder that `viva train tts` wrote")
    parser.add_argument("--asr", type=Path, help="folder that `viva train asr` wrote")
    parser.add_argument("--draft", type=Path, help="folder that `viva train draft` or `viva train medusa` wrote")
    parser.add_argument("--codec", type=Path, help="folder that `viva train assemble` or `viva train tts-codec` wrote")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.asr is not None:
        size = ship_recogniser(given.asr, given.out)
    elif given.draft is not None:
        size = ship_draft(given.draft, given.out)
    elif given.codec is None or (given.lm is None) == (given.tts is None):
        raise InputError("give --asr, or --draft, or --codec with either --lm or --tts")
    elif given.lm is not None:
        size = ship_speech(given.lm, given.codec, given.out)
    else:
        size = ship_voice(given.tts, given.codec, given.out)
    print(f"{given.out}: {size / 1e6:.1f} MB")


VOICE_NAME = "rms"
PROMPT_CODES = (25, 30)
CANDIDATES = 4
REPLIES_TO_JUDGE_BY = 4
LEFT_CHUNKS = 4


@dataclass(frozen=True)
class Judged:
    """A sentence as a prompt, and how far replies spoken after it are from the teacher's, in the vocoder's log-mel."""

    text: str
    codes: int
    mel_l1: float


def assemble_codec(ear: Path, flow: Path, vocoder: Path, teacher: Corpus, out: Path) -> Judged:
    """Write a folder that `MossSpeechCodec.load` takes, with the teacher's voice in it; which prompt it speaks with."""
    codec = MossSpeechCodec(SpeechEncoder.load(ear), _flow(flow), _vocoder(vocoder))
    learned, held_out = split_held_out(teacher)
    candidates = _prompts(codec, teacher, learned)
    replies = [index for index in held_out.tolist() if teacher.voices[index] == TEACHER.name][:REPLIES_TO_JUDGE_BY]
    judged = [_judge(codec, teacher, index, prompt, replies) for index, prompt in candidates]
    best = min(range(len(judged)), key=lambda place: judged[place].mel_l1)
    codec.save_voice(VOICE_NAME, candidates[best][1])
    codec.save(out)
    return judged[best]


def _flow(folder: Path) -> FlowDecoder:
    config = read_sizes(folder / "sizes.json").flow
    if config is None:
        raise CheckpointError(f"{folder}/sizes.json has no sizes of a flow decoder; give the folder of its training")
    return FlowDecoder.load(folder / FLOW_FILE, config)


def _vocoder(folder: Path) -> HiFT:
    config = read_sizes(folder / "sizes.json").vocoder
    if config is None:
        raise CheckpointError(f"{folder}/sizes.json has no sizes of a vocoder; give the folder of its training")
    return HiFT.load(folder / "hift.safetensors", config=config)


def _prompts(codec: MossSpeechCodec, teacher: Corpus, indices: np.ndarray) -> list[tuple[int, VoicePrompt]]:
    """Sentences of about two seconds that are whole chunks, so that a reply begins where the prompt has ended."""
    found = []
    per_code = EAR_RATE * codec.samples_per_code // VOICE_RATE
    for index in indices.tolist():
        length = int(teacher.starts[index + 1] - teacher.starts[index]) // per_code
        if length in PROMPT_CODES and teacher.voices[index] == TEACHER.name:
            found.append((index, _prompt(codec, _sound(teacher, index), length)))
        if len(found) == CANDIDATES:
            break
    if not found:
        raise InputError(
            f"no sentence of the teacher has {' or '.join(map(str, PROMPT_CODES))} codes; give a larger corpus"
        )
    return found


def _prompt(codec: MossSpeechCodec, sound: Sound, length: int) -> VoicePrompt:
    mel = _mel(sound)[: length * codec.flow.config.ratio]
    return VoicePrompt(codec.encode(sound)[:length], mel, teacher_vector(codec.flow.config.speaker_dim))


def _judge(codec: MossSpeechCodec, teacher: Corpus, index: int, prompt: VoicePrompt, replies: list[int]) -> Judged:
    voice, distances = codec.flow.voice(prompt), []
    for reply in replies:
        sound = _sound(teacher, reply)
        spoken = codec.speak(codec.encode(sound), voice, LEFT_CHUNKS)
        given, made = _mel(sound), _mel(Sound(spoken.numpy(), VOICE_RATE))
        shared = min(len(given), len(made))
        distances.append(float((given[:shared] - made[:shared]).abs().mean()))
    return Judged(teacher.texts[index], len(prompt.codes), round(float(np.mean(distances)), 4) if distances else 0.0)


def _sound(corpus: Corpus, index: int) -> Sound:
    return Sound(corpus[index][0], EAR_RATE)


def _mel(sound: Sound) -> Tensor:  # [frame, band]
    samples = torch.from_numpy(sound.mono().resampled(VOICE_RATE).samples[0])
    return VocoderMel(MATCHA_24KHZ)(samples[None])[0].T


def assemble_main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Put a trained ear, flow and vocoder into one codec folder.")
    for name in ("ear", "flow", "vocoder", "corpus", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args(arguments)
    judged = assemble_codec(given.ear, given.flow, given.vocoder, Corpus.load(given.corpus), given.out)
    print(json.dumps(asdict(judged)), flush=True)


if __name__ == "__main__":
    main()
