import pytest
import torch

from vivavoce.audio.level import buzz
from vivavoce.minis.untrained import untrained_codec, write_untrained
from vivavoce.models.flow.state import VoicePrompt


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A folder that can be served: language model, codec, and a voice by name."""
    folder = tmp_path_factory.mktemp("untrained")
    write_untrained(folder)
    codec = untrained_codec()
    with torch.no_grad():
        sound = buzz(2.0, 24_000, seed=1)
        codes = codec.encode(sound)
        mel = codec.mel(torch.from_numpy(sound.samples))[0].T
        codec.save_voice("buzz", VoicePrompt(codes[:20], mel[:80], torch.linspace(-1, 1, 192)))
        codec.save(folder / "codec")
    return str(folder)
