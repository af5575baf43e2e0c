"""Dialogues of a restaurant and hotel front desk: user sentences, replies, and dialogue state.

Every function takes languages of the desk (`language`, `languages`); the default is English as of edition 1.
"""

import random
import re
from collections.abc import Callable, Sequence
from functools import cache

from vivavoce.errors import InputError
from vivavoce.train.front_desk.answers import (
    DECLINE,
    REMEMBERED,
    DialogueState,
    Exchange,
    fixed_replies,
    normalise,
    slotted_replies,
)
from vivavoce.train.front_desk.english import ENGLISH
from vivavoce.train.front_desk.general import general_sentences
from vivavoce.train.front_desk.judge import judge
from vivavoce.train.front_desk.language import SpokenLanguage
from vivavoce.train.front_desk.languages import LANGUAGES, language, language_of, languages
from vivavoce.train.front_desk.templates import NearDuplicates, expanded
from vivavoce.train.front_desk.tools import ToolDialogueState

__all__ = [
    "DECLINE",
    "ENGLISH_ALONE",
    "INTENTS",
    "LANGUAGES",
    "SPLITS",
    "DialogueState",
    "Exchange",
    "SpokenLanguage",
    "dialogues",
    "general_sentences",
    "judge",
    "language",
    "language_of",
    "languages",
    "normalise",
    "reply_sentences",
    "single_questions",
    "templates",
    "tool_dialogues",
    "user_sentences",
]

SPLITS = ("train", "held_out")
HELD_OUT_EVERY = 7  # one template in seven is held out
INTENTS = ENGLISH.intents
NEEDS_MEMORY = ("repeat", "cancel", *REMEMBERED)
ANSWERS = ("give_people", "give_time", "give_nights", "give_name")  # only as answers to a question in a reply
OPENERS = tuple(intent for intent in INTENTS if intent not in (*NEEDS_MEMORY, *ANSWERS, "goodbye"))
WEIGHTS = {"table": 5.0, "room": 2.5, "decline": 9.0, "directions": 3.0, "price": 2.5, "order": 2.5, "wake_up": 2.0}
TRAIN_WEIGHTS = WEIGHTS | {"decline": 6.0}  # training has other declined sentences besides
COMPOSED = 0.45  # share of composed phrasings in training
OPTIONAL = 0.4  # probability of an optional part
CORRECTED = 0.12  # probability of a correction where one is possible
SWITCHED = 0.15  # probability of another language from a turn to the next
PHRASED = 0.5  # share of a chat model's phrasings in training, from edition 2 on
WITHOUT_FILLERS = ("greeting", "thanks", "goodbye", "repeat", "how_are_you", *ANSWERS)  # without fillers
ENGLISH_ALONE = (ENGLISH,)


@cache
def templates(intent: str, split: str, language: SpokenLanguage = ENGLISH) -> tuple[str, ...]:
    """The templates of an intent in a split."""
    if intent not in language.intents or split not in SPLITS:
        listed = ", ".join(language.intents)
        raise InputError(f"no templates of {intent!r} in {split!r}; intents: {listed}; splits: {SPLITS}")
    if split == "held_out":
        return (*_divided(intent, language)[1], *language.added.get(split, {}).get(intent, ()))
    return (*_written(intent, language), *_composed(intent, language), *_phrased(intent, language))


@cache
def _divided(intent: str, language: SpokenLanguage) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Training and held-out templates of an intent."""
    every = (language.corrections if intent in language.corrections else language.written)[intent]
    held_out = every[3::HELD_OUT_EVERY] + ([every[-1]] if len(every) % HELD_OUT_EVERY > 3 else [])
    learned = tuple(template for template in every if template not in held_out)
    return learned, tuple(template for template in every if template in held_out)


@cache
def _held_out(language: SpokenLanguage) -> NearDuplicates:
    every = [template for intent in language.intents for template in templates(intent, "held_out", language)]
    return NearDuplicates(every, language.plain_words)


@cache
def _written(intent: str, language: SpokenLanguage) -> tuple[str, ...]:
    """Hand-written training templates of an intent, without near duplicates of held-out ones."""
    near, written_later = _held_out(language), language.training_only.get(intent, [])
    more = [template for template in written_later if not any(way in near for way in expanded(template))]
    return (*_divided(intent, language)[0], *more)


@cache
def _composed(intent: str, language: SpokenLanguage) -> tuple[str, ...]:
    """Composed training templates of an intent, without near duplicates of held-out ones."""
    return tuple(phrasing for phrasing in language.composed(intent) if phrasing not in _held_out(language))


@cache
def _phrased(intent: str, language: SpokenLanguage) -> tuple[str, ...]:
    """A chat model's training phrasings of an intent, without near duplicates of held-out ones."""
    added = language.added.get("train", {}).get(intent, [])
    return tuple(phrasing for phrasing in added if phrasing not in _held_out(language))


def dialogues(
    split: str,
    count: int,
    seed: int,
    turns: tuple[int, int] = (1, 4),
    languages: Sequence[SpokenLanguage] = ENGLISH_ALONE,
) -> list[list[Exchange]]:
    """Random dialogues with the correct reply to every turn; with several languages, some change within a call."""
    random_source = random.Random(f"dialogues {split} {seed}")
    return [
        _dialogue(split, random_source.randint(*turns), languages, DialogueState(), random_source) for _ in range(count)
    ]


def tool_dialogues(
    split: str, count: int, seed: int, turns: tuple[int, int] = (1, 3), language: SpokenLanguage = ENGLISH
) -> list[list[Exchange]]:
    """Random dialogues in which the desk calls functions; every turn has a call, or that there is none."""
    random_source = random.Random(f"tools {split} {seed}")
    lines = []
    for _ in range(count):
        state = ToolDialogueState(random_source=random_source)
        lines.append(_dialogue(split, random_source.randint(*turns), (language,), state, random_source))
    return lines


def single_questions(
    intents: Sequence[str], count: int, seed: int, containing: str = "", language: SpokenLanguage = ENGLISH
) -> list[Exchange]:
    """Distinct first turns of these intents from the training split whose user text contains `containing`."""
    random_source = random.Random(f"questions {intents} {seed} {containing}")
    exchanges: dict[str, Exchange] = {}

    def draw() -> str:
        while True:
            intent = random_source.choice(intents)
            user, slots = _phrase(intent, "train", language, random_source)
            if containing in user:
                exchanges[user] = Exchange(intent, user, DialogueState().answer(intent, dict(slots), language), slots)
                return user

    return [exchanges[user] for user in _distinct(draw, count, f"questions with {containing!r}")]


def user_sentences(split: str, count: int, seed: int, language: SpokenLanguage = ENGLISH) -> list[str]:
    """Distinct user sentences of all intents."""
    random_source = random.Random(f"sentences {split} {seed}")
    weights = [max(_weight(intent, split), 1.0) for intent in language.intents]

    def draw() -> str:
        (intent,) = random_source.choices(language.intents, weights)
        return _phrase(intent, split, language, random_source)[0]

    return _distinct(draw, count, "user sentences")


def reply_sentences(count: int, seed: int, language: SpokenLanguage = ENGLISH) -> list[str]:
    """Distinct replies: all fixed ones, all single-slot ones, then bookings with several slots."""
    random_source = random.Random(f"replies {seed}")
    replies = dict.fromkeys([*fixed_replies(language), *slotted_replies(language)])

    def draw() -> str:
        state = DialogueState()
        phrase = _phrase("table", "train", language, random_source)
        return state.answer("table", dict(phrase[1]), language)

    while len(replies) < count:
        replies.update(dict.fromkeys(_distinct(draw, min(200, count - len(replies)), "replies")))
    ordered = list(replies)
    return ordered if len(ordered) <= count else _spread(ordered, count, language, random_source)


def _spread(replies: Sequence[str], count: int, language: SpokenLanguage, random_source: random.Random) -> list[str]:
    """The fixed replies and a sample of the others."""
    fixed = list(dict.fromkeys(fixed_replies(language)))
    others = [reply for reply in replies if reply not in fixed]
    return (fixed + random_source.sample(others, max(0, count - len(fixed))))[:count]


def _dialogue(
    split: str,
    turns: int,
    languages: Sequence[SpokenLanguage],
    state: DialogueState,
    random_source: random.Random,
) -> list[Exchange]:
    exchanges: list[Exchange] = []
    language = languages[0] if len(languages) == 1 else random_source.choice(languages)
    for turn in range(turns):
        if len(languages) > 1 and turn and random_source.random() < SWITCHED:
            language = random_source.choice([other for other in languages if other is not language])
        intent = _next_intent(state, split, turn, turns, language, random_source)
        user, slots = _phrase(intent, split, language, random_source)
        exchanges.append(state.exchange(intent, user, slots, language))
    return exchanges


def _weight(intent: str, split: str) -> float:
    return (TRAIN_WEIGHTS if split == "train" else WEIGHTS).get(intent, 1.0)


def _next_intent(
    state: DialogueState, split: str, turn: int, turns: int, language: SpokenLanguage, random_source: random.Random
) -> str:
    if language.edition > 1 and state.correctable() and random_source.random() < CORRECTED:
        return f"correct_{random_source.choice(state.correctable())}"
    awaited = state.awaited()
    if awaited is not None and random_source.random() < 0.75:
        return f"give_{awaited}"
    drawn = random_source.random()
    if turn > 0 and turn == turns - 1 and drawn < 0.12:
        return random_source.choice(("goodbye", "thanks"))
    answerable = [intent for intent, slot in REMEMBERED.items() if slot in state.known]
    if answerable and drawn < 0.5:
        return random_source.choice(answerable)
    if drawn > (0.9 if turn else 0.97):
        return _intent_needing_memory(state, random_source)
    weights = [_weight(intent, split) for intent in OPENERS]
    return random_source.choices(OPENERS, weights)[0]


def _intent_needing_memory(state: DialogueState, random_source: random.Random) -> str:
    """An intent that refers to earlier turns: repeat, cancel, or asking for an unknown value."""
    if random_source.random() < 0.6:
        return "repeat"
    both = {"memory_people", "memory_nights"}  # "how many?" refers to whichever is known
    unknown = [intent for intent, slot in REMEMBERED.items() if slot not in state.known]
    if state.known.keys() & {"people", "nights"}:
        unknown = [intent for intent in unknown if intent not in both]
    return random_source.choice([*unknown, "cancel"])


def _phrase(
    intent: str, split: str, language: SpokenLanguage, random_source: random.Random
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A random phrasing of an intent, and the slots in it."""
    template = _template(intent, split, language, random_source)
    slots: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        return _fill(match.group(1), intent, slots, language, random_source)

    text = re.sub(r"\{(\w+)\}", fill, _choose(template, random_source))
    if intent not in WITHOUT_FILLERS and intent not in language.corrections:
        text = _with_fillers(text, split, language, random_source)
    return language.sentence(text), tuple(slots.items())


def _template(intent: str, split: str, language: SpokenLanguage, random_source: random.Random) -> str:
    if split != "train":
        return random_source.choice(templates(intent, split, language))
    if _phrased(intent, language) and random_source.random() < PHRASED:
        return random_source.choice(_phrased(intent, language))
    if _composed(intent, language) and random_source.random() < COMPOSED:
        return random_source.choice(_composed(intent, language))
    return random_source.choice(_written(intent, language))


def _with_fillers(text: str, split: str, language: SpokenLanguage, random_source: random.Random) -> str:
    """Add a random filler before and, in training, a random ending after the text."""
    if random_source.random() < 0.25:
        text = random_source.choice(language.training_fillers if split == "train" else language.fillers) + text
    if split == "train" and language.polite not in text and random_source.random() < 0.1:
        bare = text.rstrip(".?!。？！")
        text = bare + random_source.choice(language.endings) + text[len(bare) :]
    return text


def _fill(
    slot_name: str, intent: str, slots: dict[str, str], language: SpokenLanguage, random_source: random.Random
) -> str:
    if slot_name in language.slot_words:
        return random_source.choice(language.slot_words[slot_name])
    if slot_name == "number":
        slot = "nights" if intent == "give_nights" else "people"
        slots[slot] = random_source.choice(language.values[slot])
        return slots[slot]
    slots[slot_name] = random_source.choice(language.values[slot_name])
    return random_source.choice(language.ways_to_say(slot_name, slots[slot_name]))


def _choose(template: str, random_source: random.Random) -> str:
    """Resolve the optional parts and choices of a template at random."""

    def resolve_optional(match: re.Match[str]) -> str:
        return match[1] + match[2] if random_source.random() < OPTIONAL else ""

    text = re.sub(r"(\s*)\[([^\]]*)\]", resolve_optional, template)
    return re.sub(r"\(([^)]*)\)", lambda match: random_source.choice(match[1].split("/")), text)


def _distinct(draw: Callable[[], str], count: int, what: str) -> list[str]:
    sentences: dict[str, None] = {}
    for _ in range(200 * count + 10_000):
        if len(sentences) == count:
            break
        sentences.setdefault(draw())
    if len(sentences) < count:
        raise InputError(f"only {len(sentences)} distinct {what} exist, fewer than the {count} requested")
    return list(sentences)
