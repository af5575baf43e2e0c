"""Telephone calls: sessions over the media streams of telephony providers and of Asterisk."""
