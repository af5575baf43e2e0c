"""PCM in, PCM out: files, resampling, mels, levels."""
