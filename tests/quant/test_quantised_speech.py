"""Quantised models speak by the same calls as float ones, in a process that knows nothing of how they were made."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.models.tiny_cosyvoice import write_folder
from vivavoce.audio.files import write
from vivavoce.audio.sound import Sound
from vivavoce.quant.methods import METHODS
from vivavoce.quant.run import Wishes, quantize

# Speaks with each folder, and prints how far the mel that its flow makes of some codes is from the float flow's.
SPEAK = """
import json, sys
from pathlib import Path
import numpy as np, torch
from vivavoce.audio.files import read
from vivavoce.models.flow_state import VoicePrompt
from vivavoce.speech.loading import open_speech_model
torch.set_num_threads(1)
recording, *folders = sys.argv[1:]
generator = torch.Generator().manual_seed(0)
codes = torch.randint(6561, (40,), generator=generator)
prompt = VoicePrompt(codes[:10], torch.randn(20, 80, generator=generator), torch.randn(192, generator=generator))
mels, told = {}, {}
for folder in folders:
    speaker = open_speech_model(folder, "cpu", "float32")
    sound = next(iter(speaker.stream("Hello.", read(recording))))
    mels[folder] = speaker.parts.speech.flow(codes, prompt)
    error = (mels[folder] - mels[folders[0]]).norm() / mels[folders[0]].norm()
    told[Path(folder).name] = [float(error), sound.shape[1], bool(np.isfinite(sound).all())]
print(json.dumps(told))
"""
METHODS_MET = ("fp16", "int8-dynamic", "int8-static", "int8-weight", "int4-weight", "fp8")
STEPS_ADD_UP = 4.0  # a mel's error against one layer's


@pytest.mark.parametrize("version", [2, 3])
def test_cosyvoice_of_either_version(version, tmp_path):
    source = write_folder(tmp_path / "float", version)
    for method in METHODS_MET:
        quantize(str(source), method, tmp_path / method, Wishes(items=1))
    time = np.arange(48_000) / 24_000
    write(tmp_path / "ann.wav", Sound((0.2 * np.sin(2 * np.pi * 180 * time)).astype(np.float32), 24_000), "wav")
    folders = [str(tmp_path / name) for name in ("float", *METHODS_MET)]
    command = [sys.executable, "-W", "ignore", "-c", SPEAK, str(tmp_path / "ann.wav"), *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["float"][0] == 0.0
    for name in METHODS_MET:
        error, samples, is_finite = told[name]
        assert 0 < error < STEPS_ADD_UP * METHODS[name].error, (name, error)
        assert samples > 0
        assert is_finite
