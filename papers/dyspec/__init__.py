"""Figures of DySpec (2410.11744)."""

SECTION = "DySpec: draft trees"
