"""Quantisation: methods, policies, calibration, conversion, and reports of quality and speed."""
