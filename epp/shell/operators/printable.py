"""Text of others, made harmless to show."""


def printable(text: str) -> str:
    """`text` with what is not printable spelt out, as in a Python literal.

    What is left is one line that UTF-8 can carry, cannot steer a terminal and does not turn the
    direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
