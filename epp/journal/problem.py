"""The error that readers of journals raise."""


class JournalError(ValueError):
    """The error of a journal that cannot be read or of an invalid query.

    Its message is one sentence.
    """
