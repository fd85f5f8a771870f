"""Text for a terminal: a name in a file may hold codes that move or hide what is shown."""


def shown(text: str) -> str:
    r"""`text` with control and format characters escaped, apart from the ends of lines.

    >>> print(shown("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def in_one_line(text: str) -> str:
    r"""`text` with the ends of lines escaped, too, so that a name cannot add a line of its own."""
    return shown(text).replace("\n", "\\n")
