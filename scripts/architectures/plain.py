"""Layers of torch itself that larger libraries build on."""

from collections.abc import Iterator

import torch
from torch import nn

from .cases import Architecture, Example

__all__ = ["plain_architectures"]


def plain_architectures() -> Iterator[Architecture]:
    """Yield recurrent networks and torch's own transformer."""
    yield Architecture("torch/lstm", lambda: _recurrent(nn.LSTM(5, 6, 2)))
    yield Architecture(
        "torch/lstm, bidirectional with projection",
        lambda: _recurrent(nn.LSTM(5, 6, bidirectional=True, proj_size=3)),
    )
    yield Architecture("torch/gru", lambda: _recurrent(nn.GRU(5, 6, 2)))
    yield Architecture("torch/rnn", lambda: _recurrent(nn.RNN(5, 6)))
    yield Architecture("torch/transformer", _transformer)
    yield Architecture("torch/transformer, training", _transformer_in_training)
    yield Architecture(
        "torch/unet", lambda: Example(_UNet(), (torch.randn(2, 1, 16, 16),))
    )


def _recurrent(layer: nn.Module) -> Example:
    return Example(layer.eval(), (torch.randn(3, 2, 5),))


def _transformer() -> Example:
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True).eval()
    return Example(model, (torch.randn(2, 5, 8), torch.randn(2, 4, 8)))


def _transformer_in_training() -> Example:
    example = _transformer()
    return Example(example.model.train(), example.args)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(True))
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(True))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        joined = torch.cat([first, self.up(second)], dim=1)
        scores: torch.Tensor = self.last(joined)
        return scores.softmax(dim=1)
