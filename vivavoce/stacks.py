"""Stacks: named sets of models that hold a conversation, and the one that this machine's user has chosen.

`viva serve`, `viva talk` and `viva demo` take `--stack NAME`; `viva setup` stores a default in a small TOML file.
"""

import json
import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from vivavoce import hub
from vivavoce.errors import InputError
from vivavoce.hub.languages import LANGUAGES, spoken_languages

logger = logging.getLogger(__name__)
CONFIG_VARIABLE = "VIVA_CONFIG"
PARTS = ("model", "asr", "chat", "tts")
MODULES_OF_MODEL = {  # of optional packages
    "moonshine-base-en": ("onnxruntime",),
    "hibari": ("hibari",),
    "kokoro-82m": ("onnx", "hibari", "misaki", "jieba", "pypinyin"),
}
HOTEL_INTRODUCTION = {
    "en": "This is the front desk of the Garden Hotel. You may ask for a table or a room, opening hours, the menu and "
    "prices, the wifi, a taxi or a wake-up call.",
    "zh-Hant": "這裡是花園飯店的櫃檯。您可以訂位、訂房，詢問營業時間、菜單、價格和無線網路，"
    "也可以請我們叫計程車或叫您起床。",
    "zh-Hans": "这里是花园饭店的前台。您可以订位、订房，询问营业时间、菜单、价格和无线网络，"
    "也可以请我们叫出租车或叫您起床。",
}
HOTEL_EXAMPLES = {
    "en": ("What time is breakfast?", "Please wake us at eight thirty.", "What do I pay for the vegetable curry?"),
    "zh-Hant": ("早餐幾點開始？", "請八點半叫我們起床。", "蔬菜咖哩多少錢？"),
    "zh-Hans": ("早餐几点开始？", "请八点半叫我们起床。", "蔬菜咖喱多少钱？"),
}
ASSISTANT = """\
You are a friendly voice assistant. Your answers are read aloud: answer in one or two short sentences of plain words, \
without lists, code or markup. Answer in the language of the question: 用中文問你，就用中文回答。"""


@dataclass(frozen=True)
class Stack:
    """The models of a conversation: a speech-to-speech `model`, or a cascade of `asr`, `chat` and `tts`."""

    name: str
    what: str
    model: str | None = None
    asr: str | None = None
    """The recogniser; beside a speech-to-speech model, it writes the user's turns down, and the model reads them."""
    bundled_asr: str | None = None
    """The recogniser where `asr` has not been fetched; None: there is no other."""
    chat: str | None = None
    tts: str | None = None
    instructions: str = ""
    introduction: Mapping[str, str] = field(default_factory=dict)
    """What it is and may be asked, by the language of the page that says it (`en`, `zh-Hant`, `zh-Hans`)."""
    examples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Questions that it may be asked, by language as well."""
    memory: int = 0
    """Bytes: of the GPU where it needs one, else resident in a process that has been warmed up."""
    needs_gpu: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """Its models, in the order in which a turn passes them."""
        return tuple(name for name in (self.asr, self.model, self.chat, self.tts) if name is not None)

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes, such as `en`, of the languages that all its models know."""
        known = [spoken_languages(name) for name in self.models]
        return tuple(code for code in LANGUAGES if all(code in each for each in known))

    @property
    def parameters(self) -> int | None:
        """Parameters of its models; None where those of one are not known."""
        counts = [parameters_of(name) for name in self.models]
        return sum(count for count in counts if count is not None) if None not in counts else None

    @property
    def options(self) -> dict[str, object]:
        """The options of `viva serve` for it; None: not set."""
        parts: dict[str, object] = {name: getattr(self, name) for name in PARTS}
        reads_words = self.model is not None and self.asr is not None
        return {**parts, "instructions": self.instructions or None, "turns_as_text": reads_words or None}

    @property
    def fetched(self) -> tuple[hub.KnownModel, ...]:
        """Its published models with their codecs; bundled ones and packages are not among them."""
        found = [model for name in self.models if (model := hub.known(name)) is not None]
        codecs = [codec for model in found if model.codec and (codec := hub.known(model.codec)) is not None]
        return (*found, *codecs)

    @property
    def missing_models(self) -> tuple[hub.KnownModel, ...]:
        """Those of them that are not, or not completely, on this machine."""
        whole = {found.name for found in hub.local_models() if not found.missing}
        return tuple(model for model in self.fetched if whole.isdisjoint({model.name, *model.mirrors}))

    @property
    def missing_modules(self) -> tuple[str, ...]:
        """Modules that its models need and that are not installed; the extra `talk` has them all."""
        needed = dict.fromkeys(module for name in self.models for module in MODULES_OF_MODEL.get(name, ()))
        return tuple(module for module in needed if find_spec(module) is None)

    def on_this_machine(self) -> "Stack":
        """The stack, with its bundled recogniser where the better one or a module it needs is missing."""
        if self.bundled_asr is None or not (self.missing_models or self.missing_modules):
            return self
        logger.warning(
            "%s is not on this machine: %s recognises speech, with more errors; `viva setup --stack %s` fetches it",
            self.asr,
            self.bundled_asr,
            self.name,
        )
        return self.with_parts(asr=self.bundled_asr)

    def with_parts(self, **parts: str | None) -> "Stack":
        """The stack with some of its models replaced; None leaves one as it is."""
        given = {name: model for name, model in parts.items() if model is not None}
        if "model" in given and self.model is None:
            raise InputError(f"the stack {self.name} is a cascade: it has asr, chat and tts, but no model")
        if {"chat", "tts"} & set(given) and self.chat is None:
            raise InputError(f"the stack {self.name} has a speech-to-speech model, but no chat and no tts")
        return replace(self, **given)  # type: ignore[arg-type]


STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            "mini",
            "the bundled miniature: the front desk of a hotel, for synthetic voices",
            model="mini-speech",
            introduction=HOTEL_INTRODUCTION,
            examples=HOTEL_EXAMPLES,
            memory=680_000_000,
        ),
        Stack(
            "desk",
            "the front desk of a hotel, for people: a recogniser, then the bundled miniature",
            asr="moonshine-base-en",
            bundled_asr="mini-asr",
            model="mini-speech",
            introduction=HOTEL_INTRODUCTION,
            examples=HOTEL_EXAMPLES,
            memory=890_000_000,
        ),
        Stack(
            "assistant",
            "general questions: recogniser, chat model and synthesizer",
            asr="whisper-base",
            chat="qwen2.5-coder-0.5b-instruct",
            tts="kokoro-82m",
            instructions=ASSISTANT,
            memory=2_900_000_000,
        ),
        Stack(
            "s2s",
            "general questions: one speech-to-speech model on a GPU",
            model="fnlp/MOSS-Speech",
            memory=28_000_000_000,
            needs_gpu=True,
        ),
    )
}
DEFAULT_STACK = "mini"
ENGLISH_PARTS = {"asr": "moonshine-base-en", "tts": "hibari"}
"""Parts of `assistant` that are quicker, and speak English only."""


def stack_named(name: str) -> Stack:
    """A stack by name."""
    if name not in STACKS:
        raise InputError(f"there is no stack {name!r}; known are {', '.join(STACKS)}")
    return STACKS[name]


def parameters_of(name: str) -> int | None:
    """How many parameters a model has, as its publisher or its card says."""
    model = hub.known(name)
    return BUNDLED_PARAMETERS.get(name) if model is None else model.parameters


BUNDLED_PARAMETERS = {"mini-speech": 31_000_000, "mini-asr": 20_000_000, "mini-tts": 7_400_000}


@dataclass(frozen=True)
class StackConfig:
    """What `viva setup` stores: a stack, and the parts of it that are replaced."""

    stack: str = DEFAULT_STACK
    model: str | None = None
    asr: str | None = None
    chat: str | None = None
    tts: str | None = None

    @property
    def chosen(self) -> Stack:
        """The stack with these parts."""
        return stack_named(self.stack).with_parts(**{name: getattr(self, name) for name in PARTS})

    def write(self, file: Path) -> None:
        """Write the file, as a whole or not at all."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
        note = "# Written by `viva setup`; read by `viva serve`, `viva talk` and `viva demo`."
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text("\n".join([note, *lines, ""]), encoding="utf8")
        partial.replace(file)


def config_file() -> Path | None:
    """The file of the chosen stack: VIVA_CONFIG (empty: none), or config.toml in the platform's folder for it."""
    given = os.environ.get(CONFIG_VARIABLE)
    if given is not None:
        return Path(given).expanduser() if given else None
    return Path(typer.get_app_dir("vivavoce")) / "config.toml"


def read_config() -> StackConfig | None:
    """The stored choice; None where there is none."""
    file = config_file()
    if file is None or not file.is_file():
        return None
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}); correct it, or run `viva setup` again") from error
    known = [each.name for each in fields(StackConfig)]
    for name, value in values.items():
        if name not in known or not isinstance(value, str):
            raise InputError(f"{file}: {name} = {value!r} is not understood; known are {', '.join(known)}, all texts")
    return StackConfig(**values)


def choose_stack(name: str | None) -> Stack:
    """The named stack; None: the stored one, else the bundled one. Parts that are stored for a stack belong to it."""
    config = read_config()
    if config is not None and name in (None, config.stack):
        return config.chosen.on_this_machine()
    return stack_named(name or DEFAULT_STACK).on_this_machine()
