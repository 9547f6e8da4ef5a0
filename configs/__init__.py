"""Complete run configs (one YAML is one run), accelerate launch configs, bundled prompts and answers."""

from pathlib import Path


def locate(path: str | Path) -> Path:
    """The path itself, or, where nothing is there and it begins with configs/, the file of that name in the installed package,
    so that `draftsmith train configs/eagle3_smollm2.yaml` works without the repository."""
    path = Path(path)
    if not path.exists() and path.parts[:1] == ("configs",):
        bundled = Path(__file__).parent.joinpath(*path.parts[1:])
        if bundled.exists():
            return bundled
    return path
