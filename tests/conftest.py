"""Which tests run when, and markers for what a machine may lack.

Plain `pytest` leaves out the tests marked `full`; `pytest -m full` runs those, `pytest -m quick` the files of
`QUICK` alone, without importing the others. `VIVA_MUST_RUN="debian npm"` turns a skip of such a test into a failure.
Tests marked `published` take weights from the cache that `viva models fetch` fills, and are skipped without them.
"""

import ctypes
import gc
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # commands that tests start would spin on every core, beside each other

os.environ["VIVA_CONFIG"] = ""  # the stack that this machine's user has chosen is none of the tests' business

import torch

from tests.must_run import leave_out
from vivavoce import hub
from vivavoce.errors import CheckpointError

MAX_KEPT_BYTES = 3 * 2**30
LONGEST = (  # files that take longest, longest first, so that no worker is left with one of them at the end
    "server/test_ray_fleet.py",
    "bench/test_turn_server.py",
    "export/test_onnx.py",
    "models/test_xy_tokenizer.py",
    "models/test_flow.py",
    "engine/test_speculative.py",
    "browser/test_conversation.py",
    "tts/test_cosyvoice.py",
    "s2s/test_moss_speech.py",
    "models/test_cosyvoice3_flow.py",
    "tts/test_onnx_backend.py",
    "test_cli.py",
    "asr/test_drafts.py",
    "quant/test_report.py",
    "quant/test_convert.py",
    "hosting/test_speech.py",
    "train/test_lm.py",
    "bench/test_turn_measures.py",
    "asr/test_transcriber.py",
    "engine/test_engine.py",
    "audio/test_files.py",
    "test_deprecated.py",
    "browser/test_mini_speech.py",
    "models/test_speech_encoder.py",
    "models/test_moss_tts_nano.py",
    "models/test_moss_speech.py",
)
FULL = {  # published sizes, exports, fleets, training runs, benches, the browser: tens of seconds a file
    "asr/test_bad_sounds.py",
    "asr/test_constrained.py",
    "asr/test_drafts.py",
    "bench/test_codec.py",
    "bench/test_cosyvoice_bench.py",
    "bench/test_serve.py",
    "bench/test_serve_simulation.py",
    "bench/test_simulation.py",
    "bench/test_tts.py",
    "bench/test_turn_measures.py",
    "bench/test_turn_server.py",
    "bench/test_verify.py",
    "browser/test_access.py",
    "browser/test_audio_modules.py",
    "browser/test_controls.py",
    "browser/test_conversation.py",
    "dialogue/test_overlap.py",
    "engine/test_fp8_cache.py",
    "engine/test_speculative_models.py",
    "export/test_onnx.py",
    "export/test_onnx_stream.py",
    "hosting/test_speech.py",
    "load/test_capacity.py",
    "minis/test_mini_tts.py",
    "models/test_bigvgan.py",
    "models/test_codec_cpu.py",
    "models/test_cosyvoice3_flow.py",
    "models/test_cosyvoice_cost.py",
    "models/test_flow_graphs.py",
    "models/test_whisper_openai.py",
    "models/test_xy_tokenizer.py",
    "quant/test_convert.py",
    "quant/test_mixture.py",
    "quant/test_quantised_speech.py",
    "quant/test_report.py",
    "server/test_ray_fleet.py",
    "train/test_asr.py",
    "train/test_drafts.py",
    "train/test_flow_training.py",
    "train/test_lm.py",
    "train/test_speech_encoder.py",
    "train/test_tts.py",
    "train/test_tts_codec.py",
    "train/test_vocoder_training.py",
    "tts/test_cosyvoice.py",
    "tts/test_onnx_backend.py",
}
QUICK = {  # folders, and files of the top level
    *("audio", "dialogue", "engine", "nn", "server"),
    *("test_cli_surface.py", "test_errors.py", "test_event_loop.py", "test_exception_handlers.py", "test_hub.py"),
    *("test_implementations.py", "test_names.py"),
}
NOT_QUICK = {
    *("audio/test_denoise.py", "audio/test_diarization.py", "dialogue/test_front_end_batch.py"),
    *("dialogue/test_model_barge_in.py", "dialogue/test_noise_reduction.py", "server/test_diarized_files.py"),
    *("server/sip/test_programs.py", "server/sip/test_outgoing_programs.py", "server/test_end_of_call.py"),
    *("server/test_doors.py", "server/test_live_conversation.py", "server/sip/test_outgoing.py"),
    "server/test_uploads.py",
    *("audio/test_files.py", "engine/test_async_decode.py", "engine/test_draft_trees.py", "engine/test_engine.py"),
    *("engine/test_failing_steps.py", "engine/test_speculative.py", "server/test_openai_agents_js.py"),
    *("dialogue/test_reasoning.py", "engine/test_playback_scheduling.py", "nn/test_process_settings.py"),
    *("server/test_fleet_moves.py", "server/test_ray_ingress.py", *FULL),
}
settings.register_profile("the same every time", derandomize=True, deadline=None)
settings.load_profile("the same every time")


def be_as_usual() -> None:
    """Tensors of tiny models are slower on two threads, much slower where cores are shared; servers hurry their own."""
    torch.set_num_threads(1)
    sys.setswitchinterval(0.005)


def pytest_configure() -> None:
    be_as_usual()
    gc.disable()  # until all is imported: nearly a million objects that live to the end


def pytest_collection_finish() -> None:
    gc.freeze()  # else every full collection walks through torch, transformers and all the others again
    gc.set_threshold(20_000, 10, 10)  # a tracer makes a million objects a second, and hardly a cycle
    gc.enable()


def name_of(path: Path) -> str:
    """The path of a test file below `tests/`."""
    return path.as_posix().rpartition("/tests/")[2]


def is_quick(path: Path) -> bool:
    name = name_of(path)
    return name not in NOT_QUICK and (name in QUICK or name.partition("/")[0] in QUICK)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_left_out = config.option.markexpr == "quick" and collection_path.is_file() and not is_quick(collection_path)
    return True if is_left_out else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(name_of(item.path), len(ranks)))
    for item in items:
        if name_of(item.path) in FULL:
            item.add_marker("full")
        elif is_quick(item.path) and not item.get_closest_marker("full"):
            item.add_marker("quick")


def missing(marker: pytest.Mark) -> str | None:
    """What this machine lacks for a marked test, or None."""
    if marker.name == "gpu":
        return None if torch.cuda.is_available() else "no CUDA device"
    programs = [name for name in marker.args if shutil.which(name) is None]
    return f"not installed: {', '.join(programs)}" if programs else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    be_as_usual()
    for name in ("gpu", "debian", "npm"):
        for marker in item.iter_markers(name):
            if lack := missing(marker):
                leave_out(name, lack)


def pytest_runtest_teardown() -> None:
    """Release the models of the last test where the process is large: workers run beside each other."""
    pages = Path("/proc/self/statm")
    if pages.exists() and int(pages.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE > MAX_KEPT_BYTES:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def published_model() -> Callable[[str], Path]:
    """A function from a model's name in `viva models` to its folder; it skips the test where that is not cached."""

    def folder(name: str) -> Path:
        try:
            return hub.resolve(name, offline=True)
        except CheckpointError:
            leave_out("published", f"{name} is not in the cache: viva models fetch {name}")

    return folder
