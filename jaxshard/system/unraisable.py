"""Errors that no code can catch, since C code called what raised them: Python prints them, and goes on."""

import sys
from collections.abc import Callable


class _Hook:
    def __init__(
        self,
        deals: "Callable[[sys.UnraisableHookArgs], bool]",
        before: "Callable[[sys.UnraisableHookArgs], object]",
    ):
        self.deals, self.before = deals, before

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not self.deals(unraisable):
            self.before(unraisable)


def deal_with(deals: "Callable[[sys.UnraisableHookArgs], bool]") -> None:
    """From now on Python does not print an error for which `deals` returns True. A second call changes nothing."""
    hook = sys.unraisablehook
    while isinstance(hook, _Hook):
        if hook.deals is deals:
            return
        hook = hook.before
    sys.unraisablehook = _Hook(deals, sys.unraisablehook)
