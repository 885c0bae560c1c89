"""The version, in a module of its own so that every layer may ask for it."""

__version__ = "0.1.0"


def installed_version(package: str) -> str | None:
    """Of another package, from its metadata, without importing it; None: it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
