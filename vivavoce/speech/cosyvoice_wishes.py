"""How a listener would like to be spoken to, as they say it: "more cheerful, please", "别太快", "in Cantonese".

A sentence is such a wish if every word of it belongs to one; anything else in it makes it part of the conversation.
"""

import re
from dataclasses import replace

from vivavoce.audio.time_stretch import FASTEST, SLOWEST
from vivavoce.speech.cosyvoice_controls import DIALECTS, LOUDEST, QUIETEST, DirectedStyle

FASTER, LOUDER = 1.2, 1.5  # what one wish changes
MOST_WORDS = 10
ASIDE = """could can would you now ok okay and it that make try a an the in to with your bit little much even just so
    for me on keep go thanks thank hey again"""
CUES = "please speak talk say sound be voice tone way manner dialect accent more very"
LESS = "less not too"
WISHES = {
    "faster": "faster quicker fast quickly quick",
    "slower": "slower slow slowly",
    "louder": "louder loud loudly",
    "quieter": "quieter softer quiet quietly soft softly",
    "normal": "normal normally usual naturally",
    "happy": "cheerful cheerfully happy happier happily joyful joyfully",
    "sad": "sad sadder sadly",
    "angry": "angry angrier angrily",
    "robot": "robot robotic",
    **{name: name for name in DIALECTS},
}
MEANING = {word: wish for wish, words in WISHES.items() for word in words.split()}
COMPARATIVES = frozenset(word for word in MEANING if word.endswith("er"))  # need no other word beside them
PHRASES = {"speed up": "faster", "slow down": "slower", "speak up": "louder", "like a robot": "robotic please"}
OPPOSITES = {"faster": "slower", "slower": "faster", "louder": "quieter", "quieter": "louder"}

POLITE = r"(?:请|麻烦)?你?(?:能不能|可不可以|可以|能)?"
ENDING = r"(?:吗|吧|好吗|可以吗)?"
CHINESE_DIALECT = re.compile(rf"{POLITE}用(\w{{2}})话(?:说|讲|表达|回答)?(?:一下)?{ENDING}")
CHINESE_WISH = re.compile(
    rf"{POLITE}(?:用)?(?:说|讲)?话?(?:得|的)?(再|更|别太|别那么|不要太)?"
    r"(快|慢|大声|小声|轻|开心|高兴|伤心|难过|生气|正常)(?:地|的)?(?:语气|声音)?"
    rf"(?:说话|说|讲)?(?:一点儿?|一些|点儿?|些)?{ENDING}"
)
CHINESE_LESS = frozenset({"别太", "别那么", "不要太"})
CHINESE_MEANING = {
    **{"快": "faster", "慢": "slower", "大声": "louder", "小声": "quieter", "轻": "quieter", "正常": "normal"},
    **{"开心": "happy", "高兴": "happy", "伤心": "sad", "难过": "sad", "生气": "angry"},
}


def directed(said: str, manner: DirectedStyle) -> DirectedStyle | None:
    """The manner after what a listener said, if all of it was a wish for how to speak; None: it was something else."""
    bare = re.sub(r"[^\w\s]", " ", said.lower()).strip()
    wish = _chinese_wish("".join(bare.split())) or _english_wish(bare)
    return None if wish is None else _changed(manner, wish)


def _english_wish(said: str) -> str | None:
    for phrase, in_short in PHRASES.items():
        said = re.sub(rf"\b{phrase}\b", in_short, said)
    words = [word for word in said.split() if word not in ASIDE.split()]
    wishes = {MEANING.get(word) for word in words if word not in (CUES + " " + LESS).split()}
    is_told = COMPARATIVES & set(words) or set((CUES + " " + LESS).split()) & set(words)
    if len(said.split()) > MOST_WORDS or len(wishes) != 1 or not is_told:
        return None
    wish = wishes.pop()
    if wish is not None and set(LESS.split()) & set(words):
        return OPPOSITES.get(wish, "normal")
    return wish


def _chinese_wish(said: str) -> str | None:
    if (found := CHINESE_DIALECT.fullmatch(said)) is not None:
        return next((name for name, dialect in DIALECTS.items() if dialect == found[1]), None)
    if (found := CHINESE_WISH.fullmatch(said)) is None or said == found[2]:
        return None
    wish = CHINESE_MEANING[found[2]]
    return OPPOSITES.get(wish, "normal") if found[1] in CHINESE_LESS else wish


def _changed(manner: DirectedStyle, wish: str) -> DirectedStyle:
    if wish == "normal":
        return replace(manner, speed=1.0, volume=1.0, style="", instruction="")
    if wish in ("faster", "slower"):
        speed = manner.speed * (FASTER if wish == "faster" else 1 / FASTER)
        return replace(manner, speed=min(max(speed, SLOWEST), FASTEST))
    if wish in ("louder", "quieter"):
        volume = manner.volume * (LOUDER if wish == "louder" else 1 / LOUDER)
        return replace(manner, volume=min(max(volume, QUIETEST), LOUDEST))
    return replace(manner, style=wish, instruction="")
