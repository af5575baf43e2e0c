"""Whisper's sizes, special tokens and decoding settings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config
from vivavoce.models.registry import CONVERTED_WHISPER, read_model_config
from vivavoce.models.tokenizers import TextTokenizer

CONV_STRIDE = 2  # mel frames per encoder position
MEL_FRAMES_PER_SECOND = 100
CONVERTED_NAMES = {  # in CTranslate2's config.json
    "alignment_heads": "alignment_heads",
    "suppress_ids": "suppress_tokens",
    "suppress_ids_begin": "begin_suppress_tokens",
}
REQUIRED = {"activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True}
CONFIG_NAMES = {
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}


@dataclass(frozen=True)
class WhisperConfig:
    """Sizes as `config.json` names them; the defaults are large-v2's, which is also Breeze-ASR-25."""

    d_model: int = 1280
    encoder_layers: int = 32
    encoder_attention_heads: int = 20
    encoder_ffn_dim: int = 5120
    decoder_layers: int = 32
    decoder_attention_heads: int = 20
    decoder_ffn_dim: int = 5120
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_target_positions: int = 448
    vocab_size: int = 51865

    def __post_init__(self) -> None:
        for side, heads in (("encoder", self.encoder_attention_heads), ("decoder", self.decoder_attention_heads)):
            if self.d_model % heads:
                raise CheckpointError(f"a Whisper of d_model {self.d_model} cannot have {heads} {side} heads")

    @property
    def window_frames(self) -> int:
        """Mel frames of a window: 3000 (30 s) in every published size."""
        return CONV_STRIDE * self.max_source_positions

    @property
    def window_seconds(self) -> float:
        """Seconds of a window."""
        return self.window_frames / MEL_FRAMES_PER_SECOND

    @classmethod
    def read(cls, folder: str | Path) -> "WhisperConfig":
        """The `config.json` of a folder; other architectures are refused."""
        file = Path(folder) / "config.json"
        values = read_config(file, "Whisper")
        if values.get("model_type", "whisper") != "whisper":
            raise CheckpointError(f"{file} is of a {values['model_type']!r} model, not of a Whisper")
        for name, wanted in REQUIRED.items():
            if values.get(name, wanted) != wanted:
                raise CheckpointError(f"{file} has {name} = {values[name]!r}; only {wanted!r} is supported")
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    @classmethod
    def from_dims(cls, dims: Mapping[str, int]) -> "WhisperConfig":
        """The `dims` of an OpenAI file."""
        try:
            named = {ours: int(dims[theirs]) for theirs, ours in CONFIG_NAMES.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the file's dims are not those of a Whisper ({error!r})") from error
        return cls(**named, encoder_ffn_dim=4 * named["d_model"], decoder_ffn_dim=4 * named["d_model"])

    def write(self, folder: str | Path, **ids: int) -> None:
        """Write `config.json` as transformers reads it; `ids` are its special token ids."""
        fixed = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "dropout": 0.0}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(fixed | REQUIRED | asdict(self) | ids, indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf8")


def _size(d_model: int, layers: int, heads: int, **more: int) -> WhisperConfig:
    ffn = 4 * d_model
    sizes = {"encoder_layers": layers, "decoder_layers": layers}
    return WhisperConfig(d_model, **sizes | more, encoder_attention_heads=heads, decoder_attention_heads=heads,
                         encoder_ffn_dim=ffn, decoder_ffn_dim=ffn)  # fmt: skip


SIZES = {
    "tiny": _size(384, 4, 6),
    "base": _size(512, 6, 8),
    "small": _size(768, 12, 12),
    "medium": _size(1024, 24, 16),
    "large-v2": WhisperConfig(),
    "large-v3": WhisperConfig(num_mel_bins=128, vocab_size=51866),
    "large-v3-turbo": WhisperConfig(num_mel_bins=128, vocab_size=51866, decoder_layers=4),
}


Task = Literal["transcribe", "translate"]
SECONDS_PER_TIMESTAMP = 0.02
PUBLISHED_TEXT_IDS = 50257  # of GPT-2's and of the multilingual BPE; English-only models have one less
PUBLISHED_TIMESTAMPS = 1501
LANGUAGES = (  # in the order of their ids
    *("en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr", "pl", "ca", "nl", "ar"),
    *("sv", "it", "id", "hi", "fi", "vi", "he", "uk", "el", "ms", "cs", "ro", "da", "hu"),
    *("ta", "no", "th", "ur", "hr", "bg", "lt", "la", "mi", "ml", "cy", "sk", "te", "fa"),
    *("lv", "bn", "sr", "az", "sl", "kn", "et", "mk", "br", "eu", "is", "hy", "ne", "mn"),
    *("bs", "kk", "sq", "sw", "gl", "mr", "pa", "si", "km", "sn", "yo", "so", "af", "oc"),
    *("ka", "be", "tg", "sd", "gu", "am", "yi", "lo", "uz", "fo", "ht", "ps", "tk", "nn"),
    *("mt", "sa", "lb", "my", "bo", "tl", "mg", "as", "tt", "haw", "ln", "ha", "ba", "jw"),
    *("su", "yue"),
)
AFTER_LANGUAGES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
OTHER_NAMES = {"nospeech": ("nocaptions",)}


@dataclass(frozen=True)
class WhisperTokens:
    """Ids of the special tokens; ids below `endoftext` are text, ids from `timestamps` on are timestamps."""

    endoftext: int
    startoftranscript: int
    languages: dict[str, int]
    translate: int
    transcribe: int
    startoflm: int
    startofprev: int
    nospeech: int
    notimestamps: int
    is_multilingual: bool = True

    @property
    def timestamps(self) -> int:
        """The id of <|0.00|>."""
        return self.notimestamps + 1

    @property
    def specials(self) -> tuple[int, ...]:
        """Ids that only prompts contain."""
        fixed = (self.startoftranscript, self.translate, self.transcribe, self.startoflm)
        return (*fixed, self.startofprev, self.nospeech)

    @classmethod
    def in_order(cls, endoftext: int, languages: Sequence[str], is_multilingual: bool = True) -> "WhisperTokens":
        """The ids that follow from Whisper's order of special tokens."""
        first = endoftext + 2
        others = {name: first + len(languages) + index for index, name in enumerate(AFTER_LANGUAGES)}
        by_language = {language: first + index for index, language in enumerate(languages)}
        return cls(endoftext, endoftext + 1, by_language, **others, is_multilingual=is_multilingual)

    @classmethod
    def of_vocabulary(cls, size: int) -> "WhisperTokens":
        """The ids of a published vocabulary: English-only (51864), 99 languages (51865) or 100 (51866)."""
        languages = size - PUBLISHED_TEXT_IDS - 2 - len(AFTER_LANGUAGES) - PUBLISHED_TIMESTAMPS
        if size == ENGLISH_ONLY:
            return cls.in_order(PUBLISHED_TEXT_IDS - 1, LANGUAGES[:99], is_multilingual=False)
        if not 99 <= languages <= len(LANGUAGES):
            raise CheckpointError(f"a vocabulary of {size} is not a published Whisper's; its tokenizer.json is needed")
        return cls.in_order(PUBLISHED_TEXT_IDS, LANGUAGES[:languages])

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer, vocabulary: int) -> "WhisperTokens":
        """The ids of the special tokens of a tokenizer."""
        specials = {name: _special(tokenizer, name) for name in ("endoftext", "startoftranscript", *AFTER_LANGUAGES)}
        by_language = {code: id_ for code in LANGUAGES if (id_ := tokenizer.id_of(f"<|{code}|>")) is not None}
        return cls(languages=by_language, is_multilingual=vocabulary != ENGLISH_ONLY, **specials)

    def by_name(self) -> dict[str, int]:
        """The ids of all but the timestamps, by their text."""
        fixed = {name: getattr(self, name) for name in ("endoftext", "startoftranscript", *AFTER_LANGUAGES)}
        return {f"<|{name}|>": id_ for name, id_ in (fixed | self.languages).items()}

    def is_timestamp(self, token: int) -> bool:
        """Whether a token is a timestamp."""
        return token >= self.timestamps

    def seconds(self, token: int) -> float:
        """The time of a timestamp."""
        return (token - self.timestamps) * SECONDS_PER_TIMESTAMP

    def timestamp(self, seconds: float) -> int:
        """The timestamp of a time."""
        return self.timestamps + round(seconds / SECONDS_PER_TIMESTAMP)

    def prompt(
        self,
        language: str | None = None,
        task: Task = "transcribe",
        timestamps: bool = False,
        earlier: Sequence[int] = (),
    ) -> list[int]:
        """The decoder's prompt: [earlier text], start, language, task, and whether there are timestamps."""
        ids = [self.startofprev, *earlier] if earlier else []
        ids.append(self.startoftranscript)
        if self.is_multilingual:
            if language not in self.languages:
                known = ", ".join(list(self.languages)[:12]) + (" …" if len(self.languages) > 12 else "")
                raise InputError(f"language {language!r} is not one of this model's: {known}")
            ids += [self.languages[language], self.translate if task == "translate" else self.transcribe]
        return ids if timestamps else [*ids, self.notimestamps]


def _special(tokenizer: TextTokenizer, name: str) -> int:
    for variant in (name, *OTHER_NAMES.get(name, ())):
        id_ = tokenizer.id_of(f"<|{variant}|>")
        if id_ is not None:
            return id_
    raise CheckpointError(f"the tokenizer has no <|{name}|>; it is not a Whisper's")


WindowFill = Literal["zeros", "silence"]
ENGLISH_ONLY, MULTILINGUAL = 51864, 51865  # published vocabularies: of English, and the smallest of many languages
NON_SPEECH = (  # brackets, notes and other symbols that are not spoken, in the multilingual vocabularies
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542, 873),
    *(893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667, 6585),
    *(6647, 7273, 9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635, 15265, 15618, 16553),
    *(16604, 18362, 18956, 20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650, 32302, 32470, 36865, 42863),
    *(47425, 49870, 50254),
)
NON_SPEECH_ENGLISH = (  # the same in the English-only vocabulary
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 357, 366, 438, 532, 685),
    *(705, 796, 930, 1058, 1220, 1267, 1279, 1303, 1343, 1377, 1391, 1635, 1782, 1875, 2162, 2361, 2488, 3467, 4008),
    *(4211, 4600, 4808, 5299, 5855, 6329, 7203, 9609, 9959, 10563, 10786, 11420, 11709, 11907, 13163, 13697, 13700),
    *(14808, 15306, 16410, 16791, 17992, 19203, 19510, 20724, 22305, 22935, 27007, 30109, 30420, 33409, 34949, 40283),
    *(40493, 40549, 47282, 49146),
)
SPACE_TOKEN = 220  # a lone space, in every published vocabulary
# (layer, head) pairs that follow the speech, by vocabulary, decoder layers and d_model; large-v2's are Breeze-ASR-25's.
ALIGNMENT_HEADS = {
    (ENGLISH_ONLY, 4, 384): "1.0 2.0 2.5 3.0 3.1 3.2 3.3 3.4",
    (ENGLISH_ONLY, 6, 512): "3.3 4.7 5.1 5.5 5.7",
    (ENGLISH_ONLY, 12, 768): "6.6 7.0 7.3 7.8 8.2 8.5 8.7 9.0 9.4 9.8 9.10 10.0 10.1 10.2 10.3 10.6 10.11 11.2 11.4",
    (ENGLISH_ONLY, 24, 1024): "11.4 14.1 14.12 14.14 15.4 16.0 16.4 16.9 17.12 17.14 18.7 18.10 18.15 20.0 20.3 20.9 "
    "20.14 21.12",
    (MULTILINGUAL, 4, 384): "2.2 3.0 3.2 3.3 3.4 3.5",
    (MULTILINGUAL, 6, 512): "3.1 4.2 4.3 4.7 5.1 5.2 5.4 5.6",
    (MULTILINGUAL, 12, 768): "5.3 5.9 8.0 8.4 8.7 8.8 9.0 9.7 9.9 10.5",
    (MULTILINGUAL, 24, 1024): "13.15 15.4 15.15 16.1 20.0 23.4",
    (MULTILINGUAL, 32, 1280): "10.12 13.17 16.11 16.12 16.13 17.15 17.16 18.4 18.11 18.19 19.11 21.2 21.3 22.3 22.9 "
    "22.12 23.5 23.7 23.13 25.5 26.1 26.12 27.15",
    (51866, 32, 1280): "7.0 10.17 12.18 13.12 16.1 17.14 19.11 21.4 24.1 25.6",
    (51866, 4, 1280): "2.4 2.11 3.3 3.6 3.11 3.14",
}


def alignment_heads(config: WhisperConfig) -> tuple[tuple[int, int], ...]:
    """The published heads of this size, else all heads of the later half of the layers."""
    listed = ALIGNMENT_HEADS.get((config.vocab_size, config.decoder_layers, config.d_model))
    if listed is None:
        half = range(config.decoder_layers // 2, config.decoder_layers)
        return tuple((layer, head) for layer in half for head in range(config.decoder_attention_heads))
    pairs = [pair.split(".") for pair in listed.split()]
    return tuple((int(layer), int(head)) for layer, head in pairs)


@dataclass(frozen=True)
class WhisperSettings:
    """Decoding settings of a model. Defaults are OpenAI's; None switches a threshold off."""

    suppressed: tuple[int, ...] = ()
    suppressed_at_start: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    latest_start: float | None = 1.0
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    best_of: int = 5
    max_compression: float | None = 2.4
    min_logprob: float | None = -1.0
    no_speech: float | None = 0.6
    likely_text_is_speech: bool = True
    """Whether a text above `min_logprob` is accepted although the model detects no speech."""
    forget_prompt_above: float = 0.5
    writes_times: bool = True
    """Whether timestamps are decoded by default; a model fine-tuned without them is worse with them."""
    untimed_up_to: float = 0.0
    """Recordings up to this many seconds have no timestamps, unless the options request them."""
    language: str | None = None
    """The language if the options have none; None: it is detected."""
    min_window_seconds: float = 1.0
    """Minimum length of trimmed windows."""
    window_fill: WindowFill = "zeros"
    """Padding of the last window: zeros in the normalised log-mel, or the log-mel of silence."""
    hotword_bonus: float = 2.0

    @classmethod
    def read(cls, folder: str | Path, config: WhisperConfig, tokens: WhisperTokens) -> "WhisperSettings":
        """The `generation_config.json` of a folder over the defaults of the published size.

        CTranslate2's folders have such values in `config.json`, under names of their own.
        """
        file = Path(folder) / "generation_config.json"
        published = cls.of_size(config, tokens)
        if not file.is_file():
            converted = read_model_config(Path(folder)) if (Path(folder) / CONVERTED_WHISPER).is_file() else {}
            known = {name: converted[theirs] for theirs, name in CONVERTED_NAMES.items() if theirs in converted}
            return published.updated(known)
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        except ValueError as error:
            raise CheckpointError(f"{file} is not JSON ({error}); fetch it again") from error
        return published.updated(values)

    @classmethod
    def of_size(cls, config: WhisperConfig, tokens: WhisperTokens) -> "WhisperSettings":
        """The settings of the published model of these sizes."""
        is_published = config.vocab_size >= ENGLISH_ONLY
        symbols = NON_SPEECH_ENGLISH if config.vocab_size == ENGLISH_ONLY else NON_SPEECH
        return cls(
            suppressed=(*(symbols if is_published else ()), *tokens.specials),
            suppressed_at_start=(*((SPACE_TOKEN,) if is_published else ()), tokens.endoftext),
            alignment_heads=alignment_heads(config),
        )

    def updated(self, values: Mapping[str, Any]) -> "WhisperSettings":
        """These settings with the values of a generation config, by its names."""
        get = values.get
        heads, latest = get("alignment_heads"), get("max_initial_timestamp_index")
        never, not_first = get("suppress_tokens"), get("begin_suppress_tokens")
        return replace(
            self,
            suppressed=self.suppressed if never is None else tuple(never),
            suppressed_at_start=self.suppressed_at_start if not_first is None else tuple(not_first),
            alignment_heads=tuple((layer, head) for layer, head in heads) if heads else self.alignment_heads,
            latest_start=self.latest_start if latest is None else latest * SECONDS_PER_TIMESTAMP,
            max_compression=get("compression_ratio_threshold", self.max_compression),
            min_logprob=get("logprob_threshold", self.min_logprob),
            no_speech=get("no_speech_threshold", self.no_speech),
            likely_text_is_speech=get("likely_text_is_speech", self.likely_text_is_speech),
            writes_times=get("writes_timestamps", self.writes_times),
            untimed_up_to=get("untimed_up_to", self.untimed_up_to),
            language=get("default_language", self.language),
            min_window_seconds=get("shortest_window", self.min_window_seconds),
            window_fill=get("window_fill", self.window_fill),
        )
