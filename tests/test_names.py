"""Names say what a thing is in the words of the field: no identifier holds a word of the list."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vivavoce"
WORDS = {  # metaphors, people in place of objects, and words for which docs/glossary.md has another
    *("ear", "ears", "mouth", "mouths", "mind", "minds", "desk", "lane", "lanes", "duty", "duties", "doors", "seat"),
    *("seats", "sitting", "roll", "ledger", "twin", "twins", "crowd", "handover", "rehearsal", "rehearse", "rehearsed"),
    *("tell", "tells", "told", "teller", "telling", "gathering", "remembering", "remember", "remembers", "spelling"),
    *("wish", "wishes", "manner", "manners", "lean", "straight", "straighten", "straightened", "narrow", "narrowed"),
    *("lesson", "lessons", "course", "courses", "exam", "exams", "judgement", "judgements", "ship", "shipped", "ships"),
    *("hearing", "hearings", "far", "here", "laid", "reordered", "owe", "owed", "owes", "pay", "pays"),
    *("most", "least", "longest", "shortest", "fewest", "reckon", "reckoned", "reckons"),
    *("whoever", "nobody", "somebody", "whom", "who"),
}
PLAIN = {"front_desk", "FRONT_DESK", "straight_through"}  # a hotel's; a term of the field
# Names of libraries and public keys, and names that are still to be replaced.
PENDING: dict[str, set[str]] = {
    "asr/__init__.py": {"longest_silence"},
    "asr/backends/ctranslate2.py": {"longest_silence"},
    "asr/drafts.py": {"most"},
    "audio/chunking.py": {"most"},
    "bench/answer.py": {"most_common"},
    "bench/asr.py": {"most"},
    "bench/capacity.py": {"most"},
    "bench/ipc.py": {"EAR", "ear"},
    "bench/serve.py": {"EAR", "ear"},
    "bench/simulation.py": {"ear"},
    "bench/tts_contenders.py": {"fewest", "longest", "mouth"},
    "cascade/loading.py": {"ear"},
    "cascade/parts.py": {"manner", "most", "told"},
    "cli/__init__.py": {"here"},
    "cli/demo_cascade.py": {"ear"},
    "dialogue/reply.py": {"longest_seconds"},
    "engine/drafts.py": {"here", "least", "longest", "most", "shortest", "twin", "twins"},
    "engine/engine.py": {"most"},
    "engine/runner.py": {"_wish", "is_narrow", "most", "narrow"},
    "engine/sampling.py": {"NARROW", "is_narrow", "most", "narrow", "remember", "wish"},
    "engine/scheduler.py": {"least"},
    "engine/sequence.py": {"least", "least_slack"},
    "engine/speculative.py": {"here", "most"},
    "engine/step.py": {"is_narrow", "narrow", "remember", "so_far", "wish"},
    "export/trtllm/decoder.py": {"tell"},
    "export/trtllm/runner.py": {"most"},
    "models/flow/state.py": {"narrow"},
    "models/llama.py": {"tell"},
    "models/moss_speech/cpu.py": {"roll"},
    "models/moss_speech/model.py": {"takes_narrow_cache"},
    "models/whisper/cpu.py": {"narrow"},
    "models/whisper/decoding.py": {"most"},
    "models/whisper/transcriber.py": {"longest_silence"},
    "models/whisper/windows.py": {"longest_silence"},
    "quant/voices.py": {"manner"},
    "runtime/batcher.py": {"most"},
    "s2s/captions.py": {"ear"},
    "s2s/conversation.py": {"ear"},
    "s2s/local_codec.py": {"EAR", "ear", "most"},
    "s2s/moss_speech.py": {"ear", "here", "least"},
    "s2s/remote_codec.py": {"EAR", "ear", "told"},
    "s2s/reply.py": {"most"},
    "server/cluster/options.py": {"least", "least_slack_ms", "most"},
    "server/config.py": {
        "least_lead_ms",
        "most_event_bytes",
        "most_pending_bytes",
        "most_sessions",
        "most_upload_bytes",
    },
    "server/hosting/__init__.py": {"told"},
    "server/hosting/audio.py": {"told"},
    "server/hosting/codec.py": {"EAR", "ear"},
    "server/hosting/conversations.py": {"ear", "least"},
    "server/realtime/encoder.py": {
        "_close_side_lane",
        "_lane",
        "_lanes",
        "_new_lane",
        "_open_side_lane",
        "lane",
        "tell",
    },
    "server/realtime/output.py": {"tell"},
    "server/realtime/response.py": {"_as_far_as_sent"},
    "server/realtime/session.py": {"least", "most"},
    "server/realtime/sessions.py": {"longest"},
    "train/asr/batches.py": {"most"},
    "train/asr/evaluate.py": {"most"},
    "train/lm/train.py": {"exam_seconds"},
    "train/speech_encoder/batches.py": {"far_positions"},
    "tts/cosyvoice.py": {"fewest", "manner", "most", "mouth", "told"},
    "tts/cosyvoice_engine.py": {"most"},
    "tts/cosyvoice_voices.py": {"ear"},
    "tts/frame_model.py": {"manner"},
    "tts/interface.py": {"fewest", "least", "longest", "manner", "most"},
    "tts/nano.py": {"mouth"},
    "tts/nano_cpu.py": {"narrow"},
    "tts/sampling.py": {"least"},
    "tts/onnx.py": {"fewest", "longest"},
    "tts/output.py": {"tell"},
    "tts/style.py": {"manner", "told", "wish", "wishes"},
}


def identifiers(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno


def has_old_word(name: str) -> bool:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return name not in PLAIN and any(part.lower() in WORDS for part in parts)


def old_names(file: Path) -> set[str]:
    names = {name for name, _ in identifiers(file.read_text(encoding="utf8")) if has_old_word(name)}
    return names - PENDING.get(str(file.relative_to(PACKAGE)), set())


def test_no_identifier_holds_an_old_word_but_those_listed():
    found = {
        str(file.relative_to(PACKAGE)): sorted(names) for file in PACKAGE.rglob("*.py") if (names := old_names(file))
    }
    assert found == {}


def test_the_list_of_exceptions_holds_nothing_else():
    for name, listed in PENDING.items():
        used = {each for each, _ in identifiers((PACKAGE / name).read_text(encoding="utf8"))}
        assert listed <= used, f"{name}: {sorted(listed - used)} can be taken off the list"


def test_no_module_is_named_by_an_old_word():
    assert not [str(file) for file in PACKAGE.rglob("*.py") if has_old_word(file.stem)]


def test_public_class_names_are_unique():
    homes: dict[str, list[str]] = {}
    elsewhere = {"moss_speech_network.py", "moss_speech_pytorch.py"}  # written into exports, with names of TensorRT-LLM
    for file in sorted(file for file in PACKAGE.rglob("*.py") if file.name not in elsewhere):
        for node in ast.parse(file.read_text(encoding="utf8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    ("name", "is_old"),
    [
        ("FarCodec", True),
        ("open_ear", True),
        ("most_rows", True),
        ("early", False),
        ("farm", False),
        ("front_desk", False),
    ],
)
def test_what_counts_as_an_old_word(name, is_old):
    assert has_old_word(name) is is_old
