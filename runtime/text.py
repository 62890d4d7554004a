"""Text from outside, shown in a terminal and used in names."""

LONGEST_NAME = 180  # of a file or folder, in bytes; file systems take 255, and names are made of it


def printable(text: str, besides: str = "") -> str:
    """Return `text` with the replacement character for all characters, except `besides`, that move
    the cursor, change the terminal, end a line or turn the direction of writing."""
    return "".join(c if c.isprintable() or c in besides else "�" for c in text)
