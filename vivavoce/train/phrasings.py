"""Phrasings of the front desk's intents, written by a chat model.

`viva train phrasings --out DIR` asks the model for ways to phrase each intent, drops lines by rules (length, language,
slots, values, answers, duplicates), asks the model which intent each remaining one has, and keeps those it names
rightly. It writes `written.jsonl` and `judged.jsonl` as it goes on, from which a stopped run resumes, and at the end
`phrasings.CODE.jsonl` for each language, divided into training and held-out phrasings. Read them before training: a
reviewed file takes the place of the one beside `vivavoce/train/front_desk`, and is part of edition 2.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from vivavoce.cascade.interfaces import ChatText
from vivavoce.cascade.local_chat import LocalChat, LocalChatOptions
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.engine.sampling import Sampling
from vivavoce.errors import InputError
from vivavoce.train.front_desk import LANGUAGES, SpokenLanguage, language
from vivavoce.train.front_desk.phrasing_rules import INTENTS, Kept, Phrasing, cleaned, split_of

MODEL = "qwen2.5-coder-1.5b-instruct"
LINES = 10  # phrasings that are asked for at once
EXAMPLES = 3
MAX_TOKENS = 200
CONCURRENT = 6  # prompts that are answered at the same time
WRITING = 0.6  # share of the time for writing; the rest is for judging
WRITTEN, JUDGED = "written.jsonl", "judged.jsonl"
STYLES = {
    "en": ("short and casual", "polite and complete", "chatty", "in a hurry", "indirect, with the reason why they ask"),
    "zh": ("簡短、隨意", "有禮貌、完整", "閒聊的語氣", "很急的語氣", "委婉，說出為什麼要問"),
}
WRITE = {
    "en": (
        "You write what guests say on the phone to the front desk of a hotel with a restaurant.",
        "Write {lines} different sentences with which a guest could {meaning}. Spoken English, {style}. "
        "A numbered list of {lines} lines, without quotation marks. Never the answer of the desk.{slots} "
        "Examples:\n{examples}",
    ),
    "zh": (
        "你負責寫出客人打電話到飯店櫃檯時說的話，用台灣的繁體中文。",
        "請寫出{lines}句不同的話，客人用來表達：{meaning}。口語，{style}。"
        "每行一句，編號1到{lines}，不要引號，不要寫櫃檯的回答。{slots}例如：\n{examples}",
    ),
}
KEEP_SLOTS = {"en": " Keep {names} exactly as written, in braces.", "zh": "請原樣保留{names}，包括大括號。"}
JUDGE = (
    "A guest talks to the front desk of a hotel with a restaurant. What does the guest want?\n{intents}\n"
    "Reply with the name alone."
)


class Chat(Protocol):
    """What is asked of a chat model: a reply to messages."""

    async def __call__(self, system: str, user: str, temperature: float, max_tokens: int) -> str:
        """The whole reply."""
        ...


@dataclass(frozen=True)
class Request:
    """One request for phrasings of an intent."""

    language: str
    intent: str
    round: int


def requests(codes: Sequence[str], intents: Sequence[str] | None, rounds: int) -> list[Request]:
    """All requests, one intent after the other within a round."""
    known = language(codes[0], 2).intents
    if unknown := set(intents or ()) - set(known):
        raise InputError(f"no intent {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return [Request(code, intent, turn) for turn in range(rounds) for intent in (intents or known) for code in codes]


def prompt(request: Request, language: SpokenLanguage, seed: int) -> tuple[str, str]:
    """System and user message of a request; the examples depend on the seed."""
    source = random.Random(f"{seed} {request}")
    templates = {**language.written, **language.corrections}[request.intent]
    plain = [template for template in templates if not set("()[]") & set(template)]
    wanted = INTENTS[request.intent]
    names = [f"{{{slot}}}" for slot in (*wanted.get("slots", ()), *wanted.get("may", ()))]
    system, user = WRITE[language.code]
    text = user.format(
        lines=LINES,
        meaning=wanted[language.code],
        style=STYLES[language.code][request.round % len(STYLES[language.code])],
        slots=KEEP_SLOTS[language.code].format(names=", ".join(names)) if names else "",
        examples="\n".join(source.sample(plain, min(EXAMPLES, len(plain)))),
    )
    return system, text.replace("{number}", "{people}")


def judge_prompt() -> str:
    """The system message of a request for the intent of a phrasing."""
    return JUDGE.format(intents="\n".join(f"{_label(intent)}: {wanted['en']}" for intent, wanted in INTENTS.items()))


def _label(intent: str) -> str:
    return "other" if intent == "decline" else intent


class JsonLines:
    """A file of JSON objects that is appended to; a last line that was cut off is dropped when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = path.read_text(encoding="utf8").rpartition("\n")[0] if path.is_file() else ""
        self.objects: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        path.write_text("".join(f"{line}\n" for line in whole.splitlines()), encoding="utf8")

    def append(self, content: dict[str, Any]) -> None:
        """Write one object."""
        self.objects.append(content)
        with self.path.open("a", encoding="utf8") as file:
            file.write(json.dumps(content, ensure_ascii=False) + "\n")


@dataclass
class PhrasingRun:
    """A run in a folder: what was written and judged there is not asked for again."""

    chat: Chat
    out: Path
    seed: int
    report: Callable[[dict[str, Any]], None]
    seconds: float = float("inf")

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.written, self.judged = JsonLines(self.out / WRITTEN), JsonLines(self.out / JUDGED)
        self._begin = time.monotonic()

    async def __call__(self, wanted: Sequence[Request]) -> list[Phrasing]:
        """Write and judge what is missing; returns the phrasings that were kept."""
        done = {Request(each["language"], each["intent"], each["round"]) for each in self.written.objects}
        await self._each([request for request in wanted if request not in done], self._write, WRITING)
        known = {(each["language"], each["text"]) for each in self.judged.objects}
        await self._each([each for each in self.candidates() if (each.language, each.text) not in known], self._judge)
        self.report({"step": "faults", **Counter(fault or "none" for _, fault in self._lines())})
        agreed = {(each["language"], each["text"]) for each in self.judged.objects if each["named"] == each["intent"]}
        return [each for each in self.candidates() if (each.language, each.text) in agreed]

    def candidates(self) -> list[Phrasing]:
        """The written phrasings that the rules let pass."""
        return [phrasing for phrasing, fault in self._lines() if fault is None]

    def _lines(self) -> Iterator[tuple[Phrasing, str | None]]:
        kept = {code: Kept(spoken) for code, spoken in LANGUAGES.items()}
        key = ("round", "intent", "language")
        for each in sorted(self.written.objects, key=lambda each: [each[name] for name in key]):
            code = each["language"]
            for line in each["reply"].splitlines():
                if line.strip():
                    phrasing = Phrasing(code, each["intent"], cleaned(line, LANGUAGES[code]))
                    yield phrasing, kept[code].fault(phrasing)

    async def _each(self, items: Sequence[Any], ask: Callable[[Any], Any], share: float = 1.0) -> None:
        """Ask about all items, several at a time, until a share of the time is over."""
        waiting = iter(items)

        async def worker() -> None:
            for item in waiting:
                if time.monotonic() - self._begin > share * self.seconds:
                    return
                await ask(item)

        await asyncio.gather(*(worker() for _ in range(CONCURRENT)))

    async def _write(self, request: Request) -> None:
        system, user = prompt(request, LANGUAGES[request.language], self.seed)
        reply = await self.chat(system, user, 0.9, MAX_TOKENS)
        self.written.append({**asdict(request), "reply": reply})
        self.report({"step": "written", **asdict(request), "lines": len(reply.splitlines())})

    async def _judge(self, phrasing: Phrasing) -> None:
        reply = await self.chat(judge_prompt(), phrasing.text, 0.0, 8)
        named = reply.strip().strip(".:`").split("\n")[0].strip()
        intent = "decline" if named == "other" else named
        self.judged.append({**asdict(phrasing), "named": intent})
        self.report({"step": "judged", **asdict(phrasing), "named": intent})


def write_phrasings(out: Path, kept: Sequence[Phrasing], seed: int) -> Counter[tuple[str, str]]:
    """Write the phrasings of each language with their split; returns how many there are of both."""
    counts: Counter[tuple[str, str]] = Counter()
    for code, spoken in LANGUAGES.items():
        lines = []
        for phrasing in sorted((each for each in kept if each.language == code), key=lambda each: each.intent):
            split = split_of(phrasing, spoken, seed)
            counts[code, split] += 1
            content = {"intent": phrasing.intent, "split": split, "text": phrasing.text}
            lines.append(json.dumps(content, ensure_ascii=False) + "\n")
        (out / f"phrasings.{code}.jsonl").write_text("".join(lines), encoding="utf8")
    return counts


async def _run(options: argparse.Namespace) -> None:
    local = LocalChat.load(options.model, options.device, LocalChatOptions(cached_sequences=CONCURRENT + 2))

    async def chat(system: str, user: str, temperature: float, max_tokens: int) -> str:
        settings = ConversationSettings(
            modality="text", sampling=Sampling(temperature, 40, 0.95), max_output_tokens=max_tokens
        )
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        pieces = [piece async for piece in local.reply(messages, settings)]
        return "".join(piece.text for piece in pieces if isinstance(piece, ChatText))

    def report(content: dict[str, Any]) -> None:
        print(json.dumps(content, ensure_ascii=False), flush=True)

    async with local:
        run = PhrasingRun(chat, options.out, options.seed, report, options.seconds)
        kept = await run(requests(options.languages, options.intents, options.rounds))
    counts = write_phrasings(options.out, kept, options.seed)
    report({"step": "kept", **{f"{code} {split}": count for (code, split), count in sorted(counts.items())}})


def main(arguments: list[str] | None = None) -> None:
    """The command `viva train phrasings`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=MODEL, help="a chat model, as of `viva talk`")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--languages", nargs="+", choices=list(LANGUAGES), default=list(LANGUAGES))
    parser.add_argument("--intents", nargs="+", help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help=f"requests for {LINES} phrasings of each intent")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ask nothing more after this time")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(_run(parser.parse_args(arguments)))
