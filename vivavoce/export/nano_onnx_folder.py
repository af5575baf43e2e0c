"""What stands beside the ONNX graphs of MOSS-TTS-Nano, so that a runtime needs nothing else: tokenizer and manifest."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vivavoce.models.moss_audio_tokenizer_config import MossAudioTokenizerConfig
from vivavoce.models.moss_audio_tokenizer_nano import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano_config import MossTTSNanoConfig
from vivavoce.models.moss_tts_nano_prompt import (
    ASSISTANT_ROLE,
    BETWEEN_TURNS,
    OTHER_FIELDS,
    REFERENCE_FIELD,
    USER_END,
    USER_ROLE,
)
from vivavoce.models.sentencepiece_tokenizer import SentencePieceTokenizer
from vivavoce.speech.settings import FILE as SETTINGS
from vivavoce.speech.settings import SpeechSettings

FORMAT_VERSION = 1
MANIFEST = "browser_poc_manifest.json"
TTS_META, CODEC_META = "tts_browser_onnx_meta.json", "codec_browser_onnx_meta.json"


def write_beside(folder: Path, out: Path) -> None:
    """What a runtime needs besides the graphs: tokenizer, settings, and the manifest with ids, templates and voices."""
    config, settings = MossTTSNanoConfig.read(folder), SpeechSettings.read(folder)
    encode = SentencePieceTokenizer.load(folder).encode
    shutil.copy(folder / "tokenizer.model", out / "tokenizer.model")
    if (folder / SETTINGS).is_file():
        shutil.copy(folder / SETTINGS, out / SETTINGS)
    manifest = {
        "format_version": FORMAT_VERSION,
        "model_files": {"tts_meta": TTS_META, "codec_meta": CODEC_META, "tokenizer_model": "tokenizer.model"},
        "tts_config": asdict(config),
        "prompt_templates": {
            "user_prompt_prefix_token_ids": [
                config.im_start_token_id, *encode(USER_ROLE), *encode(REFERENCE_FIELD)
            ],
            "user_prompt_after_reference_token_ids": encode(OTHER_FIELDS),
            "assistant_prompt_prefix_token_ids": [
                *encode(USER_END), config.im_end_token_id, *encode(BETWEEN_TURNS), config.im_start_token_id,
                *encode(ASSISTANT_ROLE),
            ],
        },
        "generation_defaults": asdict(settings.sampling) | {"do_sample": True, "sample_mode": "fixed"},
        "builtin_voices": [
            {"voice": name, "display_name": name, "group": "", "audio_file": "", "prompt_audio_codes": voice.codes}
            for name, voice in settings.voices.items()
        ],
        "text_samples": [],
    }  # fmt: skip
    codec: dict[str, Any] = {}
    if (folder / "codec" / "config.json").is_file():
        sizes = MossAudioTokenizerConfig.read(folder / "codec")
        codec = {
            "sample_rate": sizes.sample_rate, "channels": sizes.channels, "frame_samples": sizes.frame_samples,
            "num_quantizers": sizes.quantizer.num_quantizers,
            "mark": MossAudioTokenizerNano.load(folder / "codec").mark,
        }  # fmt: skip
    for name, content in ((MANIFEST, manifest), (TTS_META, {"config": asdict(config)}), (CODEC_META, codec)):
        (out / name).write_text(json.dumps(content), encoding="utf8")
