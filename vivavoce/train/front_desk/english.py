"""English at the front desk: its replies and the parts that make it a `SpokenLanguage`."""

import re

from vivavoce.train.front_desk.english_text import is_recognised_value, is_value, plain_words, same_word, spoken_words
from vivavoce.train.front_desk.english_values import (
    DAYS,
    DIRECTIONS,
    NUMBERS,
    PRICES,
    VALUES,
    WAYS_TO_SAY,
    number_words,
)
from vivavoce.train.front_desk.language import SpokenLanguage
from vivavoce.train.front_desk.templates import by_name, read

TEMPLATES = read("templates", "en")
DECLINE = "I am sorry, I did not understand that."
REPLIES = {
    "greeting": "Welcome to the Garden Hotel. How can I help you?",
    "how_are_you": "I am very well, thank you. How can I help you?",
    "identity": "I am the voice of the front desk.",
    "help": "I can book a table or a room for you.",
    "restaurant_hours": "The restaurant is open every day from noon until eleven.",
    "breakfast": "Breakfast is served from seven until ten in the morning.",
    "menu": "We have soup, salmon, chicken, steak and curry.",
    "recommend": "I recommend the grilled salmon. It is very fresh.",
    "vegetarian": "The risotto and the curry have no meat.",
    "room_price": "A room is ninety euros a night, with breakfast.",
    "bill": "Of course. I will bring you the bill.",
    "pay_card": "You can pay by card or in cash.",
    "wifi": "The wifi is free. The password is garden.",
    "check_in": "You can check in from three in the afternoon.",
    "check_out": "Please check out by eleven in the morning.",
    "taxi": "I will call a taxi for you right away.",
    "thanks": "You are welcome.",
    "goodbye": "Goodbye, and have a nice day.",
    "decline": DECLINE,
    "ask_people": "For how many people?",
    "ask_nights": "For how many nights?",
    "ask_time": "At what time, please?",
    "ask_name": "And your name, please?",
    "certainly": "Certainly.",
    "asked_table": "A table[ for {people}][ {day}][ at {time}].",
    "asked_room": "A room for {nights}.",
    "asked_time": "At {time}.",
    "thanked": "Thank you, {name}.",
    "booked_table": "Your table is booked.",
    "booked_room": "Your room is booked.",
    "cancelled": "Your booking is cancelled.",
    "no_booking": "You have no booking yet.",
    "full": "I am sorry, we are full then.",
    "nothing_said": "I have not said anything yet.",
    "not_given": "You have not told me yet.",
    "known_dish": "You ordered the {dish}.",
    "known_people": "You said {persons}.",
    "known_nights": "You said {nights}.",
    "known_time": "You said {time}.",
    "known_name": "You said {name}.",
    "directions": "{directions}",
    "price": "The {dish} is {price} euros.",
    "order": "Certainly. One {dish}.",
    "wake_up": "I will wake you at {time}.",
}
FILLERS = ("um, ", "excuse me, ", "hello, ", "hi, ", "sorry, ", "well, ", "okay, ", "so, ", "oh, ", "and ", "uh, ")
TRAINING_FILLERS = (  # in training only, like the endings
    *FILLERS,
    *("hey, ", "good morning, ", "good evening, ", "one question, ", "a quick question, ", "right, ", "yes, ", "ah, "),
    *("now, ", "then ", "by the way, ", "one more thing, ", "tell me, ", "please, ", "thank you, and "),
)
ENDINGS = (", please", ", thank you", ", thanks", ", if I may ask", ", if possible", " right now", " then", ", sorry")


def sentence(text: str) -> str:
    """Capitalise the sentence, "I" and days, and add a full stop unless punctuated."""
    text = re.sub(r"\bi\b", "I", text)
    text = re.sub(rf"\b({'|'.join(DAYS)})\b", lambda match: match.group(1).capitalize(), text)
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


ENGLISH = SpokenLanguage(
    code="en",
    written=by_name(TEMPLATES["written"]),
    training_only=by_name(TEMPLATES["training_only"]),
    openings=by_name(TEMPLATES["openings"]),
    cores={intent: by_name(kinds) for intent, kinds in TEMPLATES["cores"].items()},
    corrections=by_name(TEMPLATES["corrections"]),
    slot_words=by_name(read("words", "en")["slots"]) | {"weekday": list(DAYS)},
    values=VALUES,
    ways=WAYS_TO_SAY,
    words={
        "persons": {number: f"{number} people" for number in NUMBERS} | {"one": "one person"},
        "nights": {number: f"{number} nights" for number in NUMBERS} | {"one": "one night"},
        "price": PRICES,
        "directions": DIRECTIONS,
    },
    replies=REPLIES,
    separator=" ",
    fillers=FILLERS,
    training_fillers=TRAINING_FILLERS,
    endings=ENDINGS,
    polite="please",
    sentence=sentence,
    plain_words=plain_words,
    spoken_words=spoken_words,
    is_value=is_value,
    same_word=same_word,
    is_recognised_value=is_recognised_value,
    number_words=number_words,
    currency="euros",
    per_euro=1,
)
