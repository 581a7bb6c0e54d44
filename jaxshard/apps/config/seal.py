"""A seal on a text file, to detect whether it was changed or cut short.

The seal is a comment before and one after the text, which TOML ignores. The first has the text's SHA-256; if the second
is missing, the file was cut short.
"""

import hashlib
from typing import Literal

State = Literal["whole", "changed", "cut short", "not sealed"]

_FIRST = "# Written by jaxshard; SHA-256 of what is between this line and the last: "
_LAST = "# The end of what jaxshard wrote.\n"


def sealed(text: str) -> str:
    """The text with its seal.

    >>> state_of(sealed("[train]\\n"))
    'whole'
    """
    return f"{_FIRST}{_digest(text)}\n{text}{_LAST}"


def state_of(text: str) -> State:
    """The state of a sealed text.

    >>> [state_of(sealed("[train]\\nsteps = 300\\n").replace(*edit)) for edit in (("3", "4"), ("\\n# The", "\\n#"))]
    ['changed', 'cut short']
    """
    first, _, rest = text.partition("\n")
    if not first.startswith(_FIRST):
        return "not sealed"
    if not rest.endswith(_LAST):
        return "cut short"
    return "whole" if first.removeprefix(_FIRST) == _digest(rest.removesuffix(_LAST)) else "changed"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
