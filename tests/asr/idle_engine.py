"""Transcriptions leave nothing behind in an engine."""

from vivavoce.asr.batch import TranscribingEngine


def assert_idle(engine: TranscribingEngine) -> None:
    """Every window and sequence was given back; what ends is given back between two steps, so one is waited for."""
    engine.driver.call(lambda: None)
    assert engine.writer.store.free == engine.windows
    assert not engine.engine.scheduler.sequences and not engine.engine.has_work
