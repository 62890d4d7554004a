"""Rounds of a decode, step by step."""
