"""The recipe that a run folder holds: the board's limits hold for it, too, since the folder may come from anywhere."""

from __future__ import annotations

from pathlib import Path

from halftune.config.reading.yaml_source import parse, read_text
from halftune.config.sections.generation import GenerationSection
from halftune.config.shape import child
from halftune.core.errors import ConfigError
from halftune_webui.paths import check_links, inside
from halftune_webui.recipe import outside
from halftune_webui.runs.started import CONFIG, folder_of, read_started
from halftune_webui.runs.state import RESOLVED
from halftune_webui.settings import Settings


def command(settings: Settings, run: Path) -> list[str]:
    """What starts a run, or goes on with it: made of the run's place alone, never of the notes in its folder.

    Raises:
        HalftuneError: there is no recipe, or it leaves the board's limits.
    """
    if (run / RESOLVED).is_file():
        file, how = run / RESOLVED, ["--rerun", str(run), f"training.output_dir={run}", "training.resume=auto"]
    elif (folder_of(run) / CONFIG).is_file():  # it ended before its first step
        file = folder_of(run) / CONFIG
        how = ["--config", str(file)]
    else:
        raise ConfigError("nothing says what this run is", where=str(run), remedy="start it again from its recipe")
    _check(settings, run, file, working_folder(settings, run))
    return [*settings.program, "train", *how]


def recipe_of(settings: Settings, run: Path) -> str:
    """The recipe of a run as text, for another run: as it was written where the board has it, else with every key.

    Raises:
        HalftuneError: there is none, or it lies outside the board's folders.
    """
    for file in (folder_of(run) / CONFIG, run / RESOLVED):
        if file.is_file():
            return read_text(inside(settings.roots, str(file)))
    raise ConfigError("nothing says what this run is", where=str(run), remedy="start it again from its recipe")


def words_of(run: Path) -> list[str]:
    """The command line that does what a run does."""
    config = folder_of(run) / CONFIG
    how = ["--config", str(config)] if config.is_file() else ["--rerun", str(run)]
    return ["halftune", "train", *how]


def working_folder(settings: Settings, run: Path) -> Path:
    """Where a run was started, as far as that lies under the board's folders; else where the board was."""
    before = read_started(run)
    folder = Path(before.cwd) if before is not None and before.cwd else settings.roots[0]
    known = folder.is_dir() and any(folder.resolve().is_relative_to(root) for root in settings.roots)
    return folder if known else settings.roots[0]


def check_model(settings: Settings, run: Path) -> None:
    """Makes sure that a run's model may be loaded, whatever data it was trained on.

    Raises:
        HalftuneError: it lies outside the board's folders, or would run code.
    """
    if not (run / RESOLVED).is_file():
        raise ConfigError("nothing says what this run is", where=str(run), remedy="train it again from its recipe")
    _check(settings, run, run / RESOLVED, settings.roots[0], section="model")


def generation_of(run: Path) -> GenerationSection:
    """How the run's recipe lets answers be decoded; as by default where it says nothing that can be read."""
    try:
        return GenerationSection.model_validate(child(parse(read_text(run / RESOLVED), RESOLVED).values, "generation"))
    except (ConfigError, ValueError):
        return GenerationSection()


def _check(settings: Settings, run: Path, file: Path, start: Path, section: str = "") -> None:
    check_links(settings.roots, run)
    tree = parse(read_text(file), str(file))
    for folder in (file.parent, start):
        for problem in outside(tree, settings, start, folder):
            if not section or problem.key[0] == section:
                raise problem
