"""What the user sees of one parameter or one buffer."""

from dataclasses import dataclass
from typing import final

from .graph import Graph
from .records import BufferRecord, ParamRecord, TensorSpec
from .units import shaped, sized

__all__ = ["Buffer", "Param"]


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Param:
    """A parameter of the model; tied parameters are one, with several addresses."""

    graph: Graph
    record: ParamRecord

    @property
    def address(self) -> str:
        """Return the primary address."""
        return self.record.address

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the other addresses of the same parameter."""
        return self.record.aliases

    @property
    def spec(self) -> TensorSpec:
        """Return shape, dtype and device."""
        return self.record.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return self.record.spec.shape

    @property
    def requires_grad(self) -> bool:
        """Return whether the parameter was trainable."""
        return self.record.requires_grad

    @property
    def used_by(self) -> tuple[str, ...]:
        """Return the labels of the ops that read it."""
        return tuple(self.graph.nodes[index].label for index in self.record.used_by)

    def __repr__(self) -> str:
        """Return one line."""
        return _tensor_line("Param", self.record, self.used_by)


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Buffer:
    """A buffer of the model, labelled `buffer_k`; never an op, never extracted."""

    graph: Graph
    record: BufferRecord

    @property
    def label(self) -> str:
        """Return the label."""
        return self.record.label

    @property
    def address(self) -> str:
        """Return the primary address."""
        return self.record.address

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the other addresses of the same buffer."""
        return self.record.aliases

    @property
    def spec(self) -> TensorSpec:
        """Return shape, dtype and device."""
        return self.record.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return self.record.spec.shape

    @property
    def used_by(self) -> tuple[str, ...]:
        """Return the labels of the ops that read or wrote it."""
        return tuple(self.graph.nodes[index].label for index in self.record.used_by)

    def __repr__(self) -> str:
        """Return one line."""
        return _tensor_line("Buffer", self.record, self.used_by)


def _tensor_line(
    kind: str, record: ParamRecord | BufferRecord, used_by: tuple[str, ...]
) -> str:
    also = f" (also {', '.join(record.aliases)})" if record.aliases else ""
    spec = record.spec
    return (
        f"{kind} {record.address}{also}: {shaped(spec.shape)} {spec.dtype} on "
        f"{spec.device}, {sized(spec.nbytes)}, used by {', '.join(used_by) or 'no op'}"
    )
