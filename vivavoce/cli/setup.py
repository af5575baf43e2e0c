"""`viva setup`: looks at this machine, proposes a stack, fetches its models and makes it the default."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vivavoce.cli.options import StackName, gigabytes, table
from vivavoce.cores import usable_cores
from vivavoce.errors import CapacityError, InputError, MissingDependencyError

if TYPE_CHECKING:
    from vivavoce.stacks import Stack

INSTALL = "needs pip install 'vivavoce[talk]'"
PREFERRED = ("assistant", "desk", "mini")
"""What is proposed, the first that this machine can run; s2s is 26 GB and only taken by name, or if it is here."""


@dataclass(frozen=True)
class MachineSummary:
    """What decides which stack can run."""

    cores: int
    memory: int
    gpu: str | None
    gpu_memory: int
    cache: str
    disk: int

    @classmethod
    def look(cls) -> "MachineSummary":
        """This machine."""
        from vivavoce import hub
        from vivavoce.device import available

        devices = available()
        gpu = next((device for device in devices if device.kind != "cpu"), None)
        cpu = next(device for device in devices if device.kind == "cpu")
        cache = hub.cache_folder()
        return cls(
            usable_cores(),
            cpu.total_memory(),
            None if gpu is None else gpu.name,
            0 if gpu is None else gpu.total_memory(),
            str(cache),
            hub.free_disk(cache),
        )

    def obstacle(self, stack: "Stack") -> str | None:
        """Why a stack cannot run here; None: it can."""
        if stack.needs_gpu and self.gpu_memory < stack.memory:
            return f"needs a GPU with {gigabytes(stack.memory)}"
        if not stack.needs_gpu and self.memory < stack.memory:
            return f"needs {gigabytes(stack.memory)} of memory"
        if stack.missing_modules:
            return INSTALL
        if (size := fetched_bytes(stack)) > self.disk:
            return f"needs {gigabytes(size)} on the disk of {self.cache}"
        return None

    def proposal(self) -> "Stack":
        """The best stack that can run."""
        from vivavoce.stacks import STACKS

        if not STACKS["s2s"].missing_models and self.obstacle(STACKS["s2s"]) is None:
            return STACKS["s2s"]
        return next(STACKS[name] for name in PREFERRED if self.obstacle(STACKS[name]) is None)


def setup(
    stack: StackName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    english: Annotated[
        bool, typer.Option("--english", help="In assistant, take the quicker parts, which know English only.")
    ] = False,
) -> None:
    """Choose the models of `viva talk`, `viva serve` and `viva demo`: propose, ask, fetch, and remember."""
    from vivavoce.stacks import ENGLISH_PARTS, StackConfig, config_file, stack_named

    console = Console(highlight=False, soft_wrap=True)
    file = config_file()
    if file is None:
        raise InputError("VIVA_CONFIG is empty: unset it, or name the file to write")
    machine = MachineSummary.look()
    _print_machine(console, machine)
    console.print(_stack_table(machine))
    chosen = machine.proposal() if stack is None else stack_named(stack)
    config = StackConfig(chosen.name, **(ENGLISH_PARTS if english and chosen.chat is not None else {}))
    _require(machine, config.chosen)
    _print_models(console, config.chosen)
    if not yes and not _agrees(config.chosen):
        console.print("nothing was changed")
        raise typer.Exit(1)
    _fetch(config.chosen)
    config.write(file)
    console.print(f"{config.stack} is the default, by {escape(str(file))}; next: viva talk, or viva serve")


def fetched_bytes(stack: "Stack") -> int:
    """Bytes that are to be fetched for a stack."""
    return sum(model.bytes for model in stack.missing_models)


def _require(machine: MachineSummary, stack: "Stack") -> None:
    """Raise where this machine cannot run the stack."""
    if stack.missing_modules:
        raise MissingDependencyError(f"{stack.name} {INSTALL}: {', '.join(stack.missing_modules)} are not installed")
    if (obstacle := machine.obstacle(stack)) is not None:
        raise CapacityError(f"{stack.name} cannot run on this machine: it {obstacle}; choose another --stack")


def _agrees(stack: "Stack") -> bool:
    if not sys.stdin.isatty():
        raise InputError("there is no terminal to ask on; run it again with --yes")
    fetch = f"Fetch {gigabytes(fetched_bytes(stack))} and make" if stack.missing_models else "Make"
    return typer.confirm(f"{fetch} {stack.name} the default?", default=True)


def _fetch(stack: "Stack") -> None:
    from vivavoce import hub

    for model in stack.missing_models:
        folder = hub.resolve(model.name)
        if model.listed:
            continue  # every file was checked by its SHA-256
        report = hub.check(folder, model)
        if not report.ok:
            raise InputError(f"{model.name}: {report.problems[0]}; run the same command again")


def _print_machine(console: Console, machine: MachineSummary) -> None:
    gpu = "no GPU" if machine.gpu is None else f"{machine.gpu} with {gigabytes(machine.gpu_memory)}"
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    console.print(
        f"This machine: {cores}, {gigabytes(machine.memory)} of memory, {gpu}; {gigabytes(machine.disk)} free in "
        f"{escape(machine.cache)}"
    )


def _stack_table(machine: MachineSummary) -> Table:
    from vivavoce.stacks import STACKS

    shown = table("Stacks", "stack", "what", "to fetch", "here")
    for stack in STACKS.values():
        size = gigabytes(fetched_bytes(stack)) if stack.missing_models else "nothing"
        what = f"{stack.what}; {', '.join(stack.languages)}"
        shown.add_row(stack.name, what, size, escape(machine.obstacle(stack) or "runs"))
    return shown


def _print_models(console: Console, stack: "Stack") -> None:
    """The models of a stack with size and licence, and whether they are here."""
    from vivavoce.hub.languages import language_names, spoken_languages

    missing = {model.name for model in stack.missing_models}
    shown = table(f"Models of {stack.name}", "model", "size", "licence", "languages", "")
    for model in stack.fetched:
        action = "to fetch" if model.name in missing else "here"
        shown.add_row(model.name, gigabytes(model.bytes), model.licence, model.languages, action)
    for name in (name for name in stack.models if name not in {model.name for model in stack.fetched}):
        shown.add_row(name, "", "Apache-2.0", language_names(spoken_languages(name)), "installed")
    console.print(shown)
