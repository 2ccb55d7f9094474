"""The plan of a capture: which tensors, how caught, how laid out, of which model.

A plan is data: it goes to JSON and back without code, and two plans of one digest
produce the same values.  Making one is `planner`'s work, running one is `replayer`'s.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from .catches import Catch
from .errors import PlanError
from .forecast import Forecast, forecast_site, format_bytes, shard_rows
from .identity import ModelIdentity, digest_text
from .records import SiteKey
from .row_layout import RowLayout
from .run_modes import Autocast
from .text_tables import format_table

_FORMAT = "torchlens-plan"
_VERSION = 1

__all__ = ["CapturePlan", "Check", "SitePlan"]


@dataclass(frozen=True, slots=True)
class SitePlan:
    """One site: what is caught, how it becomes rows, as what it is kept.

    Attributes:
        name: Name of the rows in a store.
        label: Label of the op that made the tensor; for people.
        address: Module address of a module site, else `None`.
        catch: How the tensor is caught.
        layout: Where the samples are in the caught tensor.
        dtype: As the model makes it, such as "float32".
        stored_dtype: As it is kept.
        copy: Whether the caught tensor cannot be kept as it is: something may write to
            its memory later, or it is a small part of a larger memory.
        graph_digest: Digest of the ops up to this site, whatever else is planned.
    """

    name: str
    label: str
    address: str | None
    catch: Catch
    layout: RowLayout
    dtype: str
    stored_dtype: str
    copy: bool
    graph_digest: str = ""

    @property
    def key(self) -> SiteKey:
        """Return the structural identity of the site."""
        return self.catch.key

    @property
    def batch_axis(self) -> int | None:
        """Return the axis of the caught tensor that holds the samples."""
        return self.layout.batch_axis

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample's row."""
        return self.layout.row_shape

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row as kept."""
        itemsize: int = torch_dtype(self.stored_dtype).itemsize
        for size in self.row_shape:
            itemsize *= size
        return itemsize


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one self-check of the probe: passed, or what was found."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Sites of a model in the order in which they appear, and how to run it.

    Attributes:
        sites: In the order in which a forward hands them on; it ends after the last.
        model: Class, configuration and weights.
        graph_digest: Digest of the ops up to the last site, which tells changed code.
        training: Whether the model runs in train mode.
        inference: Whether inference mode is safe; else no_grad is used.
        autocast: Autocast while planning, and so in every run.
        input_batch_axis: Axis of the inputs that holds the samples.
        torch_version: Version that made the plan; recorded.
        python_version: Likewise; op sites are tied to it.
        fixed_batch: The one batch size that the model takes, if there is only one.
        weight_bytes: Bytes of parameters and buffers.
        activation_bytes: Bytes that live at one time for one sample; an estimate.
        checks: What the probe's self-checks found.
        notes: What the caller should know, such as an op that is not deterministic.
    """

    sites: tuple[SitePlan, ...]
    model: ModelIdentity
    graph_digest: str
    training: bool
    inference: bool
    autocast: Autocast
    input_batch_axis: int
    torch_version: str
    python_version: str
    fixed_batch: int | None = None
    weight_bytes: int = 0
    activation_bytes: int = 0
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.sites:
            raise PlanError("A plan needs at least one site; none came.")
        names = [site.name for site in self.sites]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(
                f"Two sites of the plan are called {twice[0]!r}. Give layers as a "
                "mapping from names of your own."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the sites, in order."""
        return tuple(site.name for site in self.sites)

    @property
    def halt_after(self) -> int:
        """Return the index of the site after which a forward can end."""
        return len(self.sites) - 1

    @property
    def model_name(self) -> str:
        """Return the class name of the model."""
        return self.model.class_name.rpartition(".")[2]

    def identity(self) -> dict[str, Any]:
        """Return every fact that determines values, as nested JSON data."""
        return {
            "model": asdict(self.model),
            "graph": self.graph_digest,
            "training": self.training,
            "autocast": _jsonable(asdict(self.autocast)),
            "input_batch_axis": self.input_batch_axis,
            "sites": {
                site.name: {
                    "key": _jsonable(asdict(site.key)),
                    "graph": site.graph_digest,
                    "layout": _jsonable(asdict(site.layout)),
                    "dtype": site.dtype,
                    "stored_dtype": site.stored_dtype,
                }
                for site in self.sites
            },
        }

    @property
    def digest(self) -> str:
        """Return the digest of `identity`; runs of one digest give the same values."""
        return digest_text(json.dumps(self.identity(), sort_keys=True))

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` is the reverse."""
        body = {"format": _FORMAT, "version": _VERSION, "digest": self.digest}
        return json.dumps(body | _jsonable(asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CapturePlan":
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: If the text is no plan, of another version, or was changed.
        """
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"The plan is not JSON: {error}.") from error
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise PlanError(
                f'The JSON is no capture plan: it lacks "format": "{_FORMAT}". Write '
                "one with plan.to_json()."
            )
        if body.get("version") != _VERSION:
            raise PlanError(
                f"The plan has version {body.get('version')!r}, but this release reads "
                f"version {_VERSION}. Plan again with this release."
            )
        try:
            plan = _plan_of(body)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"The plan's JSON is damaged: {error!r}.") from error
        if plan.digest != body.get("digest"):
            raise PlanError(
                "The plan's JSON was changed after it was written: its digest is "
                f"{plan.digest}, the one it states is {body.get('digest')}."
            )
        return plan

    def forecast(self, num_rows: int, *, batch_size: int = 32) -> Forecast:
        """Return what a run over `num_rows` samples needs."""
        sites = tuple(
            forecast_site(site.name, site.row_bytes, num_rows) for site in self.sites
        )
        batch = min(batch_size, num_rows)
        host = sum(
            site.row_bytes * (batch + shard_rows(site.row_bytes, num_rows))
            for site in self.sites
        )
        return Forecast(
            num_rows=num_rows,
            num_bytes=sum(site.num_bytes for site in sites),
            num_files=sum(site.num_files for site in sites),
            host_bytes=host,
            device_bytes=self.weight_bytes + self.activation_bytes * batch,
            sites=sites,
        )

    def summary(self) -> str:
        """Return the plan as a table that people read."""
        rows = [
            [
                site.name,
                site.label,
                str(list(site.row_shape)),
                _describe_axis(site.layout),
                site.dtype
                if site.dtype == site.stored_dtype
                else f"{site.dtype} -> {site.stored_dtype}",
                format_bytes(site.row_bytes),
                "copy" if site.copy else "",
            ]
            for site in self.sites
        ]
        header = ["name", "made by", "row", "samples", "dtype", "bytes/row", ""]
        mode = "train" if self.training else "eval"
        autocast = self.autocast.dtype or "off"
        lines = [
            f"{self.model_name}: {len(self.sites)} sites, {mode} mode, autocast "
            f"{autocast}, forward ends after {self.names[-1]!r}",
            format_table(header, rows),
            *(
                f"check {check.name}: {'passed' if check.passed else check.detail}"
                for check in self.checks
            ),
            *(f"note: {note}" for note in self.notes),
            f"digest {self.digest}",
        ]
        return "\n".join(lines)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"{name!r} is no torch dtype.")
    return dtype


def _describe_axis(layout: RowLayout) -> str:
    if layout.batch_axis is None:
        return "constant"
    if not layout.merged:
        return f"axis {layout.batch_axis}"
    order = "samples, group" if layout.merged == "batch_major" else "group, samples"
    return f"axis {layout.batch_axis} ({order} of {layout.group})"


def _jsonable(value: Any) -> Any:
    """Return `value` with tuples as lists, as it comes back from JSON."""
    return json.loads(json.dumps(value))


def _plan_of(body: Mapping[str, Any]) -> CapturePlan:
    known = {field.name for field in fields(CapturePlan)}
    facts = {name: value for name, value in body.items() if name in known}
    facts["sites"] = tuple(_site_of(site) for site in body["sites"])
    facts["model"] = ModelIdentity(**body["model"])
    facts["autocast"] = Autocast(**body["autocast"])
    facts["checks"] = tuple(Check(**check) for check in body["checks"])
    facts["notes"] = tuple(body["notes"])
    return CapturePlan(**facts)


def _site_of(body: Mapping[str, Any]) -> SitePlan:
    key = dict(body["catch"]["key"])
    key["path"] = tuple(key["path"])
    catch = dict(body["catch"])
    catch["key"] = SiteKey(**key)
    catch["children"] = tuple(catch["children"])
    layout = dict(body["layout"])
    layout["row_shape"] = tuple(layout["row_shape"])
    return SitePlan(**{**body, "catch": Catch(**catch), "layout": RowLayout(**layout)})
