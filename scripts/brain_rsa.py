"""Compare the layers of a trained network with human cortex, from stored activations.

Seven layers of a trained SqueezeNet are extracted for 92 photographs into a Zarr store.
From the rows read back, each layer gets a representational dissimilarity matrix (RDM:
1 - Pearson correlation of each pair of photographs), which is compared with the RDM of
human inferior temporal cortex, measured with fMRI for the same photographs.

Run it twice: the second run finds every row in the store and computes none.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import scipy.io
import scipy.stats
import torch
import torchvision
from PIL import Image
from torch.utils.data import Dataset

import torchlens as tl

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "scripts" / "demo_data"
WEIGHTS = DATA / "squeezenet1_0" / "state_dict.npz"
# features.0 is the convolution itself.  The ReLU after it works in place, so a plain
# hook that keeps a reference reads the ReLU's values under this name.
LAYERS = (
    "features.0",
    "features.3",
    "features.5",
    "features.8",
    "features.10",
    "features.12",
    "classifier",
)
SIZE = (227, 227)
MEAN_BGR = (104, 117, 123)
# Part of what a store is: it is not continued with photographs prepared otherwise.
PREPROCESS = {"size": SIZE, "resize": "bilinear", "minus_bgr": MEAN_BGR}


class Photographs(Dataset[torch.Tensor]):
    """The photographs as the network was trained to see them: [3, 227, 227] float32."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as image:
            resized = image.convert("RGB").resize(SIZE, Image.Resampling.BILINEAR)
        bgr = np.asarray(resized, dtype=np.float32)[:, :, ::-1]
        bgr = bgr - np.array(MEAN_BGR, dtype=np.float32)
        return torch.from_numpy(np.ascontiguousarray(bgr.transpose(2, 0, 1)))


def load_model(weights: Path | None) -> torch.nn.Module:
    """Return SqueezeNet with the trained `weights`, or freshly initialised without."""
    torch.manual_seed(0)
    model: torch.nn.Module = torchvision.models.squeezenet1_0(weights=None)
    if weights is not None:
        with np.load(weights) as arrays:
            state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        model.load_state_dict(state)
    return model.eval()


def extract(
    model: torch.nn.Module, stimuli: pd.DataFrame, output_dir: Path, overwrite: bool
) -> dict[str, np.ndarray]:
    """Extract the layers into a store (or resume it), then read every row back."""
    found = 0 if overwrite else rows_in_store(output_dir)
    photographs = Photographs(
        [DATA / "rsa92" / "stimuli" / name for name in stimuli["file"]]
    )
    store = tl.extract_dataset(
        model,
        photographs,
        LAYERS,
        output_dir=output_dir,
        ids=list(stimuli["file"]),
        metadata={"category": list(stimuli["category"])},
        preprocess=PREPROCESS,
        batch_size=16,
        overwrite=overwrite,
    )
    if found == len(photographs):
        print(f"Resumed: all {found} photographs were in the store; computed nothing.")
    else:
        print(f"Computed {len(photographs) - found} photographs, {found} were there.")
    print(f"Store: {output_dir}")
    return {layer: store[layer][:] for layer in LAYERS}


def rows_in_store(output_dir: Path) -> int:
    """Return how many photographs an earlier run left in the store."""
    try:
        return len(tl.open_store(output_dir, allow_partial=True).ids)
    except tl.StoreError:  # there is none yet; what is broken, the run will say
        return 0


def dissimilarities(rows: np.ndarray) -> np.ndarray:
    """Return the RDM [92, 92] of activations [92, *features]."""
    flat = rows.reshape(len(rows), -1).astype(np.float64)
    return np.asarray(1 - np.corrcoef(flat))


def upper_triangle(rdm: np.ndarray) -> np.ndarray:
    """Return each pair of photographs once."""
    return rdm[np.triu_indices(len(rdm), k=1)]


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Spearman's correlation of two RDMs over the pairs of photographs."""
    result = scipy.stats.spearmanr(upper_triangle(first), upper_triangle(second))
    return float(result.statistic)


def load_brain_rdms() -> np.ndarray:
    """Return the human IT RDMs, one a subject: [4, 92, 92], sessions averaged."""
    file = scipy.io.loadmat(
        DATA / "rsa92" / "92_brainRDMs.mat", squeeze_me=True, struct_as_record=False
    )
    sessions = [[session.RDM for session in subject] for subject in file["RDMs"]]
    return np.asarray(np.mean(sessions, axis=1), dtype=np.float64)


def subject_agreement(brains: np.ndarray) -> tuple[float, float]:
    """Return the lowest and highest correlation of one subject with the other three."""
    values = [
        rank_correlation(brain, np.delete(brains, i, axis=0).mean(axis=0))
        for i, brain in enumerate(brains)
    ]
    return min(values), max(values)


def print_table(
    columns: Mapping[str, Mapping[str, float]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Print a line a layer: its stored shape and its correlation in each column."""
    print("\nSpearman correlation of each layer's RDM with the mean human IT RDM\n")
    print(f"{'layer':<13}{'row':<15}" + "".join(f"{name:>11}" for name in columns))
    for layer in LAYERS:
        row = " x ".join(map(str, shapes[layer]))
        values = "".join(f"{column[layer]:>11.3f}" for column in columns.values())
        print(f"{layer:<13}{row:<15}{values}")


def draw_figure(
    path: Path,
    rdms: Mapping[str, np.ndarray],
    columns: Mapping[str, Mapping[str, float]],
    agreement: tuple[float, float],
    categories: Sequence[str],
) -> None:
    """Write the RDMs, each in percentiles, above the curve over the layers."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(13, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, len(rdms), height_ratios=(1, 1.5))
    starts = [i for i, c in enumerate(categories) if i == 0 or c != categories[i - 1]]
    middles = np.array([*starts, len(categories)], dtype=float)
    middles = (middles[:-1] + middles[1:] - 1) / 2
    for position, (name, rdm) in enumerate(rdms.items()):
        axes = figure.add_subplot(grid[0, position])
        percentiles = np.zeros_like(rdm)
        upper = np.triu_indices(len(rdm), k=1)
        ranks = scipy.stats.rankdata(rdm[upper])
        percentiles[upper] = 100 * (ranks - 1) / (len(ranks) - 1)
        image = axes.imshow(percentiles + percentiles.T, cmap="magma")
        for start in starts[1:]:
            axes.axhline(start - 0.5, color="white", linewidth=0.5, alpha=0.6)
            axes.axvline(start - 0.5, color="white", linewidth=0.5, alpha=0.6)
        axes.set_title(name, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        if position == 0:
            names = [categories[start] for start in starts]
            axes.set_yticks(middles, names, fontsize=7)
            axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=figure.axes, fraction=0.008, pad=0.01)
    bar.set_label("dissimilarity (percentile)", fontsize=8)
    bar.ax.tick_params(labelsize=7)

    axes = figure.add_subplot(grid[1, :])
    axes.axhspan(*agreement, color="0.9", label="one subject against the other three")
    # Trained above the line, the control below it, so that labels do not collide.
    styles = (("o-", "#b5367a", 9), ("s--", "0.55", -15))
    for (name, column), style in zip(columns.items(), styles, strict=False):
        marker, colour, offset = style
        heights = [column[layer] for layer in LAYERS]
        axes.plot(LAYERS, heights, marker, color=colour, linewidth=2, label=name)
        for x, height in enumerate(heights):
            axes.annotate(
                f"{height:.3f}",
                (x, height),
                xytext=(0, offset),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=colour,
            )
    axes.set_ylim(0, agreement[1] * 1.12)
    axes.set_ylabel("Spearman correlation with human IT")
    axes.set_title("SqueezeNet and human inferior temporal cortex, 92 photographs")
    axes.legend(frameon=False, loc=(0.01, 0.36))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the settings from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=ROOT / "output" / "demo",
        help="where the store and the figure go (default: %(default)s)",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        default=WEIGHTS,
        help="another state_dict.npz for squeezenet1_0",
    )
    parser.add_argument(
        "--untrained",
        action="store_true",
        help="add the same network before training, as a control",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="erase the store and start again"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Extract, compare, print the table and draw the figure."""
    settings = parse_arguments(arguments)
    stimuli = pd.read_csv(DATA / "rsa92" / "stimuli.csv")
    brains = load_brain_rdms()
    human_it = brains.mean(axis=0)
    agreement = subject_agreement(brains)

    networks = {"trained": settings.weights}
    if settings.untrained:
        networks["untrained"] = None
    columns: dict[str, dict[str, float]] = {}
    rdms: dict[str, dict[str, np.ndarray]] = {}
    for name, weights in networks.items():
        print(f"{name.capitalize()} network")
        activations = extract(
            load_model(weights),
            stimuli,
            settings.output_dir / f"squeezenet_{name}",
            settings.overwrite,
        )
        shapes = {layer: rows.shape[1:] for layer, rows in activations.items()}
        rdms[name] = {k: dissimilarities(rows) for k, rows in activations.items()}
        columns[name] = {
            k: rank_correlation(r, human_it) for k, r in rdms[name].items()
        }

    print_table(columns, shapes)
    print("\nOne subject against the other three: {:.2f} to {:.2f}".format(*agreement))
    figure = settings.output_dir / "brain_rsa.png"
    draw_figure(
        figure,
        {**rdms["trained"], "human IT": human_it},
        columns,
        agreement,
        list(stimuli["category"]),
    )
    print(f"Figure: {figure}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except tl.ResumeError as error:
        sys.exit(f"{error}\nscripts/demo --overwrite starts again.")
