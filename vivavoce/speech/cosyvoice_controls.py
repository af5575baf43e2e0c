"""How CosyVoice is told to speak: named styles, free instructions, and loudness."""

from dataclasses import dataclass

from vivavoce.errors import InputError
from vivavoce.speech.interface import SpeakingStyle

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
LONGEST_INSTRUCTION = 200  # characters


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
        if len(self.instruction) > LONGEST_INSTRUCTION:
            raise InputError(
                f"the instruction has {len(self.instruction)} characters; give at most {LONGEST_INSTRUCTION}"
            )

    def told(self, version: int) -> str:
        """The instruction that a model of this version gets; empty: none. An unknown style is refused by name."""
        if not self.style:
            return self.instruction
        styles = STYLES[version]
        if self.style not in styles:
            raise InputError(f"CosyVoice {version} has no style {self.style!r}; it has {', '.join(styles)}")
        return styles[self.style]
