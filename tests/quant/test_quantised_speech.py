"""Quantised models speak by the same calls as float ones, in another process."""

import json
import subprocess
import sys

import numpy as np

from tests.models.tiny_cosyvoice import write_folder
from vivavoce.audio.io import Sound, write
from vivavoce.quant.policy import METHODS
from vivavoce.quant.run import QuantizeOptions, quantize

# Speaks with each folder, and prints how far the mel that its flow makes of some codes is from the float flow's.
SPEAK = """
import json, sys
from pathlib import Path
import numpy as np, torch
from vivavoce.audio.io import read
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.tts.interface import open_speech_model
torch.set_num_threads(1)
recording, *folders = sys.argv[1:]
generator = torch.Generator().manual_seed(0)
codes = torch.randint(6561, (40,), generator=generator)
prompt = VoicePrompt(codes[:10], torch.randn(20, 80, generator=generator), torch.randn(192, generator=generator))
mels, figures = {}, {}
for folder in map(Path, folders):
    speaker = open_speech_model(str(folder), "cpu", "float32")
    sound = next(iter(speaker.stream("Hello.", read(recording))))
    mels[folder] = speaker.parts.speech.flow(codes, prompt)
    exact = mels[folder.parent / "float"]
    error = float((mels[folder] - exact).norm() / exact.norm())
    figures[f"{folder.parent.name} {folder.name}"] = [error, sound.shape[1], bool(np.isfinite(sound).all())]
print(json.dumps(figures))
"""
EVERY = tuple(name for name, method in METHODS.items() if not method.trains)
STEPS_ADD_UP = 4.0  # a mel's error against one layer's


def test_cosyvoice_of_either_version(tmp_path):
    folders = []
    for version, methods in {2: ("fp16", "int8-dynamic", "int8-weight"), 3: EVERY}.items():
        source = write_folder(tmp_path / str(version) / "float", version)
        for method in methods:
            quantize(str(source), method, tmp_path / str(version) / method, QuantizeOptions(items=1))
        folders += [tmp_path / str(version) / name for name in ("float", *methods)]
    time = np.arange(48_000) / 24_000
    write(tmp_path / "ann.wav", Sound((0.2 * np.sin(2 * np.pi * 180 * time)).astype(np.float32), 24_000), "wav")
    command = [sys.executable, "-W", "ignore", "-c", SPEAK, str(tmp_path / "ann.wav"), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert len(figures) == len(folders)
    for name, (error, samples, is_finite) in figures.items():
        method = name.split()[1]
        limit = 0.0 if method == "float" else STEPS_ADD_UP * METHODS[method].error
        assert error <= limit and (error > 0) == (method != "float"), (name, error)
        assert samples > 0 and is_finite, name
