"""What a run of n samples will need: rows, bytes, files, memory."""

from dataclasses import dataclass

__all__ = ["Forecast", "SiteForecast", "format_bytes"]

_SHARD_BYTES = 64 << 20
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class SiteForecast:
    """Bytes and objects that one site's array will take."""

    name: str
    row_bytes: int
    num_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Size of a run of `num_rows` samples.

    Attributes:
        num_rows: Samples, and so rows of every array.
        num_bytes: Uncompressed bytes of all arrays; what a store adds is not counted.
        num_files: Storage objects of 64 MiB, with one metadata object per array.
        host_bytes: One batch of rows, and one shard of every array, in host memory.
        device_bytes: Weights, and the activations of one batch that live at one time.
        sites: The same per site.
    """

    num_rows: int
    num_bytes: int
    num_files: int
    host_bytes: int
    device_bytes: int
    sites: tuple[SiteForecast, ...]

    def __str__(self) -> str:
        """Return the forecast as one line."""
        return (
            f"{self.num_rows} rows, {format_bytes(self.num_bytes)} in "
            f"{self.num_files} files; host memory {format_bytes(self.host_bytes)}, "
            f"model and activations {format_bytes(self.device_bytes)}"
        )


def forecast_site(name: str, row_bytes: int, num_rows: int) -> SiteForecast:
    """Return the forecast of one array of `num_rows` rows."""
    rows = shard_rows(row_bytes, num_rows)
    files = -(-num_rows // rows) + 1 if num_rows else 1
    return SiteForecast(name, row_bytes, row_bytes * num_rows, files)


def shard_rows(row_bytes: int, num_rows: int) -> int:
    """Return the rows of a storage object: a power of two of at most 64 MiB."""
    fitting = max(1, min(_SHARD_BYTES // max(row_bytes, 1), max(num_rows, 1)))
    return 1 << (fitting.bit_length() - 1)


def format_bytes(num_bytes: int) -> str:
    """Return bytes for people, such as "3.4 MiB"."""
    value = float(num_bytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
