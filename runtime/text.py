"""Text from outside, shown in a terminal and used in names."""

LONGEST_NAME = 180  # of a file or folder, in bytes; file systems take 255, and names are made of it


def plural(number: int, noun: str) -> str:
    """Return a number of things: 1 prompt, 2 prompts."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str, besides: str = "") -> str:
    """Return `text` with the replacement character for all characters, except `besides`, that move
    the cursor, change the terminal, end a line or turn the direction of writing."""
    return "".join(c if c.isprintable() or c in besides else "�" for c in text)
