"""`python -m vivavoce.bench.serve_callers`: one process of callers of `viva bench serve`.

It reads a `CallerPlan` in JSON from the first line of stdin, prints a line when it is ready, and starts at the time
(seconds of the monotonic clock) on the second line. It prints a `CallResult` in JSON for every call, then a
`CallerReport`. It loads neither torch nor NumPy for WebSockets, so that callers cost little.
"""

import asyncio
import gc
import sys
import time
from pathlib import Path

import msgspec

from vivavoce.bench.serve_calls import Call
from vivavoce.bench.serve_plans import CallerPlan, CallerReport, CallPlan, EncodedSounds
from vivavoce.bench.serve_transport import connector
from vivavoce.runtime import event_loop


async def run_calls(plan: CallerPlan, sounds: EncodedSounds, began: float) -> CallerReport:
    """Run all calls of this process, which began at this time of the monotonic clock; print their results."""
    lateness: list[float] = []
    connect = connector(plan.transport, plan.url, plan.key)

    async def run_one(call_plan: CallPlan) -> None:
        call = Call(call_plan, sounds, plan.reply_seconds, began, lateness, plan.transport)
        try:
            await asyncio.sleep(max(0.0, began + call_plan.start - time.monotonic()))
            await call.run(connect)
        finally:
            _print(call.result)

    cpu = time.process_time()
    tasks = [asyncio.create_task(run_one(call_plan)) for call_plan in plan.calls]
    left = None if plan.ends is None else max(0.0, began + plan.ends - time.monotonic())
    _, unfinished = await asyncio.wait(tasks, timeout=left)
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return CallerReport((time.process_time() - cpu) / max(1e-9, time.monotonic() - began), *_lateness(lateness))


def _lateness(seconds: list[float]) -> tuple[dict[str, float], int]:
    ordered = sorted(seconds) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[round(place * (len(ordered) - 1))] * 1e3 for name, place in places.items()}, len(seconds)


def _print(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Read the plan, and carry it out when told to."""
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=CallerPlan)
    sounds = msgspec.msgpack.decode(Path(plan.sounds).read_bytes(), type=EncodedSounds)
    gc.collect()
    gc.freeze()
    _print("ready")
    began = float(sys.stdin.buffer.readline())
    _print(event_loop.run(run_calls(plan, sounds, began)))


if __name__ == "__main__":
    main()
