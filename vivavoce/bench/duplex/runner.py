"""Play the scenes of the duplex lab to a server, several calls at once, and gather what was heard."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from vivavoce.bench.duplex.measure import CallOutcome, outcome
from vivavoce.bench.duplex.scenes import DuplexScene
from vivavoce.bench.turn import Connect, play_call, server_errors
from vivavoce.bench.turn_client import Event
from vivavoce.bench.turn_scenes import ScriptedCall, Timing, recording
from vivavoce.bench.turn_sounds import Samples
from vivavoce.evaluation.machine import stage

TIMING = Timing(between=1.2)
"""A reply to a sound that should have been ignored begins within this time, and the next sound waits for its end."""


@dataclass
class PlayedScenes:
    """The outcomes in the order of the scenes, with their recordings."""

    scenes: Sequence[DuplexScene]
    outcomes: list[CallOutcome] = field(default_factory=list)
    recordings: list[Samples] = field(default_factory=list, repr=False)
    """Caller left, replies right.  # [2, time]"""
    lateness: list[float] = field(default_factory=list, repr=False)
    """Seconds by which packets left late: how busy this machine was."""
    errors: list[str] = field(default_factory=list)


async def play_scenes(
    connect: Connect, scenes: Sequence[DuplexScene], session: Event, parallel: int = 1, timing: Timing | None = None
) -> PlayedScenes:
    """Play each scene in a session of its own, `parallel` at once."""
    free, timing = asyncio.Semaphore(parallel), timing or TIMING

    async def play_one(scene: DuplexScene) -> ScriptedCall:
        async with free:
            with stage(f"{scene.name}, {scene.language}, {scene.condition}"):
                return await play_call(connect, scene.scene, session, timing, scene.seed)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(play_one(scene)) for scene in scenes]
    calls = [task.result() for task in tasks]
    return PlayedScenes(
        scenes,
        [outcome(scene, call) for scene, call in zip(scenes, calls, strict=True)],
        [recording(call) for call in calls],
        [late for call in calls for late in call.caller.microphone.lateness],
        server_errors(calls),
    )
