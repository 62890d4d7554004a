"""Calibrating the confidences of a serving engine, position by position."""
