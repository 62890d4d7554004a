"""Evaluation: losslessness, speed-ups, and the choice of thresholds."""
