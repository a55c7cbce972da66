"""The release of TRL that this package was tested with; another is refused when the room is loaded."""

from importlib.metadata import version

SUPPORTED_TRL = "1.16."

_found = version("trl")
if not _found.startswith(SUPPORTED_TRL):
    raise ImportError(
        f"grpo_lab was tested with trl {SUPPORTED_TRL}* and found trl {_found}: its trainer overrides private methods that "
        f"may have moved. Install a matching one: pip install 'trl=={SUPPORTED_TRL}*'"
    )
