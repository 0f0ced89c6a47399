"""Files at a URI such as `s3://bucket/key`, read through fsspec (the `remote` extra)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from penstock.errors import BadValue

# In these stores an object appears under its name as a whole or not at all.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "r2", "memory"})
_MARKS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")


def is_remote(location: str) -> bool:
    return "://" in location and not location.startswith("file://")


def local_path(location: str) -> str:
    """Return the path of a `file://` URI. Any other location is unchanged."""
    return urlsplit(location).path if location.startswith("file://") else location


def open_file_system(location: str, param: str) -> tuple[Any, str]:
    """Open the file system of a URI. Returns it and the path within it."""
    try:
        import fsspec
    except ImportError:
        raise BadValue(
            f"{location} needs the package fsspec; install penstock[remote]", param=param
        ) from None
    scheme = location.split("://", 1)[0]
    try:
        return fsspec.core.url_to_fs(location)  # type: ignore[no-any-return]
    except ImportError as error:
        driver = getattr(error, "name", None) or _DRIVERS.get(scheme, "")
        named = f"the package {driver}" if driver else f"a driver for {scheme}:// ({error})"
        raise BadValue(f"{location} needs {named}, which is not installed", param=param) from None
    except ValueError as error:
        raise BadValue(f"{location} cannot be opened: {error}", param=param) from None


_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def version_of(info: dict[str, Any]) -> str:
    """Return an identity of the version of a remote file."""
    found = [str(info[name]) for name in _MARKS if info.get(name) is not None]
    return found[0] if found else ""
