"""GTCRN: masks noise in short-time spectra of speech."""
