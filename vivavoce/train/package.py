"""Turn trained parts into model folders.

`viva train assemble` joins speech encoder, flow and vocoder to one codec. `viva train package` packs a miniature for
distribution: `--lm` and `--codec` speech-to-speech, `--tts` and `--codec` text-to-speech, `--asr` an ASR model,
`--draft` its draft. Matrices become int8 with a scale per row, or fewer bits for TTS and ASR; layers of the vocoder
where errors are audible stay float16.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vivavoce.audio.io import Sound
from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.flow.model import FlowDecoder
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.hift.model import HiFT
from vivavoce.models.moss_speech.codec import DECODER_RATE, ENCODER_RATE, MossSpeechCodec, read_sizes
from vivavoce.models.quantised import is_packed, pack_file
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train import add_option
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.flow_vocoder.flow import FLOW_FILE, teacher_vector
from vivavoce.train.reply_voice import reply_voice_of, short_name

FLOAT16_TENSORS = {"hift.safetensors": ["f0_predictor", "conv_post", "source_downs"]}  # name patterns by file
TTS_BITS = {"": 5}  # by name pattern
TTS_CODEC_BITS = {"encoder": 5, "decoder": 6}
DRAFT_BITS = {"": 5}
ASR_BITS = {r"encoder\.embed_positions": 8, "": 5}  # matched in quantisation-aware training
REPLIES = {"temperature": 0.0, "left_chunks": 4}
"""Greedy replies; the flow was trained with two to ten left chunks."""
SPEECH_FILES = ("config.json", "tokenizer.json")
TTS_FILES = ("config.json", "tokenizer.model", "speech.json")
ASR_FILES = ("config.json", "tokenizer.json", "generation_config.json", "preprocessor_config.json")
WEIGHTS = "model.safetensors"


def package_speech(lm: Path, codec: Path, out: Path, no_call_bias: float = 0.0) -> int:
    """Write a speech-to-speech model folder; returns its size in bytes."""
    _package(lm, SPEECH_FILES, out)
    settings = REPLIES | _abilities(lm) | ({"no_call_bias": no_call_bias} if no_call_bias else {})
    (out / "generation_config.json").write_text(json.dumps(settings, indent=2), encoding="utf8")
    for file in sorted(codec.rglob("*")):
        target = out / "codec" / file.relative_to(codec)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors" and file.parent.name != "voices" and not is_packed(file.parent):
            pack_file(file, target, FLOAT16_TENSORS.get(file.name, ()))
        elif file.is_file():
            shutil.copy2(file, target)
    return _size(out)


def _abilities(lm: Path) -> dict[str, Any]:
    """What the language model was trained for: its evaluation has figures of languages and, if any, of tools."""
    metrics = lm / "metrics.json"
    if not metrics.is_file():
        return {}
    figures = json.loads(metrics.read_text(encoding="utf8"))
    languages = sorted(figures.get("speech_speech", {}).get("by_language", {}))
    return ({"tool_calls": True} if "tools" in figures else {}) | ({"languages": languages} if languages else {})


def package_tts(tts: Path, codec: Path, out: Path) -> int:
    """Write a TTS model folder; returns its size in bytes."""
    _package(tts, TTS_FILES, out, TTS_BITS)
    _package(codec, ("config.json",), out / "codec", TTS_CODEC_BITS)
    return _size(out)


def package_asr(asr: Path, out: Path, bits: int | None = None) -> int:
    """Write an ASR model folder; returns its size in bytes."""
    _package(asr, ASR_FILES, out, ASR_BITS if bits is None else {**ASR_BITS, "": bits})
    return _size(out)


def package_draft(draft: Path, out: Path) -> int:
    """Write the folder of an ASR draft or Medusa heads; returns its size in bytes."""
    _package(draft, ("config.json",), out, DRAFT_BITS)
    return _size(out)


def _package(trained: Path, files: Sequence[str], out: Path, bits: Mapping[str, int] | None = None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in files:
        shutil.copy2(trained / name, out / name)
    pack_file(trained / WEIGHTS, out / WEIGHTS, low_bits=bits)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", type=Path, help="folder written by `viva train lm`")
    parser.add_argument("--tts", type=Path, help="folder written by `viva train tts`")
    parser.add_argument("--asr", type=Path, help="folder written by `viva train asr`")
    parser.add_argument("--draft", type=Path, help="folder written by `viva train draft` or `viva train medusa`")
    parser.add_argument("--codec", type=Path, help="folder written by `viva train assemble` or `viva train tts-codec`")
    parser.add_argument("--bits", type=int, help="of an ASR model's matrices, as `viva train asr` rounded them")
    parser.add_argument("--no-call-bias", type=float, default=0.0, help="of a speech-to-speech model's tool decisions")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.asr is not None:
        size = package_asr(options.asr, options.out, options.bits)
    elif options.draft is not None:
        size = package_draft(options.draft, options.out)
    elif options.codec is None or (options.lm is None) == (options.tts is None):
        raise InputError("give --asr, or --draft, or --codec with either --lm or --tts")
    elif options.lm is not None:
        size = package_speech(options.lm, options.codec, options.out, options.no_call_bias)
    else:
        size = package_tts(options.tts, options.codec, options.out)
    print(f"{options.out}: {size / 1e6:.1f} MB")


PROMPT_CODES = (25, 30)
CANDIDATES = 4
EVALUATED_REPLIES = 4
LEFT_CHUNKS = 4


@dataclass(frozen=True)
class EvaluatedPrompt:
    """A voice prompt, and the log-mel L1 distance of replies synthesized with it from the teacher's."""

    text: str
    codes: int
    mel_l1: float


def assemble_codec(speech_encoder: Path, flow: Path, vocoder: Path, teacher: Corpus, out: Path) -> EvaluatedPrompt:
    """Write a folder for `MossSpeechCodec.load` with the best voice prompt of several; returns that prompt."""
    codec = MossSpeechCodec(SpeechEncoder.load(speech_encoder), _flow(flow), _vocoder(vocoder))
    learned, held_out = split_held_out(teacher)
    candidates = _prompts(codec, teacher, learned)
    voice = reply_voice_of(teacher.voices)
    replies = [index for index in held_out.tolist() if teacher.voices[index] == voice][:EVALUATED_REPLIES]
    evaluated = [_evaluate(codec, teacher, index, prompt, replies) for index, prompt in candidates]
    best = min(range(len(evaluated)), key=lambda index: evaluated[index].mel_l1)
    codec.save_voice(short_name(voice), candidates[best][1])
    codec.save(out)
    return evaluated[best]


def _flow(folder: Path) -> FlowDecoder:
    config = read_sizes(folder / "sizes.json").flow
    if config is None:
        raise CheckpointError(
            f"{folder}/sizes.json has no sizes of a flow decoder; give the folder written by `viva train flow`"
        )
    return FlowDecoder.load(folder / FLOW_FILE, config)


def _vocoder(folder: Path) -> HiFT:
    config = read_sizes(folder / "sizes.json").vocoder
    if config is None:
        raise CheckpointError(
            f"{folder}/sizes.json has no sizes of a vocoder; give the folder written by `viva train vocoder`"
        )
    return HiFT.load(folder / "hift.safetensors", config=config)


def _prompts(codec: MossSpeechCodec, teacher: Corpus, indices: np.ndarray) -> list[tuple[int, VoicePrompt]]:
    """Candidate prompts: sentences of about two seconds in whole chunks, so that replies start at a chunk."""
    prompts, voice = [], reply_voice_of(teacher.voices)
    per_code = ENCODER_RATE * codec.samples_per_code // DECODER_RATE
    for index in indices.tolist():
        length = int(teacher.starts[index + 1] - teacher.starts[index]) // per_code
        if length in PROMPT_CODES and teacher.voices[index] == voice:
            prompts.append((index, _prompt(codec, _sound(teacher, index), length)))
        if len(prompts) == CANDIDATES:
            break
    if not prompts:
        raise InputError(
            f"no sentence of the teacher has {' or '.join(map(str, PROMPT_CODES))} codes; give a larger corpus"
        )
    return prompts


def _prompt(codec: MossSpeechCodec, sound: Sound, length: int) -> VoicePrompt:
    mel = _mel(sound)[: length * codec.flow.config.ratio]
    return VoicePrompt(codec.encode(sound)[:length], mel, teacher_vector(codec.flow.config.speaker_dim))


def _evaluate(
    codec: MossSpeechCodec, teacher: Corpus, index: int, prompt: VoicePrompt, replies: list[int]
) -> EvaluatedPrompt:
    voice, distances = codec.flow.voice(prompt), []
    for reply in replies:
        sound = _sound(teacher, reply)
        spoken = codec.speak(codec.encode(sound), voice, LEFT_CHUNKS)
        recorded, generated = _mel(sound), _mel(Sound(spoken.numpy(), DECODER_RATE))
        length = min(len(recorded), len(generated))
        distances.append(float((recorded[:length] - generated[:length]).abs().mean()))
    return EvaluatedPrompt(
        teacher.texts[index], len(prompt.codes), round(float(np.mean(distances)), 4) if distances else 0.0
    )


def _sound(corpus: Corpus, index: int) -> Sound:
    return Sound(corpus[index][0], ENCODER_RATE)


def _mel(sound: Sound) -> Tensor:  # [frame, band]
    samples = torch.from_numpy(sound.mono().resampled(DECODER_RATE).samples[0])
    return VocoderMel(MATCHA_24KHZ)(samples[None])[0].T


def assemble_main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Join a trained speech encoder, flow and vocoder to one codec folder.")
    add_option(parser, "--speech-encoder", "--ear", type=Path, required=True)
    for name in ("flow", "vocoder", "corpus", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args(arguments)
    evaluated = assemble_codec(
        options.speech_encoder, options.flow, options.vocoder, Corpus.load(options.corpus), options.out
    )
    print(json.dumps(asdict(evaluated)), flush=True)


if __name__ == "__main__":
    main()
