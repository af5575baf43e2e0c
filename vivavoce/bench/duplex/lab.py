"""`viva bench duplex URL`: make the scenes, play them to a server, and report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vivavoce import hub
from vivavoce.bench.duplex import page, report, requirements
from vivavoce.bench.duplex.runner import PlayedScenes, play_scenes
from vivavoce.bench.duplex.scenes import CONDITIONS, DuplexScene, gather, script
from vivavoce.bench.duplex.speech import MODEL, SpokenTexts
from vivavoce.bench.turn import session_of, without_secrets
from vivavoce.bench.turn_client import Event, connect, realtime_url
from vivavoce.dialogue.model_barge_in import BY_MODEL
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.runtime import event_loop

SIMULATED = "simulated:"
"""`simulated:mini-speech` is that model, served in this process on a virtual clock."""


@dataclass(frozen=True)
class LabOptions:
    """What is played, and how the server is asked to take turns."""

    scenes: tuple[str, ...] | None = None
    """None: all."""
    languages: tuple[str, ...] = ("en", "zh")
    conditions: tuple[str, ...] = CONDITIONS
    count: int = 5
    """Calls of each scene in each language."""
    detection: str = "default"
    silence_ms: int = 500
    instructions: str | None = None
    parallel: int = 2
    esc50: Path | None = None
    people: Path | None = None
    speaker: Literal["any", "enrol"] = "any"
    """Of a simulated server; others have their own."""
    barge_in: str = BY_MODEL
    """What decides on barge-in in a simulated server: `rules`, `model` or a file."""
    smart_turn: str | None = None
    """The turn model of a simulated server, as `viva serve --smart-turn`; None: the bundled one."""
    speech_folder: Path | None = None
    """Where the spoken sentences are kept; None: beside the models."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.parallel < 1:
            raise InputError(f"count and parallel must be at least 1, not {self.count} and {self.parallel}")


def speech_folder() -> Path:
    """Where spoken sentences are kept."""
    return hub.cache_folder() / "vivavoce" / "duplex" / MODEL


def make_scenes(options: LabOptions) -> list[DuplexScene]:
    """The scenes with their sounds; sentences that were never spoken before are synthesised."""
    folder = options.speech_folder or speech_folder()
    with stage("making the scenes"):
        found = gather(SpokenTexts(folder), options.esc50, options.people)
        return script(found, options.count, options.scenes, options.languages, options.conditions)


def run(
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    options: LabOptions | None = None,
    require: str = "",
    out: Path | None = None,
) -> dict[str, Any]:
    """Call a server, print the tables, write `duplex.json` and `index.html` to `out`; return the figures."""
    options = options or LabOptions()
    required = requirements.parse(require, report.figure_names())
    session = session_of(options.detection, options.silence_ms, options.instructions)
    simulated = url.removeprefix(SIMULATED) if url.startswith(SIMULATED) else None
    address = url if simulated is not None else realtime_url(url, model)
    if simulated is None and (options.speaker != "any" or options.smart_turn is not None):
        option = "--smart-turn" if options.speaker == "any" else "--speaker"
        raise InputError(f"{option} is for {SIMULATED}MODEL; start the server with it")
    made = make_scenes(options)
    if simulated is not None:
        played = _play_simulated(simulated, made, session, options)
    else:
        played = event_loop.run(play_scenes(lambda: connect(address, api_key), made, session, options.parallel))
    about = {
        "url": without_secrets(address),
        "how": _how(options),
        "sounds": _sounds(options),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()},
        "session": session,
    }
    result = report.result_of(played, about, required)
    report.print_result(result)
    if out is not None:
        report.save(result, out)
        page.write_page(result, played.outcomes, played.recordings, out)
    return result


def _play_simulated(model: str, made: Sequence[DuplexScene], session: Event, options: LabOptions) -> PlayedScenes:
    """Play to a server in this process whose clock is CPU time, so that other load on this machine does not matter."""
    from vivavoce.bench.simulation import VirtualLoop, simulated_server
    from vivavoce.server.hosting.config import ConversationOptions, ServingOptions

    loop = VirtualLoop()
    conversation = ConversationOptions(speaker=options.speaker, barge_in=options.barge_in)
    served = ServingOptions(conversation=conversation, smart_turn=options.smart_turn)

    async def play() -> PlayedScenes:
        async with simulated_server(loop, model, served.dialogue(), served.settings()) as server:
            return await play_scenes(server.connect, made, session, options.parallel)

    return loop.run_main(play())


def _how(options: LabOptions) -> str:
    detection = {"default": "the server's own turn detection", "server_vad": f"server_vad, {options.silence_ms} ms"}
    speaker = ", the speaker enrolled" if options.speaker == "enrol" else ""
    return f"{detection.get(options.detection, options.detection)}, {options.parallel} calls at once{speaker}"


def _sounds(options: LabOptions) -> str:
    coughs = "coughs and noises of ESC-50" if options.esc50 is not None else "made-up coughs and knocks"
    people = ", interruptions by people" if options.people is not None else ""
    return f"Kokoro voices, {coughs}{people}"
