"""The error of readers of journals."""


class JournalError(ValueError):
    """A journal cannot be read, or a query is invalid. The message is one sentence."""
