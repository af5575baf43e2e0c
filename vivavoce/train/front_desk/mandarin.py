"""Mandarin at the front desk: its replies in Traditional script, and the parts that make it a `SpokenLanguage`."""

from vivavoce.train.front_desk.language import SpokenLanguage
from vivavoce.train.front_desk.mandarin_text import is_value, plain_words, same_word, spoken_words
from vivavoce.train.front_desk.mandarin_values import (
    DIRECTIONS,
    DISH_PRICES,
    FOREIGN_NAMES,
    ROOM_PRICE,
    VALUES,
    WAYS_TO_SAY,
    YUAN_PER_EURO,
    number_words,
)
from vivavoce.train.front_desk.templates import by_name, read

TEMPLATES = read("templates", "zh")
REPLIES = {
    "greeting": "歡迎來到花園飯店，請問有什麼可以為您服務？",
    "how_are_you": "我很好，謝謝您。請問需要什麼服務？",
    "identity": "我是櫃檯的語音助理。",
    "help": "我可以幫您訂位或訂房。",
    "restaurant_hours": "餐廳每天中午十二點開到晚上十一點。",
    "breakfast": "早餐從早上七點供應到十點。",
    "menu": "我們有湯、鮭魚、雞肉、牛排和咖哩。",
    "recommend": "我推薦烤鮭魚，非常新鮮。",
    "vegetarian": "燉飯和咖哩都沒有肉。",
    "room_price": f"房間一晚{ROOM_PRICE}元，含早餐。",
    "bill": "好的，我馬上把帳單拿給您。",
    "pay_card": "刷卡或付現都可以。",
    "wifi": "無線網路是免費的，密碼是花園。",
    "check_in": "下午三點以後可以辦理入住。",
    "check_out": "請在早上十一點以前退房。",
    "taxi": "我馬上幫您叫計程車。",
    "thanks": "不客氣。",
    "goodbye": "再見，祝您有美好的一天。",
    "decline": "很抱歉，我聽不懂您的意思。",
    "ask_people": "請問幾位？",
    "ask_nights": "請問要住幾晚？",
    "ask_time": "請問幾點？",
    "ask_name": "請問您的大名？",
    "certainly": "沒問題。",
    "asked_table": "訂桌[，{day}][，{time}][，{people}]。",
    "asked_room": "訂房，住{nights}。",
    "asked_time": "好的，{time}。",
    "thanked": "謝謝您，{name}。",
    "booked_table": "桌子已經訂好了。",
    "booked_room": "房間已經訂好了。",
    "cancelled": "您的預約已經取消了。",
    "no_booking": "您還沒有預約。",
    "full": "很抱歉，那個時間已經客滿了。",
    "nothing_said": "我還沒有說話。",
    "not_given": "您還沒有告訴我。",
    "known_dish": "您點了{dish}。",
    "known_people": "您說{people}。",
    "known_nights": "您說住{nights}。",
    "known_time": "您說{time}。",
    "known_name": "您說{name}。",
    "directions": "{directions}",
    "price": "{dish}一份{price}元。",
    "order": "好的，一份{dish}。",
    "wake_up": "我會在{time}叫醒您。",
}
FILLERS = ("嗯，", "呃，", "請問，", "你好，", "不好意思，", "那個，", "對了，", "喂，")
TRAINING_FILLERS = (*FILLERS, "您好，", "哈囉，", "那，", "還有，", "欸，", "麻煩一下，", "打擾了，", "啊，", "另外，")
ENDINGS = ("，謝謝", "，謝謝你", "，麻煩你了", "，拜託", "，感謝", "，可以嗎")


def sentence(text: str) -> str:
    """A phrasing with a full stop unless punctuated."""
    return text if text[-1] in "。？！" else text + "。"


MANDARIN = SpokenLanguage(
    code="zh",
    written=by_name(TEMPLATES["written"]),
    training_only=by_name(TEMPLATES["training_only"]),
    openings=by_name(TEMPLATES["openings"]),
    cores={intent: by_name(kinds) for intent, kinds in TEMPLATES["cores"].items()},
    corrections=by_name(TEMPLATES["corrections"]),
    slot_words=by_name(read("words", "zh")["slots"]),
    values=VALUES,
    ways=WAYS_TO_SAY,
    words={
        **{slot: {value: said[0] for value, said in ways.items()} for slot, ways in WAYS_TO_SAY.items()},
        "name": {name: ways[0] for name, ways in WAYS_TO_SAY["name"].items()} | FOREIGN_NAMES,
        "price": DISH_PRICES,
        "directions": DIRECTIONS,
    },
    replies=REPLIES,
    separator="",
    fillers=FILLERS,
    training_fillers=TRAINING_FILLERS,
    endings=ENDINGS,
    polite="謝",
    sentence=sentence,
    plain_words=plain_words,
    spoken_words=spoken_words,
    is_value=is_value,
    same_word=same_word,
    is_recognised_value=same_word,
    number_words=number_words,
    currency="yuan",
    per_euro=YUAN_PER_EURO,
)
