"""`viva bench chat`: tokens a second of a local chat model, beside its memory floor and, where installed, llama.cpp.

Each generated token reads every weight once but those of the embedding table: those bytes over the measured bandwidth
are the floor. llama.cpp is measured by its own `llama-bench` on the same file and threads, in turn with ours.
"""

import json
import platform
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vivavoce.cascade.local_chat import LocalChat, LocalChatOptions, chat_source
from vivavoce.device import pick
from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.errors import VivaError
from vivavoce.evaluation.machine import read_bandwidth, stage
from vivavoce.models.llama import Llama
from vivavoce.nn.block_linear import BlockLinear
from vivavoce.nn.linear import Linear

LLAMA_BENCH = "llama-bench"
FIRST_ID = 1000  # of the prompt: any ordinary token


@dataclass(frozen=True)
class ChatSpeed:
    """Tokens a second of a prompt and of a reply."""

    prompt: float
    reply: float


def run(
    name: str, device: str = "auto", prompt: int = 128, reply: int = 64, repeats: int = 3, out: Path | None = None
) -> dict[str, Any]:
    """Measure, print, write `chat.json` to `out`, and return what was measured."""
    target = pick(device)
    with stage("reading memory, for the floor"):
        bandwidth = read_bandwidth(target)
    chat = LocalChat.load(name, device, LocalChatOptions(cache_rows=max(512, 2 * (prompt + reply))))
    model = chat.core.model
    assert isinstance(model, Llama)
    read_bytes = bytes_per_token(model)
    file, peer = chat_source(name), shutil.which(LLAMA_BENCH) if target.kind == "cpu" else None
    ours, theirs = [], []
    with stage("replies"):
        _measure(chat.core, prompt, 2)  # allocates
        for _ in range(repeats):
            ours.append(_measure(chat.core, prompt, reply))
            if peer and file.is_file():
                theirs.append(_measure_peer(peer, file, prompt, reply))
    result = {
        "model": name,
        "machine": {
            "device": target.name,
            "threads": torch.get_num_threads(),
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "bytes_per_token": read_bytes,
        "floor_tokens_per_second": bandwidth / read_bytes,
        "ours": asdict(_best(ours)),
        "llama_cpp": asdict(_best(theirs)) if theirs else None,
    }
    _print(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "chat.json").write_text(json.dumps(result, indent=1), encoding="utf8")
    return result


def bytes_per_token(model: Llama) -> int:
    """Bytes of the matrices that every token is multiplied with."""
    layers = [module for module in model.modules() if isinstance(module, (BlockLinear, Linear))]
    total = sum(each.nbytes if isinstance(each, BlockLinear) else each.weight.nbytes for each in layers)
    return total + (model.model.embed_tokens.weight.nbytes if model.lm_head is None else 0)


def _measure(engine: Engine, prompt: int, reply: int) -> ChatSpeed:
    sequence = engine.open([((FIRST_ID + index) % engine.model.vocabularies[0],) for index in range(prompt)])
    start = time.perf_counter()
    engine.complete(sequence, Generation(Sampling(temperature=0.0), max_new_rows=1))
    first = time.perf_counter()
    made = 0
    while made < reply:  # the model may end its reply early
        made += len(engine.complete(sequence, Generation(Sampling(temperature=0.0), max_new_rows=reply - made)))
    last = time.perf_counter()
    engine.close(sequence)
    return ChatSpeed(prompt / (first - start), made / (last - first))


def _measure_peer(program: str, file: Path, prompt: int, reply: int) -> ChatSpeed:
    sizes = ["-p", str(prompt), "-n", str(reply), "-t", str(torch.get_num_threads()), "-r", "1"]
    done = subprocess.run([program, "-m", str(file), *sizes, "-o", "json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise VivaError(f"{program} failed: {done.stderr.strip()[-300:]}")
    speeds = {bool(each["n_gen"]): float(each["avg_ts"]) for each in json.loads(done.stdout)}
    return ChatSpeed(speeds[False], speeds[True])


def _best(speeds: list[ChatSpeed]) -> ChatSpeed:
    """The highest of each, which other load on the machine affects least."""
    return ChatSpeed(max(each.prompt for each in speeds), max(each.reply for each in speeds))


def _print(result: dict[str, Any]) -> None:
    floor = result["floor_tokens_per_second"]
    print(f"{result['model']}: {result['bytes_per_token'] / 1e6:.0f} MB a token, at most {floor:.1f} tokens/s")
    for name in ("ours", "llama_cpp"):
        if speed := result[name]:
            share = f"{speed['reply'] / floor:.2f} of the floor's"
            print(f"{name:>10}: prompt {speed['prompt']:.1f} tokens/s, reply {speed['reply']:.1f} tokens/s, {share}")
