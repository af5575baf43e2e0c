"""The front desk's functions as declared for a model that does not know the desk: described, with lists of values."""

from typing import Any

from vivavoce.dialogue.settings import Tool
from vivavoce.train.front_desk.english_values import PRICES, SHORT_DISHES
from vivavoce.train.front_desk.tools import SUBJECTS

INSTRUCTIONS = (
    "You are the front desk of a restaurant with hotel. Call a function when the guest asks for what it does and all "
    "of its required values are known; give it what was said and nothing else. Otherwise answer in one short sentence. "
    "Write times as 8:30."
)
DISHES = [dish if dish == "cheeseburger" else SHORT_DISHES.get(dish, (dish,))[-1] for dish in PRICES]
TOPICS = list(dict.fromkeys(subject for subject, _ in SUBJECTS.values()))


def _tool(name: str, description: str, required: tuple[str, ...], properties: dict[str, Any]) -> Tool:
    return Tool(name, description, {"type": "object", "properties": properties, "required": list(required)})


DESCRIBED_TOOLS = (
    Tool.plain("print_report", "Prints the report of a day, for the staff.", ("day",), day="string"),
    Tool.plain(
        "book_table",
        "Reserves a table in the restaurant.",
        ("people", "time"),
        people="integer",
        time="string",
        day="string",
        name="string",
    ),
    Tool.plain("book_room", "Reserves a hotel room.", ("nights",), nights="integer", name="string"),
    _tool(
        "look_up",
        'Answers questions on prices and times: "what is the steak" or "how much do you charge for it" (subject: the '
        "dish), what a room costs, when the restaurant is open or still serves food, when breakfast is, what there is "
        'to eat (menu), "how do I get online" (wifi), when guests can have their room (check in), how long they may '
        "keep it (check out).",
        ("subject",),
        {"subject": {"enum": [*TOPICS, *DISHES]}},
    ),
    _tool(
        "order",
        'Sends an order for a dish or drink to the kitchen: "I\'ll have the steak", "the soup for me".',
        ("dish",),
        {"dish": {"enum": DISHES}},
    ),
    Tool.plain("hang_up", "Ends the call."),
)
