"""Text of others, made harmless to show."""


def printable(text: str) -> str:
    """`text`, or if not all of it is printable how a Python literal would spell it in ASCII.

    It is one line that UTF-8 can carry, cannot steer a terminal and does not turn the direction of
    writing.
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode()
