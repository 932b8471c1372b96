"""What went wrong, in a sentence."""

import sys


def sentence_of(problem: Exception) -> str:
    """As it is told to people: an `OSError` without its number, the file first."""
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{problem.filename}: {problem.strerror}"
    return str(problem)


def unread(file: object, problem: Exception, what: str) -> str:
    """Why `file`, which should hold `what`, cannot be read; an `OSError` names it itself."""
    if isinstance(problem, OSError):
        return sentence_of(problem)
    if isinstance(problem, UnicodeDecodeError):
        byte = problem.object[problem.start]
        return f"{file}: expected {what} in UTF-8, got the byte {byte:#04x} at {problem.start:,}"
    return f"{file}: expected {what}: {problem}"


def warned(sentence: str) -> None:
    """Tell on stderr what a command goes on in spite of."""
    sys.stderr.write(f"sim: warning: {sentence}\n")


def failed(sentence: str, *, code: int) -> int:
    """Tell what ends a command on stderr; `code` is the one that it exits with."""
    sys.stderr.write(f"sim: {sentence}\n")
    return code
