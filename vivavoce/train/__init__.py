"""Training of the bundled miniatures, behind `viva train`: a package per model, and what they share."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class _FormerOption(argparse.Action):
    """A former name of an option: accepted with a warning, and not listed in the help."""

    def __init__(self, *, present: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.present = present

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(f"{parser.prog}: {option_string} is deprecated; use {self.present}", file=sys.stderr)
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def add_option(
    container: argparse._ActionsContainer, name: str, *former_names: str, required: bool = False, **settings: Any
) -> None:
    """Add an option to a parser, under its present name and the former ones, which are deprecated."""
    target = container.add_mutually_exclusive_group(required=True) if required else container
    action = target.add_argument(name, **settings)
    same: dict[str, Any] = {each: getattr(action, each) for each in ("dest", "nargs", "const", "type", "default")}
    for former_name in former_names:
        target.add_argument(former_name, action=_FormerOption, present=name, help=argparse.SUPPRESS, **same)
