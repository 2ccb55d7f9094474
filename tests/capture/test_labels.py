"""The grammar of labels, addresses and paths, as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlens.errors import SelectorError
from torchlens.labels import (
    BOUNDARY_TYPES,
    AddressRef,
    LabelRef,
    format_path,
    match_label,
    match_suffix,
    normalise_type,
    parse_address,
    parse_label,
    parse_path,
)

numbers = st.integers(1, 10**6)
types = st.from_regex(r"[a-z][a-z0-9]{0,12}", fullmatch=True)
op_types = types.filter(lambda name: name not in BOUNDARY_TYPES)
fields = st.from_regex(r"\.[a-zA-Z_]\w{0,8}", fullmatch=True)
paths = st.lists(st.one_of(st.integers(0, 99), st.text(), fields), max_size=5).map(
    tuple
)
components = st.text(
    st.characters(exclude_characters=".:[]", exclude_categories=["Cs"]), min_size=1
)
addresses = st.lists(components, min_size=1, max_size=5).map(".".join)


@settings(deadline=None)
@given(op_types, numbers, st.none() | numbers, st.none() | numbers)
def test_label_reads_back_as_written(
    kind: str, k: int, n: int | None, p: int | None
) -> None:
    ref = LabelRef(kind, k, n, p)
    assert parse_label(str(ref)) == ref
    step = "" if n is None else f"_{n}"
    assert str(ref) == f"{kind}_{k}{step}" + ("" if p is None else f":{p}")


@settings(deadline=None)
@given(st.sampled_from(BOUNDARY_TYPES), numbers)
def test_boundary_label_reads_back_as_written(kind: str, k: int) -> None:
    ref = parse_label(f"{kind}_{k}")
    assert ref == LabelRef(kind, k)
    assert ref.is_boundary and str(ref) == f"{kind}_{k}"


@settings(deadline=None)
@given(st.text())
def test_label_grammar_takes_a_text_whole_or_not_at_all(text: str) -> None:
    ref = match_label(text)
    assert ref is None or str(ref) == text


@settings(deadline=None)
@given(paths)
def test_path_reads_back_as_written(path: tuple[str | int, ...]) -> None:
    assert parse_path(format_path(path)) == path


@settings(deadline=None)
@given(addresses, st.none() | numbers, paths)
def test_address_reads_back_as_written(
    address: str, call: int | None, path: tuple[str | int, ...]
) -> None:
    # Directly after an address a field cannot be told from a submodule.
    if call is None and path and str(path[0]).startswith("."):
        path = path[1:] and (0, *path[1:])
    ref = AddressRef(address, call, path)
    assert parse_address(str(ref)) == ref
    assert match_suffix(str(ref)[len(address) :]) == (call, path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("conv2d_3_7", ("conv2d", 3, 7, None)),
        ("linear_1_1:2", ("linear", 1, 1, 2)),
        ("conv2d_3", ("conv2d", 3, None, None)),
        ("linear_1:2", ("linear", 1, None, 2)),
        ("input_1", ("input", 1, None, None)),
        ("buffer_12", ("buffer", 12, None, None)),
        ("log1p_1_4", ("log1p", 1, 4, None)),
    ],
)
def test_label_forms_have_these_parts(
    text: str, parts: tuple[str, int, int | None, int | None]
) -> None:
    assert parse_label(text) == LabelRef(*parts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "conv2d",
        "conv2d_0_1",
        "conv2d_1_0",
        "conv2d_01",
        "max_pool2d_1_3",
        "conv2d_1_2_3",
        "conv2d_1:0",
        "conv2d_1:",
        "input_1_2",
        "output_1:1",
        "2d_1",
        "conv2d_1 ",
        "conv2d_1\n",
        "conv2d_-1",
        "conv2d_\u0661",
    ],
)
def test_label_that_is_none_is_refused_with_the_forms(text: str) -> None:
    assert match_label(text) is None
    with pytest.raises(SelectorError, match=r"is not a label\. A label reads type_k_n"):
        parse_label(text)


@pytest.mark.parametrize(
    "parts", [("conv2d", 0), ("max_pool2d", 1), ("relu", 1, 2, 0), ("input", 1, 2)]
)
def test_label_parts_that_cannot_be_written_are_refused(parts: tuple[str, int]) -> None:
    with pytest.raises(SelectorError, match="is not a label"):
        LabelRef(*parts)


@pytest.mark.parametrize(
    ("func_name", "expected"),
    [
        ("max_pool2d", "maxpool2d"),
        ("scaled_dot_product_attention", "scaleddotproductattention"),
        ("_native_multi_head_attention", "nativemultiheadattention"),
        ("relu_", "relu"),
        ("__add__", "add"),
        ("Conv2d", "conv2d"),
    ],
)
def test_type_is_the_function_name_without_underscores(
    func_name: str, expected: str
) -> None:
    assert normalise_type(func_name) == expected


@settings(deadline=None)
@given(st.from_regex(r"[a-z_][a-z0-9_]{0,20}", fullmatch=True))
def test_type_of_any_function_fits_the_label_grammar(func_name: str) -> None:
    kind = normalise_type(func_name)
    if kind and not kind[0].isdigit() and kind not in BOUNDARY_TYPES:
        assert match_label(f"{kind}_1_2") == LabelRef(kind, 1, 2)


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("features.6", AddressRef("features.6")),
        ("features.6:1", AddressRef("features.6", 1)),
        ("self", AddressRef("self")),
        ("addr[0]", AddressRef("addr", None, (0,))),
        ('addr["hidden"]', AddressRef("addr", None, ("hidden",))),
        ("addr['hidden']", AddressRef("addr", None, ("hidden",))),
        ("addr[0].key", AddressRef("addr", None, (0, ".key"))),
        ("act:2.key", AddressRef("act", 2, (".key",))),
        ('addr["a\\"b"]', AddressRef("addr", None, ('a"b',))),
        ("""addr['a"b']""", AddressRef("addr", None, ('a"b',))),
        (r"""addr['it\'s']""", AddressRef("addr", None, ("it's",))),
    ],
)
def test_address_forms_have_these_parts(text: str, ref: AddressRef) -> None:
    assert parse_address(text) == ref


@pytest.mark.parametrize(
    "text", ["", ".", "a..b", "a.", "a:0", "a:x", "a[", "a[]", "a[x]", "a[0]b", "a:1:2"]
)
def test_address_that_is_none_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(SelectorError, match=r"is not a module address\. An address"):
        parse_address(text)


@pytest.mark.parametrize("text", ["[x]", "[0", ".1", "key", '["a]', "[0] [1]"])
def test_path_that_is_none_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(SelectorError, match="is not a path into an output. Write it"):
        parse_path(text)


def test_path_with_a_bad_escape_is_refused() -> None:
    with pytest.raises(SelectorError, match="has a bad escape"):
        parse_path(r'["\q"]')
