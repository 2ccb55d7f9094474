"""What one extraction is: the plan, the data, and every fact its values depend on.

Nothing here touches the store except to look for an earlier plan; nothing runs the
model except the making of a new plan.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from torchlens.errors import DataError, InputError, ModelError
from torchlens.lookup import Layers
from torchlens.model_access import unwrap_model
from torchlens.model_inputs import ModelInputs
from torchlens.planner import plan as make_plan
from torchlens.plans import CapturePlan
from torchlens.storage import ArraySpec

from .config import DEFAULT_BATCH_SIZE
from .fingerprints import describe_callable, fingerprint_rows
from .loading import BatchMaker, Failure, read_items
from .model_call import InputRule, Inputs, make_input_rule, read_signature
from .plan_request import digest_request
from .sample_ids import Metadata, make_id_rule, make_metadata
from .samples import Source, open_source
from .streams import count_stream

__all__ = ["DataOptions", "Job", "example_inputs", "make_job"]

_EXAMPLE_ROWS = 3
_TRIED_ROWS = 20
# The plan's check whose failure says that values depend on who is in the batch.
_ALONE = "sample alone equals sample in batch"

FindPlan = Callable[[str], CapturePlan | None]


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How the dataset is read and given to the model, as `extract_dataset` takes it."""

    ids: Any = None
    metadata: Any = None
    inputs: Inputs = None
    collate: Callable[[list[Any]], Any] | None = None
    transform: Callable[[Any], Any] | None = None
    num_workers: int = 0
    preprocess: Any = None
    fingerprint: str | None = None
    device: str | torch.device | None = None
    dtype: str | Mapping[str, str] | None = None
    allow: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A model, its plan, and a dataset, ready to run.

    Attributes:
        model: As the caller passed it.
        plan: What is captured and how it is stored.
        plan_is_checked: Whether the plan is known to fit the model's weights.
        source: The dataset.
        make: Makes batches, with ids and metadata.
        metadata: Columns given beside the data.
        rule: Makes arguments from batches.
        device: Where inputs go; `None` leaves them where they are.
        batch_size: Samples run together.
        arrays: What the store holds.
        identity: Every fact that all layers' values depend on.
        provenance: Facts worth keeping, the plan among them.
    """

    model: nn.Module
    plan: CapturePlan
    plan_is_checked: bool
    source: Source
    make: BatchMaker
    metadata: Metadata
    rule: InputRule
    device: torch.device | None
    batch_size: int
    arrays: Mapping[str, ArraySpec]
    identity: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        assert self.source.num_rows is not None
        return self.source.num_rows


def make_job(
    model: nn.Module,
    dataset: object,
    layers: Layers | CapturePlan,
    options: DataOptions,
    *,
    batch_size: int | None,
    saturate: bool,
    find_plan: FindPlan,
) -> Job:
    """Look at the dataset and the model, and plan.

    Args:
        model: The model.
        dataset: Any form that `open_source` takes.
        layers: What to extract, or a finished plan.
        options: How to read the data.
        batch_size: Samples run together; `None` takes a DataLoader's, else the default.
        saturate: Whether overflow is cut to the largest value, which changes values.
        find_plan: Returns the plan that an earlier run made for the same request.

    Raises:
        TorchLensError: Of the kind that says what to change.
    """
    plain = unwrap_model(model)
    source = open_source(
        dataset,
        collate=options.collate,
        num_workers=options.num_workers,
        transform=options.transform,
    )
    batch_size = batch_size or source.batch_size or DEFAULT_BATCH_SIZE
    # A model that takes batches of one size only has to be shown such a batch.
    num_shown = batch_size if "fixed_batch" in options.allow else _EXAMPLE_ROWS
    source, pairs, fingerprint = _look_at(source, options.fingerprint, num_shown)
    metadata = make_metadata(options.metadata, source)
    ids = make_id_rule(options.ids, source, pairs[0][1], metadata)
    signature = read_signature(plain)
    dropped = frozenset({*metadata.item_keys, *([ids.key] if ids.key else [])})
    # Workers get what they need of the metadata, not whole columns.
    in_items = Metadata(item_keys=metadata.item_keys)
    make = BatchMaker(source.collate, ids, in_items, dropped - signature.names)
    example = make(pairs)
    rule = make_input_rule(example.inputs, signature, options.inputs, dropped)
    device = _input_device(plain, options.device)
    inputs = rule.apply(example.inputs, device)

    identity: dict[str, Any] = {
        "dataset": {
            "num_rows": source.num_rows,
            "ids": ids.identity(),
            "fingerprint": fingerprint,
        },
        "preprocess": _describe_preprocessing(source, options),
        "inputs": rule.identity(),
        "overflow": "saturated" if saturate else "as computed",
    }
    request = None
    if isinstance(layers, CapturePlan):
        if options.dtype is not None or options.allow:
            raise InputError(
                "layers is a finished plan, which says itself what dtypes are stored "
                "and what is allowed. Give dtype= and allow= to tl.plan instead."
            )
        plan, checked = layers, False
    else:
        request = digest_request(
            plain, layers, options.dtype, options.allow, identity, inputs
        )
        known = find_plan(request) if request is not None else None
        checked = True
        plan = known or make_plan(
            model, inputs, layers, dtype=options.dtype, allow=options.allow
        )
    if plan.fixed_batch is not None:
        batch_size = min(batch_size, plan.fixed_batch)
    if any(check.name == _ALONE and not check.passed for check in plan.checks):
        identity["batch_size"] = batch_size
    facts = plan.identity()
    sites = facts.pop("sites")
    # The graph up to the deepest site changes when layers are added later; each site
    # carries the digest of what leads to it.
    del facts["graph"]
    return Job(
        model=model,
        plan=plan,
        plan_is_checked=checked,
        source=source,
        make=make,
        metadata=metadata,
        rule=rule,
        device=device,
        batch_size=batch_size,
        arrays={
            site.name: ArraySpec(site.row_shape, site.stored_dtype, sites[site.name])
            for site in plan.sites
        },
        identity=identity | facts,
        provenance={
            "request": request,
            "plan": json.loads(plan.to_json()),
            "batch_size": batch_size,
            "torch": plan.torch_version,
            "python": plan.python_version,
        },
    )


def example_inputs(
    model: nn.Module, dataset: object, transform: Any, inputs: Inputs
) -> ModelInputs:
    """Return what the model is given for the first items of a dataset."""
    source, pairs, _ = _look_at(open_source(dataset, transform=transform), "given")
    ids = make_id_rule(None, source, pairs[0][1], Metadata())
    signature = read_signature(unwrap_model(model))
    dropped = frozenset([ids.key] if ids.key else [])
    batch = BatchMaker(source.collate, ids, Metadata(), dropped - signature.names)
    example = batch(pairs).inputs
    return make_input_rule(example, signature, inputs, dropped).apply(example)


def _look_at(
    source: Source, given: str | None, num_shown: int = _EXAMPLE_ROWS
) -> tuple[Source, list[tuple[int, Any]], str | None]:
    """Return the source with its length, its first items, and its fingerprint."""
    if source.streamed:
        counted = count_stream(source, num_shown)
        items = list(enumerate(counted.first_items))
        return counted.source, items, given or counted.fingerprint
    return source, _first_items(source, num_shown), given or fingerprint_rows(source)


def _first_items(source: Source, num_shown: int) -> list[tuple[int, Any]]:
    """Return the first items that can be read; the example is made of them."""
    assert source.num_rows is not None
    rows = range(min(num_shown + _TRIED_ROWS, source.num_rows))
    pairs = (pair for row in rows for pair in read_items(source.items, [row]))
    failures: list[Failure] = []

    def readable(pair: tuple[int, Any]) -> bool:
        if isinstance(pair[1], Failure):
            failures.append(pair[1])
        return not isinstance(pair[1], Failure)

    found = list(islice(filter(readable, pairs), num_shown))
    if not found:
        error = DataError(
            f"None of the first {len(rows)} items of the dataset could be read. The "
            f"first one: {failures[0].message}."
        )
        error.add_note(failures[0].details)
        raise error
    return found


def _input_device(
    model: nn.Module, wanted: str | torch.device | None
) -> torch.device | None:
    """Return where inputs go; the model itself is never moved."""
    if any("_hf_hook" in vars(module) for module in model.modules()):
        # Offloading hooks bring the inputs to where each part of the model is.
        return None if wanted is None else torch.device(wanted)
    tensors = [*model.parameters(), *model.buffers()]
    here = tensors[0].device if tensors else torch.device("cpu")
    if wanted is None:
        return here
    asked = torch.device(wanted)
    if tensors and (asked.type != here.type or asked.index not in (None, here.index)):
        raise ModelError(
            f'device="{asked}" was asked for, but the model is on "{here}", and a '
            f'model is never moved here. Call model.to("{asked}") first, or leave '
            f"device out to use where it is."
        )
    return here if tensors else asked


def _describe_preprocessing(source: Source, options: DataOptions) -> dict[str, Any]:
    found: dict[str, Any] = {"description": options.preprocess}
    if options.transform is not None:
        found["transform"] = describe_callable(options.transform)
    if source.collate is not default_collate:
        found["collate"] = describe_callable(source.collate)
    return found
