"""CosyVoice 2 and 3 from the folders they are published in, as those are."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vivavoce.errors import CheckpointError
from vivavoce.models.causal_hift import CausalHiFT, CausalHiFTConfig
from vivavoce.models.cosyvoice3_dit import DiTConfig
from vivavoce.models.cosyvoice3_flow import CosyVoice3Flow, CosyVoice3FlowConfig, LookaheadConfig
from vivavoce.models.cosyvoice_ear import CosyVoiceSpeechTokenizer
from vivavoce.models.cosyvoice_lm import CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.cosyvoice_tokens import load_tokenizer
from vivavoce.models.flow import FlowConfig, FlowDecoder
from vivavoce.models.flow_encoder import FlowEncoderConfig
from vivavoce.models.flow_estimator import FlowEstimatorConfig
from vivavoce.models.flow_speech import FlowSpeech
from vivavoce.models.hift import HiFT
from vivavoce.models.hift_geometry import HiFTConfig
from vivavoce.models.hift_stream import HiFTStream
from vivavoce.models.tokenizer import TextTokenizer

VERSION_FILES = {2: "cosyvoice2.yaml", 3: "cosyvoice3.yaml"}
LM, REINFORCED_LM, FLOW, VOCODER = "llm.pt", "llm.rl.pt", "flow.pt", "hift.pt"
SIZES = "sizes.json"  # ours, for checkpoints of other sizes than the published ones, which have no such file
VOCODER_LOOK_RIGHT = 8  # mel frames, of version 2


def version_of(folder: str | Path) -> int | None:
    """Which CosyVoice a folder holds; None: neither."""
    return next((version for version, name in VERSION_FILES.items() if (Path(folder) / name).is_file()), None)


@dataclass(frozen=True)
class CosyVoiceSizes:
    """Sizes of the three models."""

    lm: CosyVoiceLMConfig
    flow: FlowConfig | CosyVoice3FlowConfig
    vocoder: HiFTConfig

    @classmethod
    def published(cls, version: int) -> "CosyVoiceSizes":
        """Of CosyVoice2-0.5B or Fun-CosyVoice3-0.5B-2512."""
        if version == 2:
            return cls(CosyVoiceLMConfig.cosyvoice2(), FlowConfig.cosyvoice2(), HiFTConfig())
        return cls(CosyVoiceLMConfig.cosyvoice3(), CosyVoice3FlowConfig(), CausalHiFTConfig())

    @classmethod
    def of_folder(cls, folder: Path, version: int) -> "CosyVoiceSizes":
        """What the folder says, or the published ones."""
        file = folder / SIZES
        if not file.is_file():
            return cls.published(version)
        try:
            given: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
            flow, vocoder = given["flow"], given["vocoder"]
            lists = {name: tuple(value) for name, value in vocoder.items() if isinstance(value, list)}
            encoder, estimator = flow.pop("encoder"), flow.pop("estimator")
            lm = CosyVoiceLMConfig(**given["lm"])
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
            raise CheckpointError(f"{file} does not give the sizes of a CosyVoice ({error})") from error

    def write(self, folder: Path) -> None:
        """So that `of_folder` finds them."""
        parts = {name: dataclasses.asdict(getattr(self, name)) for name in ("lm", "flow", "vocoder")}
        parts["vocoder"].pop("f0_dtype", None)  # always float64
        (folder / SIZES).write_text(json.dumps(parts, indent=2), encoding="utf8")


@dataclass(frozen=True)
class CosyVoiceParts:
    """Everything a folder holds, loaded."""

    lm: CosyVoiceLM
    speech: FlowSpeech
    tokenizer: TextTokenizer
    ear: CosyVoiceSpeechTokenizer

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

    `reinforced` takes version 3's `llm.rl.pt`, and so does a folder that has no other.
    """
    folder = Path(folder)
    version = version_of(folder)
    if version is None:
        raise CheckpointError(f"{folder} has neither {' nor '.join(VERSION_FILES.values())}; it is no CosyVoice 2 or 3")
    lm_file = language_model(folder, reinforced)
    absent = [file.name for file in (lm_file, folder / FLOW, folder / VOCODER) if not _is_here(file)]
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
    """The file of a folder's language model, by its published name."""
    plain, better = folder / LM, folder / REINFORCED_LM
    return better if reinforced or (_is_here(better) and not _is_here(plain)) else plain


def _is_here(file: Path) -> bool:
    """Whether a published file is there, as it was published or quantised."""
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
