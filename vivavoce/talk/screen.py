"""What `viva talk` shows: captions as lines and, in a terminal, level meters and the running turn below them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from vivavoce.talk.turns import TalkTurn

FLOOR_DBFS, TOP_DBFS = -60.0, -10.0
METER_CELLS = 12
DECAY_DB = 6.0  # of a meter, each time it is drawn
REFRESHES = 12  # a second


class Screen:
    """Use as `with`. Without a terminal only whole lines are printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._heard = self._said = FLOOR_DBFS
        self._turns: Sequence[TalkTurn] = ()
        self._latencies: list[float] = []

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=REFRESHES, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, line: str) -> None:
        """Print a remark."""
        self._console.print(f"[dim]{escape(line)}[/dim]", highlight=False)

    def working(self, what: str) -> AbstractContextManager[object]:
        """Show what is being done before the conversation."""
        if self._console.is_terminal:
            return self._console.status(what)
        self.note(f"… {what}")
        return nullcontext()

    def heard(self, dbfs: float) -> None:
        """Note the level of the microphone."""
        self._heard = max(self._heard, dbfs)

    def said(self, dbfs: float) -> None:
        """Note the level of the reply."""
        self._said = max(self._said, dbfs)

    def show(self, turns: Sequence[TalkTurn]) -> None:
        """Set the turns whose captions are still changing."""
        self._turns = turns

    def turn(self, turn: TalkTurn) -> None:
        """Print the captions of a turn that is over."""
        if turn.heard:
            self._console.print(f"[bold cyan]you [/bold cyan] {escape(turn.heard.strip())}", highlight=False)
        for filler in turn.fillers:
            self._console.print(f"[bold green]viva[/bold green] [dim]{escape(filler)}[/dim]", highlight=False)
        said = turn.said.strip() + (" —" if turn.is_interrupted else "")
        if said:
            self._console.print(f"[bold green]viva[/bold green] {escape(said)}", highlight=False)
        if turn.error is not None:
            self._console.print(f"[red]{escape(turn.error)}[/red]", highlight=False)
        details = []
        if turn.v2v_ms is not None:
            self._latencies.append(turn.v2v_ms)
            details.append(f"{turn.v2v_ms:.0f} ms from your last sound to the first of the reply")
        if turn.is_interrupted:
            details.append("interrupted")
        if details:
            self.note(f"     {'; '.join(details)}")

    def _render(self) -> Group:
        lines = []
        for turn in self._turns:
            lines += [Text(f"you  {turn.heard or '…'}", "cyan"), Text(f"viva {turn.said}", "green")]
        self._heard, self._said = (max(FLOOR_DBFS, each - DECAY_DB) for each in (self._heard, self._said))
        return Group(*lines, Text(f"you {meter(self._heard)}   viva {meter(self._said)}{self._median()}", "dim"))

    def _median(self) -> str:
        if not self._latencies:
            return ""
        ordered = sorted(self._latencies)
        return f"   latency {ordered[len(ordered) // 2]:.0f} ms (median of {len(ordered)})"


def meter(dbfs: float) -> str:
    """A level as a bar."""
    share = (min(max(dbfs, FLOOR_DBFS), TOP_DBFS) - FLOOR_DBFS) / (TOP_DBFS - FLOOR_DBFS)
    filled = round(share * METER_CELLS)
    return "█" * filled + "░" * (METER_CELLS - filled)
