"""Replay: the counts of decoding, computed from a harvest."""
