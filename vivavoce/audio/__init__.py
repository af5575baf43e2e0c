"""Audio processing: files, resampling, mels, levels, voice activity, echo, and the playback clock."""
