"""Kokoro-82M, a text-to-speech model: phonemes and a voice in, 24 kHz sound out."""
