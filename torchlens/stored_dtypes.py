"""As which dtype each site is kept: what the user may ask for, checked."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from .errors import PlanError
from .plans import SitePlan

_STORABLE = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)
_Asked = str | torch.dtype

__all__ = ["choose_dtypes"]


def choose_dtypes(
    sites: tuple[SitePlan, ...], asked: _Asked | Mapping[str, _Asked] | None
) -> tuple[SitePlan, ...]:
    """Return the sites with their stored dtypes.

    One dtype holds for every floating-point site and leaves the others; a mapping by
    site name must fit the kind of each.

    Raises:
        PlanError: If a dtype is unknown, does not fit, or a name is unknown.
    """
    if asked is None:
        return sites
    if not isinstance(asked, Mapping):
        name = _name_of(asked)
        if not _is_floating(name):
            raise PlanError(
                f"dtype={name!r} was asked for every site, but only floating-point "
                "dtypes can be: values would be lost. Give a mapping by site name for "
                "integer sites."
            )
        return tuple(
            replace(site, stored_dtype=name) if _is_floating(site.dtype) else site
            for site in sites
        )
    unknown = sorted(set(asked) - {site.name for site in sites})
    if unknown:
        raise PlanError(
            f"dtype names the site {unknown[0]!r}, which the plan does not have. It "
            f"has {', '.join(repr(site.name) for site in sites)}."
        )
    return tuple(
        _stored_as(site, _name_of(asked[site.name])) if site.name in asked else site
        for site in sites
    )


def _stored_as(site: SitePlan, name: str) -> SitePlan:
    if _kind(name) != _kind(site.dtype):
        raise PlanError(
            f"The site {site.name!r} is {site.dtype} and cannot be kept as {name}: "
            "values would be lost or change their meaning. Ask for a "
            f"{_kind(site.dtype)} dtype."
        )
    return replace(site, stored_dtype=name)


def _name_of(asked: object) -> str:
    name = str(asked).removeprefix("torch.")
    if not isinstance(asked, str | torch.dtype) or name not in _STORABLE:
        raise PlanError(
            f"dtype={asked!r} is not known. Use one of {', '.join(_STORABLE)}."
        )
    return name


def _is_floating(name: str) -> bool:
    return _kind(name) == "floating-point"


def _kind(name: str) -> str:
    dtype = getattr(torch, name)
    if dtype.is_floating_point:
        return "floating-point"
    if dtype.is_complex:
        return "complex"
    return "boolean" if dtype is torch.bool else "integer"
