"""What every setting is: type, range, choices and a line of help, said once and checked before
anything is loaded. Nothing here knows a model library."""
