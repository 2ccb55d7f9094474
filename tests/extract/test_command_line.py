"""The commands, their output and their exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch import nn

from torchlens.errors import DataError, InputError, ModelError
from torchlens.extract.command_line import main
from torchlens.extract.named_objects import (
    load_dataset,
    load_model,
    load_object,
    load_transform,
)
from torchlens.storage import open_store

MODEL = """
import time
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.1 if len(x) == 4 else 0)
        return x

def build_slow():
    torch.manual_seed(0)
    return nn.Sequential(Slow(), nn.Linear(8, 4))

class Hungry(nn.Module):
    def forward(self, x):
        if len(x) == 4:
            torch.empty(1 << 62, dtype=torch.uint8)
        return x

class Broken(nn.Module):
    def forward(self, x):
        if len(x) == 4:
            raise RuntimeError("the model is broken")
        return x

def build_hungry():
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), Hungry(), nn.Linear(8, 4))

def build_broken():
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), Broken(), nn.Linear(8, 4))

instance = build()
nothing = 3
pairs = [{"id": f"s{n}", "x": torch.full((8,), float(n)), "y": n} for n in range(6)]

def numbers():
    return torch.ones(5, 8)

def prepare(image):
    pixels = torch.tensor(list(image.tobytes()), dtype=torch.float32)
    return pixels.reshape(image.height, image.width, 3).permute(2, 0, 1) / 255
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of a file with models and data."""
    file = tmp_path / f"net_{tmp_path.name}.py"
    file.write_text(MODEL)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules)
    return str(file)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "x.npy"
    np.save(file, np.random.default_rng(0).standard_normal((20, 8)).astype("f4"))
    return str(file)


# ------------------------------------------------------------------------ commands


def test_layers_lists_modules_with_shapes_and_cost(
    net: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layers", f"{net}:build", "--input-shape", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "type", "row", "bytes/row", "params", "FLOPs"]
    assert ["0", "Linear", "[16]", "float32", "64", "B", "144", "272"] in [
        line.split() for line in lines
    ]


def test_layers_lists_operations_by_label(
    net: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layers", f"{net}:build", "--data", rows, "--ops"]) == 0
    out = capsys.readouterr().out
    assert "linear_1_1" in out and "relu_1_2" in out and "[16] float32" in out


def test_plan_is_printed_saved_and_run(
    net: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(tmp_path / "plan.json"), str(tmp_path / "s")
    command = ["plan", f"{net}:build", "--data", rows, "--layers", "0", "2"]
    assert main([*command, "-o", file, "--rows", "1000"]) == 0
    text = capsys.readouterr().out
    assert "2 sites" in text and "forecast: 1000 rows" in text
    assert main(["extract", f"{net}:build", rows, "--plan", file, "-o", out]) == 0
    assert open_store(out).layers == ("0", "2")


def test_extract_stores_what_hooks_see_and_continues(
    net: str, rows: str, tmp_path: Path, hooked: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "s")
    command = ["extract", f"{net}:build", rows, "-o", out, "--layers", "2"]
    command += ["--batch-size", "20", "--block-rows", "32"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == f"{out}/data.zarr"
    assert "20 of 20 rows computed" in captured.err
    data = torch.from_numpy(np.load(rows))
    wanted = hooked(load_model(f"{net}:build", None), [data], ["2"])["2"]
    np.testing.assert_array_equal(open_store(out)["2"][:], wanted)
    assert main(command) == 0
    assert "nothing to do: 1 of 1 blocks" in capsys.readouterr().err
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_extract_takes_ids_metadata_and_inputs(net: str, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("name,age\n" + "".join(f"p{n},{n}\n" for n in range(6)))
    out = str(tmp_path / "s")
    command = ["extract", f"{net}:build", f"{net}:pairs", "-o", out, "--layers", "2"]
    command += ["--inputs", "x", "--ids", "name", "--metadata", str(table), "-q"]
    assert main(command) == 0
    store = open_store(out)
    assert store.ids == tuple(f"p{n}" for n in range(6))
    assert store.metadata["age"].tolist() == list(range(6))


def test_extract_reads_a_folder_of_images(
    net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("b.png", "a.png"):
        Image.new("RGB", (2, 2), "white").save(folder / name)
    command = ["extract", "torch.nn:Flatten", str(folder), "-o", str(tmp_path / "s")]
    command += ["--layers", "self", "-q"]
    assert main(command) == 2
    assert "need --transform" in capsys.readouterr().err
    assert main([*command, "--transform", f"{net}:prepare"]) == 0
    store = open_store(tmp_path / "s")
    assert store.ids == ("a.png", "b.png")
    assert (store[store.layers[0]][:] == 1).all()
    (folder / "c.png").write_bytes(b"no image")
    command[4] = str(tmp_path / "t")
    command += ["--transform", f"{net}:prepare", "--on-error", "skip"]
    assert main(command) == 0
    capsys.readouterr()
    assert main(["info", command[4]]) == 0
    assert "not be read and are empty, 1: 2\n" in capsys.readouterr().out


def test_info_and_verify_read_a_store(
    net: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    main(["extract", f"{net}:build", rows, "-o", str(out), "--layers", "2", "-q"])
    capsys.readouterr()
    assert main(["info", str(out)]) == 0
    text = capsys.readouterr().out
    assert "complete, 20 of 20 rows" in text and "[20, 4]" in text
    assert main(["info", "--json", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["num_rows"] == 20
    assert main(["verify", "--deep", str(out)]) == 0
    assert "no problems" in capsys.readouterr().out
    shard = next(path for path in out.glob("data.zarr/2/c*") if path.is_file())
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(bytes(content))
    assert main(["verify", "--deep", str(out)]) == 1
    assert "data.zarr/2/c" in capsys.readouterr().out


# ---------------------------------------------------------------------- exit codes


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["extract"]):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for code in (
            "  0  done",
            "  1  failed",
            "  2  bad",
            " 75  stopped",
            "137  out",
        ):
            assert code in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["extract", "{net}:build", "{rows}", "--layers", "relu9"], "relu9"),
        (["extract", "{net}:build", "{rows}"], "either --layers or --plan"),
        (["extract", "{net}:absent", "{rows}", "--layers", "2"], "has no 'absent'"),
        (["extract", "{net}:nothing", "{rows}", "--layers", "2"], "'int' object"),
        (["extract", "{net}:build", "no.npy", "--layers", "2"], "no file 'no.npy'"),
        (
            ["extract", "{net}:build", "{rows}", "--layers", "2", "--max-bytes", "9"],
            "max_bytes permits 9",
        ),
        (
            ["extract", "{net}:build", "{rows}", "--plan", "no.json"],
            "'no.json' cannot be read",
        ),
        (["extract", "{net}:build", "{rows}", "--layers", "2", "--dtype", "f"], "'f'"),
    ],
)
def test_bad_input_exits_with_2_or_says_why(
    net: str,
    rows: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    filled = [part.format(net=net, rows=rows) for part in arguments]
    code = main([*filled, "-o", str(tmp_path / "s"), "-q"])
    assert message in capsys.readouterr().err
    assert code == (1 if "object" in message else 2)


def test_bad_arguments_exit_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["extract"])
    assert caught.value.code == 2


def test_another_run_in_the_store_exits_with_2(
    net: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["extract", f"{net}:build", rows, "-o", str(tmp_path / "s"), "-q"]
    assert main([*command, "--layers", "2"]) == 0
    assert main([*command, "--layers", "2", "--preprocess", "other"]) == 2
    assert "identity.preprocess" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("build_broken", 1, "the model is broken"),
        ("build_hungry", 137, "out of memory"),
    ],
)
def test_failures_have_their_own_codes(
    net: str,
    rows: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    code: int,
    message: str,
) -> None:
    command = ["extract", f"{net}:{model}", rows, "-o", str(tmp_path / "s"), "-q"]
    command += ["--layers", "2", "--batch-size", "4"]
    assert main(command) == code
    assert message in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        main(["--debug", *command])


def test_time_limit_exits_with_75_and_the_next_call_goes_on(
    net: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["extract", f"{net}:build_slow", rows, "-o", str(tmp_path / "s"), "-q"]
    command += ["--layers", "1", "--batch-size", "4", "--block-rows", "4"]
    assert main([*command, "--time-limit", "0.3"]) == 75
    assert "Run the same command again" in capsys.readouterr().err
    assert main(command) == 0


def test_an_interrupt_exits_with_130_and_without_a_traceback(
    net: str,
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchlens.extract.engine.extract_dataset", interrupted)
    command = ["extract", f"{net}:build", rows, "-o", str(tmp_path / "s")]
    command += ["--layers", "2"]
    assert main(command) == 130
    err = capsys.readouterr().err
    assert err == "torchlens: interrupted; run the same command again to go on.\n"
    with pytest.raises(KeyboardInterrupt):
        main(["--debug", *command])


@pytest.mark.multiprocess
def test_module_runs_as_a_command(net: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "torchlens", "layers", f"{net}:build", "--data", "x"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("torchlens: 'x' is no folder of images")


# -------------------------------------------------------------------------- names


def test_objects_are_found_in_files_and_modules(net: str) -> None:
    assert load_object("torch.nn:Linear") is nn.Linear
    assert load_object(f"{net}:build").__name__ == "build"
    # The same file twice is the same module: its classes compare equal.
    assert load_object(f"{net}:Slow") is load_object(f"{net}:Slow")


def test_file_named_like_a_known_module_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("answer = 42\n")
    assert load_object(f"{tmp_path}/json.py:answer") == 42
    assert json.loads("[1]") == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "names no object"),
        (":x", "names no object"),
        ("no/such.py:x", "no file 'no/such.py'"),
        ("no.such.module:x", "no module 'no.such.module'"),
        ("json:nothing", "json has no 'nothing'"),
    ],
)
def test_names_of_nothing_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_object(name)


def test_models_are_instances_classes_or_functions(net: str) -> None:
    assert isinstance(load_model(f"{net}:instance", None), nn.Sequential)
    assert isinstance(load_model(f"{net}:build", None), nn.Sequential)
    assert isinstance(load_model(f"{net}:Slow", None), nn.Module)
    with pytest.raises(ModelError, match="gave a Tensor; wanted a torch.nn.Module"):
        load_model(f"{net}:numbers", None)


def test_weights_come_from_files(net: str, tmp_path: Path) -> None:
    model = load_model(f"{net}:build", None)
    state = {
        name: torch.zeros_like(value) for name, value in model.state_dict().items()
    }
    torch.save(state, tmp_path / "w.pt")
    np.savez(
        tmp_path / "w.npz", **{name: value.numpy() for name, value in state.items()}
    )
    for file in ("w.pt", "w.npz"):
        loaded = load_model(f"{net}:build", str(tmp_path / file))
        assert all(not parameter.any() for parameter in loaded.parameters())
    torch.save({"other": torch.zeros(1)}, tmp_path / "bad.pt")
    with pytest.raises(InputError, match="do not fit Sequential"):
        load_model(f"{net}:build", str(tmp_path / "bad.pt"))
    with pytest.raises(InputError, match="no file with a state dict"):
        load_model(f"{net}:build", "nothing.pt")


def test_torchvision_models_are_found_by_name() -> None:
    pytest.importorskip("torchvision")
    assert (
        type(load_model("torchvision:squeezenet1_1", "none")).__name__ == "SqueezeNet"
    )
    with pytest.raises(InputError, match="has no model 'resnet19'.*resnet18"):
        load_model("torchvision:resnet19", None)


def test_untrained_torchvision_models_are_the_same_each_time() -> None:
    pytest.importorskip("torchvision")
    before = torch.get_rng_state()
    first, second = (
        load_model("torchvision:squeezenet1_1", "none").state_dict() for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_cannot_be_downloaded_say_what_else_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = pytest.importorskip("torchvision.models")

    def offline(*_: object, **__: object) -> None:
        raise URLError("no route")

    monkeypatch.setattr(models, "get_model", offline)
    with pytest.raises(ModelError, match="no route.*--weights"):
        load_model("torchvision:squeezenet1_1", None)


def test_transforms_come_with_torchvision_weights() -> None:
    pytest.importorskip("torchvision")
    default = load_transform(None, "torchvision:resnet18", None)
    named = load_transform("torchvision:ResNet18_Weights.DEFAULT", "x:y", None)
    assert repr(default) == repr(named) and "crop_size=[224]" in repr(named)
    # Nothing says how images were prepared for weights of one's own.
    assert load_transform(None, "torchvision:resnet18", "none") is None
    assert load_transform(None, "x:y", None) is None
    with pytest.raises(InputError, match="names no torchvision weights"):
        load_transform("torchvision:ResNet18_Weights.OLD", "x:y", None)


def test_transformers_models_are_read_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11)
    transformers.GPT2Model(config).save_pretrained(tmp_path / "m")
    assert type(load_model(f"hf:{tmp_path}/m", None)).__name__ == "GPT2Model"
    with pytest.raises(InputError, match="names no folder"):
        load_model("hf:nowhere", None)


def test_datasets_are_folders_files_or_objects(net: str, rows: str) -> None:
    assert load_dataset(rows).shape == (20, 8)
    assert load_dataset(f"{net}:numbers").shape == (5, 8)
    assert len(load_dataset(f"{net}:pairs")) == 6
    assert load_dataset(str(Path(rows).parent)) == Path(rows).parent
    with pytest.raises(DataError, match="no folder of images, no .npy file"):
        load_dataset("nothing")
