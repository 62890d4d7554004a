"""Figures of any pair, whatever its methods."""

SECTION = "This pair"
