"""Viva Voce: a real-time speech engine."""

__version__ = "0.1.0"
