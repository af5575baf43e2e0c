"""The front desk's functions as declared for a model that does not know the desk: described, with lists of values."""

from dataclasses import replace

from vivavoce.dialogue.settings import Tool
from vivavoce.train.front_desk.english_values import PRICES, SHORT_DISHES
from vivavoce.train.front_desk.tools import OTHERS, SUBJECTS, TOOLS

INSTRUCTIONS = (
    "You are the front desk of a restaurant with hotel. Call a function when the guest asks for what it does and all "
    "of its required values are known; give it what was said and nothing else. Otherwise answer in one short sentence. "
    "Write times as 8:30."
)
# By their short names, as guests call them, but for "burger": a model that begins "che…" would be led to "chicken".
DISHES = [dish if dish == "cheeseburger" else SHORT_DISHES.get(dish, (dish,))[-1] for dish in PRICES]
TOPICS = list(dict.fromkeys(subject for subject, _ in SUBJECTS.values()))


def _described(tool: Tool, description: str, **values: list[str]) -> Tool:
    """The tool with this description, and lists of the values of some arguments."""
    listed = {name: {"enum": each} for name, each in values.items()}
    parameters = {**tool.parameters, "properties": {**tool.parameters["properties"], **listed}}
    return replace(tool, description=description, parameters=parameters)


DESCRIBED_TOOLS = (
    _described(OTHERS[0], "Prints the report of a day, for the staff."),
    _described(TOOLS["book_table"], "Reserves a table in the restaurant."),
    _described(TOOLS["book_room"], "Reserves a hotel room."),
    _described(
        TOOLS["look_up"],
        'Answers questions on prices and times: "what is the steak" or "how much do you charge for it" (subject: the '
        "dish), what a room costs, when the restaurant is open or still serves food, when breakfast is, what there is "
        'to eat (menu), "how do I get online" (wifi), when guests can have their room (check in), how long they may '
        "keep it (check out).",
        subject=[*TOPICS, *DISHES],
    ),
    _described(
        TOOLS["order"],
        'Sends an order for a dish or drink to the kitchen: "I\'ll have the steak", "the soup for me".',
        dish=DISHES,
    ),
    OTHERS[-1],
)
