"""Labels of traced models: the published numbers, and what must stay apart."""

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from torchlens.graph import Graph
from torchlens.tracer import run_capture


def graph_of(model: nn.Module, *args: object, **kwargs: object) -> Graph:
    return run_capture(model.eval(), args, kwargs).graph


def labels_of(model: nn.Module, *args: object) -> list[str]:
    return [op.label for op in graph_of(model, *args).ops]


class Lambda(nn.Module):
    """A model from a function of (self, x), for one-line cases."""

    def __init__(self, function, **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def test_labels_of_an_mlp_follow_type_and_position() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)
    )
    graph = graph_of(model, torch.randn(2, 3))
    assert [node.label for node in graph.nodes] == [
        "input_1",
        "linear_1_1",
        "relu_1_2",
        "linear_2_3",
        "relu_2_4",
        "linear_3_5",
        "output_1",
    ]


def test_labels_of_alexnet_are_the_published_ones() -> None:
    graph = graph_of(torchvision.models.alexnet(), torch.randn(1, 3, 224, 224))
    assert [op.label for op in graph.ops] == (
        "conv2d_1_1 relu_1_2 maxpool2d_1_3 conv2d_2_4 relu_2_5 maxpool2d_2_6 "
        "conv2d_3_7 relu_3_8 conv2d_4_9 relu_4_10 conv2d_5_11 relu_5_12 "
        "maxpool2d_3_13 adaptiveavgpool2d_1_14 flatten_1_15 dropout_1_16 "
        "linear_1_17 relu_6_18 dropout_2_19 linear_2_20 relu_7_21 linear_3_22"
    ).split()
    assert len(graph.ops) == 22
    produced = {
        graph.nodes[leaf.node].label: call.address
        for call in graph.module_calls
        for leaf in call.outputs
        if call.address[-1].isdigit()
    }
    assert produced["conv2d_3_7"] == "features.6"
    assert produced["linear_3_22"] == "classifier.6"


def test_labels_of_resnet18_keep_shared_relus_apart() -> None:
    graph = graph_of(torchvision.models.resnet18(), torch.randn(1, 3, 64, 64))
    assert [op.label for op in graph.ops[:12]] == (
        "conv2d_1_1 batchnorm_1_2 relu_1_3 maxpool2d_1_4 conv2d_2_5 batchnorm_2_6 "
        "relu_2_7 conv2d_3_8 batchnorm_3_9 iadd_1_10 relu_3_11 conv2d_4_12"
    ).split()
    assert len(graph.ops) == 69
    made = {
        graph.nodes[call.outputs[0].node].label: call.label
        for call in graph.module_calls
        if call.address == "layer1.0.relu"
    }
    assert made == {"relu_2_7": "layer1.0.relu:1", "relu_3_11": "layer1.0.relu:2"}


def test_labels_of_a_loop_are_passes() -> None:
    def forward(self, x):
        for _ in range(4):
            x = self.fc(x)
            x = x + 1
            x = x * 2
        return x

    labels = labels_of(Lambda(forward, fc=nn.Linear(3, 3)), torch.randn(2, 3))
    assert labels == [
        f"{name}:{step}"
        for step in range(1, 5)
        for name in ("linear_1_1", "add_1_2", "mul_1_3")
    ]


def test_labels_of_an_lstm_have_one_op_per_output() -> None:
    def forward(self, x):
        _, (hidden, _) = self.lstm(x)
        return self.fc(hidden[-1])

    model = Lambda(forward, lstm=nn.LSTM(4, 5), fc=nn.Linear(5, 2))
    graph = graph_of(model, torch.randn(3, 2, 4))
    assert [op.label for op in graph.ops] == (
        "zeros_1_1 zeros_2_2 lstm_1_3 lstm_2_4 lstm_3_5 getitem_1_6 linear_1_7"
    ).split()
    assert [op.output_index for op in graph.ops[2:5]] == [0, 1, 2]
    assert len({op.parents for op in graph.ops[2:5]}) == 1
    call = graph.calls_of("lstm")[0]
    assert [leaf.path for leaf in call.outputs] == [(0,), (1, 0), (1, 1)]


def test_labels_follow_the_branch_that_ran() -> None:
    def forward(self, x):
        if x.sum() < 0:
            x = -x
        for _ in range(2):
            x = self.fc2(torch.relu(self.fc1(x)))
        return x

    model = Lambda(forward, fc1=nn.Linear(3, 3), fc2=nn.Linear(3, 3))
    assert (
        labels_of(model, -torch.ones(2, 3))
        == (
            "sum_1_1 lt_1_2 neg_1_3 linear_1_4:1 relu_1_5:1 linear_2_6:1 "
            "linear_1_4:2 relu_1_5:2 linear_2_6:2"
        ).split()
    )
    assert "neg_1_3" not in labels_of(model, torch.ones(2, 3))


def test_labels_of_in_place_ops_and_their_readers() -> None:
    def forward(self, x):
        y = self.fc(x)
        z = y.relu_()
        y.add_(1)
        y += 2
        y[:, 0] = 5
        return y + z

    graph = graph_of(Lambda(forward, fc=nn.Linear(3, 3)), torch.randn(2, 3))
    assert [op.label for op in graph.ops] == (
        "linear_1_1 relu_1_2 add_1_3 iadd_1_4 setitem_1_5 add_2_6"
    ).split()
    last = graph.ops[-1]
    assert [graph.nodes[p].label for p in last.parents] == ["setitem_1_5"]
    assert [op.func_name for op in graph.ops[1:3]] == ["relu_", "add_"]
    assert [op.inplace for op in graph.ops] == [False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("function", "labels"),
    [
        (lambda self, x: x + 1, ["add_1_1"]),
        (lambda self, x: 2 * x, ["mul_1_1"]),
        (lambda self, x: 1 - x, ["rsub_1_1"]),
        (lambda self, x: x / 2, ["truediv_1_1"]),
        (lambda self, x: x // 2, ["floordivide_1_1"]),
        (lambda self, x: -x, ["neg_1_1"]),
        (lambda self, x: x @ x.T, ["t_1_1", "matmul_1_2"]),
        (lambda self, x: x > 0, ["gt_1_1"]),
        (lambda self, x: x[0], ["getitem_1_1"]),
        (lambda self, x: x.real, ["real_1_1"]),
        (lambda self, x: x.contiguous() + 1, ["contiguous_1_1", "add_1_2"]),
        (lambda self, x: torch.ones_like(x), ["oneslike_1_1"]),
        (lambda self, x: x + torch.zeros(1), ["zeros_1_1", "add_1_2"]),
        (
            lambda self, x: F.normalize(x),
            ["linalgvectornorm_1_1", "clampmin_1_2", "expandas_1_3", "div_1_4"],
        ),
        (lambda self, x: F.relu(x), ["relu_1_1"]),
        (lambda self, x: torch.ops.aten.relu(x), ["relu_1_1"]),
        (lambda self, x: F.max_pool1d(x, 1), ["maxpool1d_1_1"]),
    ],
)
def test_label_of_an_expression(function, labels) -> None:
    assert labels_of(Lambda(function), torch.rand(3, 3)) == labels


def test_calls_without_a_tensor_are_no_ops_of_the_graph() -> None:
    def forward(self, x):
        assert x.shape[0] == x.size(0) and x.dim() == 2
        return x * x.sum().item()

    assert labels_of(Lambda(forward), torch.ones(2, 2)) == ["sum_1_1", "mul_1_2"]


def test_splits_are_one_op_per_part() -> None:
    graph = graph_of(Lambda(lambda self, x: x.split(1)), torch.randn(3, 2))
    assert [op.label for op in graph.ops] == ["split_1_1", "split_2_2", "split_3_3"]
    assert [op.output_index for op in graph.ops] == [0, 1, 2]
    assert {op.num_outputs for op in graph.ops} == {3}


def test_residual_adds_of_two_lines_are_two_layers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Linear(4, 4)
            self.mlp = nn.Linear(4, 4)

        def forward(self, x):
            x = x + self.attn(x)
            return x + self.mlp(x)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x):
            for _ in range(12):
                x = self.block(x)
            return x

    graph = graph_of(Shared(), torch.randn(2, 4))
    layers = {op.layer_label: op.num_passes for op in graph.ops}
    assert layers == {"linear_1_1": 12, "add_1_2": 12, "linear_2_3": 12, "add_2_4": 12}
    stacked = graph_of(nn.Sequential(Block(), Block()), torch.randn(2, 4))
    assert len({op.layer_label for op in stacked.ops}) == 8


def test_one_activation_twice_in_a_sequential_makes_passes() -> None:
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)
    assert labels_of(model, torch.randn(1, 2)) == [
        "linear_1_1",
        "tanh_1_2:1",
        "linear_2_3",
        "tanh_1_2:2",
    ]


def test_recursion_makes_new_layers() -> None:
    def dive(x, depth):
        x = x + 1
        return x if depth == 0 else dive(x, depth - 1)

    labels = labels_of(Lambda(lambda self, x: dive(x, 2)), torch.zeros(1))
    assert labels == ["add_1_1", "add_2_2", "add_3_3"]


def test_site_keys_survive_another_batch_size_in_a_comprehension() -> None:
    model = Lambda(lambda self, x: sum([torch.relu(v) + 1 for v in x.split(1)]))
    large = graph_of(model, torch.randn(3, 2))
    small = graph_of(model, torch.randn(2, 2))
    keys = {op.key for op in small.ops if op.func_name == "relu"}
    assert keys < {op.key for op in large.ops if op.func_name == "relu"}
    # The third add of the small batch is another operation than that of the large.
    third_small = [op for op in small.ops if op.type == "add"][2]
    third_large = [op for op in large.ops if op.type == "add"][2]
    assert third_small.key != third_large.key


def test_site_keys_are_unique() -> None:
    graph = graph_of(torchvision.models.vit_b_16(), torch.randn(1, 3, 224, 224))
    keys = [op.key for op in graph.ops]
    assert len(set(keys)) == len(keys)


def test_module_returning_its_input_is_an_identity_op() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.ReLU())
    graph = graph_of(model, torch.randn(1, 2))
    assert [op.label for op in graph.ops] == ["linear_1_1", "identity_1_2", "relu_1_3"]
    assert graph.nodes[graph.calls_of("1")[0].outputs[0].node].type == "identity"
    assert graph.ops[2].parents == (graph.ops[1].index,)


def test_gpt2_labels_number_positions() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=12,
        n_embd=16,
        n_head=2,
        vocab_size=50,
        activation_function="gelu_new",
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    graph = graph_of(model, input_ids=torch.arange(5)[None])
    tanh = [op for op in graph.ops if op.type == "tanh"]
    assert [op.layer_label.split("_")[1] for op in tanh] == [
        str(position) for position in range(1, 13)
    ]
    assert graph.module_calls[tanh[5].module_call].address == (
        "transformer.h.5.mlp.act"
    )
