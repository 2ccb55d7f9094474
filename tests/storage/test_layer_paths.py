"""Layer names become safe paths and come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlens.errors import DataError
from torchlens.storage import layer_name, layer_path
from torchlens.storage.layer_paths import assign_paths

SAFE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-~")
NAMES = st.text(
    st.characters(codec="utf-8"), min_size=1, max_size=16
) | st.sampled_from(["..", ".", "a/b", "../../etc", "a:2", 'h["x"]', "lstm[0]", "~"])


@given(NAMES)
@settings(deadline=None)
def test_layer_path_is_undone_by_layer_name(name: str) -> None:
    assert layer_name(layer_path(name)) == name
    assert layer_name(layer_path(name, escape_case=True)) == name


@given(NAMES)
@settings(deadline=None)
def test_layer_path_is_one_safe_component(name: str) -> None:
    path = layer_path(name)
    assert set(path) <= SAFE
    assert path not in (".", "..", "zarr.json")
    assert not path.startswith((".", "-", "__"))
    assert not path.endswith(".")
    assert len(path) <= 200


@given(st.lists(NAMES, unique=True, max_size=8))
@settings(deadline=None)
def test_assigned_paths_differ_even_without_case(names: list[str]) -> None:
    paths = assign_paths(names)
    assert set(paths) == set(names)
    assert len({path.casefold() for path in paths.values()}) == len(names)
    assert [layer_name(paths[name]) for name in names] == names


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("features.0", "features.0"),
        ("Mixed_5b", "Mixed_5b"),
        ("lstm[0]", "lstm~5b0~5d"),
        ('enc["x"]', "enc~5b~22x~22~5d"),
        ("a/b", "a~2fb"),
        ("..", "~2e~2e"),
        ("act:2", "act~3a2"),
        ("é", "~c3~a9"),
        ("zarr.json", "~7aarr.json"),
        ("con", "~63on"),
        ("__x", "~5f_x"),
        ("end.", "end~2e"),
    ],
)
def test_layer_path_of_known_names(name: str, path: str) -> None:
    assert layer_path(name) == path


def test_names_that_differ_in_case_get_different_paths() -> None:
    paths = assign_paths(["Conv", "conv"])
    assert paths["Conv"].casefold() != paths["conv"].casefold()
    assert layer_name(paths["Conv"]) == "Conv"
    assert assign_paths(["conv1"], taken=["CONV1"]) == {"conv1": "~63onv1"}
    assert layer_name("~63onv1") == "conv1"


def test_long_names_are_shortened_and_stay_distinct() -> None:
    first, second = "x" * 500 + "1", "x" * 500 + "2"
    assert len(layer_path(first)) <= 200
    assert layer_path(first) != layer_path(second)
    with pytest.raises(DataError, match="name too long for a path"):
        layer_name(layer_path(first))


@pytest.mark.parametrize("name", ["", "\udc80"])
def test_impossible_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="layer name"):
        layer_path(name)
