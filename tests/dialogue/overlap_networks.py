"""Barge-in networks whose answer does not depend on the sound, or on its distance alone."""

from dataclasses import fields, replace

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


def network_that_hears_distance() -> OverlapNetwork:
    """A turn, or a bystander where the evidence says that the talker is distant; nothing else counts."""
    network = network_with({SoundKind.TURN: 0.0, SoundKind.BYSTANDER: -5.0}, -20.0)
    empty = replace(network, **{each.name: np.zeros_like(getattr(network, each.name)) for each in fields(network)})
    size = empty.recurrent_state.shape[1]
    empty.input_weight[0, -1] = 5.0  # evidence that the talker is distant
    empty.recurrent_input[2 * size, 0] = 5.0  # the state is new with each window
    empty.recurrent_input_bias[size : 2 * size] = -20.0
    empty.output_weight[SoundKind.BYSTANDER, 0] = 10.0
    return replace(empty, output_bias=network.output_bias)
