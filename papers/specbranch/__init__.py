"""Figures of SpecBranch (2506.01979)."""

SECTION = "SpecBranch"
