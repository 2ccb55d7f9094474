"""Views of one kind in order, found by number or by name."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, final, overload

from .errors import SelectorError
from .near_misses import listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ViewList"]

View = TypeVar("View")


@final
class ViewList(Sequence[View], Generic[View]):
    """Views of one kind in order, by number or by name."""

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[int], View],
        find: Callable[[str], View],
        table: "Callable[[], pd.DataFrame]",
    ) -> None:
        self._names = names
        self._make = make
        self._find = find
        self._table = table

    def keys(self) -> tuple[str, ...]:
        """Return the names, in order."""
        return tuple(self._names)

    def values(self) -> tuple[View, ...]:
        """Return the views, in order."""
        return tuple(self)

    def items(self) -> tuple[tuple[str, View], ...]:
        """Return names and views, in order."""
        return tuple(zip(self._names, self, strict=True))

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row for each."""
        return self._table()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._names)

    def __iter__(self) -> Iterator[View]:
        """Yield the views in order."""
        return map(self._make, range(len(self._names)))

    def __contains__(self, key: object) -> bool:
        """Return whether there is such a name, or such a view."""
        if not isinstance(key, str):
            return any(view == key for view in self)
        try:
            self._find(key)
        except SelectorError:
            return False
        return True

    @overload
    def __getitem__(self, key: int | str) -> View: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[View, ...]: ...

    def __getitem__(self, key: int | str | slice) -> View | tuple[View, ...]:
        """Return one by number or name, or several by slice.

        Raises:
            SelectorError: If there is no such name.
        """
        if isinstance(key, str):
            return self._find(key)
        numbers = range(len(self._names))[key]
        if isinstance(numbers, int):
            return self._make(numbers)
        return tuple(map(self._make, numbers))

    def __repr__(self) -> str:
        """Return the number and the first names."""
        return f"<{len(self._names)}: {listed(self._names)}>"
