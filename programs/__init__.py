"""What the programs do: composed, checked settings in, files and tables out."""
