"""Speculation where many requests are decoded together, by replay of a harvest."""
