"""Figures of HSD and block verification."""

SECTION = "HSD: block verification"
