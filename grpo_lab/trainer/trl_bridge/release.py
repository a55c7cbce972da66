"""The releases of TRL that this package was tested with; another is refused when the room is loaded."""

from importlib.metadata import version

#: minor releases, oldest first (docs/compatibility.md says what was run on each)
SUPPORTED_TRL: tuple[str, ...] = ("1.15", "1.16")


def refuse_untested(found: str) -> None:
    """Raise ``ImportError`` for a release of TRL whose private methods nobody compared with what this room relies
    on."""
    if ".".join(found.split(".")[:2]) not in SUPPORTED_TRL:
        listing = ", ".join(f"{minor}.*" for minor in SUPPORTED_TRL)
        newest = SUPPORTED_TRL[-1]
        raise ImportError(
            f"grpo_lab was tested with trl {listing} and found trl {found}: its trainer overrides private methods that "
            f"may have moved. Install one of those: pip install 'trl=={newest}.*'. What moved between {newest} and "
            "another release: "
            f"`python scripts/check_upstream.py {found}` in a checkout of grpo_lab"
        )


refuse_untested(version("trl"))
