"""`viva plan`: capacity, latency and cost of serving on a GPU, and a simulated day of calls."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivavoce.cli.bench import Out
from vivavoce.cli.options import Json, print_json, progress_to
from vivavoce.errors import InputError

if TYPE_CHECKING:
    from vivavoce.plan.figures import Accelerator, QuestionLoad

DAY = "A simulated day"


def plan(
    model: Annotated[str, typer.Option(help="The model; only MOSS-Speech has been measured.")] = "MOSS-Speech",
    gpu: Annotated[str, typer.Option(help="H200, H100, A100, L40S, RTX5090, RTX4090, L4 or Ascend910B.")] = "H200",
    method: Annotated[str, typer.Option(help="bf16, int8, fp8, int4, int8+kv8 or int4+kv8.")] = "bf16",
    context: Annotated[
        int, typer.Option(min=1, help="Rows of history per session; a second of speech has 12.5.")
    ] = 4096,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Concurrent conversations. Default: as many as fit.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price of a card in dollars per hour.")] = None,
    memory: Annotated[
        float | None, typer.Option(min=1.0, help="Memory of the card in gigabytes. Default: the card's usual memory.")
    ] = None,
    figures: Annotated[
        list[Path] | None,
        typer.Option(
            dir_okay=False,
            help="Measurements on your card, given twice: JSON of viva bench lm, then of viva bench serve.",
        ),
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", rich_help_panel=DAY, help="Simulate a day of calls.")] = False,
    calls: Annotated[float, typer.Option(min=1.0, rich_help_panel=DAY, help="Concurrent calls at the peak.")] = 1000.0,
    cell: Annotated[
        float, typer.Option(min=10.0, rich_help_panel=DAY, help="Calls per cell; a larger fleet has several cells.")
    ] = 2000.0,
    call_seconds: Annotated[
        float, typer.Option(min=1.0, rich_help_panel=DAY, help="Mean length of a call in seconds.")
    ] = 240.0,
    hours: Annotated[float, typer.Option(min=0.1, rich_help_panel=DAY, help="Hours to simulate.")] = 24.0,
    boot_seconds: Annotated[
        float, typer.Option(min=0.0, rich_help_panel=DAY, help="Seconds until a new card serves.")
    ] = 180.0,
    spare: Annotated[
        float, typer.Option(min=0.0, rich_help_panel=DAY, help="Share of the capacity that is kept free.")
    ] = 0.12,
    failures: Annotated[float, typer.Option(min=0.0, rich_help_panel=DAY, help="Failures per card and year.")] = 12.0,
    outage: Annotated[
        float | None,
        typer.Option(min=0.0, max=23.0, rich_help_panel=DAY, help="Hour at which the largest region fails."),
    ] = None,
    turn_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, rich_help_panel=DAY, help="Share of calls relayed by TURN.")
    ] = 0.15,
    seed: Annotated[int, typer.Option(rich_help_panel=DAY, help="Seed of the simulation.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Estimate the capacity, latency and cost of a GPU; with --simulate, of a fleet over a day of calls."""
    with progress_to(as_json):
        from vivavoce.plan import fits, print_plan, save
        from vivavoce.plan import plan as make_plan

        load = _load(model, gpu, method, context, sessions, figures or [], price, memory)
        result: dict[str, Any] = {"plan": make_plan(load), "fits": fits(load.card, load)}
        print_plan(result["plan"], result["fits"])
        if simulate:
            result["day"] = _play(
                result["plan"], load, cell,
                calls=calls, hours=hours, call_seconds=call_seconds, boot_seconds=boot_seconds, spare=spare,
                failures_a_year=failures, outage_hour=outage, turn_share=turn_share, seed=seed,
            )  # fmt: skip
        if out is not None:
            save(result, out)
    if as_json:
        print_json(result)


def _load(
    model: str,
    gpu: str,
    method: str,
    context: int,
    sessions: int | None,
    figures: list[Path],
    price: float | None,
    memory: float | None,
) -> "QuestionLoad":
    from vivavoce.plan import figures as known

    return known.QuestionLoad(
        card=_priced(known.named(known.ACCELERATORS, gpu, "card"), price, memory),
        sizes=known.named(known.SIZES, model, "model"),
        measured=known.H200_MEASURED if not figures else known.read_measured(*_read(figures)),
        method=known.named(known.METHODS, method, "method"),
        context=context,
        sessions=sessions,
    )


def _priced(card: "Accelerator", price: float | None, memory: float | None) -> "Accelerator":
    """The card with a price in dollars an hour and a memory in gigabytes of its own, where they are given."""
    card = replace(card, price=card.price if price is None else price)
    return replace(card, memory=card.memory if memory is None else memory * 1e9)


def _play(planned: dict[str, Any], load: "QuestionLoad", cell: float, **day: Any) -> Any:
    """Simulate a day of calls on cards of this plan, and print it."""
    from vivavoce.plan import play, print_day
    from vivavoce.plan.simulation import Fleet

    if not planned["most_sessions"]:
        raise InputError(
            f"no session fits on {load.card.name} with {load.method.name} and {load.context} rows; "
            "there is nothing to simulate"
        )
    fleet = Fleet(places=planned["most_sessions"], card_price=load.card.price, **day)
    result = play(fleet, cell)
    print_day(result, fleet.places)
    return result


def _read(files: list[Path]) -> tuple[Any, Any]:
    if len(files) != 2:
        raise InputError(
            f"give --figures twice, for the JSON of viva bench lm and of viva bench serve; not {len(files)} times"
        )
    try:
        first, second = (json.loads(file.read_text(encoding="utf8")) for file in files)
    except (OSError, ValueError) as error:
        raise InputError(f"the figures cannot be read: {error}") from error
    return first, second
