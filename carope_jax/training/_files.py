"""Files that are whole or not there."""

from pathlib import Path

from etils import epath


def write_whole(path: Path | epath.Path, text: str) -> None:
    """Writes a file under another name first: a crash leaves what was there before."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.replace(path)
