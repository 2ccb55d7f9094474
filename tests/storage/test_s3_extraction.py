"""A whole extraction onto S3, its loader's workers forked, under a flaky network."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchlens.extract import extract_dataset
from torchlens.storage import open_store

pytestmark = [pytest.mark.s3, pytest.mark.multiprocess]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("installed", ["obstore", "s3fs only"])
def test_an_extraction_with_forked_workers_ends_in_the_same_store(
    tmp_path: Path,
    seaweed: Any,
    s3: ModuleType,
    s3_url: str,
    installed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.url)
    if installed != "obstore":
        monkeypatch.setattr(
            "torchlens.storage.obstore_client.find_spec", lambda name: None
        )
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU())
    items = torch.randn(40, 5)
    data = TensorDataset(items)
    loader = DataLoader(
        data, batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    for place in (s3_url, str(tmp_path / "local")):
        rule = seaweed.inject("503", "PUT", "commits", times=1)
        store = extract_dataset(
            model, loader, ["1"], output_dir=place, block_rows=8, progress=False
        )
        assert store.verify(deep=True).ok
    assert rule.met == 0  # the second one was never needed: that was on disk
    again = open_store(s3_url)
    with torch.no_grad():
        expected = model(items).numpy()
    np.testing.assert_allclose(again["1"][:], expected, rtol=1e-6, atol=1e-7)
    local = open_store(tmp_path / "local")
    np.testing.assert_array_equal(again["1"][:], local["1"][:])
    assert again.ids == local.ids
    seaweed.heal()
    finished = extract_dataset(
        model, loader, ["1"], output_dir=s3_url, block_rows=8, progress=False
    )
    assert seaweed.count("PUT", "data.zarr/1/c") == 0, "a finished store was rewritten"
    assert finished.complete
