"""Logs of confidences, one file each format: a class whose `read` gives the table."""
