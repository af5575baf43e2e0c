"""Voices of Kokoro-82M that only measure: no training set has them, nor mixtures with them."""

HELD_OUT_VOICES = {
    "en": ("af_nova", "am_onyx", "bf_isabella", "bm_lewis"),
    "zh": ("zf_xiaoni", "zm_yunyang"),
}
