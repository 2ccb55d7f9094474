"""Ids and metadata: where they come from, and every rule about them."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from torchlens.errors import DataError
from torchlens.extract.sample_ids import (
    IdRule,
    Metadata,
    UniqueIds,
    make_id_rule,
    make_metadata,
)
from torchlens.extract.samples import Source, open_source

ITEMS = [{"id": f"s{n}", "x": n, "kind": n % 2} for n in range(4)]


@pytest.fixture
def source() -> Source:
    return open_source(ITEMS)


def ids_of(rule: IdRule, items: list[Any] = ITEMS) -> list[str]:
    return [rule.id_of(row, item) for row, item in enumerate(items)]


def test_ids_default_to_the_entry_id(source: Source) -> None:
    rule = make_id_rule(None, source, ITEMS[0], Metadata())
    assert ids_of(rule) == ["s0", "s1", "s2", "s3"]


def test_ids_default_to_row_numbers_without_that_entry() -> None:
    source = open_source(torch.zeros(3, 2))
    rule = make_id_rule(None, source, source.items[0], Metadata())
    assert ids_of(rule, [0, 0, 0]) == ["0", "1", "2"]


def test_ids_default_to_file_names() -> None:
    source = Source([1, 2], 2, file_names=("b/x.png", "a.png"))
    assert ids_of(make_id_rule(None, source, 1, Metadata()), [1, 2]) == [
        "b/x.png",
        "a.png",
    ]


def test_ids_come_from_a_callable_an_entry_or_a_sequence(source: Source) -> None:
    plain = Metadata()
    by_call = make_id_rule(lambda item: item["x"] + 10, source, ITEMS[0], plain)
    assert ids_of(by_call) == ["10", "11", "12", "13"]
    assert ids_of(make_id_rule("x", source, ITEMS[0], plain)) == ["0", "1", "2", "3"]
    given = make_id_rule(np.array([7, 6, 5, 4]), source, ITEMS[0], plain)
    assert ids_of(given) == ["7", "6", "5", "4"]


def test_ids_come_from_a_metadata_column(source: Source) -> None:
    metadata = make_metadata({"name": ["d", "c", "b", "a"]}, source)
    rule = make_id_rule("name", source, ITEMS[0], metadata)
    assert ids_of(rule) == ["d", "c", "b", "a"]


@pytest.mark.parametrize(
    "value", [torch.tensor(7), np.int64(7), b"7", 7, "7", np.array([7])]
)
def test_id_values_become_the_same_text(value: object) -> None:
    assert IdRule(key="k").id_of(0, {"k": value}) == "7"


@pytest.mark.parametrize("value", [None, 0.5, torch.zeros(2), np.zeros((2, 2))])
def test_id_values_that_are_no_names_are_refused(value: object) -> None:
    with pytest.raises(DataError, match="[Aa]n id must be|An id must be one value"):
        IdRule(key="k").id_of(0, {"k": value})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b", "a", "c"], "'a' belongs to row 0 and to row 2"),
        (["a", "b"], "2 entries, but the dataset has 4 rows"),
        ("colour", "names neither a metadata column .* nor an entry"),
    ],
)
def test_bad_ids_are_refused(source: Source, ids: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_id_rule(ids, source, ITEMS[0], Metadata())


def test_item_without_its_id_is_named() -> None:
    with pytest.raises(DataError, match="Row 3 has no entry 'id'"):
        IdRule(key="id").id_of(3, {"x": 1})


def test_repeated_ids_are_refused_across_batches() -> None:
    unique = UniqueIds()
    unique.add(0, ["a", "b"])
    unique.add(0, ["a", "b"])  # the same rows again
    with pytest.raises(DataError, match=r"'b' belongs to row 1 and to row 2.*worker"):
        unique.add(2, ["b"])


def test_unreadable_rows_have_ids_too() -> None:
    assert IdRule(known=("a", "b")).without_item(1) == "b"
    assert IdRule(key="id").without_item(1) == "unreadable-1"
    assert IdRule().without_item(1) == "1"


@pytest.mark.parametrize("as_frame", [False, True])
def test_metadata_columns_are_cut_by_rows(source: Source, as_frame: bool) -> None:
    columns = {"age": np.arange(4) * 2, "name": list("wxyz")}
    metadata = make_metadata(pd.DataFrame(columns) if as_frame else columns, source)
    assert metadata.of_rows(range(1, 3)) == {"age": [2, 4], "name": ["x", "y"]}


def test_metadata_comes_from_entries_of_items(source: Source) -> None:
    metadata = make_metadata(["kind", "x"], source)
    assert metadata.of_item(3, ITEMS[3]) == [1, 3]
    assert make_metadata("kind", source).item_keys == ("kind",)
    with pytest.raises(DataError, match="Row 0 has no entry 'x'"):
        metadata.of_item(0, {"kind": 1})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": [1, 2]}, "'a' has 2 values, but the dataset has 4 rows"),
        ({"id": [1, 2, 3, 4]}, "called 'id', a name the samples table uses"),
        (["id"], "'id' and 'sample' are names"),
        ([1], "names of entries of dict items"),
    ],
)
def test_bad_metadata_is_refused(source: Source, metadata: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_metadata(metadata, source)


def test_metadata_entry_must_be_one_value(source: Source) -> None:
    metadata = make_metadata(["x"], source)
    assert metadata.of_item(0, {"x": torch.tensor([2])}) == [2]
    with pytest.raises(DataError, match=r"'x' has shape \(2,\)"):
        metadata.of_item(0, {"x": torch.zeros(2)})


def test_text_that_is_not_unicode_is_refused_before_anything_runs() -> None:
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    folder = dataclasses.replace(open_source([torch.zeros(2)]), file_names=(name,))
    with pytest.raises(DataError, match=r"'caf\\udce9.png' cannot be stored.*UTF-8"):
        make_id_rule(None, folder, torch.zeros(2), Metadata())
    with pytest.raises(DataError, match=r"'caf\\udce9.png' cannot be stored"):
        make_id_rule([name], folder, torch.zeros(2), Metadata())


def test_identity_tells_ids_apart_before_items_are_read() -> None:
    rules = [
        IdRule(),
        IdRule(key="id"),
        IdRule(key="name"),
        IdRule(function=str),
        IdRule(known=("a", "b")),
        IdRule(known=("ab", "")),
    ]
    assert len({rule.identity() for rule in rules}) == len(rules)
