"""A `tokenizer.json` with the ids of the published multilingual vocabulary, and pieces of its own."""

from itertools import product

from vivavoce.models.whisper.config import LANGUAGES
from vivavoce.train.asr import byte_letters


def published_tokenizer() -> dict:
    """Bytes, pairs and triples of letters, special tokens, timestamps."""
    letters = byte_letters()
    visible = [letters[byte] for byte in range(32, 127)]
    pairs = list(product(visible, visible))
    merges = [*pairs, *((first + second, third) for first, second in pairs for third in visible[1:60])][: 50257 - 256]
    vocabulary = {piece: id_ for id_, piece in enumerate([*letters.values(), *("".join(pair) for pair in merges)])}
    names = ["endoftext", "startoftranscript", *LANGUAGES[:99], "translate", "transcribe", "startoflm", "startofprev"]
    names += ["nospeech", "notimestamps", *(f"{time * 0.02:.2f}" for time in range(1501))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 50257 + index, "content": f"<|{name}|>", "special": not name[0].isdigit(), **flags}
            for index, name in enumerate(names)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [list(pair) for pair in merges]},
    }
