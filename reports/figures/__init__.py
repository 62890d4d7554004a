"""Figures of a report: a folder for this pair, and one for each paper whose plots they
reproduce."""
