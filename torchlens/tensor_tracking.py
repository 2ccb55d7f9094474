"""Which node made which tensor, and payloads that stay what they were.

Payloads are references.  Before an op writes into memory, the payloads that share this
memory are copied; writes that no one announced show in the tensors' version counters.
"""

import weakref
from collections.abc import Iterable

import torch

__all__ = ["Payloads", "TensorTable", "memory_key", "version_of"]


def memory_key(tensor: torch.Tensor) -> int:
    """Return a number shared by all live tensors that use the same memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)  # sparse and functorch-wrapped tensors have no storage


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often the tensor's memory was written, `None` if not counted."""
    if tensor.is_inference():
        return None
    return tensor._version


class TensorTable:
    """Maps live tensor objects to the node that last wrote them.

    Keyed by `id`, guarded by a weak reference, since ids are used again.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._writes: dict[int, int] = {}

    def assign(self, tensor: torch.Tensor, node: int) -> None:
        """Record that `tensor` is now the output of `node`."""
        self._nodes[id(tensor)] = (weakref.ref(tensor), node)

    def node_of(self, tensor: torch.Tensor) -> int | None:
        """Return the node that made `tensor`, or `None` if it was not seen."""
        entry = self._nodes.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        return entry[1]

    def wrote(self, memory: int, node: int) -> None:
        """Record that `node` wrote into `memory`."""
        self._writes[memory] = node

    def writer_after(self, tensor: torch.Tensor, node: int) -> int | None:
        """Return the node that wrote the tensor's memory after `node` made it."""
        if not self._writes:
            return None
        writer = self._writes.get(memory_key(tensor))
        return writer if writer is not None and writer > node else None


class Payloads:
    """The saved tensors of one capture, by node."""

    def __init__(self, *, detach: bool, protected: Iterable[torch.Tensor]) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int | None] = {}
        self._detach = detach
        self._by_memory: dict[int, list[int]] = {}
        self._protected = {memory_key(tensor) for tensor in protected}

    def save(self, node: int, tensor: torch.Tensor) -> None:
        """Keep `tensor` as the payload of `node`.

        Views of parameters and buffers are copied at once: training changes those.
        """
        memory = memory_key(tensor)
        if memory in self._protected:
            tensor = tensor.clone()
        else:
            self._by_memory.setdefault(memory, []).append(node)
        self.tensors[node] = tensor.detach() if self._detach else tensor
        self.versions[node] = version_of(self.tensors[node])

    def before_write(self, memory: int) -> None:
        """Copy every payload that lies in `memory`, which is about to change."""
        for node in self._by_memory.pop(memory, ()):
            copied = self.tensors[node].clone()
            self.tensors[node] = copied
            self.versions[node] = version_of(copied)

    def overwritten(self) -> list[int]:
        """Return the nodes whose payload was written by code no one saw."""
        return [
            node
            for node, tensor in self.tensors.items()
            if self.versions[node] is not None
            and version_of(tensor) != self.versions[node]
        ]
