"""`viva talk`: a full-duplex conversation in the terminal, with microphone and loudspeaker or with files for them."""
