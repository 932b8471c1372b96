"""What went wrong, in a sentence."""


def sentence_of(problem: Exception) -> str:
    """As it is told to people: an `OSError` without its number, the file first."""
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{problem.filename}: {problem.strerror}"
    return str(problem)
