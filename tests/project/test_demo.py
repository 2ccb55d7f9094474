"""The demo on its real data, against plain hooks and ranks computed here."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

LAYERS = ("features.0", "features.3", "features.5", "features.8")
LAYERS += ("features.10", "features.12", "classifier")
# Published with the data; read through plain hooks.  features.0 is the convolution
# before the in-place ReLU behind it (with the ReLU applied it would be 0.084).
EXPECTED = (0.066, 0.102, 0.168, 0.226, 0.288, 0.307, 0.246)


class Demo:
    """Runs scripts/brain_rsa.py and reads its table."""

    def __init__(self, root: Path, output: Path) -> None:
        self.root = root
        self.data = root / "scripts" / "demo_data"
        self.output = output
        self.first: dict[str, float] = {}

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        script = str(self.root / "scripts" / "brain_rsa.py")
        return subprocess.run(
            [sys.executable, script, "--output-dir", str(self.output), *args],
            cwd=self.output.parent,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def table(self, *args: str) -> dict[str, float]:
        result = self.run(*args)
        assert result.returncode == 0, result.stderr[-2000:]
        return read_table(result.stdout)

    def expected(self, weights: Path) -> dict[str, float]:
        """Return the same table computed without torchlens."""
        activations = self.hooked(weights)
        brain = self.human_it()
        return {
            layer: spearman(1 - np.corrcoef(rows.reshape(92, -1)), brain)
            for layer, rows in activations.items()
        }

    def hooked(self, weights: Path) -> dict[str, np.ndarray]:
        from torchvision.models import squeezenet1_0

        model = squeezenet1_0(weights=None).eval()
        with np.load(weights) as arrays:
            state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        model.load_state_dict(state)
        rows: dict[str, list[torch.Tensor]] = {layer: [] for layer in LAYERS}
        for layer in LAYERS:
            model.get_submodule(layer).register_forward_hook(
                lambda _, __, out, layer=layer: rows[layer].append(out.clone())
            )
        with torch.inference_mode():
            for batch in self.images().split(16):
                model(batch)
        return {layer: torch.cat(parts).numpy() for layer, parts in rows.items()}

    def images(self) -> torch.Tensor:
        from PIL import Image

        def load(name: str) -> np.ndarray:
            with Image.open(self.data / "rsa92" / "stimuli" / name) as image:
                small = image.convert("RGB").resize((227, 227), Image.BILINEAR)
            return np.array(small, dtype=np.float32)

        with (self.data / "rsa92" / "stimuli.csv").open() as file:
            rgb = np.stack([load(line["file"]) for line in csv.DictReader(file)])
        bgr = rgb[..., ::-1] - np.array([104, 117, 123], dtype=np.float32)
        return torch.from_numpy(bgr.transpose(0, 3, 1, 2).copy())

    def human_it(self) -> np.ndarray:
        import scipy.io

        file = scipy.io.loadmat(self.data / "rsa92" / "92_brainRDMs.mat")["RDMs"]
        return np.mean([session["RDM"] for session in file.ravel()], axis=0)


def read_table(text: str) -> dict[str, float]:
    """Return the correlations a run printed."""
    found = re.findall(r"^(\S+) +[\dx ]+ (-?\d\.\d{3})$", text, re.M)
    return {layer: float(value) for layer, value in found}


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return the rank correlation over the pairs, ties at their mean rank."""
    pairs = np.triu_indices(92, k=1)
    return float(np.corrcoef(ranks(first[pairs]), ranks(second[pairs]))[0, 1])


def ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]


@pytest.fixture(scope="module")
def demo(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Return the demo after its first run."""
    demo = Demo(project_root, tmp_path_factory.mktemp("demo") / "output")
    demo.first = demo.table()
    return demo


@pytest.fixture
def changed_weights(demo: Demo, tmp_path: Path) -> Path:
    """Return the trained weights with one number of the first convolution changed."""
    with np.load(demo.data / "squeezenet1_0" / "state_dict.npz") as arrays:
        state = dict(arrays)
    state["features.0.weight"] = state["features.0.weight"].copy()
    state["features.0.weight"][0, 0, 0, 0] += 50
    path = tmp_path / "changed.npz"
    np.savez(path, **state)
    return path


def test_demo_prints_what_plain_hooks_give(demo: Demo) -> None:
    assert tuple(demo.first) == LAYERS
    assert tuple(demo.first.values()) == pytest.approx(EXPECTED, abs=0.0011)
    oracle = demo.expected(demo.data / "squeezenet1_0" / "state_dict.npz")
    assert demo.first == pytest.approx(oracle, abs=0.0011)
    assert (demo.output / "brain_rsa.png").stat().st_size > 50_000


def test_demo_run_again_computes_nothing_and_says_so(demo: Demo) -> None:
    again = demo.run()
    assert "all 92 photographs were in the store; computed nothing" in again.stdout
    assert "nothing to do: " in again.stderr
    assert read_table(again.stdout) == demo.first


def test_demo_refuses_to_resume_with_another_weight(
    demo: Demo, changed_weights: Path
) -> None:
    result = demo.run("--weights", str(changed_weights))
    assert result.returncode == 1
    assert "identity.model.weights: stored" in result.stderr
    assert "scripts/demo --overwrite" in result.stderr
    assert "Traceback" not in result.stderr


def test_demo_table_follows_the_weights(
    demo: Demo, changed_weights: Path, tmp_path: Path
) -> None:
    other = Demo(demo.root, tmp_path / "output")
    table = other.table("--weights", str(changed_weights))
    assert abs(table["features.0"] - demo.first["features.0"]) > 0.002
    assert table == pytest.approx(other.expected(changed_weights), abs=0.0011)
