"""The text of HTML, in time that grows with its length only."""

import html

NOT_SHOWN = ("script", "style")


def without_markup(text: str) -> str:
    """The text between tags; scripts and styles are left out."""
    first, *pieces = text.split("<")
    found, hidden = [first], ""
    for piece in pieces:
        tag, end, rest = piece.partition(">")
        name = (tag.split(maxsplit=1) or [""])[0].lower()
        if hidden:
            hidden = "" if name == f"/{hidden}" else hidden
        elif name in NOT_SHOWN:
            hidden = name
            continue
        if not hidden:
            found.append(f" {rest}" if end else f"<{piece}")
    return html.unescape("".join(found))
