"""MOSS-TTS-Nano by ONNX Runtime, without torch: folders of `viva export onnx`, and the published ONNX folders.

A frame is drawn inside a graph, one call each, with the published settings; greedy frames, and `exact` ones that equal
torch's code for code, go through the local transformer step by step.
"""

import json
from collections.abc import Callable, Generator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import Sound
from vivavoce.audio.player import PlaybackClock
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError
from vivavoce.models.moss_audio_tokenizer.config import reference_samples
from vivavoce.models.moss_tts_nano.prompt import (
    MossTTSNanoConfig,
    MossTTSNanoPrompt,
    NanoSampling,
    NanoTokenizerProtocol,
)
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.tts.frame_model import (
    CallerFrames,
    ChunkedPlayback,
    Codes,
    Frame,
    Frames,
    FrameTTS,
    Samples,
    SequenceDraw,
    SpokenPrefix,
    beside,
    spare_cores,
)
from vivavoce.tts.interface import SETTINGS_FILE, SpeechSettings, StoredVoice, VoiceStore

OFFICIAL_CODEC = "OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano-ONNX"
MANIFEST, CODEC_META = "browser_poc_manifest.json", "codec_browser_onnx_meta.json"
HIDDEN, TEXT_STEP, AUDIO_STEP = 0, 1, 2  # `step_type` of the cached local step
MAX_THREADS = 4  # more make it slower, as those who measured it found
LARGEST_UNIFORM = 0.99999994
VOICES_KEPT_READY = 4
TYPES = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}
Arrays = Mapping[str, Any]  # of numpy, or values that stay with the runtime


class Channel(NamedTuple):
    """How one channel is drawn."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float


class OnnxSession:
    """A session; inputs and outputs by name, integers made of the type it wants."""

    def __init__(self, file: Path, threads: int, device: str) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError("ONNX speech needs onnxruntime: pip install 'vivavoce[onnx]'") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        on_gpu = device.startswith("cuda") and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        providers = [*(["CUDAExecutionProvider"] if on_gpu else []), "CPUExecutionProvider"]
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file), options, providers=providers)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{file} cannot be opened as an ONNX graph ({first}); fetch it again") from error
        self.inputs = {each.name: each for each in self._session.get_inputs()}
        self.outputs = [each.name for each in self._session.get_outputs()]
        self._value: Any = onnxruntime.OrtValue.ortvalue_from_numpy

    def __call__(self, given: Arrays) -> dict[str, Any]:
        """Outputs as values that stay with the runtime: `.numpy()` of those that are read."""
        values = {}
        for name, value in given.items():
            is_array = isinstance(value, np.ndarray)
            values[name] = self._value(np.ascontiguousarray(value, self.dtype(name))) if is_array else value
        return dict(zip(self.outputs, self._session.run_with_ort_values(self.outputs, values), strict=True))

    def dtype(self, name: str) -> Any:
        """Of an input."""
        return TYPES[self.inputs[name].type]


class OnnxKVCache(NamedTuple):
    """Keys and values of the rows so far, and how many there are."""

    layers: dict[str, Any]
    rows: int


class OnnxTTS(FrameTTS):
    """Says texts, one at a time in each thread."""

    def __init__(
        self,
        folder: Path,
        codec_folder: Path,
        device: str = "cpu",
        threads: int | None = None,
        voices: str | Path | None = None,
        exact: bool = False,
        tokenizer: NanoTokenizerProtocol | None = None,
        settings: SpeechSettings | None = None,
    ) -> None:
        manifest = _content(folder / MANIFEST)
        meta = _content(codec_folder / CODEC_META)
        known = MossTTSNanoConfig.__dataclass_fields__
        given: dict[str, Any] = {k: v for k, v in manifest.get("tts_config", {}).items() if k in known}
        self.config, self.exact = MossTTSNanoConfig(**given), exact
        self.settings = settings or _settings(folder, manifest)
        self.voices = VoiceStore(self.settings.voices, voices)
        self.prompt = MossTTSNanoPrompt(self.config, tokenizer or SentencePieceTokenizer.load(folder))
        self._meta: dict[str, Any] = {"sample_rate": 48_000, "channels": 2, "frame_samples": 3840, "mark": ""} | meta
        self._open: Callable[[Path, str], OnnxSession] = lambda where, name: OnnxSession(
            where / f"{name}.onnx", threads or max(1, min(MAX_THREADS, spare_cores())), device
        )
        self._folder, self._codec_folder = folder, codec_folder
        self._beside = beside()
        self._voices: dict[Codes, OnnxKVCache] = {}
        self.prefill, self.step = self._open(folder, "moss_tts_prefill"), self._open(folder, "moss_tts_decode_step")
        self.codec_step = self._open(codec_folder, "moss_audio_tokenizer_decode_step")

    @classmethod
    def load(
        cls,
        name: str,
        device: str = "auto",
        dtype: str = "auto",
        codec: str | None = None,
        threads: int | None = None,
        voices: str | Path | None = None,
        exact: bool = False,
    ) -> "OnnxTTS":
        """A folder of graphs or a hub id; the codec's graphs stand beside, in `codec`, or are fetched."""
        if dtype not in ("auto", "float32"):
            raise InputError(f"ONNX speech is float32; {dtype!r} is of the graphs, not of their use")
        folder = hub.resolve(name)
        homes = [
            place for place in (folder, folder / "codec") if (place / "moss_audio_tokenizer_decode_step.onnx").is_file()
        ]
        codec_folder = homes[0] if homes and codec is None else hub.resolve(codec or OFFICIAL_CODEC)
        return cls(folder, codec_folder, device, threads, voices, exact)

    @property
    def rate(self) -> int:
        """Samples a second of what comes out."""
        return int(self._meta["sample_rate"])

    @property
    def channels(self) -> int:
        """Of what comes out."""
        return int(self._meta["channels"])

    @property
    def mark(self) -> str:
        """Whose codes its voices have."""
        return str(self._meta["mark"]) or f"{self.rate} Hz, ONNX"

    @property
    def _parallel_parts(self) -> int:
        return 1

    @cached_property
    def encode(self) -> OnnxSession:
        """The codec's way in, opened when a recording comes."""
        return self._open(self._codec_folder, "moss_audio_tokenizer_encode")

    @cached_property
    def drawn_frame(self) -> OnnxSession:
        """A frame in one call."""
        return self._open(self._folder, "moss_tts_local_fixed_sampled_frame")

    @cached_property
    def local_step(self) -> OnnxSession:
        """One position of a frame."""
        return self._open(self._folder, "moss_tts_local_cached_step")

    def _start_playback(
        self, player: PlaybackClock, clock: Callable[[], float], is_live: bool
    ) -> ChunkedPlayback[dict[str, Any]]:
        seconds = int(self._meta["frame_samples"]) / self.rate
        return ChunkedPlayback(self._decode, self._silence(), seconds, player, clock, self._beside, is_live)

    def _frames(self, text: str, before: SpokenPrefix, seed: int, greedy: bool) -> Frames:
        return CallerFrames(self._speak(text, before, seed, greedy))

    def _encode_reference(self, sound: Sound) -> list[list[int]]:
        frame = int(self._meta["frame_samples"])
        samples = reference_samples(sound, self.rate, self.channels)
        whole = samples[:, : samples.shape[1] // frame * frame]
        made = self.encode({"waveform": whole[None], "input_lengths": np.array([whole.shape[1]])})
        codes: list[list[int]] = made["audio_codes"].numpy()[0, :, : self.config.n_vq].tolist()
        return codes

    def _speak(self, text: str, before: SpokenPrefix, seed: int, greedy: bool) -> Generator[Frame, None, None]:
        rows = self.prompt.speech(before.words + text) + self.prompt.spoken(before.said)
        hidden, past = self._read(before.reference, np.array(rows))
        stepwise = greedy or self.exact
        draw = SequenceDraw(
            _channels(self.settings.sampling, self.config.n_vq, greedy), seed, self.config.audio_vocab_size
        )
        uniform = np.random.default_rng(seed)
        seen = np.zeros((1, self.config.n_vq, self.config.audio_vocab_size), np.int32)
        tokens = self.prompt.count_tokens(text)
        for number in range(self.settings.max_frames(tokens) + 1):
            draw.start_row(past.rows)
            may_stop = number >= self.settings.min_frames(tokens)
            codes = self._stepwise(hidden, draw, may_stop) if stepwise else self._drawn(hidden, seen, uniform, may_stop)
            if codes is None:
                return
            yield codes
            seen[0, np.arange(len(codes)), codes] = 1
            row = np.array([[self.config.audio_assistant_slot_token_id, *codes]])
            hidden, past = self._behind(past, row)

    def _read(self, reference: Codes, text: NDArray[np.int64]) -> tuple[NDArray[np.float32], OnnxKVCache]:
        """The state after a voice and a text. Where the step takes many rows, the voice is read once and kept."""
        voice = np.array(self.prompt.before_text(reference))
        if not isinstance(self.step.inputs["input_ids"].shape[1], str):
            return self._from_start(np.concatenate([voice, text]))
        if reference not in self._voices:
            while len(self._voices) >= VOICES_KEPT_READY:
                self._voices.pop(next(iter(self._voices)))
            self._voices[reference] = self._from_start(voice)[1]
        return self._behind(self._voices[reference], text)

    def _from_start(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], OnnxKVCache]:
        made = self.prefill({"input_ids": rows[None], "attention_mask": np.ones((1, len(rows)))})
        return made["global_hidden"].numpy()[:, -1], _past(made, len(rows))

    def _behind(self, past: OnnxKVCache, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], OnnxKVCache]:
        made = self.step({"input_ids": rows[None], "past_valid_lengths": np.array([past.rows]), **past.layers})
        return made["global_hidden"].numpy()[:, -1], _past(made, past.rows + len(rows))

    def _drawn(
        self, hidden: NDArray[np.float32], seen: NDArray[np.int32], uniform: np.random.Generator, may_stop: bool
    ) -> Frame | None:
        numbers = np.minimum(uniform.random((1, 1 + self.config.n_vq)), LARGEST_UNIFORM)
        made = self.drawn_frame(
            {
                "global_hidden": hidden,
                "repetition_seen_mask": seen,
                "assistant_random_u": numbers[:, 0],
                "audio_random_u": numbers[:, 1:],
            }
        )
        if may_stop and not made["should_continue"].numpy().item():
            return None
        return tuple(made["frame_token_ids"].numpy()[0].tolist())

    def _stepwise(self, hidden: NDArray[np.float32], draw: SequenceDraw, may_stop: bool) -> Frame | None:
        config = self.config
        names = [name for name in self.local_step.inputs if name.startswith("local_past")]
        past: dict[str, Any] = {name: np.zeros((1, 0, config.num_heads, config.head_dim)) for name in names}

        def step(kind: int, text: int = 0, code: int = 0, book: int = 0, length: int = 0) -> dict[str, Any]:
            numbers = {"text_token_id": text, "audio_token_id": code, "channel_index": book, "step_type": kind}
            given = {name: np.array([value]) for name, value in numbers.items()}
            lengths = {"past_valid_lengths": np.array([length])}
            made = self.local_step({"global_hidden": hidden, **given, **lengths, **past})
            past.update({name: made[name.replace("past", "present", 1)] for name in names})
            return made

        ways = [config.audio_assistant_slot_token_id, config.audio_end_token_id]
        stops = step(HIDDEN)["text_logits"].numpy().reshape(-1)[ways]
        if not may_stop:
            stops[1] = -np.inf
        if draw.choose(0, stops) == 1:
            return None
        made, codes = step(TEXT_STEP, text=ways[0], length=1), list[int]()
        for book in range(config.n_vq):
            logits = made["audio_logits"].numpy().reshape(config.n_vq, -1)[book]
            codes.append(draw.sample(1 + book, logits))
            if book + 1 < config.n_vq:
                made = step(AUDIO_STEP, code=codes[-1], book=book, length=book + 2)
        return tuple(codes)

    def _silence(self) -> dict[str, Any]:
        """The codec's state before the first frame: nothing anywhere, positions of −1."""
        given = {name: each for name, each in self.codec_step.inputs.items() if not _is_code_input(name)}
        return {
            name: np.full(each.shape, -1 if "positions" in name else 0, self.codec_step.dtype(name))
            for name, each in given.items()
        }

    def _decode(self, state: dict[str, Any], codes: list[Frame], lead: float = 0.0) -> tuple[Samples, dict[str, Any]]:
        names = sorted((name for name in self.codec_step.inputs if _is_code_input(name)), key=lambda n: "length" in n)
        made = self.codec_step({names[0]: np.array([codes]), names[1]: np.array([len(codes)]), **state})
        return made["audio"].numpy()[0], {name: made[f"{name}_out"] for name in state}


def _is_code_input(name: str) -> bool:
    return "codes" in name or "lengths" in name


def _past(made: dict[str, Any], rows: int) -> OnnxKVCache:
    layers = {name.replace("present", "past", 1): value for name, value in made.items() if name.startswith("present")}
    return OnnxKVCache(layers, rows)


def _channels(sampling: NanoSampling, codebooks: int, greedy: bool) -> list[Channel]:
    drawn = [Channel(*each) for each in sampling.per_channel(codebooks)]
    return [each._replace(temperature=0.0) for each in drawn] if greedy else drawn


def _settings(folder: Path, manifest: dict[str, Any]) -> SpeechSettings:
    if (folder / SETTINGS_FILE).is_file():
        return SpeechSettings.read(folder)
    try:
        given = manifest.get("builtin_voices", [])
        voices = {each["voice"]: StoredVoice(each["voice"], each["prompt_audio_codes"]) for each in given}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} lists voices without {error}; fetch it again") from error
    return SpeechSettings(voices=voices)


def _content(file: Path) -> dict[str, Any]:
    """The content of a JSON file; nothing where there is none."""
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch it again") from error
    return content
