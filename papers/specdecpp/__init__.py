"""Figures of SpecDec++ (2405.19715)."""

SECTION = "SpecDec++"
