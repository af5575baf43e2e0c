"""What is said in the corpus of turn ends: sentences, hesitations inside them, and beginnings that are not finished.

Every list is split: the last fifth of its entries is only used to evaluate, so that no held-out text shares a part
with a text of training, apart from the openings.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

HELD_OUT_SHARE = 5
"""One of this many entries of each list is held out."""
UNFINISHED = 0.35  # share of texts that stop within a sentence
HESITANT = 0.2  # share of the finished ones with a hesitation inside
SHORT = 0.15  # share of the finished ones that are short answers
LISTED = 0.1  # share of the finished ones that are numbers in groups


@dataclass(frozen=True)
class TurnText:
    """A text, and whether the turn is over after it."""

    language: str
    text: str
    is_finished: bool


@dataclass(frozen=True)
class Words:
    """The parts of sentences of a language: opening + action + detail + end."""

    openings: tuple[tuple[str, str], ...]
    """Beginnings, each with the mark that ends its sentence."""
    actions: tuple[str, ...]
    details: tuple[str, ...]
    statements: tuple[str, ...]
    """Whole sentences with `|` where a speaker may pause."""
    short: tuple[str, ...]
    number_openings: tuple[str, ...]
    digits: tuple[str, ...]
    fillers: tuple[str, ...]
    """Said inside a sentence, with their marks."""
    trailing: tuple[str, ...]
    """Said after a beginning, by a speaker who goes on."""
    connectives: tuple[str, ...]
    """Words after which a sentence cannot end."""
    space: str


ENGLISH = Words(
    openings=(
        ("I would like to", "."),
        ("I need to", "."),
        ("Could you help me to", "?"),
        ("Can we", "?"),
        ("Would it be possible to", "?"),
        ("My sister wants to", "."),
        ("We are planning to", "."),
        ("I completely forgot to", "."),
        ("Do you know how to", "?"),
        ("Please remind me to", "."),
        ("Is it too late to", "?"),
        ("Yesterday I had to", "."),
        ("What is the best way to", "?"),
        ("Let's", "."),
        ("I was wondering if I could", "."),
    ),
    actions=(
        "book a flight to Chicago",
        "change my appointment with the dentist",
        "send a letter to my landlord",
        "return these shoes",
        "order two large pizzas with mushrooms",
        "find a good doctor near the station",
        "cancel the meeting with the new client",
        "rent a small car",
        "learn the guitar",
        "fix the washing machine",
        "invite the whole family",
        "pay the electricity bill",
        "paint the kitchen",
        "take the dog to the vet",
        "move to a quieter street",
        "buy tickets for the concert",
        "get a refund for the broken lamp",
        "speak with someone about my contract",
        "cook something light",
        "update the software on my laptop",
        "visit the museum of modern art",
        "leave the keys with the neighbour",
        "borrow a ladder",
        "print the photographs from our holiday",
        "set an alarm",
        "reach the support team",
        "reserve a court for tennis",
        "translate this document into Spanish",
        "pick up the parcel from the post office",
        "open a savings account",
    ),
    details=(
        "next Tuesday",
        "before the weekend",
        "because the weather is getting worse",
        "for my mother's birthday",
        "if that is all right with you",
        "with two of my colleagues",
        "after the children are asleep",
        "as soon as possible",
        "without paying too much",
        "in the first week of October",
        "when the shop opens again",
        "although it is raining",
        "near the old harbour",
        "at a quarter past three",
        "so that nobody has to wait",
        "with the card I used last time",
        "for about three hours",
        "until the end of the month",
        "from my phone",
        "while we are in the city",
        "on the second floor",
        "unless it costs more than fifty dollars",
        "tonight",
        "by myself",
        "on Thursday evening",
    ),
    statements=(
        "The train | was late again, | so I missed | the beginning of the film.",
        "My brother works | for a company that | makes parts for bicycles.",
        "If you go | straight down this road, | you will see | the bakery on your left.",
        "I think | the blue one | looks better than | the green one.",
        "She told me that | the shop closes | at six on Saturdays.",
        "What would you do | if you had | a whole year off?",
        "The problem is | that my screen goes black | every time I | open the camera.",
        "We grew up | in a village with | only one street | and a tiny school.",
        "How long does it take | to get from here to | the other side of the river?",
        "There were | more than two hundred people | in a room for | eighty.",
        "I usually drink | coffee with a little milk | but no sugar.",
        "Have you ever | tried to explain | the rules of cricket to | a child?",
        "Most of the books | on that shelf | belong to my grandfather.",
        "When I was | about ten years old, | we had a | very big black dog.",
        "It is not that | I don't like it, | I just | don't have the time.",
        "The doctor said | I should | take two of these | every morning.",
        "Tell me | something about | the history of this place.",
        "He bought | a house in | the middle of | nowhere.",
        "Which of these | is the one that | you wanted me to sign?",
        "I am calling because | the heating in our flat | has stopped working.",
        "Our flight lands | at ten past nine, | and then we | have to find a taxi.",
        "Could you say | the last part | again, a bit | slower?",
        "The soup was cold | and the waiter | never came back to | our table.",
        "They are going to | close the bridge for | at least three weeks.",
        "What is the name of | the actor who | played the father?",
        "I'm allergic to | nuts and | to most kinds of | shellfish.",
        "You can leave it | on the desk next to | the printer.",
        "My daughter | turns seven on | the nineteenth of May.",
        "Does the price include | breakfast and | the use of the pool?",
        "As far as I know | the library stays open | until eight.",
    ),
    short=(
        *("Yes, please.", "No, thank you.", "Two.", "On Friday.", "Maybe later.", "That's all.", "Sounds good."),
        *("Of course.", "I don't know.", "Not really.", "Around noon.", "Just me.", "Never.", "Twenty five."),
        *("What do you mean?", "How much?", "Thanks a lot.", "In the morning.", "Not yet.", "Fine by me."),
        *("Good evening.", "Goodbye.", "Why not?", "The red one.", "At the airport.", "Margaret Hill.", "Really?"),
        *("With milk.", "Nine o'clock.", "I agree.", "Where is it?"),
    ),
    number_openings=("My number is", "The code is", "It's", "You can call me at", "The reference is"),
    digits=("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    fillers=(", um,", ", uh,", ", you know,", ", let me see,", "... um,", ", well,", " uh... "),
    trailing=(", um...", ", uh...", "...", ",", " uh,", "—", ", let me see...", ", you know,", ", hmm..."),
    connectives=("and", "but", "because", "so", "with", "for", "the", "if", "or", "that", "a", "to"),
    space=" ",
)

MANDARIN = Words(
    openings=(
        ("我想", "。"),
        ("我需要", "。"),
        ("你能不能帮我", "？"),
        ("可不可以", "？"),
        ("我们打算", "。"),
        ("我妈妈想", "。"),
        ("请问怎么", "？"),
        ("我昨天忘了", "。"),
        ("麻烦你帮我", "。"),
        ("现在还来得及", "吗？"),
        ("我朋友让我", "。"),
        ("你知道在哪里可以", "吗？"),
    ),
    actions=(
        "订一张去上海的机票",
        "改一下牙医的预约",
        "给房东写一封信",
        "退掉这双鞋",
        "点两份牛肉面",
        "找一个车站附近的医院",
        "取消明天的会议",
        "租一辆小一点的车",
        "学弹吉他",
        "修一下洗衣机",
        "请全家人吃饭",
        "交这个月的电费",
        "带狗去看医生",
        "搬到安静一点的地方",
        "买两张音乐会的票",
        "换一个大一点的房间",
        "找人问一下合同的事情",
        "做一点清淡的菜",
        "去看新开的博物馆",
        "把钥匙交给邻居",
        "借一把梯子",
        "洗几张旅行的照片",
        "联系一下客服",
        "把这份文件翻译成英文",
        "去邮局拿一个包裹",
        "开一个新的账户",
    ),
    details=(
        "，因为天气越来越冷了",
        "，下个星期二之前",
        "，如果你方便的话",
        "，给我妈妈过生日",
        "，跟两个同事一起",
        "，等孩子睡了以后",
        "，越快越好",
        "，不要花太多钱",
        "，用上次那张卡",
        "，大概三个小时",
        "，虽然外面在下雨",
        "，这样大家就不用等了",
        "，在老火车站旁边",
        "，最好是星期四晚上",
        "，不过不能超过五百块",
        "",
        "",
        "",
        "",
        "，趁我们还在这里",
    ),
    statements=(
        "火车又 | 晚点了，所以我 | 没看到电影的开头。",
        "我弟弟在一家 | 做自行车零件的公司 | 上班。",
        "你一直往前走，| 就会看到左边有 | 一家面包店。",
        "我觉得蓝色的 | 比绿色的 | 好看一点。",
        "她跟我说 | 那家店星期六 | 六点就关门了。",
        "如果有一整年的假期，| 你会 | 做什么？",
        "问题是我每次 | 打开相机，屏幕就 | 变黑了。",
        "我们小时候住在 | 一个只有一条街的 | 小村子里。",
        "从这里到河的 | 另外一边要 | 多长时间？",
        "我一般喝 | 加一点牛奶的咖啡，不放 | 糖。",
        "书架上的书 | 大部分都是 | 我爷爷的。",
        "我十岁的时候，| 家里有一只 | 很大的黑狗。",
        "医生说我 | 每天早上要 | 吃两片这个药。",
        "你给我讲讲 | 这个地方的 | 历史吧。",
        "他在山里面 | 买了一栋 | 很旧的房子。",
        "我打电话是因为 | 我们家的暖气 | 坏了。",
        "我们的飞机九点十分 | 到，然后还要 | 找出租车。",
        "最后那一句 | 你能不能再 | 说慢一点？",
        "他们要把那座桥 | 关掉，至少 | 三个星期。",
        "演爸爸的那个 | 演员叫什么 | 名字？",
        "我对花生 | 还有大部分的海鲜 | 过敏。",
        "你放在打印机 | 旁边的桌子上 | 就可以了。",
        "我女儿 | 五月十九号 | 满七岁。",
        "这个价格 | 包括早餐和 | 游泳池吗？",
        "据我所知 | 图书馆 | 八点才关门。",
    ),
    short=(
        *("好的，谢谢。", "不用了。", "两个。", "星期五。", "以后再说吧。", "就这些。", "可以啊。", "当然。"),
        *("我不知道。", "不太想。", "中午左右。", "就我一个人。", "从来没有。", "二十五。", "什么意思？"),
        *("多少钱？", "非常感谢。", "早上吧。", "我都可以。", "晚上好。", "再见。", "为什么呢？", "红色的。"),
        *("在机场。", "真的吗？", "加牛奶。", "九点钟。", "我同意。", "在哪里？", "没问题。"),
    ),
    number_openings=("我的号码是", "密码是", "你可以打", "订单号是"),
    digits=("零", "一", "二", "三", "四", "五", "六", "七", "八", "九"),
    fillers=("，嗯，", "，那个，", "，就是，", "，呃，", "，这个，"),
    trailing=("，嗯……", "，那个……", "……", "，", "，呃，", "，就是……", "，然后……"),
    connectives=("然后", "因为", "但是", "所以", "跟", "的", "把", "如果", "还有"),
    space="",
)

WORDS = {"en": ENGLISH, "zh": MANDARIN}


def turn_texts(language: str, part: str, count: int, seed: int = 0) -> list[TurnText]:
    """Texts of a part, `train` or `held_out`; deterministic for its arguments."""
    source, words = random.Random(f"turn texts {language} {part} {seed}"), WORDS[language]
    drawn = _Draw(words, part, source)
    return [TurnText(language, *drawn.text()) for _ in range(count)]


def part_of(entries: Sequence[str], part: str) -> Sequence[str]:
    """The entries of a list that a part may use."""
    held = max(1, len(entries) // HELD_OUT_SHARE)
    return entries[-held:] if part == "held_out" else entries[:-held]


class _Draw:
    """Draws texts from the lists of a language."""

    def __init__(self, words: Words, part: str, source: random.Random) -> None:
        self.words, self.part, self.source = words, part, source

    def text(self) -> tuple[str, bool]:
        if self.source.random() < UNFINISHED:
            return self._unfinished(), False
        kind = self.source.random()
        if kind < SHORT:
            return self._one_of(self.words.short), True
        if kind < SHORT + LISTED:
            return self._number(), True
        pieces = self._pieces()
        if self.source.random() < HESITANT:
            pieces = self._hesitant(pieces)
        return self._joined(pieces), True

    def _one_of(self, entries: Sequence[str]) -> str:
        return self.source.choice(part_of(entries, self.part))

    def _pieces(self) -> list[str]:
        """The pieces of a sentence, between which a speaker may pause."""
        if self.source.random() < 0.5:
            return [piece.strip() for piece in self._one_of(self.words.statements).split("|")]
        opening, mark = self.source.choice(self.words.openings)
        action, detail = self._one_of(self.words.actions), self._one_of(self.words.details)
        if self.source.random() < 0.4 or not detail:
            return [opening, action + mark]
        if self.words.space:
            return [opening, action, detail + mark]
        return [opening, action + detail + mark.replace("吗？", "，可以吗？")]

    def _hesitant(self, pieces: list[str]) -> list[str]:
        place = self.source.randrange(len(pieces) - 1)
        filler = self.source.choice(self.words.fillers)
        return [*pieces[:place], pieces[place].rstrip(",，") + filler, *pieces[place + 1 :]]

    def _unfinished(self) -> str:
        """A beginning of a sentence, as a speaker says it who is about to go on."""
        pieces = self._pieces()
        kept = pieces[: self.source.randrange(1, len(pieces))] if len(pieces) > 1 else pieces
        beginning = self._joined(kept).rstrip(",，")
        if self.source.random() < 0.3:
            beginning += self.words.space + self.source.choice(self.words.connectives)
        return beginning + self.source.choice(self.words.trailing)

    def _number(self) -> str:
        """A number in groups, the pauses between which are no ends."""
        groups = [
            self.words.space.join(self.source.choices(self.words.digits, k=self.source.choice((2, 3, 4))))
            for _ in range(self.source.choice((2, 3)))
        ]
        comma, full_stop = (", ", ".") if self.words.space else ("，", "。")
        opening = self._one_of(self.words.number_openings)
        return opening + self.words.space + comma.join(groups) + full_stop

    def _joined(self, pieces: Sequence[str]) -> str:
        return self.words.space.join(pieces).replace("  ", " ")
