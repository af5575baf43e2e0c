"""Errors that speak to the person who can act: what was wrong, with which value, and what to do."""


class VivaError(Exception):
    """Base of every error a user can do something about. Its message is one line, shown without a traceback."""


class CheckpointError(VivaError):
    """A model's files are missing, damaged, or not of the layout they claim."""


class InputError(VivaError):
    """What the caller passed cannot be used: wrong ids, wrong rate, wrong shape, empty."""


class NothingToSayError(InputError):
    """A text holds nothing that a voice could say."""


class CapacityError(VivaError):
    """It would be right, but it does not fit: context, cache pages, memory."""


class MissingDependencyError(VivaError):
    """A feature needs an extra that is not installed; the message names the pip command."""


def shown(text: str) -> str:
    """A text as a message quotes it: its beginning, where it is long."""
    return repr(text if len(text) <= 30 else text[:30] + "…")
