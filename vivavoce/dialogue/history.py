"""The ordered items of a conversation: added, removed, cut to what was played; stored audio is bounded."""

import re
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from vivavoce.dialogue.items import AudioPart, Content, Item, Message, Part, Samples, TextPart, ToolCall, ToolOutput
from vivavoce.errors import InputError

MAX_ITEMS = 2000
MAX_SOUND_SECONDS = 900.0
MAX_RETRACTED = 8


def new_id(kind: str) -> str:
    """A fresh id, such as `item_…`."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class SpokenWords:
    """The words of a spoken reply and where in its sound each run of them begins, in seconds."""

    runs: tuple[tuple[float, str], ...] = ()

    def add(self, at: float, text: str) -> "SpokenWords":
        """With more words, which start `at` seconds."""
        return SpokenWords((*self.runs, (at, text)))

    @property
    def text(self) -> str:
        """All words."""
        return "".join(text for _, text in self.runs)

    def until(self, seconds: float, whole: float, is_whole: bool = True) -> str:
        """The words in the first `seconds` of `whole`: a run that was cut keeps its first words.

        Where the sound was not generated to its end, the last run is taken to last as long as speaking it does.
        """
        if not self.runs:
            return ""
        words = []
        ends = [at for at, _ in self.runs[1:]] + [whole]
        if not is_whole:
            at, text = self.runs[-1]
            ends[-1] = max(whole, at + speaking_seconds(text))
        for (at, text), end in zip(self.runs, ends, strict=True):
            share = 1.0 if seconds >= end else (seconds - at) / max(end - at, 1e-6)
            if share <= 0:
                break
            words.append(text if share >= 1 else first_words(text, share))
        return "".join(words)


WORD = re.compile(r"\s*(?:[\u2e80-\uffff]|[^\s\u2e80-\uffff]+)")  # a word, or a letter of a script without spaces


def speaking_seconds(text: str) -> float:
    """Approximate duration of a spoken text: 15 letters a second, 4 where each is a syllable."""
    syllabic = sum(ord(letter) >= 0x2E80 for letter in text)
    return syllabic / 4.0 + (len(text) - syllabic) / 15.0


def first_words(text: str, share: float) -> str:
    """About this share of a text, cut between words where it has spaces."""
    length = int(len(text) * share)
    if length >= len(text):
        return text
    space = text.rfind(" ", 0, length + 1)
    return text[:space] if space > 0 else ("" if " " in text else text[:length])


@dataclass
class _Uncut:
    """All that was emitted of the last reply, as a client may later correct where it is cut."""

    item: str
    sound: Samples
    rate: int
    words: SpokenWords
    is_whole: bool


@dataclass
class History:
    """The items of a conversation."""

    _items: list[Item] = field(default_factory=list)
    _uncut: _Uncut | None = None
    _retracted: deque[Item] = field(default_factory=lambda: deque(maxlen=MAX_RETRACTED))

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> Sequence[Item]:
        """The items, in order."""
        return tuple(self._items)

    @property
    def last(self) -> str | None:
        """The id of the last item."""
        return self._items[-1].id if self._items else None

    def find(self, id: str) -> Item:
        """The item of this id, also one that was retracted lately."""
        return self.retracted(id) or self._items[self._index(id)]

    def retracted(self, id: str) -> Item | None:
        """The item of this id, if it was retracted lately."""
        return next((item for item in self._retracted if item.id == id), None)

    def retract(self, id: str) -> None:
        """Remove an item that a client may still refer to, as it has not learned of this yet."""
        self._retracted.append(self._items.pop(self._index(id)))

    def previous(self, id: str) -> str | None:
        """The id of the item before this one."""
        index = self._index(id)
        return self._items[index - 1].id if index else None

    def add(self, content: Content, id: str | None = None, after: str | None = None) -> tuple[Item, str | None]:
        """A new item and its predecessor; `after` "root" puts it first, None last."""
        if id is not None and any(item.id == id for item in self._items):
            raise InputError(f"an item {id!r} exists already; give another id")
        index = len(self._items) if after is None else 0 if after == "root" else self._index(after) + 1
        item = Item(id or new_id("item"), content)
        self._items.insert(index, item)
        self._bound()
        return item, self.previous(item.id)

    def replace(self, item: Item) -> None:
        """Replace an item by one with the same id."""
        self._items[self._index(item.id)] = item
        self._bound()

    def delete(self, id: str) -> Item:
        """Remove an item."""
        return self.retracted(id) or self._items.pop(self._index(id))

    def store_uncut(self, item: str, sound: Samples, rate: int, words: SpokenWords, is_whole: bool) -> None:
        """Store all that was emitted of a reply, so that it can be cut again elsewhere."""
        self._uncut = _Uncut(item, sound, rate, words, is_whole)

    def cut(self, id: str, seconds: float) -> Item:
        """Cut a spoken reply to its first seconds; `InputError` where it has no sound or less."""
        item = self.find(id)
        if self.retracted(id) is not None:
            return item
        if not isinstance(item.content, Message) or item.content.role != "assistant":
            raise InputError(f"item {id!r} is not a reply and cannot be cut")
        audio = next((part for part in item.content.parts if isinstance(part, AudioPart)), None)
        if audio is None:
            raise InputError(f"item {id!r} has no sound to cut")
        uncut = self._uncut if self._uncut is not None and self._uncut.item == id else None
        sound, rate = (audio.samples, audio.rate) if uncut is None else (uncut.sound, uncut.rate)
        whole = len(sound) / rate
        if seconds > whole + 0.05:
            raise InputError(
                f"item {id!r} has {whole * 1e3:.0f} ms of sound, so it cannot be cut at {seconds * 1e3:.0f}"
            )
        words = SpokenWords(((0.0, audio.transcript or ""),)) if uncut is None else uncut.words
        cut_sound = sound[: round(seconds * rate)]
        is_whole = uncut is None or uncut.is_whole
        part = AudioPart(cut_sound, rate, words.until(seconds, whole, is_whole) if words.text else audio.transcript)
        cut = replace(item, content=replace(item.content, parts=(part,)), is_complete=len(cut_sound) == len(sound))
        self.replace(cut)
        return cut

    def _index(self, id: str) -> int:
        for index in range(len(self._items) - 1, -1, -1):
            if self._items[index].id == id:
                return index
        raise InputError(f"there is no item {id!r} in this conversation")

    def _bound(self) -> None:
        """Drop the audio of old items beyond MAX_SOUND_SECONDS, and the oldest items beyond MAX_ITEMS."""
        del self._items[: max(0, len(self._items) - MAX_ITEMS)]
        seconds = 0.0
        for index in range(len(self._items) - 1, -1, -1):
            length = sound_seconds(self._items[index])
            seconds += length
            if length and seconds > MAX_SOUND_SECONDS:
                self._items[index] = without_sound(self._items[index])


def sound_seconds(item: Item) -> float:
    """Seconds of sound in an item."""
    if not isinstance(item.content, Message):
        return 0.0
    return sum(len(part.samples) / part.rate for part in item.content.parts if isinstance(part, AudioPart))


def without_sound(item: Item) -> Item:
    """The item with its transcript but no samples."""
    if not isinstance(item.content, Message):
        return item
    parts = tuple(
        AudioPart(part.samples[:0].copy(), part.rate, part.transcript) if isinstance(part, AudioPart) else part
        for part in item.content.parts
    )
    return replace(item, content=replace(item.content, parts=parts))


def written(item: Item) -> str:
    """The text of an item, as far as it is known."""
    if isinstance(item.content, ToolCall):
        return item.content.arguments
    if isinstance(item.content, ToolOutput):
        return item.content.output
    return "".join(text_of_part(part) for part in item.content.parts)


def text_of_part(part: Part) -> str:
    """The text of a part of a message, as far as it is known; a picture has none."""
    if isinstance(part, TextPart):
        return part.text
    return (part.transcript or "") if isinstance(part, AudioPart) else ""


@dataclass(frozen=True)
class HistoryWindow:
    """Shares of the context: above `high` the oldest turns are dropped down to `low`, so that it happens rarely."""

    high: float = 0.75
    low: float = 0.5


def first_retained(
    lengths: Sequence[int], fixed: int, capacity: int, first: int = 0, window: HistoryWindow | None = None
) -> int:
    """The index of the first turn to keep, of turns with these lengths; those before `first` are dropped already.

    `fixed` rows are always kept, and so is the last turn.
    """
    window = window or HistoryWindow()
    first = min(first, max(0, len(lengths) - 1))
    if fixed + sum(lengths[first:]) <= window.high * capacity:
        return first
    while first < len(lengths) - 1 and fixed + sum(lengths[first:]) > window.low * capacity:
        first += 1
    return first
