"""Speaking styles from words: instructions given with a text, and requests that a user makes in a conversation.

Every model can change its speed; all else needs a `Directable` model. Instructions that a model cannot follow are
refused.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from vivavoce.audio.stretch import FASTEST, SLOWEST
from vivavoce.errors import InputError
from vivavoce.tts.interface import SpeakingStyle, SpeechModel

DIALECTS = {
    **{"cantonese": "广东", "northeastern": "东北", "gansu": "甘肃", "guizhou": "贵州", "henan": "河南"},
    **{"hubei": "湖北", "hunan": "湖南", "jiangxi": "江西", "minnan": "闽南", "ningxia": "宁夏", "shanxi": "山西"},
    **{"shaanxi": "陕西", "shandong": "山东", "shanghai": "上海", "sichuan": "四川", "tianjin": "天津"},
    **{"yunnan": "云南"},
}
STYLES = {
    2: {name: f"用{dialect}话说这句话" for name, dialect in DIALECTS.items()},
    3: {name: f"请用{dialect}话表达。" for name, dialect in DIALECTS.items()}
    | {
        "loud": "Please say a sentence as loudly as possible.",
        "soft": "Please say a sentence in a very soft voice.",
        "slow": "请用尽可能慢地语速说一句话。",
        "fast": "请用尽可能快地语速说一句话。",
        "happy": "请非常开心地说一句话。",
        "sad": "请非常伤心地说一句话。",
        "angry": "请非常生气地说一句话。",
        "peppa-pig": "我想体验一下小猪佩奇风格，可以吗？",
        "robot": "你可以尝试用机器人的方式解答吗？",
    },
}
"""Per CosyVoice version: the instructions it was trained on, by name."""
QUIETEST, LOUDEST = 0.05, 4.0
MAX_INSTRUCTION = 200  # characters


@dataclass(frozen=True)
class DirectedStyle(SpeakingStyle):
    """A speaking style with CosyVoice's controls."""

    style: str = ""
    """One of `STYLES`; empty: the voice's default style."""
    instruction: str = ""
    """Free text instead of a style, such as "Speak like a tired teacher."."""
    volume: float = 1.0
    """Factor for the loudness; peaks stay within full scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not QUIETEST <= self.volume <= LOUDEST:
            raise InputError(f"volume must be a factor of {QUIETEST} to {LOUDEST}, not {self.volume}")
        if self.style and self.instruction:
            raise InputError(f"give the style {self.style!r} or an instruction, not both")
        if len(self.instruction) > MAX_INSTRUCTION:
            raise InputError(f"the instruction has {len(self.instruction)} characters; give at most {MAX_INSTRUCTION}")

    def instruction_for(self, version: int) -> str:
        """The instruction for a model of this version, or an empty string. An unknown style is refused."""
        if not self.style:
            return self.instruction
        styles = STYLES[version]
        if self.style not in styles:
            raise InputError(f"CosyVoice {version} has no style {self.style!r}; it has {', '.join(styles)}")
        return styles[self.style]


FASTER, LOUDER = 1.2, 1.5  # factor of one request
MAX_WORDS = 10
FILLER_WORDS = """could can would you now ok okay and it that make try a an the in to with your bit little much even
    just so for me on keep go thanks thank hey again"""
CUE_WORDS = "please speak talk say sound be voice tone way manner dialect accent more very"
LESS_WORDS = "less not too"
REQUESTS = {
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
MEANING = {word: request for request, words in REQUESTS.items() for word in words.split()}
COMPARATIVES = frozenset(word for word in MEANING if word.endswith("er"))  # need no other word beside them
PHRASES = {"speed up": "faster", "slow down": "slower", "speak up": "louder", "like a robot": "robotic please"}
OPPOSITES = {"faster": "slower", "slower": "faster", "louder": "quieter", "quieter": "louder"}

POLITE = r"(?:请|麻烦)?你?(?:能不能|可不可以|可以|能)?"
ENDING = r"(?:吗|吧|好吗|可以吗)?"
CHINESE_DIALECT = re.compile(rf"{POLITE}用(\w{{2}})话(?:说|讲|表达|回答)?(?:一下)?{ENDING}")
CHINESE_REQUEST = re.compile(
    rf"{POLITE}(?:用)?(?:说|讲)?话?(?:得|的)?(再|更|别太|别那么|不要太)?"
    r"(快|慢|大声|小声|轻|开心|高兴|伤心|难过|生气|正常)(?:地|的)?(?:语气|声音)?"
    rf"(?:说话|说|讲)?(?:一点儿?|一些|点儿?|些)?{ENDING}"
)
CHINESE_LESS = frozenset({"别太", "别那么", "不要太"})
CHINESE_MEANING = {
    **{"快": "faster", "慢": "slower", "大声": "louder", "小声": "quieter", "轻": "quieter", "正常": "normal"},
    **{"开心": "happy", "高兴": "happy", "伤心": "sad", "难过": "sad", "生气": "angry"},
}


def apply_request(text: str, style: DirectedStyle) -> DirectedStyle | None:
    """The style after a user's text, if all of the text is a request for how to speak; else None."""
    normalised = re.sub(r"[^\w\s]", " ", text.lower()).strip()
    request = _chinese_request("".join(normalised.split())) or _english_request(normalised)
    return None if request is None else _apply(style, request)


def _english_request(text: str) -> str | None:
    for phrase, in_short in PHRASES.items():
        text = re.sub(rf"\b{phrase}\b", in_short, text)
    words = [word for word in text.split() if word not in FILLER_WORDS.split()]
    requests = {MEANING.get(word) for word in words if word not in (CUE_WORDS + " " + LESS_WORDS).split()}
    is_request = COMPARATIVES & set(words) or set((CUE_WORDS + " " + LESS_WORDS).split()) & set(words)
    if len(text.split()) > MAX_WORDS or len(requests) != 1 or not is_request:
        return None
    request = requests.pop()
    if request is not None and set(LESS_WORDS.split()) & set(words):
        return OPPOSITES.get(request, "normal")
    return request


def _chinese_request(text: str) -> str | None:
    if (match := CHINESE_DIALECT.fullmatch(text)) is not None:
        return next((name for name, dialect in DIALECTS.items() if dialect == match[1]), None)
    if (match := CHINESE_REQUEST.fullmatch(text)) is None or text == match[2]:
        return None
    request = CHINESE_MEANING[match[2]]
    return OPPOSITES.get(request, "normal") if match[1] in CHINESE_LESS else request


def _apply(style: DirectedStyle, request: str) -> DirectedStyle:
    if request == "normal":
        return replace(style, speed=1.0, volume=1.0, style="", instruction="")
    if request in ("faster", "slower"):
        speed = style.speed * (FASTER if request == "faster" else 1 / FASTER)
        return replace(style, speed=min(max(speed, SLOWEST), FASTEST))
    if request in ("louder", "quieter"):
        volume = style.volume * (LOUDER if request == "louder" else 1 / LOUDER)
        return replace(style, volume=min(max(volume, QUIETEST), LOUDEST))
    return replace(style, style=request, instruction="")


MAX_SHOWN = 60  # characters of the instructions in an error


@runtime_checkable
class Directable(Protocol):
    """A TTS model that takes style instructions."""

    def styled_by_instructions(self, instructions: str, style: SpeakingStyle) -> SpeakingStyle:
        """The style for free-form instructions; a style that the model does not have is refused."""
        ...

    def styled_by_request(self, text: str, style: SpeakingStyle) -> SpeakingStyle | None:
        """The style after a user's text, if all of it is a request that the model can follow; else None."""
        ...


def with_instructions(tts: SpeechModel, instructions: str, style: SpeakingStyle) -> SpeakingStyle:
    """The style that follows from instructions; empty ones leave it unchanged."""
    words = instructions.strip()
    if not words:
        return style
    if isinstance(tts, Directable):
        return tts.styled_by_instructions(words, style)
    changed = _apply_speed_request(words, style)
    if changed is None:
        raise InputError(
            f"this model takes no instructions such as {words[:MAX_SHOWN]!r}, except for its speed; "
            "leave them out or use CosyVoice"
        )
    return changed


def with_user_requests(tts: SpeechModel, texts: Iterable[str], style: SpeakingStyle) -> SpeakingStyle:
    """The style after a user's texts in order, most of which contain no request."""
    for words in texts:
        if isinstance(tts, Directable):
            style = tts.styled_by_request(words, style) or style
        else:
            style = _apply_speed_request(words, style) or style
    return style


def _apply_speed_request(text: str, style: SpeakingStyle) -> SpeakingStyle | None:
    requested = apply_request(text, DirectedStyle(speed=style.speed))
    is_speed = requested is not None and requested == DirectedStyle(speed=requested.speed)
    return replace(style, speed=requested.speed) if requested is not None and is_speed else None
