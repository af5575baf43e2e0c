"""Training of the turn-end model: spoken sentences, finished or left unfinished, and the network that tells them."""
