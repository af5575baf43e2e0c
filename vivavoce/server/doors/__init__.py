"""Door processes: they terminate the sockets of clients, and the engine process serves them over one link each."""
