"""What is said over a reply in the corpus of overlaps: interruptions, backchannels, fillers and laughs.

None of the interruptions is one of the duplex lab's; the backchannels are the words there are.
"""

import random

from vivavoce.train.turn_end.texts import turn_texts

KINDS = ("interruption", "backchannel", "filler", "laugh")
SHARES = {"interruption": 0.5, "backchannel": 0.36, "filler": 0.07, "laugh": 0.07}
SHORT = 0.45  # share of interruptions that are short ones of the lists below

OPENINGS = {
    "en": (
        *("Excuse me,", "But", "Actually", "One question,", "Hang on,", "Stop.", "Let me ask,", "Hey,", "Listen,"),
        *("Just a second,", "Never mind,", "Can I", "I don't think", "That's wrong,", "Not that one,", "Please,"),
        *("What about", "Why", "How", "When", "Which", "Do you mean", "Is that", "Could you", "And then", "So"),
        *("Okay, but", "Yeah, but", "Right, and", "Oh no,", "Sorry to interrupt,", "Hello?", "Forget it,", "Quiet,"),
    ),
    "zh": (
        *("打断一下，", "可是", "其实", "我有个问题，", "别说了，", "停，", "你听我说，", "喂，", "算了，", "不是，"),
        *("能不能", "我觉得", "错了，", "不是那个，", "请问", "那么", "为什么", "怎么", "什么时候", "哪一个"),
        *("你是说", "这是", "可以", "然后呢，", "所以", "好，可是", "对，但是", "哎呀，", "对不起，", "慢着，"),
    ),
}
RESTS = {
    "en": (
        *("the other hotel is closer.", "I only have ten minutes.", "my train leaves at nine.", "we need two of them."),
        *("is it open on Monday?", "can you repeat the number?", "you already said that.", "the address is different."),
        *("I would rather have the small one.", "who is going to pay?", "tell me about the garden.", "slow down."),
    ),
    "zh": (
        *("另外那家更近。", "我只有十分钟。", "我的火车九点开。", "我们需要两个。", "星期一开门吗？"),
        *(
            "号码再说一遍。",
            "你已经说过了。",
            "地址不一样。",
            "我要小的那个。",
            "谁来付钱？",
            "说说花园吧。",
            "说慢一点。",
        ),
    ),
}
BACKCHANNELS = {
    "en": (
        *("mm-hm.", "Mm-hmm.", "mm.", "Hmm.", "Uh-huh.", "Uh huh.", "Yeah.", "Yes.", "Yep.", "Yeah yeah.", "Okay."),
        *("Ok.", "Right.", "Sure.", "I see.", "Got it.", "Oh.", "Ah.", "Aha.", "Good.", "Great.", "Really?", "Wow."),
        *("Exactly.", "Of course.", "All right.", "Oh okay.", "Oh yeah.", "Nice.", "Cool."),
    ),
    "zh": (
        *("嗯。", "嗯嗯。", "嗯嗯嗯。", "对。", "对对。", "对对对。", "好。", "好的。", "好好。", "是。", "是的。"),
        *("是吗？", "哦。", "噢。", "啊。", "行。", "没错。", "明白。", "知道了。", "真的吗？", "嗯，好。", "哦，对。"),
    ),
}
FILLERS = {"en": ("Um.", "Uh.", "Er.", "Uhm.", "Hm."), "zh": ("呃。", "嗯……", "唔。", "额。")}
LAUGHS = {
    "en": ("Ha ha ha ha!", "Hahaha!", "Ha ha!", "Heh heh heh.", "Hee hee hee!", "Ho ho ho ho."),
    "zh": ("哈哈哈哈！", "哈哈！", "嘿嘿嘿。", "呵呵呵。", "嘻嘻嘻！"),
}


def overlap_text(kind: str, code: str, source: random.Random) -> str:
    """A text of this kind."""
    banks = {"backchannel": BACKCHANNELS, "filler": FILLERS, "laugh": LAUGHS}
    if kind in banks:
        return source.choice(banks[kind][code])
    if source.random() < SHORT:
        space = " " if code == "en" else ""
        return f"{source.choice(OPENINGS[code])}{space}{source.choice(RESTS[code])}"
    return turn_texts(code, "train", 1, source.randrange(2**31))[0].text


def draw_kind(source: random.Random) -> str:
    """A kind, by the shares."""
    return source.choices(list(SHARES), list(SHARES.values()))[0]
