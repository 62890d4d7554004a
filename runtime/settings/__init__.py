"""Settings: type, range, choices and line of help, declared once and checked before anything is
loaded. Nothing here knows a model library."""
