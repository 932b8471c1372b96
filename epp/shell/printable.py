"""Make text from outside the picker safe to display."""


def printable(text: str) -> str:
    """Return `text` unchanged if all characters are printable, else in ASCII with the escapes of a
    Python string.

    The result is one line that can be encoded in UTF-8. It cannot control a terminal or change the
    direction of writing.
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode()
