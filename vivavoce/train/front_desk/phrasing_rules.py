"""Rules for phrasings that a chat model writes: which lines are kept, and into which split they go."""

import re
import tomllib
import zlib
from dataclasses import dataclass
from functools import cache

from vivavoce.train.front_desk.answers import fixed_replies
from vivavoce.train.front_desk.english_text import normalise
from vivavoce.train.front_desk.language import SpokenLanguage
from vivavoce.train.front_desk.scripts import is_traditional, traditional
from vivavoce.train.front_desk.templates import FOLDER, NearDuplicates

INTENTS = tomllib.loads((FOLDER / "intents.toml").read_text(encoding="utf8"))
HELD_OUT_EVERY = 5
SLOT = re.compile(r"\{(\w+)\}")
MAX_WORDS, MAX_CHARACTERS = 16, 24
BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)、．])?\s*")
LETTERS = {"en": re.compile(r"[A-Za-z' ,.?!-]+"), "zh": re.compile(r"[\u4e00-\u9fff，。？！、 ]+")}
NUMBERS = {  # values have to be slots
    "en": re.compile(
        r"\b(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|noon|midnight|o'clock|monday|tuesday"
        r"|wednesday|thursday|friday|saturday|sunday|tomorrow|tonight)\b"
    ),
    "zh": re.compile("[二三四五六七八九十百兩0-9]|星期|禮拜|明天|明晚|今晚"),
}
ANSWERS = {  # beginnings of what the desk would say, not the guest
    "en": re.compile(
        r"(sure|certainly|of course|yes|here (is|are)|our |we (offer|have|serve|accept)|you can|i can |i will be happy"
        r"|i'm sorry|i am sorry|as an|how (can|may) i (help|assist)|welcome|the restaurant (is|opens|closes)"
        r"|you're welcome|you are welcome|please wait)"
    ),
    "zh": re.compile(
        "(當然|沒問題|我們(有|提供|接受)|您可以|我可以幫|很抱歉|歡迎|不客氣|請稍等|有什麼可以幫|好的，我)"
    ),
}
MAY_BEGIN_SO = ("thanks", "goodbye", "greeting", "decline")  # and corrections: of these "yes" and "sorry" are no answer
REPLY_OVERLAP = 0.75


@dataclass(frozen=True)
class Phrasing:
    """A way to phrase an intent, with slots as `{slot}`; `{number}` is the bare number of `{people}`."""

    language: str
    intent: str
    text: str


def cleaned(line: str, language: SpokenLanguage) -> str:
    """A line of the model as a template: without bullets and quotation marks, and in the script that is shown."""
    text = BULLET.sub("", line).strip().strip("\"'“”「」『』").strip()
    if language.code == "zh":
        text = traditional(text).replace("?", "？").replace(",", "，").replace("!", "！").rstrip("。！")
        return re.sub(r"\s+", "", text)
    text = " ".join(text.rstrip(".!").split())
    return re.sub(r"\bI\b", "i", text[:1].lower() + text[1:])


def fault(phrasing: Phrasing, language: SpokenLanguage) -> str | None:
    """Why a phrasing is not kept; None if it is."""
    text, code = phrasing.text, language.code
    wanted = INTENTS[phrasing.intent]
    slots, required = SLOT.findall(text.replace("{number}", "{people}")), wanted.get("slots", [])
    bare = SLOT.sub("" if code == "zh" else "x", text)
    size = len(bare) if code == "zh" else len(bare.split())
    if not text or size > (MAX_CHARACTERS if code == "zh" else MAX_WORDS):
        return "length"
    if (sorted(slots) != sorted(required)) if required else (set(slots) - set(wanted.get("may", []))):
        return "slots"
    if len(set(slots)) < len(slots) or "{" in bare or "}" in bare:
        return "slots"
    if (bare and not LETTERS[code].fullmatch(bare)) or (code == "zh" and not is_traditional(bare)):
        return "language"
    if phrasing.intent != "decline" and NUMBERS[code].search(bare.lower()):
        return "value"
    return "answer" if _is_answer(phrasing, bare, language) else None


def _is_answer(phrasing: Phrasing, bare: str, language: SpokenLanguage) -> bool:
    """Whether it begins like an answer of the desk, or is nearly one of its replies."""
    if phrasing.intent in MAY_BEGIN_SO or phrasing.intent.startswith("correct_"):
        return False
    if ANSWERS[language.code].match(bare.lower()):
        return True
    words = _words(bare, language.code)
    return any(len(words & reply) >= REPLY_OVERLAP * len(words | reply) for reply in _reply_words(language))


@cache
def _reply_words(language: SpokenLanguage) -> tuple[frozenset[str], ...]:
    return tuple(_words(reply, language.code) for reply in fixed_replies(language))


def _words(text: str, code: str) -> frozenset[str]:
    return frozenset(re.sub(r"\W", "", text) if code == "zh" else normalise(text).split())


@cache
def _written(language: SpokenLanguage) -> NearDuplicates:
    every = [*language.written.values(), *language.training_only.values(), *language.corrections.values()]
    return NearDuplicates([template for templates in every for template in templates], language.plain_words)


class Kept:
    """Phrasings without duplicates, and without what the hand-written templates have."""

    def __init__(self, language: SpokenLanguage) -> None:
        self.language = language
        self._seen: set[tuple[str, ...]] = set()

    def fault(self, phrasing: Phrasing) -> str | None:
        """As `fault`, or that it is a duplicate; what has no fault is a duplicate the next time."""
        found = fault(phrasing, self.language)
        words = self.language.plain_words(phrasing.text)
        if found is None and (words in self._seen or phrasing.text in _written(self.language)):
            found = "duplicate"
        if found is None:
            self._seen.add(words)
        return found


def split_of(phrasing: Phrasing, language: SpokenLanguage, seed: int) -> str:
    """The split of a phrasing, by its normalised form: the same for every spelling and order of phrasings."""
    words = " ".join(language.plain_words(phrasing.text))
    return "train" if zlib.crc32(f"{seed} {words}".encode()) % HELD_OUT_EVERY else "held_out"
