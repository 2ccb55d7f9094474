"""What decides the result of a torch call besides its arguments.

Random generators and autocast: noted when an op runs, put back when a validation
executes the op again.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CallConditions", "Generators", "conditions_of", "uncast"]


@dataclass(frozen=True, slots=True)
class CallConditions:
    """Surroundings of one torch call.

    Attributes:
        random_states: State of each device's generator that it may have drawn from.
        generators: Generators among its arguments with their states.
        autocast: Device type and dtype of each autocast that was on.
    """

    random_states: tuple[tuple[torch.device, torch.Tensor], ...] = ()
    generators: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the surroundings back for a while; the devices' states stay so."""
        for device, state in self.random_states:
            _set_random_state(device, state)
        with ExitStack() as stack:
            for generator, state in self.generators:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            for device_type, dtype in self.autocast:
                stack.enter_context(torch.autocast(device_type, dtype))
            yield


class Generators:
    """Generators that a forward was seen to draw from, to be left as they were."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the state of each generator among the arguments of a call."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self._states:
                self._states[id(value)] = value, value.get_state()

    def restore(self) -> None:
        """Give every generator the state it had first."""
        for generator, state in self._states.values():
            generator.set_state(state)


def conditions_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, random: bool
) -> CallConditions | None:
    """Return the surroundings of a call about to run, `None` if nothing is special."""
    devices = _devices(args, kwargs)
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in sorted({device.type for device in devices})
        if kind != "meta" and torch.is_autocast_enabled(kind)
    )
    if not random:
        return CallConditions(autocast=autocast) if autocast else None
    generators = tuple(
        (value, value.get_state())
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Generator)
    )
    states = tuple((device, _random_state(device)) for device in devices)
    return CallConditions(states, generators, autocast)


@contextmanager
def uncast() -> Iterator[None]:
    """Turn autocast off, on whatever device it is on."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _devices(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.device]:
    """Return the CPU, the devices of tensors, and the device asked for."""
    found = [torch.device("cpu")]
    for value in (*args, *kwargs.values()):
        device = value.device if isinstance(value, torch.Tensor) else value
        if value is kwargs.get("device") and isinstance(value, str):
            device = torch.device(value)
        if isinstance(device, torch.device) and device not in found:
            found.append(device)
    return found


def _random_state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
