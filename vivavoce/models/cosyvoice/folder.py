"""CosyVoice 2 and 3 in their published folders: networks for reference recordings, text tokenizer, sizes, loading.

`graphed` replays flow and vocoder as CUDA graphs.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.audio.io import Sound
from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.mel import COSYVOICE3_24KHZ, MATCHA_24KHZ, KaldiFbank, VocoderMel, WhisperMel
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError
from vivavoce.models.checkpoint import first_line
from vivavoce.models.cosyvoice.dit import CosyVoice3Flow, CosyVoice3FlowConfig, DiTConfig, LookaheadConfig
from vivavoce.models.cosyvoice.lm import END_OF_PROMPT, CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.flow.cuda import GraphedFlow
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig, FlowSpeech
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTConfig
from vivavoce.models.hift.cuda import GraphedCausalHiFT, GraphedVocoder
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.registry import COSYVOICE_LMS, COSYVOICE_VERSIONS
from vivavoce.models.tokenizers import TextTokenizer

RATE = KaldiFbank.RATE


class OnnxFile:
    """An ONNX network on the CPU."""

    def __init__(self, file: str | Path, what: str) -> None:
        """`what` names the feature that needs the network, for error messages."""
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError(f"{what} needs onnxruntime: pip install 'vivavoce[onnx]'") from error
        if not Path(file).is_file():
            raise CheckpointError(f"{file} does not exist; the codec's folder must have it")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
        except Exception as error:  # the exceptions of onnxruntime share no base class
            raise CheckpointError(f"{file} cannot be read as ONNX ({first_line(error)}); fetch it again") from error
        self._inputs = [each.name for each in self._session.get_inputs()]

    def run(self, *arrays: NDArray[Any]) -> NDArray[Any]:
        """The first output; inputs in the file's order."""
        outputs = self._session.run(None, dict(zip(self._inputs, arrays, strict=True)))
        return np.asarray(outputs[0])


class SpeakerEmbedder:
    """Sound at 16 kHz → x-vector."""

    def __init__(self, file: str | Path) -> None:
        self._network = OnnxFile(file, "a voice's speaker vector")
        self.fbank = KaldiFbank(subtract_mean=True)

    def embed(self, samples: Tensor) -> Tensor:
        """The speaker's vector.  # [time] → [dim]"""
        if samples.ndim != 1 or not torch.isfinite(samples).all():
            raise InputError(f"a speaker vector needs finite samples [time], not {list(samples.shape)}")
        features = self.fbank(samples.cpu().float()[None])  # [1, frame, 80]
        return torch.from_numpy(self._network.run(features.numpy()).astype(np.float32)).flatten()


TOKENIZERS = {2: "speech_tokenizer_v2.onnx", 3: "speech_tokenizer_v3.onnx"}
SPEAKER = "campplus.onnx"
MEL_SPECS = {2: MATCHA_24KHZ, 3: COSYVOICE3_24KHZ}  # by version: they differ in the highest frequency
FRAMES_PER_CODE = 2  # of mel
MAX_REFERENCE_SECONDS = 30.0
MIN_REFERENCE_SECONDS = 1.0
LOWEST_RATE = 16_000
SILENCE_DBFS = -60.0


class Rates(NamedTuple):
    """Sample rates of input and output."""

    input: int = 16_000
    output: int = 24_000


class CosyVoiceSpeechTokenizer:
    """Speech codes and voice prompts of recordings, by the published networks of a folder."""

    rates = Rates()

    def __init__(self, folder: str | Path, version: int) -> None:
        folder = Path(folder)
        self._tokenizer = OnnxFile(folder / TOKENIZERS[version], "a voice's speech codes")
        self._speaker = SpeakerEmbedder(folder / SPEAKER)
        self._log_mel, self._mel = WhisperMel(mels=128), VocoderMel(MEL_SPECS[version])

    def codes(self, sound: Sound) -> Tensor:
        """Speech codes of a recording of at most 30 s, 25 per second.  # int64 [code]"""
        if sound.seconds > MAX_REFERENCE_SECONDS:
            raise InputError(f"the recording has {sound.seconds:.1f} s; give at most {MAX_REFERENCE_SECONDS:.0f}")
        log_mel = self._log_mel(mono_samples(sound, self.rates.input)[None])  # [1, 128, frame]
        codes = self._tokenizer.run(log_mel.numpy(), np.array([log_mel.shape[-1]], dtype=np.int32))
        return torch.from_numpy(codes.astype(np.int64)).flatten()

    def reference(self, sound: Sound) -> VoicePrompt:
        """The voice prompt of a recording; codes and mel have equal length."""
        check_reference(sound)
        codes = self.codes(sound)
        mel = self._mel(mono_samples(sound, self.rates.output)[None])[0].T  # [frame, band]
        length = min(len(codes), len(mel) // FRAMES_PER_CODE)
        speaker = self._speaker.embed(mono_samples(sound, self.rates.input))
        return VoicePrompt(codes[:length], mel[: length * FRAMES_PER_CODE].contiguous(), speaker)


def check_reference(sound: Sound) -> None:
    """Raise `InputError` unless a recording is usable as a voice."""
    if sound.seconds > MAX_REFERENCE_SECONDS or sound.seconds < MIN_REFERENCE_SECONDS:
        raise InputError(
            f"the voice recording has {sound.seconds:.1f} s; give {MIN_REFERENCE_SECONDS:.0f} to "
            f"{MAX_REFERENCE_SECONDS:.0f}, best 5 to 10"
        )
    if sound.rate < LOWEST_RATE:
        raise InputError(f"the voice recording has {sound.rate} Hz; give at least {LOWEST_RATE}")
    if (level := rms_dbfs(sound.samples)) < SILENCE_DBFS:
        raise InputError(f"the voice recording is silent ({level:.0f} dBFS); give one with speech in it")


def mono_samples(sound: Sound, rate: int) -> Tensor:
    """A sound of any rate and channels as mono samples.  # [time]"""
    return torch.from_numpy(sound.mono().resampled(rate).samples[0])


TOKENIZER_FOLDER = "CosyVoice-BlankEN"
EVENTS = (
    *("[breath]", "<strong>", "</strong>", "[noise]", "[laughter]", "[cough]", "[clucking]", "[accent]"),
    *("[quick_breath]", "<laughter>", "</laughter>", "[hissing]", "[sigh]", "[vocalized-noise]", "[lipsmack]", "[mn]"),
)
END_OF_SYSTEM = "<|endofsystem|>"
ARPABET = """
    AA AA0 AA1 AA2 AE AE0 AE1 AE2 AH AH0 AH1 AH2 AO AO0 AO1 AO2 AW AW0 AW1 AW2 AY AY0 AY1 AY2 B CH D DH EH EH0 EH1
    EH2 ER ER0 ER1 ER2 EY EY0 EY1 EY2 F G HH IH IH0 IH1 IH2 IY IY0 IY1 IY2 JH K L M N NG OW OW0 OW1 OW2 OY OY0 OY1
    OY2 P R S SH T TH UH UH0 UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH
"""
PINYIN = """
    a ai an ang ao b c ch d e ei en eng f g h i ian in ing iu ià iàn iàng iào iá ián iáng iáo iè ié iòng ióng iù iú
    iā iān iāng iāo iē iě iōng iū iǎ iǎn iǎng iǎo iǒng iǔ j k l m n o ong ou p q r s sh t u uang ue un uo uà uài uàn
    uàng uá uái uán uáng uè ué uì uí uò uó uā uāi uān uāng uē uě uī uō uǎ uǎi uǎn uǎng uǐ uǒ vè w x y z zh à ài àn
    àng ào á ái án áng áo è èi èn èng èr é éi én éng ér ì ìn ìng í ín íng ò òng òu ó óng óu ù ùn ú ún ā āi ān āng āo
    ē ēi ēn ēng ě ěi ěn ěng ěr ī īn īng ō ōng ōu ū ūn ǎ ǎi ǎn ǎng ǎo ǐ ǐn ǐng ǒ ǒng ǒu ǔ ǔn ǘ ǚ ǜ
"""
PHONEMES = tuple(f"[{phoneme}]" for phoneme in (ARPABET + PINYIN).split())
ADDED = {2: (END_OF_PROMPT, *EVENTS), 3: (END_OF_PROMPT, *EVENTS, END_OF_SYSTEM, *PHONEMES)}
"""Added tokens by version, in the order of their ids."""

# Qwen2's pre-tokenizer: contractions, words with the character before them, single digits, punctuation with trailing
# line ends, line ends, and spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(folder: str | Path, version: int) -> TextTokenizer:
    """The tokenizer of a model's folder: Qwen2's with the added tokens of its version."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise MissingDependencyError("text needs the tokenizers package: pip install tokenizers") from error
    folder = Path(folder) / TOKENIZER_FOLDER
    files = [folder / name for name in ("vocab.json", "merges.txt", "tokenizer_config.json")]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}; fetch the model again")
    try:
        backend = Tokenizer(models.BPE.from_file(str(files[0]), str(files[1])))
        own = json.loads(files[2].read_text(encoding="utf8"))["added_tokens_decoder"]
        own_tokens = [own[number]["content"] for number in sorted(own, key=int)]
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{folder} does not have Qwen2's tokenizer ({error}); fetch the model again") from error
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (*own_tokens, *ADDED[version])])
    return TextTokenizer(backend)


VERSION_FILES = COSYVOICE_VERSIONS
(LM, REINFORCED_LM), FLOW, VOCODER = COSYVOICE_LMS, "flow.pt", "hift.pt"
SIZES = "sizes.json"  # written by `CosyVoiceSizes.write`; published folders have no such file
VOCODER_LOOK_RIGHT = 8  # mel frames, of version 2


def version_of(folder: str | Path) -> int | None:
    """The CosyVoice version of a folder; None if it is neither."""
    return next((version for version, name in VERSION_FILES.items() if (Path(folder) / name).is_file()), None)


@dataclass(frozen=True)
class CosyVoiceSizes:
    """Sizes of the three models."""

    lm: CosyVoiceLMConfig
    flow: FlowConfig | CosyVoice3FlowConfig
    vocoder: HiFTConfig

    @classmethod
    def published(cls, version: int) -> "CosyVoiceSizes":
        """Sizes of CosyVoice2-0.5B or Fun-CosyVoice3-0.5B-2512."""
        if version == 2:
            return cls(CosyVoiceLMConfig.cosyvoice2(), FlowConfig.cosyvoice2(), HiFTConfig())
        return cls(CosyVoiceLMConfig.cosyvoice3(), CosyVoice3FlowConfig(), CausalHiFTConfig())

    @classmethod
    def of_folder(cls, folder: Path, version: int) -> "CosyVoiceSizes":
        """The sizes file of a folder, or the published sizes."""
        file = folder / SIZES
        if not file.is_file():
            return cls.published(version)
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
            flow, vocoder = values["flow"], values["vocoder"]
            lists = {name: tuple(value) for name, value in vocoder.items() if isinstance(value, list)}
            encoder, estimator = flow.pop("encoder"), flow.pop("estimator")
            lm = CosyVoiceLMConfig(**values["lm"])
            if version == 2:
                return cls(
                    lm,
                    FlowConfig(
                        **flow, encoder=FlowEncoderConfig(**encoder), estimator=FlowEstimatorConfig(**estimator)
                    ),
                    HiFTConfig(**(vocoder | lists)),
                )
            return cls(
                lm,
                CosyVoice3FlowConfig(**flow, encoder=LookaheadConfig(**encoder), estimator=DiTConfig(**estimator)),
                CausalHiFTConfig(**(vocoder | lists)),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} does not have the sizes of a CosyVoice ({error})") from error

    def write(self, folder: Path) -> None:
        """Write the sizes file for `of_folder`."""
        parts = {name: dataclasses.asdict(getattr(self, name)) for name in ("lm", "flow", "vocoder")}
        parts["vocoder"].pop("f0_dtype", None)  # always float64
        (folder / SIZES).write_text(json.dumps(parts, indent=2), encoding="utf8")


@dataclass(frozen=True)
class CosyVoiceParts:
    """The loaded parts of a folder."""

    lm: CosyVoiceLM
    speech: FlowSpeech
    tokenizer: TextTokenizer
    speech_tokenizer: CosyVoiceSpeechTokenizer

    @property
    def version(self) -> int:
        """2 or 3."""
        return self.lm.config.version


def load_cosyvoice(
    folder: str | Path,
    device: torch.device | str = "cpu",
    lm_dtype: torch.dtype = torch.float32,
    flow_dtype: torch.dtype = torch.float32,
    reinforced: bool = False,
) -> CosyVoiceParts:
    """A published folder; the vocoder is always in float32.

    `reinforced` selects version 3's `llm.rl.pt`, as does a folder without `llm.pt`.
    """
    folder = Path(folder)
    version = version_of(folder)
    if version is None:
        files = " nor ".join(VERSION_FILES.values())
        raise CheckpointError(f"{folder} has neither {files}; it is not a CosyVoice 2 or 3")
    lm_file = language_model(folder, reinforced)
    absent = [file.name for file in (lm_file, folder / FLOW, folder / VOCODER) if not _exists(file)]
    if absent:
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}; fetch the model again")
    sizes = CosyVoiceSizes.of_folder(folder, version)
    return CosyVoiceParts(
        CosyVoiceLM.load(lm_file, sizes.lm, device, lm_dtype),
        load_speech(folder, sizes, device, flow_dtype),
        load_tokenizer(folder, version),
        CosyVoiceSpeechTokenizer(folder, version),
    )


def language_model(folder: Path, reinforced: bool = False) -> Path:
    """The file of a folder's language model."""
    plain, reinforced_file = folder / LM, folder / REINFORCED_LM
    return reinforced_file if reinforced or (_exists(reinforced_file) and not _exists(plain)) else plain


def _exists(file: Path) -> bool:
    """Whether a published file exists, as published or quantised."""
    return file.is_file() or file.with_suffix(".safetensors").is_file()


def load_speech(folder: Path, sizes: CosyVoiceSizes, device: torch.device | str, dtype: torch.dtype) -> FlowSpeech:
    """Flow and vocoder of a folder."""
    if isinstance(sizes.flow, FlowConfig):
        vocoder = HiFT.load(folder / VOCODER, device, sizes.vocoder)
        flow = FlowDecoder.load(folder / FLOW, sizes.flow, device, dtype)
        return FlowSpeech(flow, HiFTStream(vocoder, VOCODER_LOOK_RIGHT))
    assert isinstance(sizes.vocoder, CausalHiFTConfig)
    causal = CausalHiFT.load(folder / VOCODER, device, sizes.vocoder)
    return FlowSpeech(CosyVoice3Flow.load(folder / FLOW, sizes.flow, device, dtype), causal)


PREFIX_STEP = 125  # codes: all voices of up to five seconds share graphs


def graphed(speech: FlowSpeech) -> FlowSpeech:
    """Flow and vocoder replayed as CUDA graphs."""
    flow, vocoder = GraphedFlow(speech.flow, PREFIX_STEP), speech.vocoder
    if isinstance(vocoder, CausalHiFT):
        return FlowSpeech(flow, GraphedCausalHiFT(vocoder))
    assert isinstance(vocoder, HiFTStream)
    return FlowSpeech(flow, GraphedVocoder(vocoder))


def warm_up(speech: FlowSpeech, voice: FlowVoice, batches: Sequence[int], left_chunks: int | None) -> None:
    """Capture first and recurring hops before the first reply."""
    config, first = speech.flow.config, speech.flow.first_hop(voice)
    for streams in sorted(batches, reverse=True):  # the largest first: the smaller ones reuse its memory
        states = [speech.start(voice, left_chunks, seed) for seed in range(streams)]
        for size in (first + config.lookahead, config.chunk, config.chunk, 2 * config.chunk):
            codes = [torch.zeros(size, dtype=torch.int64)] * streams
            _, states = speech.step_batch(states, codes, [False] * streams)
