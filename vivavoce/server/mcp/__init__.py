"""The server as a client of MCP servers, whose tools its conversations may call."""
