"""A trained recogniser as a checkpoint that transformers reads too."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivavoce.models.whisper import Whisper
from vivavoce.train.recogniser.vocabulary import Vocabulary

SHORTEST_HEARD = 1.2  # seconds it hears at once as well as those it was taught with


def save_whisper(
    model: Whisper, vocabulary: Vocabulary, folder: Path, heads: Sequence[tuple[int, int]] | None = None
) -> None:
    """Weights as float16, `config.json`, `tokenizer.json`, `generation_config.json`, `preprocessor_config.json`.

    `heads` are those that tell when words were said, by layer and number; the last layer's, if nobody looked for them.
    """
    last = [(model.config.decoder_layers - 1, head) for head in range(model.config.decoder_attention_heads)]
    ids = vocabulary.tokens
    special = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), ids.endoftext)
    special["decoder_start_token_id"] = ids.startoftranscript
    kept = Whisper(model.config).half()
    kept.load_state_dict(model.state_dict())
    kept.save(folder, **special)
    vocabulary.write(folder)
    begin_suppressed = [*vocabulary.encode("")[:1], ids.endoftext]
    generation: dict[str, Any] = {
        **special,
        "begin_suppress_tokens": begin_suppressed,
        "suppress_tokens": list(ids.specials),
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": id_ for code, id_ in ids.languages.items()},
        "task_to_id": {"transcribe": ids.transcribe, "translate": ids.translate},
        "no_timestamps_token_id": ids.notimestamps,
        "prev_sot_token_id": ids.startofprev,
        "max_initial_timestamp_index": 100,
        "shortest_window": SHORTEST_HEARD,
        "window_fill": "silence",  # as in its training batches
        "untimed_up_to": model.config.window_seconds,  # it learned more words than times
        "likely_text_is_speech": False,  # it was taught to say that nobody speaks; what it writes then means nothing
        "max_length": model.config.max_target_positions,
        "alignment_heads": [list(pair) for pair in heads or last],
    }
    seconds = model.config.window_seconds
    preprocessor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": model.config.num_mel_bins,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": int(seconds),
        "n_samples": int(seconds * 16_000),
        "nb_max_frames": model.config.window_frames,
        "padding_side": "right",
        "padding_value": 0.0,
    }
    for name, values in (("generation_config", generation), ("preprocessor_config", preprocessor)):
        write_json(folder / f"{name}.json", values)


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write values so that people can read them."""
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf8")
