"""Barge-in networks whose answer does not depend on the sound."""

from dataclasses import replace

import numpy as np

from vivavoce.dialogue.overlap_model import OverlapNetwork, SoundKind, read_overlap_network


def network_that_always_says(kind: SoundKind) -> OverlapNetwork:
    """Certain of a kind."""
    return network_with({kind: 5.0}, -5.0)


def network_with(outputs: dict[SoundKind, float], others: float = 0.0) -> OverlapNetwork:
    """These outputs, before they are normalised."""
    network = read_overlap_network()
    bias = np.array([outputs.get(kind, others) for kind in SoundKind], np.float32)
    return replace(network, output_weight=np.zeros_like(network.output_weight), output_bias=bias)


def network_in_doubt(log_odds: float) -> OverlapNetwork:
    """A turn with these odds, else a backchannel."""
    return network_with({SoundKind.TURN: log_odds, SoundKind.BACKCHANNEL: 0.0}, -20.0)
