"""Runs a plan over batches at the speed of a plain forward, guarding every batch.

What may differ between batches is checked while the tensors pass by: which sites come,
in which order, how often, of which shape and dtype.  Nothing is traced here, except a
batch that took another path under the policy "retrace".
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from .batch_template import BatchTemplate, TakeRows
from .catches import Halt, describe_key
from .errors import PathDivergenceError, PlanError, ReplayError, TorchLensWarning
from .interception import Interception
from .model_access import unwrap_model
from .model_state import preserved_state
from .plan_fit import check_fit, python_version
from .plans import CapturePlan, torch_dtype
from .retracing import rows_of_capture
from .run_modes import ModuleModes, RunModes, training_mode
from .structures import leaves
from .tracer import run_capture

Policy = Literal["raise", "retrace"]
_NUM_IDS_SHOWN = 5

__all__ = ["Policy", "Replayer"]


class Replayer:
    """Context in which `run` hands back the rows of a plan's sites for a batch.

    The model is in the plan's train/eval mode while it runs, and exactly as it was
    after the context.

    Attributes:
        missing: Sites that the last batch did not have, under the policy "retrace".
        diverged: Batches so far that took another path than planned.

    Example:
        >>> import torchlens as tl
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> plan = tl.plan(model, torch.randn(4, 3), "1")
        >>> with Replayer(model, plan) as replayer:
        ...     rows = replayer.run((torch.randn(5, 3),), {}, num_samples=5)
        >>> rows["1"].shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: CapturePlan,
        *,
        on_divergence: Policy = "raise",
        check_model: bool = True,
    ) -> None:
        """Prepare to run `plan`; nothing is put on the model yet.

        Args:
            model: The model of the plan.
            plan: From `plan` or `CapturePlan.from_json`.
            on_divergence: What to do with a batch that takes another path.
            check_model: Whether to compare the model's weights and settings with those
                of the plan; leave it on unless that was done already.

        Raises:
            PlanError: If the model is not the one that was planned.
        """
        if on_divergence not in ("raise", "retrace"):
            raise PlanError(
                'on_divergence was wanted as "raise" or "retrace", but '
                f"{on_divergence!r} came."
            )
        self._model = unwrap_model(model)
        check_fit(self._model, plan, weights=check_model)
        self.plan = plan
        self.missing: tuple[str, ...] = ()
        self.diverged = 0
        self._policy = on_divergence
        self._modes = RunModes(plan.autocast)
        catches = [site.catch for site in plan.sites]
        if (plan.python_version, plan.torch_version) != (
            python_version(),
            torch.__version__,
        ):
            # Instruction offsets would not compare.
            catches = [replace(catch, caller="") for catch in catches]
        self._interception = Interception(
            self._model, catches, self._receive, self._modes
        )
        self._stack = ExitStack()
        self._num_batches = 0
        # Offloading hooks bring weights back only when a module's forward returns.
        self._halting = not any(
            "_hf_hook" in vars(module) for module in self._model.modules()
        )
        self._far = any(
            parameter.device.type != "cpu" for parameter in self._model.parameters()
        )
        self._last = plan.halt_after
        self._names = plan.names
        self._dtypes = [torch_dtype(site.dtype) for site in plan.sites]
        self._stored = [torch_dtype(site.stored_dtype) for site in plan.sites]
        self._copies = [site.copy or site.batch_axis is None for site in plan.sites]
        self._constants: dict[int, Tensor | None] = {
            index: None
            for index, site in enumerate(plan.sites)
            if site.batch_axis is None
        }
        self._templates: dict[int, BatchTemplate] = {}
        # The state of one run, here and not in an object for the hot path's sake.
        self._next = 0
        self._shapes: Sequence[tuple[int, ...]] = ()
        self._rows: Sequence[TakeRows | None] = ()
        self._targets: list[Tensor] | None = None
        self._kept: list[Tensor] = []
        self._versions: list[int | None] = []
        self._halted = False

    def __enter__(self) -> "Replayer":
        try:
            training = self.plan.training
            self._modes.modules = ModuleModes(self._model, training)
            if training:
                # Running statistics go on from batch to batch, and back at the end.
                self._stack.enter_context(training_mode(self._model, training))
                self._stack.enter_context(preserved_state(self._model))
            self._stack.enter_context(self._interception)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        num_samples: int,
        sample_ids: Sequence[str] | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Run one batch and return {site name: rows of [num_samples, *row_shape]}.

        Args:
            args: Positional arguments of the model's call.
            kwargs: Keyword arguments.
            num_samples: Batch size.
            sample_ids: Ids of the samples, for messages.
            out: Tensors that the rows are copied to while the model runs; without it
                the rows come as ordinary tensors that may be kept and trained on.

        Raises:
            PathDivergenceError: If the batch took another path than planned.
            InputError: If `out` does not fit the plan.
        """
        template = self._begin(num_samples, out)
        args, kwargs = template.pad(args, kwargs)
        # Only a batch that may run twice needs its inputs watched.
        once = out is not None and self._policy == "raise"
        versions = [] if once else _versions(args, kwargs)
        inference = out is not None and self.plan.inference
        failure: Exception | None = None
        try:
            _, stopped = self._interception.forward(args, kwargs, inference=inference)
        except Exception as error:
            failure, stopped = error, False
        problem = self._interception.relay.problem
        if problem is None and self._halted and not stopped:
            self._stop_halting()
        elif problem is None and failure is not None:
            failure.add_note(f"While replaying {self._describe_batch(sample_ids)}.")
            raise failure
        elif problem is None and self._next <= self._last:
            key = self.plan.sites[self._next].key
            problem = f"{describe_key(key)} never appeared"
        if problem is not None:
            self._refuse_batch(problem, failure, sample_ids)
            self._check_inputs(versions, args, kwargs, sample_ids)
            return self._retrace(args, kwargs)
        if out is not None:
            return dict(out)
        if self._overwritten():
            self._check_inputs(versions, args, kwargs, sample_ids)
            return self.run(
                args, kwargs, num_samples=num_samples, sample_ids=sample_ids
            )
        kept = dict(zip(self._names, self._kept, strict=True))
        self._kept = []
        return kept

    def _begin(
        self, num_samples: int, out: Mapping[str, Tensor] | None
    ) -> BatchTemplate:
        template = self._templates.get(num_samples)
        if template is None:
            template = BatchTemplate(self.plan, num_samples)
            self._templates[num_samples] = template
        self._targets = None if out is None else template.targets(out)
        self._shapes = template.shapes
        self._rows = template.rows
        self._kept = []
        self._versions = []
        self._next = 0
        self._halted = False
        self.missing = ()
        self._num_batches += 1
        return template

    def _receive(self, index: int, tensor: Tensor) -> None:
        """Take the tensor of one site: the hot path, run inside the model's forward."""
        if (
            index != self._next
            or tensor.shape != self._shapes[index]
            or tensor.dtype is not self._dtypes[index]
        ):
            self._refuse(index, tensor)
        if index in self._constants:
            self._check_constant(index, tensor)
        if tensor.requires_grad:
            # The forward has turned autograd on for itself; rows are values.
            tensor = tensor.detach()
        rows = self._rows[index]
        value = tensor if rows is None else rows(tensor)
        if self._targets is not None:
            target = self._targets[index]
            if self._far and value.dtype is not target.dtype:
                # Half the bytes, or fewer, cross to the host.
                value = value.to(target.dtype)
            target.copy_(value)
        else:
            self._keep(index, value)
        self._next = index + 1
        # A doubtful call shows what it was when later calls come, or none does.
        if (
            index == self._last
            and self._halting
            and not self._interception.relay.doubtful
        ):
            self._halted = True
            self._interception.relay.end()
            raise Halt

    def _check_constant(self, index: int, tensor: Tensor) -> None:
        first = self._constants[index]
        if first is None:
            self._constants[index] = tensor.detach().clone()
        elif not torch.equal(first, tensor):
            site = self.plan.sites[index]
            self._interception.relay.diverge(
                f"site {site.name!r}: {describe_key(site.key)} was planned as a "
                "constant, but differs from the one of an earlier batch"
            )

    def _keep(self, index: int, value: Tensor) -> None:
        version = None
        if value.dtype is not self._stored[index]:
            value = value.to(self._stored[index])
        elif self._copies[index] or value.is_inference():
            value = value.clone(memory_format=torch.contiguous_format)
        else:
            version = value._version
        self._kept.append(value)
        self._versions.append(version)

    def _overwritten(self) -> bool:
        """Note sites whose kept tensor was written to after it was caught."""
        found = False
        for index, version in enumerate(self._versions):
            if version is not None and self._kept[index]._version != version:
                self._copies[index] = found = True
        return found

    def _refuse(self, index: int, tensor: Tensor) -> None:
        site = self.plan.sites[index]
        if index == self._next:
            wanted = f"{site.dtype} {list(self._shapes[index])}"
            came = f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
            problem = f"{describe_key(site.key)} is {came}, where {wanted} was planned"
        elif self._next > self._last:
            problem = f"{describe_key(site.key)} appeared after the last planned site"
        else:
            due = self.plan.sites[self._next].key
            problem = (
                f"{describe_key(site.key)} appeared when {describe_key(due)} was due"
            )
        self._interception.relay.diverge(f"site {site.name!r}: {problem}")

    def _stop_halting(self) -> None:
        self._halting = False
        warnings.warn(
            f"The forward of {self.plan.model_name} swallowed the signal that ends it "
            f"after {self.plan.names[-1]!r} (a bare `except:` or "
            "`except BaseException:`). The rows are right; from here on the forward "
            "runs to its end.",
            TorchLensWarning,
            stacklevel=3,
        )

    def _refuse_batch(
        self,
        problem: str,
        failure: Exception | None,
        sample_ids: Sequence[str] | None,
    ) -> None:
        self.diverged += 1
        if self._policy == "retrace":
            return
        raise PathDivergenceError(
            f"{self._describe_batch(sample_ids)} of {self.plan.model_name} took "
            f"another path than the plan: {problem}. Plan with a batch that takes "
            'this path, or pass on_divergence="retrace" to keep the sites that '
            "still exist."
        ) from failure

    def _check_inputs(
        self,
        versions: list[int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        sample_ids: Sequence[str] | None,
    ) -> None:
        """Refuse to run a batch again whose inputs the forward has changed."""
        if _versions(args, kwargs) != versions:
            raise ReplayError(
                f"{self._describe_batch(sample_ids)} must run a second time, but the "
                f"forward of {self.plan.model_name} has written to its inputs. Give "
                "copies of them, or use out=."
            )

    def _retrace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Capture everything, and take what exists under its planned key."""
        with self._interception.removed(), ExitStack() as stack:
            self._modes.enter(stack, inference=False)
            capture = run_capture(self._model, args, kwargs, wanted=None, detach=True)
        rows = rows_of_capture(
            self.plan, capture.graph, capture.payloads, self._shapes, self._rows
        )
        self.missing = tuple(name for name in self.plan.names if name not in rows)
        result = {}
        for index, name in enumerate(self.plan.names):
            target = None if self._targets is None else self._targets[index]
            if name not in rows:
                if target is not None:
                    target.fill_(float("nan") if target.is_floating_point() else 0)
            elif target is not None:
                result[name] = target.copy_(rows[name])
            else:
                cast = rows[name].to(self._stored[index])
                result[name] = cast.clone(memory_format=torch.contiguous_format)
        return result

    def _describe_batch(self, sample_ids: Sequence[str] | None) -> str:
        if not sample_ids:
            return f"Batch {self._num_batches}"
        shown = ", ".join(map(repr, sample_ids[:_NUM_IDS_SHOWN]))
        more = len(sample_ids) - _NUM_IDS_SHOWN
        tail = f" and {more} more" if more > 0 else ""
        return f"Batch {self._num_batches} (samples {shown}{tail})"


def _versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return how often each input was written to, where torch counts that."""
    return [
        -1 if tensor.is_inference() else tensor._version
        for _, tensor in leaves((args, kwargs))
    ]
