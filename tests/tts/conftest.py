"""A model on disk that every test of speaking can load."""

from pathlib import Path

import pytest

from tests.s2s.small_parts import small_tts
from vivavoce.models.moss_tts_nano.prompt import NanoSampling
from vivavoce.tts.interface import SpeechSettings


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A model with its codec and settings, as `mini-tts` is; its weights are random."""
    settings = SpeechSettings(NanoSampling(max_new_frames=9), 60, spells_numbers=True, own_voice="rms")
    return small_tts(tmp_path_factory.mktemp("mini"), settings)
