"""Which node made which tensor, and payloads that stay what they were.

Payloads are references.  Before an op writes into memory, the payloads that share this
memory are copied; writes that no one announced show in the tensors' version counters.
"""

import weakref
from dataclasses import dataclass

import torch

from .records import ArgRef

__all__ = ["Known", "Payloads", "TensorTable", "memory_key", "version_of"]


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


@dataclass(slots=True, eq=False)
class Known:
    """What is known of a live tensor.

    Attributes:
        tensor: The object; ids are used again, so it must still be this one.
        node: The node that last wrote it; `None` for a parameter or buffer.
        ref: How the arguments of an op refer to it.
        memory: Its `memory_key`.
        version: Its write count when it became known.
    """

    tensor: weakref.ref[torch.Tensor]
    node: int | None
    ref: ArgRef
    memory: int
    version: int | None


class TensorTable:
    """Maps live tensor objects to the node that last wrote them.

    Attributes:
        known: What is known, by the object's id; `find` checks the object.
        writes: The last node that wrote into a memory.
    """

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}
        self.writes: dict[int, int] = {}
        self._batched: dict[int, tuple[torch.Tensor, Known]] = {}

    def assign(
        self, tensor: torch.Tensor, node: int | None, ref: ArgRef | None = None
    ) -> Known:
        """Record that `tensor` is now the output of `node`, or what `ref` says."""
        known = Known(
            weakref.ref(tensor),
            node,
            ref or ArgRef(node),
            memory_key(tensor),
            None if tensor.is_inference() else tensor._version,
        )
        self.known[id(tensor)] = known
        if known.memory < 0:
            self._assign_inner(tensor, known)
        return known

    def _assign_inner(self, tensor: torch.Tensor, known: Known) -> None:
        """Know the tensor inside a functorch wrapper, which comes out of a vmap."""
        inner = _unwrapped(tensor)
        if inner is not tensor:
            # Held: nothing else may get this memory while the capture runs.
            self._batched[memory_key(inner)] = inner, known

    def find(self, tensor: torch.Tensor) -> Known | None:
        """Return what is known of `tensor`, `None` if it was never seen."""
        known = self.known.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        return None

    def find_related(self, tensor: torch.Tensor) -> Known | None:
        """Return what is known of the other side of a vmap's boundary."""
        inner = _unwrapped(tensor)
        if inner is not tensor:
            return self.find(inner)
        batched = self._batched.get(memory_key(tensor))
        return None if batched is None else batched[1]

    def node_of(self, tensor: torch.Tensor) -> int | None:
        """Return the node that made `tensor`, or `None` if it was not seen."""
        known = self.find(tensor)
        return None if known is None else known.node

    def wrote(self, memory: int, node: int) -> None:
        """Record that `node` wrote into `memory`."""
        self.writes[memory] = node

    def writer_after(self, known: Known) -> int | None:
        """Return the node that wrote the tensor's memory after it became known."""
        if not self.writes:
            return None
        writer = self.writes.get(known.memory)
        if writer is None or (known.node is not None and writer <= known.node):
            return None
        return writer


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class Payloads:
    """The saved tensors of one capture, by node."""

    def __init__(self, *, detach: bool, protected: frozenset[int]) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int | None] = {}
        self._detach = detach
        self._by_memory: dict[int, list[int]] = {}
        self._protected = protected

    def save(self, node: int, tensor: torch.Tensor, memory: int) -> None:
        """Keep `tensor` as the payload of `node`.

        Views of parameters and buffers are copied at once: training changes those.
        """
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
