"""Text from outside, shown in a terminal and used in names."""

LONGEST_NAME = 180  # of a file or folder, in bytes; file systems take 255, and names are made of it


def printable(text: str, besides: str = "") -> str:
    """`text` with nothing in it that moves the cursor, changes the terminal, ends a line or turns
    the direction of writing: such characters become the replacement character, except `besides`."""
    return "".join(c if c.isprintable() or c in besides else "�" for c in text)
