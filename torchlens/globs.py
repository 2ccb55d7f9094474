"""Globs over module addresses: `*` and `?` inside one component, `**` across dots."""

import re

from .addresses import Place, all_addresses, output_sites
from .errors import SelectorError
from .graph import Graph, Site
from .labels import match_suffix
from .near_misses import listed, nearest
from .records import ModuleRecord

__all__ = ["compile_glob", "glob_sites", "is_glob"]

_PARTS = re.compile(r"\*\*\.|\.\*\*$|\*\*|\*|\?|[^*?]+?(?=\.\*\*$|[*?]|$)")
_MEANING = {
    "**.": r"(?:.*\.)?",
    ".**": r"\..*",
    "**": r".*",
    "*": r"[^.]*",
    "?": r"[^.]",
}


def is_glob(text: str) -> bool:
    """Return whether `text` holds a wildcard."""
    return "*" in text or "?" in text


def compile_glob(glob: str) -> re.Pattern[str]:
    """Return the glob as a regular expression for `fullmatch`.

    Example:
        >>> bool(compile_glob("layer*.1").fullmatch("layer1.0.1"))
        False
    """
    parts = _PARTS.findall(glob)
    return re.compile("".join(_MEANING.get(part, re.escape(part)) for part in parts))


def glob_sites(graph: Graph, text: str) -> tuple[Site, ...]:
    """Return the output sites of the modules whose address matches, in execution order.

    Modules that match but have no output of their own, such as containers, are left
    out. A call and a path may follow the glob: "h.*.attn[0]".

    Raises:
        SelectorError: If no site is left.
    """
    sites: list[Site] = []
    reasons: list[str] = []
    for place in _places(graph, text):
        try:
            sites.extend(output_sites(graph, place))
        except SelectorError as error:
            reasons.append(str(error))
    if not sites:
        raise SelectorError(_nothing(graph, text, reasons))
    return tuple(sorted(sites, key=lambda site: (site.order, str(site.key.path))))


def _places(graph: Graph, text: str) -> list[Place]:
    """Return the modules that match; the longest glob that matches any wins."""
    for end in range(len(text), 0, -1):
        suffix = match_suffix(text[end:])
        if suffix is None or not is_glob(text[:end]):
            continue
        pattern = compile_glob(text[:end])
        names = [(module, _matching(pattern, module)) for module in _children(graph)]
        places = [Place(name, module, *suffix) for module, name in names if name]
        if places:
            return places
    return []


def _children(graph: Graph) -> list[ModuleRecord]:
    return [module for module in graph.modules.values() if module.address != "self"]


def _matching(pattern: re.Pattern[str], module: ModuleRecord) -> str | None:
    names = (module.address, *module.aliases)
    return next((name for name in names if pattern.fullmatch(name)), None)


def _nothing(graph: Graph, text: str, reasons: list[str]) -> str:
    if reasons:
        return (
            f"The glob {text!r} matches {len(reasons)} modules, but none has such an "
            f"output. {reasons[0]}"
        )
    close = nearest(text.replace("*", "").replace("?", ""), all_addresses(graph))
    meant = f" Nearest: {listed(close)}." if close else ""
    return (
        f"No module address of {graph.model_name} matches the glob {text!r}.{meant} "
        "* and ? stay inside one component of an address, ** crosses dots; labels are "
        f"not searched (tl.regex is for those). graph.modules lists all "
        f"{len(graph.modules)}."
    )
