"""Error messages of commands: one sentence for each error."""

import sys


def sentence_of(problem: Exception) -> str:
    """Return the text of an error. The text of an `OSError` that names a file starts with the file
    and has no error number.
    """
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{problem.filename}: {problem.strerror}"
    return str(problem)


def unread(file: object, problem: Exception, what: str) -> str:
    """Return why `file`, which should contain `what`, cannot be read, as a sentence that names the
    file.
    """
    if isinstance(problem, OSError):
        return sentence_of(problem)
    if isinstance(problem, UnicodeDecodeError):
        byte = problem.object[problem.start]
        return f"{file}: expected {what} in UTF-8, got the byte {byte:#04x} at {problem.start:,}"
    return f"{file}: expected {what}: {problem}"


def warned(sentence: str) -> None:
    """Print a warning to stderr. The command continues."""
    sys.stderr.write(f"sim: warning: {sentence}\n")


def failed(sentence: str, *, code: int) -> int:
    """Print the error that ends a command to stderr, and return `code`, the command's exit code."""
    sys.stderr.write(f"sim: {sentence}\n")
    return code
