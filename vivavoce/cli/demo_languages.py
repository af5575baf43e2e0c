"""The languages of `viva demo`: which models can be asked in one, and the instructions of a cascade in it."""

from vivavoce.errors import InputError
from vivavoce.hub.languages import LANGUAGES, language_names, spoken_languages
from vivavoce.train.front_desk import language

FACTS = ("breakfast", "restaurant_hours", "menu", "room_price", "wifi", "check_in", "check_out", "pay_card")
"""Intents whose replies are the facts of the instructions."""
ROLES = {
    "en": "You are the voice of the front desk of the Garden Hotel. Answer in one short sentence, and only from these "
    "facts:",
    "zh": "你是花園飯店櫃檯的語音助理。請只根據以下的資訊，用一句簡短的中文回答：",
}


def hotel_instructions(code: str) -> str:
    """The instructions of a cascade for the bundled question of a language."""
    replies = language(code).replies
    return "\n".join([ROLES[code], *(f"- {replies[intent]}" for intent in FACTS)])


def require_language(code: str, *models: object) -> None:
    """Raise where the demo has no question in a language, or where one of the models does not know it."""
    if code not in ROLES:
        raise InputError(f"the demo asks in {' or '.join(ROLES)}, not in {code!r}")
    for model in models:
        spoken = spoken_languages(str(model))
        if code not in spoken:
            raise InputError(
                f"{model} knows {language_names(spoken)}, not {LANGUAGES[code]}: name another model or stack, or "
                f"give --language {spoken[0]}"
            )
