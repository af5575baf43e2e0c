"""`viva plan`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from vivavoce.cli.bench import Out
from vivavoce.cli.options import Json, print_json, progress_to
from vivavoce.errors import InputError

DAY = "A simulated day"


def plan(
    model: Annotated[str, typer.Option(help="The model; MOSS-Speech is the one there are figures of.")] = "MOSS-Speech",
    gpu: Annotated[str, typer.Option(help="H200, H100, A100, L40S, RTX5090, RTX4090, L4 or Ascend910B.")] = "H200",
    method: Annotated[str, typer.Option(help="bf16, int8, fp8, int4, int8+kv8 or int4+kv8.")] = "bf16",
    context: Annotated[
        int, typer.Option(min=1, help="Rows of history a session may have: 12.5 a second of speech.")
    ] = 4096,
    sessions: Annotated[int | None, typer.Option(min=1, help="Conversations at once; else as many as fit.")] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Dollars an hour of a card.")] = None,
    memory: Annotated[float | None, typer.Option(min=1.0, help="Gigabytes of a card, where it has others.")] = None,
    figures: Annotated[
        list[Path] | None,
        typer.Option(dir_okay=False, help="JSON of viva bench lm, then again of viva bench serve, from your card."),
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", rich_help_panel=DAY, help="Play a day of calls.")] = False,
    calls: Annotated[float, typer.Option(min=1.0, rich_help_panel=DAY, help="At once, when it is busiest.")] = 1000.0,
    cell: Annotated[
        float, typer.Option(min=10.0, rich_help_panel=DAY, help="Calls of one cell; more are many.")
    ] = 2000.0,
    call_seconds: Annotated[float, typer.Option(min=1.0, rich_help_panel=DAY, help="Mean length of a call.")] = 240.0,
    hours: Annotated[float, typer.Option(min=0.1, rich_help_panel=DAY, help="Hours to play.")] = 24.0,
    boot_seconds: Annotated[float, typer.Option(min=0.0, rich_help_panel=DAY, help="Until a new card serves.")] = 180.0,
    spare: Annotated[float, typer.Option(min=0.0, rich_help_panel=DAY, help="Share of places kept free.")] = 0.12,
    failures: Annotated[float, typer.Option(min=0.0, rich_help_panel=DAY, help="Of a card, in a year.")] = 12.0,
    outage: Annotated[
        float | None, typer.Option(min=0.0, max=23.0, rich_help_panel=DAY, help="The hour the largest region is gone.")
    ] = None,
    turn_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, rich_help_panel=DAY, help="Calls relayed by TURN.")
    ] = 0.15,
    seed: Annotated[int, typer.Option(rich_help_panel=DAY, help="Another seed, another day.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How many conversations a card holds, what they wait and cost; and how a fleet fares over a day of calls."""
    with progress_to(as_json):
        from vivavoce.plan import figures as known
        from vivavoce.plan import fits, play
        from vivavoce.plan import plan as make_plan
        from vivavoce.plan.report import print_day, print_plan, save
        from vivavoce.plan.simulation import Fleet

        card = known.named(known.ACCELERATORS, gpu, "card")
        card = replace(card, price=card.price if price is None else price)
        card = replace(card, memory=card.memory if memory is None else memory * 1e9)
        question = known.QuestionLoad(
            card=card,
            sizes=known.named(known.SIZES, model, "model"),
            measured=known.H200_MEASURED if not figures else known.read_measured(*_read(figures)),
            method=known.named(known.METHODS, method, "method"),
            context=context,
            sessions=sessions,
        )
        planned = make_plan(question)
        result: dict[str, Any] = {"plan": planned, "fits": fits(card, question)}
        print_plan(planned, result["fits"])
        if simulate:
            if not planned["most_sessions"]:
                raise InputError(
                    f"no session fits on {card.name} with {method} and {context} rows; there is no day to play"
                )
            fleet = Fleet(
                calls=calls,
                hours=hours,
                call_seconds=call_seconds,
                boot_seconds=boot_seconds,
                spare=spare,
                failures_a_year=failures,
                outage_hour=outage,
                turn_share=turn_share,
                places=planned["most_sessions"],
                card_price=card.price,
                seed=seed,
            )
            result["day"] = play(fleet, cell)
            print_day(result["day"], fleet.places)
        if out is not None:
            save(result, out)
    if as_json:
        print_json(result)


def _read(files: list[Path]) -> tuple[Any, Any]:
    if len(files) != 2:
        raise InputError(
            f"--figures is given twice: the JSON of viva bench lm, then of viva bench serve; not {len(files)}"
        )
    try:
        first, second = (json.loads(file.read_text(encoding="utf8")) for file in files)
    except (OSError, ValueError) as error:
        raise InputError(f"the figures cannot be read: {error}") from error
    return first, second
