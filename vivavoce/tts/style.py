"""How a model is told to speak: in words before it speaks, or by what a listener says in between.

What a model cannot do is refused by name. Speed is everybody's; all else takes a model that can be directed.
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
"""By version: the instructions that the weights were taught, by name."""
QUIETEST, LOUDEST = 0.05, 4.0
MAX_INSTRUCTION = 200  # characters


@dataclass(frozen=True)
class DirectedStyle(SpeakingStyle):
    """A manner with CosyVoice's own controls."""

    style: str = ""
    """One of `STYLES`; empty: as the voice speaks by itself."""
    instruction: str = ""
    """Free words instead of a style, such as "Speak like a tired teacher."."""
    volume: float = 1.0
    """Times the usual loudness; peaks stay within full scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not QUIETEST <= self.volume <= LOUDEST:
            raise InputError(f"volume must be {QUIETEST} to {LOUDEST} times the usual, not {self.volume}")
        if self.style and self.instruction:
            raise InputError(f"give the style {self.style!r} or an instruction, not both")
        if len(self.instruction) > MAX_INSTRUCTION:
            raise InputError(f"the instruction has {len(self.instruction)} characters; give at most {MAX_INSTRUCTION}")

    def instruction_for(self, version: int) -> str:
        """The instruction that a model of this version gets; empty: none. An unknown style is refused by name."""
        if not self.style:
            return self.instruction
        styles = STYLES[version]
        if self.style not in styles:
            raise InputError(f"CosyVoice {version} has no style {self.style!r}; it has {', '.join(styles)}")
        return styles[self.style]


FASTER, LOUDER = 1.2, 1.5  # what one wish changes
MAX_WORDS = 10
ASIDE = """could can would you now ok okay and it that make try a an the in to with your bit little much even just so
    for me on keep go thanks thank hey again"""
CUES = "please speak talk say sound be voice tone way manner dialect accent more very"
LESS = "less not too"
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


def directed(said: str, style: DirectedStyle) -> DirectedStyle | None:
    """The manner after what a listener said, if all of it was a wish for how to speak; None: it was something else."""
    bare = re.sub(r"[^\w\s]", " ", said.lower()).strip()
    request = _chinese_request("".join(bare.split())) or _english_request(bare)
    return None if request is None else _changed(style, request)


def _english_request(said: str) -> str | None:
    for phrase, in_short in PHRASES.items():
        said = re.sub(rf"\b{phrase}\b", in_short, said)
    words = [word for word in said.split() if word not in ASIDE.split()]
    requests = {MEANING.get(word) for word in words if word not in (CUES + " " + LESS).split()}
    is_instructed = COMPARATIVES & set(words) or set((CUES + " " + LESS).split()) & set(words)
    if len(said.split()) > MAX_WORDS or len(requests) != 1 or not is_instructed:
        return None
    request = requests.pop()
    if request is not None and set(LESS.split()) & set(words):
        return OPPOSITES.get(request, "normal")
    return request


def _chinese_request(said: str) -> str | None:
    if (found := CHINESE_DIALECT.fullmatch(said)) is not None:
        return next((name for name, dialect in DIALECTS.items() if dialect == found[1]), None)
    if (found := CHINESE_REQUEST.fullmatch(said)) is None or said == found[2]:
        return None
    request = CHINESE_MEANING[found[2]]
    return OPPOSITES.get(request, "normal") if found[1] in CHINESE_LESS else request


def _changed(style: DirectedStyle, request: str) -> DirectedStyle:
    if request == "normal":
        return replace(style, speed=1.0, volume=1.0, style="", instruction="")
    if request in ("faster", "slower"):
        speed = style.speed * (FASTER if request == "faster" else 1 / FASTER)
        return replace(style, speed=min(max(speed, SLOWEST), FASTEST))
    if request in ("louder", "quieter"):
        volume = style.volume * (LOUDER if request == "louder" else 1 / LOUDER)
        return replace(style, volume=min(max(volume, QUIETEST), LOUDEST))
    return replace(style, style=request, instruction="")


SHOWN = 60  # characters of what was asked for, in an error


@runtime_checkable
class Directable(Protocol):
    """A speech model that can be told how to speak."""

    def styled_by_instructions(self, instructions: str, style: SpeakingStyle) -> SpeakingStyle:
        """The manner that these words ask for, which may be any; what the model cannot do is refused by name."""
        ...

    def styled_by_request(self, said: str, style: SpeakingStyle) -> SpeakingStyle | None:
        """The manner after what a listener said, if all of it was a wish that can be granted."""
        ...


def with_instructions(speaker: SpeechModel, instructions: str, style: SpeakingStyle) -> SpeakingStyle:
    """How a model speaks that was given such instructions; none change nothing."""
    words = instructions.strip()
    if not words:
        return style
    if isinstance(speaker, Directable):
        return speaker.styled_by_instructions(words, style)
    changed = _at_another_speed(words, style)
    if changed is None:
        raise InputError(
            f"this model cannot be told how to speak, as in {words[:SHOWN]!r}, but for its speed; "
            "leave the instructions out or take CosyVoice"
        )
    return changed


def with_user_requests(speaker: SpeechModel, said: Iterable[str], style: SpeakingStyle) -> SpeakingStyle:
    """How a model speaks after all that a listener has said, in their order; most of it asks for nothing."""
    for words in said:
        if isinstance(speaker, Directable):
            style = speaker.styled_by_request(words, style) or style
        else:
            style = _at_another_speed(words, style) or style
    return style


def _at_another_speed(said: str, style: SpeakingStyle) -> SpeakingStyle | None:
    asked = directed(said, DirectedStyle(speed=style.speed))
    is_speed = asked is not None and asked == DirectedStyle(speed=asked.speed)
    return replace(style, speed=asked.speed) if asked is not None and is_speed else None
