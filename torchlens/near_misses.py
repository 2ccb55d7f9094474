"""What the user may have meant: the parts of an error message that help.

Knows names only; raises nothing itself.
"""

import difflib
from collections.abc import Iterable

__all__ = ["listed", "nearest", "unknown_name"]

_LISTED = 5
_ALIKE = 0.5


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Return up to `count` candidates that `name` may stand for, best first.

    Other capitals, and a path that lacks or repeats its front part, count as nearest;
    then similar spelling.
    """
    pool = list(dict.fromkeys(candidates))
    folded = name.casefold()
    same_end = [
        candidate
        for candidate in pool
        if candidate.casefold() == folded or candidate.casefold().endswith(f".{folded}")
    ]
    same_end.sort(key=len)
    wrapped = [name for name in pool if folded.endswith(f".{name.casefold()}")]
    wrapped.sort(key=len, reverse=True)
    alike = sorted(
        (name for name in pool if _likeness(folded, name) >= _ALIKE),
        key=lambda name: -_likeness(folded, name),  # stable: ties stay in order
    )
    return tuple(dict.fromkeys([*same_end, *alike, *wrapped]))[:count]


def _likeness(folded: str, name: str) -> float:
    matcher = difflib.SequenceMatcher(None, name.casefold(), folded)
    if matcher.real_quick_ratio() < _ALIKE or matcher.quick_ratio() < _ALIKE:
        return 0.0
    return matcher.ratio()


def listed(names: Iterable[str], limit: int = _LISTED) -> str:
    """Return names as text, cut after `limit` with the number left out."""
    pool = list(dict.fromkeys(names))
    if not pool:
        return "none"
    shown = ", ".join(repr(name) for name in pool[:limit])
    return shown if len(pool) <= limit else f"{shown} and {len(pool) - limit} more"


def unknown_name(name: str, candidates: Iterable[str], everything: str) -> str:
    """Return the sentences that follow "there is no such name".

    Args:
        name: What was asked.
        candidates: What there is.
        everything: Where all of it is listed, such as "graph.modules".
    """
    pool = list(dict.fromkeys(candidates))
    close = nearest(name, pool)
    meant = f"Nearest: {listed(close)}." if close else "Nothing is spelt alike."
    return f"{meant} {everything} lists all {len(pool)}."
