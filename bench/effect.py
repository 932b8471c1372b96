"""Proof that an injected fault happened.

A harness that breaks something on purpose measures nothing if the thing is not broken. Each fault
of `make chaos`, `make attack`, `make soak` and `make night` therefore observes its effect directly
at the broken part and calls `require_effect`. A run whose fault has no effect fails and writes no
figure.
"""


class NoEffectError(Exception):
    """A fault was injected, and the broken part behaves as before."""


def require_effect(happened: bool, fault: str, *, observed: str, expected: str) -> None:
    """Raise `NoEffectError` unless `happened`.

    `observed` and `expected` describe the effect at the broken part, with units.
    """
    if not happened:
        raise NoEffectError(
            f"{fault}: the fault did not take effect: observed {observed}, expected {expected}"
        )
