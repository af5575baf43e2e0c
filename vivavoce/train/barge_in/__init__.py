"""Training of the barge-in model: spoken overlaps, simulated scenes, and the network."""
