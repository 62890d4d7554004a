"""Logs of confidences: for each format one module with a class whose `read` returns the table."""
