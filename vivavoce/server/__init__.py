"""The wire: Realtime events over WebSocket and WebRTC, audio over HTTP, keys, limits and metrics."""
