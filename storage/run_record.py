"""run.json: what a run is, and the array metadata that every writer must use.

Whatever is read here may be damaged or foreign, so every field is checked before use
and every failure names the object.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchlens.errors import ManifestError

from .checksums import crc32c, sha256_hex
from .layout import Layout
from .run_spec import ArraySpec
from .shards import (
    ArrayFormat,
    Encoded,
    ShardDamage,
    check_shard,
    encoded_bytes,
    parse_format,
)

FORMAT = "torchlens-store"
VERSION = 1

ORDER = "_run/order"
GROUP = "data.zarr"
ROOT_METADATA = f"{GROUP}/zarr.json"
SAMPLES = "samples.parquet"
_LARGEST_RECORD = 256 << 20


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json: what a run is, and the array metadata every writer must use.

    Attributes:
        run_id: sha256 of the file.
        paths: Layer name to path below the group.
        documents: Metadata key below the group to document, verbatim.
        formats: Layer name to what its document says about its objects.
    """

    run_id: str
    layout: Layout
    arrays: Mapping[str, ArraySpec]
    paths: Mapping[str, str]
    documents: Mapping[str, Mapping[str, Any]]
    formats: Mapping[str, ArrayFormat]
    identity: Mapping[str, Any]
    provenance: Mapping[str, Any]
    versions: Mapping[str, str]

    def folder(self, *parts: str) -> str:
        """Return a key inside the run's folder."""
        return "/".join(["_run", self.run_id, *parts])

    def commit_key(self, block: int) -> str:
        """Return the key of a block's commit record."""
        return self.folder("commits", f"b{block:08d}.json")

    def samples_key(self, block: int) -> str:
        """Return the key of a block's part of the samples table."""
        return self.folder("samples", f"b{block:08d}.parquet")

    @property
    def manifest_key(self) -> str:
        """The key of the manifest, whose existence says that the run is finished."""
        return self.folder("manifest.json")

    def shards_of(self, name: str, block: int) -> range:
        """Return the numbers of a layer's shards that hold a block."""
        form = self.formats[name]
        start, stop = self.layout.span(block)
        return range(start // form.shard_rows, -(-stop // form.shard_rows))

    def shard_key(self, name: str, shard: int) -> str:
        """Return the key of a shard."""
        return f"{GROUP}/{self.paths[name]}/{self.formats[name].key(shard)}"

    def inspect(self, name: str, shard: int, data: bytes) -> Encoded:
        """Return the facts of a shard's bytes.

        Raises:
            ShardDamage: If they do not decode as the shard's rows.
        """
        form = self.formats[name]
        if form.plain:
            content = check_shard(form, data, shard)
            if len(data) != form.shard_bytes(shard):
                raise ShardDamage("it has another size than its rows need")
            return Encoded([data], len(data), crc32c(data), content)
        from .zarr_store import decodes_with_zarr

        start, stop = form.rows_of(shard)
        key = form.key(shard)
        path = self.paths[name]
        if not decodes_with_zarr(self.documents, path, key, data, start, stop):
            raise ShardDamage("zarr cannot decode it")
        return encoded_bytes(data)

    def required_keys(self, block: int) -> set[str]:
        """Return the keys that a block must have by the pinned metadata."""
        keys = {
            self.shard_key(name, shard)
            for name in self.arrays
            for shard in self.shards_of(name, block)
        }
        return keys | {self.samples_key(block)}


def dump(value: Any, *, readable: bool = False) -> bytes:
    """Return JSON in the one form that all records are written in."""
    indent = 1 if readable else None
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, indent=indent)
    return text.encode("utf-8") + b"\n"


def load(data: bytes, where: str) -> dict[str, Any]:
    """Parse a record.

    Raises:
        ManifestError: If it is no JSON object.
    """
    if len(data) > _LARGEST_RECORD:
        raise ManifestError(f"{where} is {len(data)} bytes, too big for a record.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"{where} is no valid JSON ({error}): the record is damaged."
        ) from error
    if not isinstance(value, dict):
        raise ManifestError(f"{where} holds no JSON object: the record is damaged.")
    return value


def parse_run(data: bytes, run_id: str, where: str) -> RunRecord:
    """Parse run.json, and check it against the digest that names its folder.

    Raises:
        ManifestError: If it is damaged or of an unknown version.
    """
    body = load(data, where)
    if body.get("format") != FORMAT:
        raise ManifestError(
            f"{where} says format {body.get('format')!r}; a store says {FORMAT!r}."
        )
    if body.get("version") != VERSION:
        raise ManifestError(
            f"{where} has format version {body.get('version')!r}; this torchlens reads "
            f"version {VERSION}. Open it with the torchlens that wrote it, or a newer."
        )
    if sha256_hex(data) != run_id:
        raise ManifestError(
            f"{where} does not have the digest {run_id[:12]}... that names its folder: "
            "it was changed after the run began. Restore it, or extract again."
        )
    try:
        return _read_run(body, run_id, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{where} lacks or garbles a field: {error!r}.") from error


def run_document(
    layout: Layout,
    arrays: Mapping[str, ArraySpec],
    paths: Mapping[str, str],
    documents: Mapping[str, Mapping[str, Any]],
    identity: Mapping[str, Any],
    provenance: Mapping[str, Any],
    versions: Mapping[str, str],
) -> bytes:
    """Return the bytes of a new run.json."""
    return dump(
        {
            "format": FORMAT,
            "version": VERSION,
            "num_rows": layout.num_rows,
            "block_rows": layout.block_rows,
            "arrays": [
                {
                    "name": name,
                    "path": paths[name],
                    "row_shape": list(spec.row_shape),
                    "dtype": spec.dtype,
                    "identity": spec.identity,
                }
                for name, spec in arrays.items()
            ],
            "zarr": documents,
            "identity": identity,
            "provenance": provenance,
            "versions": versions,
        },
        readable=True,
    )


def _read_run(body: Mapping[str, Any], run_id: str, where: str) -> RunRecord:
    arrays = {
        str(array["name"]): ArraySpec(
            tuple(array["row_shape"]), array["dtype"], array["identity"]
        )
        for array in body["arrays"]
    }
    paths = {str(array["name"]): str(array["path"]) for array in body["arrays"]}
    for path in paths.values():
        if not path or set(path) & set("/\\\0") or path in (".", ".."):
            raise ManifestError(f"{where} names the path {path!r}, which is not safe.")
    documents = {
        f"{p}/zarr.json": body["zarr"][f"{p}/zarr.json"] for p in paths.values()
    }
    formats = {
        name: parse_format(documents[f"{path}/zarr.json"], f"{name!r} in {where}")
        for name, path in paths.items()
    }
    num_rows, block_rows = int(body["num_rows"]), int(body["block_rows"])
    _check_formats(arrays, formats, num_rows, block_rows, where)
    sizes = {name: (form.chunk_rows, form.shard_rows) for name, form in formats.items()}
    return RunRecord(
        run_id=run_id,
        layout=Layout(num_rows, block_rows, sizes),
        arrays=arrays,
        paths=paths,
        documents=documents,
        formats=formats,
        identity=dict(body["identity"]),
        provenance=dict(body["provenance"]),
        versions=dict(body["versions"]),
    )


def _check_formats(
    arrays: Mapping[str, ArraySpec],
    formats: Mapping[str, ArrayFormat],
    num_rows: int,
    block_rows: int,
    where: str,
) -> None:
    if num_rows < 1 or block_rows < 1:
        raise ManifestError(f"{where} declares no rows.")
    for name, form in formats.items():
        spec = arrays[name]
        declared: Sequence[Any] = (num_rows, spec.row_shape, spec.dtype)
        if declared != (form.num_rows, form.row_shape, form.dtype):
            raise ManifestError(f"{where} and its array metadata disagree on {name!r}.")
        if block_rows % form.shard_rows:
            raise ManifestError(f"{where}: shards of {name!r} do not divide the block.")
