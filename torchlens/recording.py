"""One forward, a few of its tensors: `record` and `pluck`.

Thin faces over the catches of a replay.  Tensors come as the model makes them; cutting
them into rows of samples is a plan's work.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .catch_choice import choose_catch
from .catches import Catch, Halt, describe_key
from .errors import PathDivergenceError, SelectorError
from .interception import Interception
from .lookup import Layer, Layers, resolve_layers
from .model_access import unwrap_model
from .model_inputs import ModelInputs, as_inputs
from .model_state import preserved_state
from .planner import check_call, device_type
from .probe import preserved_tensors
from .run_modes import RunModes, ambient_autocast, training_mode
from .tracer import run_capture

__all__ = ["Recording", "pluck", "record"]


@dataclass(frozen=True)
class Recording(Mapping[str, Tensor]):
    """Tensors of one forward by name, in the order in which they appeared.

    Attributes:
        tensors: Copies, without connection to autograd.
        output: What the model returned; `None` where the forward was ended early.
        halted: Whether it was.
    """

    tensors: Mapping[str, Tensor]
    output: Any = field(repr=False)
    halted: bool

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise SelectorError(
                f"Nothing was recorded as {name!r}; recorded were "
                f"{', '.join(map(repr, self.tensors))}."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


def record(
    model: nn.Module,
    *inputs: Any,
    layers: Layers,
    input_kwargs: Mapping[str, Any] | None = None,
    halt: bool = True,
    training: bool = False,
) -> Recording:
    """Return the tensors at `layers` in one forward of `model`.

    The model is traced without keeping anything, then run natively with only what the
    layers need; gradients are not recorded.

    Args:
        model: The model.
        *inputs: Positional arguments of its call.
        layers: Labels, module addresses, globs, selectors, or a mapping to these.
        input_kwargs: Keyword arguments of its call.
        halt: Whether to end the forward after the last of the layers.
        training: Whether to run in train mode; otherwise in eval mode.

    Raises:
        SelectorError: If layers name nothing, or too much.
        InputError: If the inputs do not fit the model.
        PathDivergenceError: If the model took another path than in its trace.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> list(record(model, torch.randn(4, 3), layers=["0", "relu_1"]))
        ['0', 'relu_1']
    """
    given = ModelInputs(inputs, {} if input_kwargs is None else input_kwargs)
    return _record(model, given, layers, halt, training)


def pluck(
    model: nn.Module, inputs: Any, layer: Layer, *, training: bool = False
) -> Tensor:
    """Return the tensor at one layer, as a hook with a clone would get it.

    Args:
        model: The model.
        inputs: A tensor, a tuple of positional arguments, a mapping of keyword
            arguments, or `ModelInputs`.
        layer: A label, module address or selector that names exactly one tensor.
        training: Whether to run in train mode; otherwise in eval mode.

    Raises:
        SelectorError: If `layer` names nothing, or more than one tensor.
        InputError: If the inputs do not fit the model.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> pluck(model, torch.randn(4, 3), "0").shape
        torch.Size([4, 2])
    """
    recording = _record(model, as_inputs(inputs), layer, True, training)
    if len(recording) > 1:
        raise SelectorError(
            f"{layer!r} names {len(recording)} tensors, {', '.join(recording)}, and "
            "pluck returns one. Name one of them, or use record."
        )
    return next(iter(recording.values()))


def _record(
    model: nn.Module, inputs: ModelInputs, layers: Layers, halt: bool, training: bool
) -> Recording:
    module = unwrap_model(model)
    check_call(module, inputs)
    modes = RunModes(ambient_autocast(device_type(module)))
    with ExitStack() as stack:
        stack.enter_context(training_mode(module, training))
        stack.enter_context(preserved_state(module))
        catches = _find(module, inputs, layers, modes)
        return _run(module, inputs, catches, modes, halt)


def _find(
    model: nn.Module, inputs: ModelInputs, layers: Layers, modes: RunModes
) -> dict[str, Catch]:
    """Return how each layer is caught, from a trace that leaves no mark."""
    given = inputs.clone()
    with ExitStack() as stack:
        stack.enter_context(preserved_tensors(model))
        modes.enter(stack, inference=False)
        graph = run_capture(model, given.args, given.kwargs).graph
    sites = resolve_layers(graph, layers)
    return {name: choose_catch(graph, name, site) for name, site in sites.items()}


def _run(
    model: nn.Module,
    inputs: ModelInputs,
    catches: Mapping[str, Catch],
    modes: RunModes,
    halt: bool,
) -> Recording:
    names = tuple(catches)
    found: dict[str, Tensor] = {}

    def receive(index: int, tensor: Tensor) -> None:
        found[names[index]] = tensor.detach().clone()
        if halt and len(found) == len(names):
            interception.relay.end()
            raise Halt

    interception = Interception(model, tuple(catches.values()), receive, modes)
    with interception:
        output, halted = interception.forward(
            inputs.args, inputs.kwargs, inference=False
        )
    problem = interception.relay.problem
    absent = [name for name in names if name not in found]
    if problem is None and absent:
        problem = f"{describe_key(catches[absent[0]].key)} never appeared"
    if problem is not None:
        raise PathDivergenceError(
            f"{type(model).__name__} took another path than in its trace a moment "
            f"before, on the same inputs: {problem}. Its path depends on something "
            "else, such as random numbers or a counter."
        )
    return Recording(found, output, halted)
