"""Models made smaller: methods, policies, calibration, conversion, and a report of what it cost."""
