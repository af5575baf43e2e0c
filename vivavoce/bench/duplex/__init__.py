"""The duplex lab: how a Realtime server takes turns on speech, noise, echo and other people's voices."""
