"""Modules that were never called: which op did their work, or why there is none.

`nn.MultiheadAttention` hands the weight of its `out_proj` to a function and never calls
the module; the op that read the weight is what the user means by that address.
"""

from .errors import SelectorError
from .graph import Graph
from .near_misses import listed
from .records import ModuleRecord, OpRecord

__all__ = ["stand_in_ops"]

# Class name of the module -> type of the op that computes the same thing.
_FUNCTIONS = {
    "Linear": "linear",
    "Bilinear": "bilinear",
    "Conv1d": "conv1d",
    "Conv2d": "conv2d",
    "Conv3d": "conv3d",
    "ConvTranspose1d": "convtranspose1d",
    "ConvTranspose2d": "convtranspose2d",
    "ConvTranspose3d": "convtranspose3d",
    "Embedding": "embedding",
    "EmbeddingBag": "embeddingbag",
    "LayerNorm": "layernorm",
    "RMSNorm": "rmsnorm",
    "GroupNorm": "groupnorm",
    "BatchNorm1d": "batchnorm",
    "BatchNorm2d": "batchnorm",
    "BatchNorm3d": "batchnorm",
    "InstanceNorm1d": "instancenorm",
    "InstanceNorm2d": "instancenorm",
    "InstanceNorm3d": "instancenorm",
    "PReLU": "prelu",
}


def stand_in_ops(graph: Graph, module: ModuleRecord) -> tuple[OpRecord, ...]:
    """Return the ops that did the work of a module that was never called.

    Returns:
        One op for each time the work was done, in execution order.

    Raises:
        SelectorError: If no op, or not these alone, did it; the message says what
            happened to the module's parameters and what to ask for instead.
    """
    readers = _readers(graph, module)
    classes = (name.rpartition(".")[2] for name in module.type_names)
    function = next((_FUNCTIONS[name] for name in classes if name in _FUNCTIONS), None)
    own = set(module.params)
    if own and readers and all(_does(op, function, own) for op in readers):
        return readers
    raise SelectorError(_reason(graph, module, readers))


def _readers(graph: Graph, module: ModuleRecord) -> tuple[OpRecord, ...]:
    """Return the ops that read the module's parameters for somebody else.

    A tied weight is also read by the other module that owns it, in its own call.
    """
    used = {
        node
        for name in module.params
        for node in graph.params[name].used_by
        if name not in _owner(graph, graph.nodes[node]).params
    }
    return tuple(graph.nodes[node] for node in sorted(used))


def _owner(graph: Graph, op: OpRecord) -> ModuleRecord:
    return graph.modules[graph.module_calls[op.module_call].address]


def _does(op: OpRecord, function: str | None, params: set[str]) -> bool:
    return op.type == function and set(op.params) == params and op.num_outputs == 1


def _reason(graph: Graph, module: ModuleRecord, readers: tuple[OpRecord, ...]) -> str:
    names = [repr(module.address), *map(repr, module.aliases)]
    start = (
        f"{' = '.join(names)} ({module.type_name}) was never called as a module in "
        "this forward pass"
    )
    if readers:
        return f"{start}: {_read_elsewhere(graph, readers)}"
    inside = [
        address
        for address in graph.modules
        if address.startswith(f"{module.address}.") and graph.calls_of(address)
    ]
    if inside:
        return (
            f"{start}: it only holds {len(inside)} modules that were, such as "
            f"{listed(inside, 3)}. Name those, or write "
            f'"{module.address}.*", or tl.in_module({module.address!r}) for the ops.'
        )
    sharing = [
        address
        for address, other in graph.modules.items()
        if graph.calls_of(address) and not set(module.params).isdisjoint(other.params)
    ]
    if sharing:
        return (
            f"{start}: its parameters are tied to those of {listed(sharing, 3)}, which "
            f"ran instead. Ask for {sharing[0]!r}."
        )
    if "ScriptModule" in module.type_name:
        return (
            f"{start}: it is TorchScript, whose calls and ops run outside Python and "
            "cannot be seen. Use the eager module it was made from."
        )
    why = "no op read its parameters" if module.params else "has no parameters"
    return (
        f"{start}, and {why}: this input took another way{_gap(graph)}. Choose a "
        "module that runs, or trace with an input (and train or eval mode) that "
        "reaches it."
    )


def _gap(graph: Graph) -> str:
    """Return that code which cannot be seen may have done the work, if there is any."""
    return "" if graph.complete else f", or unseen code did its work ({graph.gaps[0]})"


def _read_elsewhere(graph: Graph, readers: tuple[OpRecord, ...]) -> str:
    # What only prepares a weight (a cast, a transpose) is of no use to the caller.
    with_data = [op for op in readers if op.parents]
    first = with_data[0] if with_data else readers[-1]
    where = graph.module_calls[first.module_call].address
    frames = graph.frames(first)
    line = f" ({frames[-1].file}:{frames[-1].line})" if frames else ""
    labels = listed((op.label for op in readers), 3)
    return (
        f"its parameters were read directly by {labels} in module {where!r}{line}, "
        "a fused or functional computation whose inner values are not the output of "
        f"this module. Ask for tl.label({first.label!r}) or the module {where!r}, or "
        "run the model's unfused path."
    )
