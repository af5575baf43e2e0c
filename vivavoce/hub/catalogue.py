"""The published models that this package can run: ids, revisions, sizes, licences and required files."""

import re
from dataclasses import dataclass
from pathlib import Path

from vivavoce.hub.sources import Source


@dataclass(frozen=True)
class ModelFile:
    """A file of a model: its SHA-256 decides whether it is the publisher's, wherever it comes from."""

    name: str
    sha256: str
    bytes: int
    sources: tuple[Source, ...]
    """Tried in order, after the local folders."""


@dataclass(frozen=True)
class KnownModel:
    """A published model: its id, and the files it must have."""

    name: str
    what: str
    bytes: int
    """Approximate size of the download."""
    files: tuple[str, ...]
    revision: str | None = None
    """The tested revision; None: the newest."""
    mirrors: tuple[str, ...] = ()
    """Other ids of the same model."""
    unused: tuple[str, ...] = ()
    """Patterns of large files that are not read, and therefore not downloaded."""
    codec: str | None = None
    """The codec published with it, if it is a separate model."""
    licence: str = ""
    """Of the weights, as their publisher names it."""
    languages: str = ""
    listed: tuple[ModelFile, ...] = ()
    """All files with their hashes; empty: the model is a repository, fetched as a whole."""

    @property
    def parameters(self) -> int | None:
        """How many parameters it has, as `what` says; None: it does not say."""
        said = re.search(r"([\d.]+) ([MB]) parameters", self.what)
        return None if said is None else round(float(said[1]) * {"M": 1e6, "B": 1e9}[said[2]])

    def missing(self, folder: Path) -> list[str]:
        """Expected files that the folder lacks; a listed file must also have its size."""
        sizes = {file.name: file.bytes for file in self.listed}
        return [name for name in self.files if not _has(folder / name, sizes.get(name))]


def _has(file: Path, size: int | None) -> bool:
    return file.is_file() and (size is None or file.stat().st_size == size)


COSYVOICE_FILES = (
    "llm.pt",
    "flow.pt",
    "hift.pt",
    "campplus.onnx",
    "CosyVoice-BlankEN/vocab.json",
    "CosyVoice-BlankEN/merges.txt",
    "CosyVoice-BlankEN/tokenizer_config.json",
)
COSYVOICE_UNUSED = (
    "CosyVoice-BlankEN/model.safetensors",
    "flow.decoder.estimator.*",
    "flow.encoder.*",
    "*.batch.onnx",
)
WHISPER_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")

PUBLISHED = (
    KnownModel(
        name="fnlp/MOSS-Speech",
        what="speech-to-speech language model, 9.1 B parameters, bfloat16",
        licence="not named",
        languages="English, Mandarin",
        revision="cff025bb41d8459d59abac0b5e44aba7f659ec9e",
        bytes=18_203_000_000,
        files=("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
        mirrors=("OpenMOSS-Team/MOSS-Speech",),
        codec="fnlp/MOSS-Speech-Codec",
    ),
    KnownModel(
        name="fnlp/MOSS-Speech-Codec",
        what="its speech tokenizer and vocoder, 12.5 Hz, one codebook of 16384",
        licence="not named",
        languages="English, Mandarin",
        revision="eeec733e4e1dea7da444d332d8e1621ef257414c",
        bytes=8_053_000_000,
        files=(
            "config.json",
            "model.safetensors",
            "preprocessor_config.json",
            "flow/config.yaml",
            "flow/flow.pt",
            "flow/flow-chunk-5.pt",
            "flow/flow-chunk-25.pt",
            "flow/hift.pt",
            "flow/campplus.onnx",
        ),
        mirrors=("OpenMOSS-Team/MOSS-Speech-Codec",),
    ),
    KnownModel(
        name="FunAudioLLM/Fun-CosyVoice3-0.5B-2512",
        what="CosyVoice 3: text to speech in any voice, 0.86 B parameters, 24 kHz",
        licence="Apache-2.0",
        languages="9, English and Mandarin among them",
        bytes=6_463_600_000,
        files=("cosyvoice3.yaml", "llm.rl.pt", "speech_tokenizer_v3.onnx", *COSYVOICE_FILES),
        unused=COSYVOICE_UNUSED,
    ),
    KnownModel(
        name="FunAudioLLM/CosyVoice2-0.5B",
        what="CosyVoice 2: text to speech in any voice, 0.64 B parameters, 24 kHz",
        licence="Apache-2.0",
        languages="English, Mandarin, Japanese, Korean",
        bytes=3_085_900_000,
        files=("cosyvoice2.yaml", "speech_tokenizer_v2.onnx", *COSYVOICE_FILES),
        unused=COSYVOICE_UNUSED,
    ),
    KnownModel(
        name="OpenMOSS-Team/MOSS-TTS-Nano",
        what="text to speech for CPUs, 0.1 B parameters, 48 kHz stereo",
        licence="not named",
        languages="20, English and Mandarin among them",
        bytes=235_200_000,
        files=("config.json", "pytorch_model.bin", "tokenizer.model"),
        mirrors=("OpenMOSS-Team/MOSS-TTS-Nano-100M",),
        codec="OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano",
    ),
    KnownModel(
        name="OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano",
        what="its codec, 12.5 Hz, 16 codebooks",
        licence="not named",
        bytes=88_000_000,
        files=("config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    ),
    KnownModel(
        name="fnlp/XY_Tokenizer_TTSD_V0",
        what="XY-Tokenizer: codec of 12.5 Hz and 8 codebooks, 16 to 24 kHz",
        licence="not named",
        bytes=2_100_000_000,
        files=("xy_tokenizer.ckpt",),
    ),
    KnownModel(
        name="MediaTek-Research/Breeze-ASR-25",
        what="speech recognition for Taiwanese Mandarin and English, Whisper large-v2, float16",
        licence="Apache-2.0",
        languages="Mandarin, English",
        bytes=3_090_000_000,
        files=WHISPER_FILES,
        unused=("whisper-github/*",),
    ),
    KnownModel(
        name="openai/whisper-large-v2",
        what="speech recognition in 99 languages, 1.5 B parameters",
        licence="Apache-2.0",
        languages="99",
        bytes=6_180_000_000,
        files=WHISPER_FILES,
        unused=("flax_model*", "tf_model*", "pytorch_model*", "*.fp32*"),
    ),
    KnownModel(
        name="nvidia/bigvgan_v2_24khz_100band_256x",
        what="BigVGAN: vocoder of 112 M parameters, 24 kHz",
        licence="MIT",
        bytes=450_000_000,
        files=("config.json", "bigvgan_generator.pt"),
        unused=("bigvgan_discriminator*", "*_3msteps*"),
    ),
)
