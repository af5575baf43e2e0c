"""Languages as `/v1/audio/*` names them: English names in transcripts, and the languages of a text's script."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

LANGUAGE_NAMES = {
    **{"en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean"},
    **{"fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan"},
    **{"nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi"},
    **{"fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay"},
    **{"cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian"},
    **{"th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin"},
    **{"mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian"},
    **{"lv": "latvian", "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian", "kn": "kannada"},
    **{"et": "estonian", "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian"},
    **{"ne": "nepali", "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian", "sw": "swahili"},
    **{"gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer", "sn": "shona"},
    **{"yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan", "ka": "georgian", "be": "belarusian"},
    **{"tg": "tajik", "sd": "sindhi", "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao"},
    **{"uz": "uzbek", "fo": "faroese", "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk"},
    **{"mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog"},
    **{"mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian", "ln": "lingala", "ha": "hausa"},
    **{"ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese"},
}
"""By the codes of Whisper."""
CODES = {name: code for code, name in LANGUAGE_NAMES.items()}
SCRIPTS = {  # by the first word of a character's Unicode name; Latin letters are written in too many languages
    "CJK": ("zh", "ja", "yue"),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "HANGUL": ("ko",),
    "CYRILLIC": ("ru", "uk", "bg", "sr", "mk", "be", "kk", "mn", "tg", "tt", "ba"),
    "ARABIC": ("ar", "fa", "ur", "ps", "sd"),
    "HEBREW": ("he", "yi"),
    "GREEK": ("el",),
    "DEVANAGARI": ("hi", "mr", "ne", "sa"),
    "BENGALI": ("bn", "as"),
    "THAI": ("th",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "ARMENIAN": ("hy",),
    "GEORGIAN": ("ka",),
}


def language_name(code: str) -> str:
    """The name of a language as OpenAI's transcripts have it; a code without one is returned as it is."""
    return LANGUAGE_NAMES.get(code, code)


def language_code(language: str) -> str:
    """The code of a language that is given by its code or its name."""
    return CODES.get(language.lower(), language.lower())


def unspoken_languages(text: str, spoken: Sequence[str]) -> tuple[str, ...]:
    """The languages of a text, if its script says that it is in none of those that are spoken; else none."""
    letters = Counter(unicodedata.name(each, "").partition(" ")[0] for each in text if each.isalpha())
    if not letters or not spoken:
        return ()
    languages = SCRIPTS.get(letters.most_common(1)[0][0], ())
    return () if set(languages) & set(spoken) else languages
