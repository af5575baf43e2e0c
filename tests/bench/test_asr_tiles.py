"""The search for tiles keeps what is faster and right, and nothing else."""

import pytest
import torch

from vivavoce.bench import asr_tiles
from vivavoce.bench.asr_tiles import TileSearch, candidates
from vivavoce.errors import InputError
from vivavoce.kernels import tiles
from vivavoce.kernels.tiles import Tile, fits, name_around, window_attention_name
from vivavoce.models.whisper.config import SIZES, WhisperConfig
from vivavoce.models.whisper.model import Whisper

CONFIG = WhisperConfig(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=60, max_target_positions=80,
)  # fmt: skip


class Timed(asr_tiles.StepOfTexts):
    """A step whose time is said by the tiles it would find; 64 columns at a time compute something else."""

    faster: tuple[float, ...] = (0.5, 0.9)

    def milliseconds(self) -> tuple[float, torch.Tensor]:
        entries = tiles.tiles(self.device)
        named = [entries.get(name_around(self.rows.dtype, *shape, self.texts)) for shape in self.shapes[:-1]]
        window = entries.get(window_attention_name(self.texts, 2, 16))
        if window is not None and window.stages == 3:
            raise RuntimeError("out of resource: shared memory")
        elapsed = 8.0 * (self.faster[0] if all(named) else 1.0)
        elapsed *= self.faster[1] if named[3] is not None and named[3].warps == 8 else 1.0
        is_wrong = window is not None and window.inputs == 64
        return elapsed * (0.1 if is_wrong else 1.0), torch.ones(self.texts, 4) * (3.0 if is_wrong else 1.0)


@pytest.fixture
def step(tmp_path, monkeypatch):
    monkeypatch.setenv(tiles.CACHE_VARIABLE, str(tmp_path))
    tiles.tiles.cache_clear()
    yield Timed(Whisper.random(CONFIG), 8)
    tiles.tiles.cache_clear()


@torch.inference_mode()
def test_the_fastest_that_says_the_same_is_found(step, capsys):
    search = TileSearch(step)
    search.run()
    found = search.found()
    assert search.best_ms == pytest.approx(8.0 * 0.5 * 0.9)
    outer = name_around(torch.float32, 32, 64, 8)
    assert found[outer] is not None
    assert found[outer].warps == 8
    assert set(found) == {name_around(torch.float32, *shape, 8) for shape in step.shapes[:-1]}
    assert not tiles.tiles(step.device)  # what was tried is gone
    assert "shared memory" in capsys.readouterr().out


@torch.inference_mode()
def test_nothing_is_kept_where_nothing_is_faster(step):
    step.faster = (1.1, 0.99)
    search = TileSearch(step)
    search.run()
    assert search.found() == {}


def test_every_candidate_fits_the_large_models():
    for name in ("small", "medium", "large-v2"):
        config = SIZES[name]
        width, inner = config.d_model, config.decoder_ffn_dim
        assert all(fits(tile, width, normed=True) for tile in candidates(width, width))
        assert sum(fits(tile, inner, normed=False) for tile in candidates(inner, width)) >= 4
    assert not fits(Tile(16, 640, 0, 4), 1280, normed=True)
    assert not fits(Tile(16, 1100, 0, 4), 1100, normed=False)


def test_a_cpu_has_no_tiles():
    with pytest.raises(InputError, match="GPU"):
        asr_tiles.run(device="cpu")
