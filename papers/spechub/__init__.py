"""Figures of SpecHub (2411.05289)."""

SECTION = "SpecHub: two candidates"
