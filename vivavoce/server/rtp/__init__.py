"""RTP media of telephone calls: packets, SRTP, jitter buffer, loss concealment, key presses and RTCP reports."""
